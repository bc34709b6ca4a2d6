"""The budget, put to the test: honest implementations stay within it, mistakes do not.

An honest implementation is the text of a form, of its steps or of its VJP in another arithmetic (sums in another order,
exponentials in base 2, weights or every result rounded to the type that is stored, float32 inside), or another text:
the online softmax in tiles. They run on the golden cases of every variant and on random draws of sdpa.

    python -m attention_ref.conformance.budget             print what was measured
    python -m attention_ref.conformance.budget --write     write it into docs/budget.md, and the figure
"""
import sys
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import variants
from ..dense import sdpa
from ..masks import causal
from . import cases, report
from .diagnosis import mistakes, wrong_outputs
from .numbers import ARITHMETIC, Numbers, cast, conditioning, round_to
from .verify import check

DTYPES = "float64", "float32", "float16", "bfloat16"
HALF = "float16", "bfloat16"
DRAWS = 200
KINDS = "plain", "offset 50", "outliers", "cancelling"
ROOT = Path(__file__).parents[2]
FIGURE = "figures/budget_honest_against_wrong.svg"
BEGIN, END = "<!-- from here on written by the command -->\n", "<!-- up to here -->\n"


class OneByOne(Numbers):
    """Sums and matrix products term by term, from the first to the last."""
    step = 1

    def compute(self, ufunc, method, xs, options):
        if ufunc is np.matmul:
            return self.total(xs[0][..., None] * xs[1][..., None, :, :], axis=-2)
        if ufunc is np.add and method == "reduce":
            return self.total(xs[0], **options)
        return super().compute(ufunc, method, xs, options)

    def total(self, x, axis=0, keepdims=False, **_):
        axes = tuple(range(x.ndim)) if axis is None else tuple(np.atleast_1d(axis))
        for a in axes:
            x = np.add.accumulate(np.insert(np.flip(x, a) if self.step < 0 else x, 0, 0, a), a).take([-1], a)
        return x if keepdims else x.squeeze(axes)


class FromTheLast(OneByOne):
    """Sums and matrix products term by term, from the last to the first: the keys in reversed order."""
    step = -1


class Base2(Numbers):
    """exp and log by way of exp2 and log2, which is what hardware has."""

    def compute(self, ufunc, method, xs, options):
        if ufunc is np.exp:
            return np.exp2(xs[0] * float(np.log2(np.e)))
        if ufunc is np.log:
            return np.log2(xs[0]) * float(np.log(2))
        return super().compute(ufunc, method, xs, options)


class Short(Numbers):
    """float32 arithmetic whose results, or those of some ufuncs, are rounded to a shorter type."""
    to, rounded = "bfloat16", None

    def compute(self, ufunc, method, xs, options):
        y = super().compute(ufunc, method, xs, options)
        short = np.asarray(y).dtype.kind == "f" and (self.rounded is None or ufunc.__name__ in self.rounded)
        return round_to(y, self.to).astype(np.float32) if short else y


class Float16Weights(Short):
    """float32 arithmetic that keeps the weights, before and after they are normalised, in float16."""
    to, rounded = "float16", ("exp", "divide")


class BFloat16Weights(Float16Weights):
    """float32 arithmetic that keeps the weights, before and after they are normalised, in bfloat16."""
    to = "bfloat16"


class Way(NamedTuple):
    """How an implementation computes: the type it computes in, its arithmetic, the accumulator it may claim."""
    inside: str
    system: type
    accumulate: str


def ways(dtype):
    """Name -> Way of every honest implementation that reads and writes a type."""
    found = {"eager": Way(ARITHMETIC.get(dtype, dtype), Short if dtype == "bfloat16" else None, dtype)}
    if dtype != "bfloat16":
        systems = {"one by one": OneByOne, "from the last": FromTheLast, "base 2": Base2}
        found |= {name: Way(dtype, system, dtype) for name, system in systems.items()}
    if dtype in HALF:
        found["short weights"] = Way("float32", Float16Weights if dtype == "float16" else BFloat16Weights, dtype)
        found["float32 inside"] = Way("float32", None, "float32")
        found["float32, one by one"] = Way("float32", OneByOne, "float32")
    return found


def tiled(q, k, v, mask, bias, sink, scale, softcap, block):
    """sdpa by the online softmax over tiles of keys: a text of its own."""
    rows, Tk = q.shape[:3], k.shape[2]
    mask, bias = np.broadcast_to(mask, (*rows, Tk)), np.broadcast_to(bias, (*rows, Tk))
    k, v = sdpa.unread(k, mask), sdpa.unread(v, mask)
    m, z, o = sdpa.per_row(sink, q), 1.0, np.zeros((*rows, v.shape[3]), q.dtype)
    for j in range(0, Tk, block):
        at = slice(j, j + block)
        s = sdpa.logits(q, k[:, :, at], bias[..., at], scale, softcap)[-1]
        s = np.where(mask[..., at], s, -np.inf)
        top = np.maximum(m, s.max(-1, keepdims=True))
        base = np.where(top == -np.inf, 0, top)
        c, p, m = np.exp(m - base), np.exp(s - base), top
        z, o = c * z + p.sum(-1, keepdims=True), c * o + p @ v[:, :, at]
    z = np.where(m == -np.inf, 1, z)
    return dict(o=o / z, lse=np.broadcast_to(m + np.log(z), (*rows, 1))[..., 0])


def texts(case):
    """Name -> (function, arguments) of all that computes something of a case; compiled loops are left to `verify`."""
    module = case.module
    found = {name: (form, case.inputs) for name, form in cases.forms(module).items() if name != "loop"}
    if case.variant == "sdpa":
        found |= {f"tiles of {n}": (partial(tiled, block=n), case.inputs) for n in (4, 64)}
    if case.steps:
        found["steps"] = cases.named(module.steps, module.STEPS), cases.needs(module.steps, case.inputs)
    if case.gradients:
        found["vjp"] = module.vjp, case.cotangents | case.inputs
    return found


def run(function, arguments, dtype, way):
    """Outputs of a function that reads and writes dtype and computes another way."""
    given = cast(arguments, way.inside)
    if way.system:
        given = {name: x.view(way.system) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
                 for name, x in given.items()}
    with np.errstate(all="ignore"):
        outputs = {name: np.asarray(y) for name, y in function(**given).items()}
    return outputs if way.inside == dtype else {name: round_to(y, dtype) for name, y in outputs.items()}


def honest(case, dtype):
    """(implementation, Result) of every honest run of a case in a type."""
    for name, (function, arguments) in texts(case).items():
        for label, way in ways(dtype).items():
            if not is_drift(case, dtype, label):
                yield f"{name}, {label}", check(case, run(function, arguments, dtype, way), dtype, way.accumulate)


def wrong(case, slug, dtype):
    """The Result of a mistake on a case in a type; None if it touches nothing that the case holds."""
    outputs = {name: round_to(y, dtype) for name, y in wrong_outputs(case, slug, dtype).items()}
    return check(case, outputs, dtype) if outputs else None
