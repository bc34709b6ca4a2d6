"""How somebody's function is called: by which names, with arrays of which library, in which layout and memory.

A `Call` holds these choices around a function and gives its outputs on a golden case as NumPy arrays by our names.
"""
from dataclasses import dataclass, field
from inspect import signature
from typing import Callable

import numpy as np

from ..names import STATES
from ..shapes import parse
from .blackbox import parameters
from .libraries import BACKENDS, VIEWS, fitting, to_numpy
from .numbers import cast
from .verify import as_dict

LAYOUTS = "BHTD", "BTHD", "packed"                       # of tokens; the first is ours
STATE_LAYOUTS = "BHKV", "BHVK"                           # of states


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
    state_layout: str = "BHKV"          # of every state (B, heads, dk, dv): BHVK is (B, heads, dv, dk)
    rename: dict = field(default_factory=dict)           # our name -> theirs
    grad: bool = False                  # gradients by the autograd of the library
    vjp: Callable | None = None         # or by this backward
    strides: bool = False               # judge every view that the library has, too
    repeat: int = 1                     # runs that must agree bit by bit
    view: str = ""                      # how the arrays lie in memory, one of VIEWS

    def __post_init__(self):
        for name, choices in dict(backend=BACKENDS, layout=LAYOUTS, state_layout=STATE_LAYOUTS).items():
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

    @property
    def parameters(self):
        """What `blackbox.parameters` knows of those of the function."""
        return parameters(self.function)

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
        if self.state_layout != STATE_LAYOUTS[0] and not STATES & set(ours):
            raise ValueError(f"state_layout: {case.variant} has no {' or '.join(sorted(STATES))}")
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
        if layout := self._layout_of(case, name):
            y = in_layout(layout, x)
            x = y.copy() if x.flags.c_contiguous else y
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
        layout, shape = self._layout_of(case, name), case.expected[name].shape
        if not layout:
            return y
        wanted = in_layout(layout, np.empty(shape)).shape
        if y.shape != wanted:
            raise ValueError(f"{name}: expected shape {wanted} in layout {layout}, got {y.shape}")
        return from_layout(layout, y, shape)

    def _layout_of(self, case, name):
        """The layout of an array that the function has in another one than we, else "".

        Only what is (B, heads, tokens or slots, channels) has a layout, and a state (B, heads, dk, dv).
        """
        module = case.module
        schema = module.INPUTS | getattr(module, "STEPS", {}) | module.OUTPUTS
        axes = parse(schema.get(name) or schema.get(name[1:], "")).axes
        kinds = [axis[0] for axis in axes]
        if kinds == ["B", "H", "d", "d"] and STATES & {name, name[1:]}:
            return self.state_layout.removeprefix(STATE_LAYOUTS[0])
        is_tokens = kinds[:2] + kinds[3:] == ["B", "H", "d"] and kinds[2] != "d"
        return self.layout.removeprefix(LAYOUTS[0]) if is_tokens else ""

    def _taken(self, function, names):
        """The names that function has a parameter for."""
        found, _ = parameters_of(function)
        return [name for name in names if self.rename.get(name, name) in found]

    def _untaken(self, function, names):
        """The names that function cannot be given."""
        _, any_name = parameters_of(function)
        return [] if any_name else [name for name in names if name not in self._taken(function, names)]


def in_layout(layout, x):
    """An array of ours in a layout of theirs: (B, H, T, d) in BTHD or packed, (B, H, dk, dv) in BHVK."""
    if layout in STATE_LAYOUTS:
        return x.swapaxes(2, 3)
    (B, H, T, d), y = x.shape, x.swapaxes(1, 2)
    return y.reshape(B, T, H * d) if layout == "packed" else y


def from_layout(layout, y, shape):
    """An array in a layout of theirs in ours, which has this shape."""
    if layout in STATE_LAYOUTS:
        return y.swapaxes(2, 3)
    B, H, T, d = shape
    return y.reshape(B, T, H, d).swapaxes(1, 2)


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
