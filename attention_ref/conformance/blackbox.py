"""A function known by its calls alone: the names of its parameters, the layout of its arrays, the sizes it takes.

Inside, all arrays are (B, H, T, d); `Box` puts them into the layout of the function and its output back. A `Callee`
holds the function itself, here or in a process of its own.
"""
import re
import time
import tracemalloc
from inspect import Parameter, signature
from itertools import product
from types import SimpleNamespace

import numpy as np

from .. import variants
from ..names import NAMES
from .cases import shape_of
from .isolation import NotAsked, plain
from .libraries import BACKENDS, first_line, to_numpy

ALIASES = dict(queries="q", keys="k", values="v", attention_mask="mask", sm_scale="scale", logits_soft_cap="softcap",
               soft_cap="softcap", is_causal="causal", num_heads="heads", n_heads="heads", h0="initial_state",
               s0="initial_state", state="initial_state", g="log_decay", gk="log_decay")
FILL = dict(scale=lambda n: n.dk ** -0.5, mask=lambda n: np.ones((n.Tq, n.Tk), bool), softcap=lambda n: None,
            bias=lambda n: np.zeros((n.Tq, n.Tk)), sink=lambda n: np.full(n.H, -np.inf), causal=lambda n: False,
            heads=lambda n: n.H, left=lambda n: None, right=lambda n: None, lengths=lambda n: np.full(n.B, n.Tk),
            initial_state=lambda n: np.zeros((n.B, n.H, n.dk, n.dv)), beta=lambda n: np.ones((n.B, n.H, n.Tk)),
            log_decay=lambda n: np.zeros((n.B, n.H, n.Tk)), past_length=lambda n: np.zeros(n.B, np.int64))
PAIRS, STATES = ("mask", "bias"), ("initial_state",)
BLOCKS = dict.fromkeys(("query_block", "key_block", "chunk_size"), 4)
RAGGED = dict(B=2, H=3, Hq=3, Hkv=3, Tq=5, Tk=7, T=7, dk=4, dv=6, P=8, W=8) | BLOCKS


def same(x):
    """x itself."""
    return x


def swapped(x):
    """x with its axes 1 and 2 exchanged."""
    return x.swapaxes(1, 2)


def side_by_side(x):
    """(B, H, T, ...) as (B, T, H ...): the heads of a token side by side."""
    return swapped(x).reshape(x.shape[0], x.shape[2], -1)


# Layout -> what it means, its number of axes, from (B, H, T, d) into it, and back when there are H heads
LAYOUTS = dict(
    BHTD=("batch, head, token, channel", 4, same, lambda y, H: y),
    BTHD=("batch, token, head, channel", 4, swapped, lambda y, H: swapped(y)),
    packed=("batch, token, head * channel", 3, side_by_side, lambda y, H: swapped(y.reshape(*y.shape[:2], H, -1))),
    BTD=("batch (or head), token, channel", 3, lambda x: x[:, 0], lambda y, H: y[:, None]),
    TBD=("token, batch (or head), channel", 3, lambda x: x[:, 0].swapaxes(0, 1),
         lambda y, H: y.swapaxes(0, 1)[:, None]),
    TD=("token, channel", 2, lambda x: x[0, 0], lambda y, H: y[None, None]),
)


def aliases():
    """Name in anybody's code -> our name, from the glossary and the few names it does not have."""
    found = {}
    for name, entry in NAMES.items():
        for other in (name, entry.torch, entry.jax, entry.onnx, entry.fla):
            word = other.split(" ")[0]
            if word.isidentifier():
                found.setdefault(word, name)
    return ALIASES | found


def parameters(function):
    """Name -> whether a call must state it; read from the first line of the docstring where there is no signature.

    None if nothing tells the names.
    """
    try:
        found = signature(function).parameters.values()
    except (TypeError, ValueError):
        inside = re.match(r"\w+\(([^)]*)\)", function.__doc__ or "")
        words = [w.strip() for w in inside[1].split(",")] if inside else []
        return {w.split("=")[0]: "=" not in w for w in words if w.split("=")[0].isidentifier()} or None
    stars = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    return {p.name: p.default is p.empty for p in found if p.kind not in stars} or None


class Callee:
    """A function that gets and gives NumPy arrays, whatever library its own are of."""

    def __init__(self, function, backend="numpy"):
        if backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
        self.function, self.library = function, BACKENDS[backend](None)
        self.measures_memory = backend == "numpy"        # other libraries have their own

    def parameters(self):
        """See `parameters`."""
        return parameters(self.function)

    def call(self, given, dtype, traced=False):
        """(the arrays it returns, the seconds that it took, the bytes that NumPy held at most if traced, else 0)."""
        with self.library.scope(dtype), np.errstate(all="ignore"):
            self.given = {name: self.library.array(x, dtype) if isinstance(x, np.ndarray) else x
                          for name, x in given.items()}
            y, seconds, most = measured(lambda: self.function(**self.given), traced)
            many = y.values() if isinstance(y, dict) else y if isinstance(y, (tuple, list)) else (y,)
            return [plain(to_numpy(x)) for x in many if x is not None], seconds, most

    def left(self):
        """Name -> what the last call left of the arrays that it was given."""
        return {name: plain(to_numpy(x)) for name, x in self.given.items() if hasattr(x, "dtype")}


class IsolatedCallee:
    """A `Callee` that lives in a `Worker`."""

    def __init__(self, worker, backend):
        self.worker, self.measures_memory = worker, backend == "numpy"

    def parameters(self):
        return self.worker.ask("parameters")

    def call(self, given, dtype, traced=False):
        return self.worker.ask("call", given, dtype, traced)

    def left(self):
        return self.worker.ask("left")


def measured(function, traced):
    """(what function() returns, seconds, the most bytes that Python and NumPy held if traced, else 0)."""
    start = time.perf_counter()
    if not traced:
        return function(), time.perf_counter() - start, 0
    tracemalloc.start()
    try:
        return function(), time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Box:
    """A function of at least q, k, v as a black box.

    Raises ValueError if it takes no q, k, v or answers in no known layout; what it raised itself is in the message.
    """

    def __init__(self, function, backend="numpy"):
        self.callee = function if isinstance(function, (Callee, IsolatedCallee)) else Callee(function, backend)
        self.dtype, self.traced, self.flat, self.hides = "float64", False, False, False
        self.linear, self.rows, self.support, self.fit = False, False, None, None          # what experiments found
        known, found = aliases(), self.callee.parameters() or dict(q=True, k=True, v=True, scale=True)
        if len(found) < 3:
            raise ValueError(f"impl: expected a function of at least q, k, v, got one of ({', '.join(found)})")
        self.names = {known.get(name, name): name for name in reversed(found)}
        if not {"q", "k", "v"} <= set(self.names):       # other names: the first three, in this order
            self.names = dict(zip("qkv", found)) | {known.get(name, name): name for name in list(found)[3:]}
        self.required = [role for role, name in self.names.items() if found[name] and role not in "qkv"]
        for role in self.required:
            fill(role, SimpleNamespace(**RAGGED))
        self.layout, self.free, self.mixes = _open(self)
        self.width = str(self.outputs[0].dtype)
        self.inside = _inside(self)
        self.eps = float(np.finfo(self.inside).eps)

    def sizes(self, **wanted):
        """A namespace of sizes that the function takes, as near to the wanted ones as it can be."""
        n = RAGGED | wanted
        axes = LAYOUTS[self.layout][1]
        n |= dict(H=1) if self.layout in ("BTD", "TBD") else dict(B=1, H=1) if axes == 2 else {}
        n |= {} if "Tq" in self.free else dict(Tq=n["Tk"])
        n |= {} if "dv" in self.free else dict(dv=n["dk"])
        return SimpleNamespace(**n | dict(Hq=n["H"], Hkv=n["H"], T=n["Tk"]))

    def takes(self, role):
        """Whether it has a parameter with that meaning."""
        return role in self.names

    def __call__(self, q, k, v, **roles):
        """o (B, H, Tq, dv); `outputs` keeps all that the function returned, `seconds` and `bytes` what it cost."""
        n = dict(B=q.shape[0], H=q.shape[1], Hq=q.shape[1], Hkv=k.shape[1], Tq=q.shape[2], Tk=k.shape[2],
                 T=k.shape[2], P=k.shape[2], dk=q.shape[3], dv=v.shape[3])
        n = SimpleNamespace(**RAGGED | n)
        grouped = dict(enable_gqa=True) if self.takes("enable_gqa") and n.H != n.Hkv else {}
        filled = {role: fill(role, n) for role in self.required}
        filled |= dict(mask=~filled["mask"]) if self.hides else {}
        roles = grouped | filled | dict(q=q, k=k, v=v) | roles
        given = {self.names[role]: self.give(role, x) for role, x in roles.items()}
        self.outputs, self.seconds, self.bytes = self.callee.call(given, self.dtype, self.traced)
        return LAYOUTS[self.layout][3](self.outputs[0], n.H)

    def give(self, role, x):
        """One argument in the layout of the function and in its dtype; masks and biases broadcast over the heads."""
        if not isinstance(x, np.ndarray):
            return x
        _, axes, into, _ = LAYOUTS[self.layout]
        x = x.astype(self.dtype) if x.dtype.kind == "f" else x
        if role in PAIRS:
            leading = () if self.flat else (1,) * (axes - x.ndim) if axes > x.ndim else x.shape[:axes - 2]
            return x.reshape(*leading, *x.shape[-2:])
        if role in STATES:
            return x[:, 0] if axes == 3 and self.layout != "packed" else x[0, 0] if axes == 2 else x
        return np.ascontiguousarray(into(x)) if x.ndim > 2 else x


def fill(role, n):
    """A value for an argument that must be stated: one that changes nothing where there is one."""
    if role in FILL:
        return FILL[role](n)
    if role in BLOCKS:
        return BLOCKS[role]
    for module in variants().values():
        try:
            if {"q", "k", "v", role} <= set(module.INPUTS):
                value = module.NEUTRAL.get(role, lambda n: NAMES[role].draw(shape_of(module.INPUTS[role], vars(n))))
                return value(n) if callable(value) else value
        except (AttributeError, KeyError, TypeError):    # a size or a value that only its cases state
            continue
    raise ValueError(f"impl: must be given {role}, which has no neutral value that is known")


def draw(n, seed=0, size=1.0):
    """Normal q, k, v of the sizes n, the same for a seed; q and k have standard deviation `size`."""
    random = np.random.default_rng(seed)
    shapes = (n.B, n.H, n.Tq, n.dk), (n.B, n.H, n.Tk, n.dk), (n.B, n.H, n.Tk, n.dv)
    q, k, v = (random.standard_normal(shape) for shape in shapes)
    return size * q, size * k, v


def _open(box):
    """(layout, sizes that are free, whether batch entries or heads mix) of the first layout that fits.

    A layout fits if the output has its shape and a value changes nothing in other batch entries and heads; if there is
    none, heads may mix. Masks and biases that must be given are tried with and without leading axes, masks of True and
    of False.
    """
    problem, mixing = None, None
    pairs, masks = (bool(set(box.required) & set(roles)) for roles in (PAIRS, ["mask"]))
    for free in (("Tq", "dv"), ("Tq",), ("dv",), ()):
        for box.layout in LAYOUTS:
            if box.layout == "packed" and not box.takes("heads"):
                continue
            box.free = free
            for box.flat, box.hides in product((False, True)[:1 + pairs], (False, True)[:1 + masks]):
                try:
                    mixed = _mixes(box)
                except Exception as error:
                    if box.layout == "BHTD" and not isinstance(error, NotAsked):
                        problem = f"{type(error).__name__}: {first_line(error)}"
                    continue
                if mixed is False:
                    return box.layout, free, False
                mixing = mixing or mixed and (box.layout, free, True)
    if not mixing:
        said = f"; as BHTD with equal sizes it raised {problem}" if problem else ""
        raise ValueError(f"impl: no layout of q, k, v gives an output of their shape{said}")
    return mixing


def _mixes(box):
    """Whether a value moves the outputs of other batch entries or heads; None if the output has another shape."""
    n = box.sizes()
    q, k, v = draw(n)
    before = box(q, k, v)
    if before.shape != (n.B, n.H, n.Tq, n.dv):
        return None
    v[0, 0] += 1
    moved = np.abs(box(q, k, v) - before) > 0            # NaN does not move
    if not moved.any():
        return None
    return bool(moved[1:].any() or moved[:, 1:].any())


def _inside(box):
    """The narrowest type it computes in for float64, from how roughly the output follows a step of 1e-8."""
    n, h = box.sizes(), 1e-8
    q, k, v = draw(n)
    up, middle, down = (box((1 + s) * q, k, v).astype(np.float64) for s in (h, 0, -h))
    rough = np.max(np.abs(up - 2 * middle + down)) / (1 + np.max(np.abs(middle)))
    return next((t for t in ("float64", "float32") if rough < 1e3 * np.finfo(t).eps), "float16")
