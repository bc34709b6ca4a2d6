"""How somebody's function is called: by which names, with arrays of which library, in which layout and memory.

A `Call` holds these choices around a function and gives its outputs on a golden case as NumPy arrays by our names.
`to_numpy` brings arrays of any library back; `template` is the text of a file for what no option covers.
"""
import importlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Callable

import numpy as np

from ..names import NAMES
from ..shapes import parse
from .cases import title
from .numbers import cast
from .verify import as_dict

LAYOUTS = "BHTD", "BTHD", "packed"
VIEWS = dict(                                            # name -> (what is stored, the view of it that has the numbers)
    transposed=(lambda x: x.swapaxes(-1, -min(2, x.ndim)).copy(), lambda y: y.swapaxes(-1, -min(2, y.ndim))),
    sliced=(lambda x: np.repeat(x, 2, -1), lambda y: y[..., ::2]),
    reversed=(lambda x: x[..., ::-1].copy(), lambda y: y[..., ::-1]))


# Array libraries: `array` makes one of theirs, `differentiate` is their autograd, `scope` holds while they are used

class NumPy:
    """NumPy arrays; bfloat16 is the type of ml_dtypes where that is installed, else float32."""
    views, autograd = tuple(VIEWS), False

    def __init__(self, device):
        if device not in (None, "cpu"):
            raise ValueError(f"device: NumPy arrays are on cpu, got {device!r}")

    def array(self, x, dtype):
        return x.astype(bfloat16(), order="K") if dtype == "bfloat16" and x.dtype.kind == "f" else x

    def scope(self, dtype):
        return nullcontext()


class CuPy(NumPy):
    """CuPy arrays on the device of that number (0)."""

    def __init__(self, device):
        self.cupy, number = library("cupy"), (device or "0").removeprefix("cuda:")
        if not number.isdecimal():
            raise ValueError(f"device: expected a number or cuda:number, got {device!r}")
        self.device = int(number)

    def array(self, x, dtype):
        return self.cupy.asarray(super().array(x, dtype))

    def scope(self, dtype):
        return self.cupy.cuda.Device(self.device)


class Torch(NumPy):
    """Torch tensors on a device that torch.device understands."""
    views, autograd = ("transposed", "sliced"), True     # there are no negative strides

    def __init__(self, device):
        self.torch = library("torch")
        try:
            self.device = self.torch.zeros(1, device=device).device
        except Exception as error:
            raise ValueError(f"device: torch has no {device!r}: {first_line(error)}") from None

    def array(self, x, dtype):
        y = self.torch.from_numpy(x)
        return y.to(self.device, getattr(self.torch, dtype) if y.is_floating_point() else y.dtype)

    def differentiate(self, function, x, cotangents):
        """(outputs, gradients) of a function of a dict of arrays; an input that was not used has gradient 0."""
        x = {name: y.detach().requires_grad_() for name, y in x.items()}
        outputs = function(x)
        fit = fitting(outputs, cotangents)
        ends = [name for name in fit if getattr(outputs[name], "requires_grad", False)]
        if fit and not ends:
            raise ValueError(f"{', '.join(fit)}: no autograd history: detached, or computed outside torch")
        ys = [outputs[name] for name in ends]
        starts = [cotangents[name].to(y.dtype) for name, y in zip(ends, ys)]
        found = self.torch.autograd.grad(ys, list(x.values()), starts, materialize_grads=True) if ends else ()
        return outputs, dict(zip(x, found))


class Jax(NumPy):
    """JAX arrays on a device like cpu, gpu or gpu:1; float64 is switched on while it is asked for."""
    views, autograd = (), True

    def __init__(self, device):
        self.jax = library("jax")
        kind, _, number = (device or "").partition(":")
        try:
            self.device = self.jax.devices(kind or None)[int(number or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"device: jax has no {device!r}: {first_line(error)}") from None

    def array(self, x, dtype):
        return self.jax.device_put(super().array(x, dtype), self.device)

    def scope(self, dtype):
        return self.jax.enable_x64(True) if dtype == "float64" else nullcontext()

    def differentiate(self, function, x, cotangents):
        """(outputs, gradients) of a function of a dict of arrays."""
        def split(x):
            y = function(x)
            return {name: y[name] for name in fitting(y, cotangents)}, y
        ends, pull, outputs = self.jax.vjp(split, x, has_aux=True)
        return outputs, pull({name: cotangents[name].astype(y.dtype) for name, y in ends.items()})[0] if ends else {}


BACKENDS = dict(numpy=NumPy, torch=Torch, jax=Jax, cupy=CuPy)


def library(name):
    """The module of an array library; ValueError if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"backend: cannot import {name}: {first_line(error)}") from None


def first_line(error):
    """What an error says first."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def bfloat16():
    """The bfloat16 of ml_dtypes, or float32 without it."""
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        return np.dtype(np.float32)


def fitting(outputs, cotangents):
    """The names of the outputs that have a cotangent of their shape."""
    return [name for name, y in outputs.items() if name in cotangents
            and tuple(getattr(y, "shape", ())) == tuple(cotangents[name].shape)]


def to_numpy(y):
    """An array of any library as a NumPy array: from its device, without its autograd, torch's bfloat16 as float32."""
    if y is None:
        raise ValueError("outputs: expected arrays, got None")
    if hasattr(y, "detach"):
        y = y.detach().cpu()
        return (y.float() if str(y.dtype) == "torch.bfloat16" else y).numpy()
    if hasattr(y, "__cuda_array_interface__") and hasattr(y, "get"):
        return y.get()
    if hasattr(y, "__dlpack__") and not hasattr(y, "__array__"):
        return np.from_dlpack(y)
    return np.asarray(y)


# The call

@dataclass
class Call:
    """Somebody's function with what has to be done before and after it; ValueError for choices that do not go together.

    function: takes the arguments of INPUTS by name, or some of them, or also sizes of the case (H, Tq, ...), and gives
    the outputs in the order of OUTPUTS, the first of them, or a dict. With parameters named like cotangents (do, dlse)
    it is a backward, and gives gradients: a dict, or a tuple in the order of the inputs.
    """
    function: Callable
    backend: str = "numpy"              # the library of the arrays
    device: str | None = None
    layout: str = "BHTD"                # of every array (B, heads, tokens, channels): BTHD, or packed (B, T, H*d)
    rename: dict = field(default_factory=dict)           # our name -> theirs
    grad: bool = False                  # gradients by the autograd of the library
    vjp: Callable | None = None         # or by this backward
    strides: bool = False               # judge every view that the library has, too
    repeat: int = 1                     # runs that must agree bit by bit
    view: str = ""                      # how the arrays lie in memory, one of VIEWS

    def __post_init__(self):
        for name, choices in dict(backend=BACKENDS, layout=LAYOUTS).items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.repeat < 1:
            raise ValueError(f"repeat: expected a number of runs >= 1, got {self.repeat}")
        self.library = BACKENDS[self.backend](self.device)
        if self.grad and not self.vjp and not self.library.autograd:
            raise ValueError(f"grad: {self.backend} has no autograd: name a backward with --vjp module:function")
        if self.strides and not self.library.views:
            raise ValueError(f"strides: arrays of {self.backend} have none")

    @property
    def views(self):
        """How the arrays may lie in memory beside the plain way, if that is asked for."""
        return self.library.views if self.strides else ()

    def check_names(self, case):
        """ValueError for a name that the variant or the function does not have, or a backward in the wrong place."""
        ours = [*case.inputs, *case.outputs]
        ours += [*case.sizes, *("d" + name for name in ours)]
        theirs, any_name = parameters_of(self.function)
        for name, other in self.rename.items():
            if name not in ours:
                raise ValueError(f"rename: {case.variant} has {', '.join(ours)}, got {name!r}")
            if name in case.inputs and other not in theirs and not any_name:
                raise ValueError(f"rename: the function has {', '.join(sorted(theirs))}, got {other!r}")
        cotangents = ["d" + name for name in case.outputs]
        if (self.grad or self.vjp) and self._taken(self.function, cotangents):
            raise ValueError("grad: the function takes cotangents: it is a backward, judged without --grad and --vjp")
        if self.vjp and not self._taken(self.vjp, cotangents):
            raise ValueError(f"vjp: expected a function that takes {', '.join(cotangents)}, or some of them")

    def __call__(self, case, dtype):
        """Name -> NumPy array: the outputs on a case, and gradients if they are asked for and the case has them.

        Raises NotImplementedError where the function cannot be asked, ValueError for outputs that nobody can read.
        """
        with self.library.scope(dtype):
            if self._taken(self.function, ["d" + name for name in case.outputs]):
                return self.backward(self.function, case, dtype)
            found = self.forward(case, dtype)
            if self.vjp and case.gradients:
                found |= self.backward(self.vjp, case, dtype)
            return found

    def forward(self, case, dtype):
        """The outputs of the function, and its gradients by autograd if those are asked for."""
        x = self.arguments(self.function, case, dtype)

        def call(x):
            return self.named(case, self.function(**self.renamed(x)))
        if not self.grad or self.vjp or not case.gradients:
            return self.numpy(case, call(x))
        leaves = {name: y for name, y in x.items() if "d" + name in case.gradients and hasattr(y, "shape")}
        cotangents = {name[1:]: d for name, d in self.cotangents(case, dtype).items()}
        y, gradients = self.library.differentiate(lambda leaves: call(x | leaves), leaves, cotangents)
        used = ["d" + name for name in fitting(y, cotangents)]
        found = self.numpy(case, {"d" + name: g for name, g in gradients.items()})
        return self.numpy(case, y) | with_rest(case, found, used)

    def backward(self, function, case, dtype):
        """The gradients that a function of cotangents and inputs gives."""
        if not case.gradients:
            raise NotImplementedError("has no gradients")
        x, d = self.arguments(function, case, dtype), self.cotangents(case, dtype)
        d = {name: y for name, y in d.items() if name not in self._untaken(function, d)}
        y = function(**self.renamed(d | x))
        if isinstance(y, (tuple, list)):
            if not 1 <= len(y) <= len(case.gradients):
                raise ValueError(f"gradients: expected {', '.join(case.gradients)}, got {len(y)} arrays")
            y = dict(zip(case.gradients, y))
        return with_rest(case, self.numpy(case, self.named(case, y)), d)

    def used(self, case, outputs):
        """The cotangents that reached the gradients, () if all did: those a backward takes, or of what autograd saw."""
        names, lost = ["d" + name for name in case.outputs], []
        if self.vjp or self._taken(self.function, names):
            lost = self._untaken(self.vjp or self.function, names)
        elif self.grad:
            lost = [name for name in names if name[1:] not in outputs]
        return tuple(name for name in names if name not in lost) if lost else ()

    def arguments(self, function, case, dtype):
        """What function takes of a case, by our names; NotImplementedError if the case needs more than it takes."""
        absent = self._untaken(function, case.inputs)
        needed = [name for name in absent if not case.is_neutral(name)]
        if needed:
            raise NotImplementedError(f"takes no {', '.join(needed)}")
        sizes = {name: case.sizes[name] for name in self._taken(function, case.sizes)}
        return sizes | {name: self.array(case, name, x, dtype)
                        for name, x in case.in_dtype(dtype).items() if name not in absent}

    def cotangents(self, case, dtype):
        """The cotangents of a case as arrays of the library."""
        return {name: self.array(case, name, x, dtype) for name, x in cast(case.cotangents, dtype).items()}

    def array(self, case, name, x, dtype):
        """An array as the function gets it: its layout, its library, its view. Anything else stays."""
        if not isinstance(x, np.ndarray):
            return x
        if self._has_layout(case, name):
            (B, H, T, d), y = x.shape, x.swapaxes(1, 2)
            x = y.reshape(B, T, H * d) if self.layout == "packed" else y.copy() if x.flags.c_contiguous else y
        put, take = VIEWS[self.view] if self.view and x.ndim else (lambda x: x, lambda y: y)
        return take(self.library.array(put(x), dtype))

    def named(self, case, y):
        """What the function returned, as a dict by our names."""
        ours = {other: name for name, other in self.rename.items()}
        found = as_dict(case, {ours.get(name, name): a for name, a in y.items()} if isinstance(y, dict) else y)
        if not found:                                    # names that another case has, or nothing at all
            kind = NotImplementedError if isinstance(y, dict) and y else ValueError
            raise kind(f"outputs: expected some of {', '.join(case.expected)}, got none of them")
        return found

    def numpy(self, case, found):
        """Arrays of the library as NumPy arrays in the layout of the schema."""
        return {name: self._schema_layout(case, name, to_numpy(y)) for name, y in found.items()}

    def renamed(self, x):
        """Arguments by the names that the function has for them."""
        return {self.rename.get(name, name): y for name, y in x.items()}

    def _schema_layout(self, case, name, y):
        if not self._has_layout(case, name):
            return y
        B, H, T, d = case.expected[name].shape
        wanted = (B, T, H * d) if self.layout == "packed" else (B, T, H, d)
        if y.shape != wanted:
            raise ValueError(f"{name}: expected shape {wanted} in layout {self.layout}, got {y.shape}")
        return y.reshape(B, T, H, d).swapaxes(1, 2)

    def _has_layout(self, case, name):
        """Whether an array is (B, heads, tokens or slots, channels) and the layout is another than that."""
        module = case.module
        schema = module.INPUTS | getattr(module, "STEPS", {}) | module.OUTPUTS
        axes = parse(schema.get(name) or schema.get(name[1:], "")).axes
        return self.layout != "BHTD" and [a[0] for a in axes[:2] + axes[3:]] == ["B", "H", "d"] and axes[2][0] != "d"

    def _taken(self, function, names):
        """The names that function has a parameter for."""
        found, _ = parameters_of(function)
        return [name for name in names if self.rename.get(name, name) in found]

    def _untaken(self, function, names):
        """The names that function cannot be given."""
        _, any_name = parameters_of(function)
        return [] if any_name else [name for name in names if name not in self._taken(function, names)]


def parameters_of(function):
    """The names of its parameters, and whether it takes any name: what has no readable signature does."""
    try:
        found = signature(function).parameters
    except (TypeError, ValueError):
        return set(), True
    return set(found), any(p.kind is p.VAR_KEYWORD for p in found.values())


def with_rest(case, found, used):
    """Gradients, and what they lack of the golden ones if only the cotangents named in used reached the function.

    A gradient is linear in the cotangents: the part of an output that was not returned is added from the reference.
    """
    if set(case.cotangents) <= set(used):
        return found
    with np.errstate(all="ignore"):
        rest = case.module.vjp(**{n: 0 * d if n in used else d for n, d in case.cotangents.items()} | case.inputs)
    return {name: (g + rest[name]).astype(g.dtype) if name in rest and g.shape == np.shape(rest[name]) else g
            for name, g in found.items()}


# The adapter file

TEMPLATE = '''"""Your implementation of {variant} as attention_ref calls it: {title}

    attention-ref verify {variant} --impl adapter:run --dtype float32{backward_option}

With --backend torch, jax or cupy the arrays are of that library. A parameter that you do not need may go; one named
like a size ({sizes}) gets it. Where yours cannot do what is asked, raise
NotImplementedError("why"): the case counts as unsupported. This file runs as it is, with the NumPy reference in place
of yours.

Conventions:
{conventions}
"""
from attention_ref import {variant} as yours              # your module


def run({inputs}):
    """Returns {outputs},
    as a tuple in this order, or the first only.

{arguments}

    An axis with ? may be 1, and leading ones may be missing.
    """
    return yours.dense({passed})
'''
BACKWARD = '''

def backward({cotangents}, {inputs}):
    """Returns a dict of the gradients {gradients}; {cotangents} are shaped like the outputs."""
    return yours.vjp({cotangents}, {passed})
'''


def template(case):
    """The text of adapter.py: a function of the arguments of the variant of a golden case, to be filled."""
    module = case.module
    words = dict(
        variant=case.variant, title=title(module),
        sizes=", ".join(case.sizes),
        conventions="\n".join(f"    {name}: {text}" for name, text in module.CONVENTIONS.items()),
        inputs=", ".join(module.INPUTS), passed=", ".join(f"{name}={name}" for name in module.INPUTS),
        outputs=", ".join(f"{name} ({text.replace(' ', ', ')})" for name, text in module.OUTPUTS.items()),
        arguments="\n".join(f"    {name:16}{_described(name, text)}" for name, text in module.INPUTS.items()),
        cotangents=", ".join("d" + name for name in module.OUTPUTS), gradients=", ".join(case.gradients),
        backward_option=" --vjp adapter:backward" if case.gradients else "")
    return (TEMPLATE + BACKWARD * bool(case.gradients)).format(**words)


def _described(name, text):
    """Shape or kind of an argument, and what it is."""
    return f"{text or 'number':28}{NAMES[name].meaning}"
