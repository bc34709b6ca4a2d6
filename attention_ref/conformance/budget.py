"""The budget, put to the test: honest implementations stay within it, mistakes do not.

An honest implementation is the text of a form, of the steps or of the VJP in another arithmetic: sums in another order,
exponentials in base 2, weights or every result rounded to the type that is stored, float32 inside. All run on the
golden cases of every variant, and those of flash, online softmax included, on random draws with up to 256 keys.

    python -m attention_ref.conformance.budget             print what was measured
    python -m attention_ref.conformance.budget --write     write it into docs/budget.md, and the figure
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..dense import flash
from . import cases
from .diagnosis import mistakes, wrong_outputs
from .numbers import TINY, UNIT, Numbers, cast, conditioning, round_to
from .report import number
from .verify import check

DTYPES = "float64", "float32", "float16", "bfloat16"
DRAWS = [f"draw {n}" for n in range(200)]
KINDS = "plain", "offset 50", "outliers", "cancelling"
ATOL = dict(float64=1.0, float32=7.7, float16=0.01, bfloat16=6e-4)           # atol / rtol of torch.testing
ROOT, FIGURE = Path(__file__).parents[2], "figures/budget_honest_against_wrong.svg"
BEGIN, END = "<!-- written by python -m attention_ref.conformance.budget --write -->\n", "<!-- up to here -->\n"


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
        return np.log2(xs[0]) * float(np.log(2)) if ufunc is np.log else super().compute(ufunc, method, xs, options)


class Short(Numbers):
    """float32 arithmetic in which all results, or those of some ufuncs, are rounded to a shorter type."""
    to, only = "bfloat16", None

    def compute(self, ufunc, method, xs, options):
        y = super().compute(ufunc, method, xs, options)
        short = np.asarray(y).dtype.kind == "f" and (self.only is None or ufunc in self.only)
        return round_to(y, self.to).astype(np.float32) if short else y


def ways(dtype):
    """Name -> (type computed in, arithmetic, accumulator claimed) of the honest ways to read and write a type."""
    if dtype == "bfloat16":
        found = {"eager": ("float32", Short, dtype)}
    else:
        systems = {"eager": None, "one by one": OneByOne, "from the last": FromTheLast, "base 2": Base2}
        found = {name: (dtype, system, dtype) for name, system in systems.items()}
    if dtype in ("float16", "bfloat16"):
        weights = type("Weights", (Short,), dict(to=dtype, only=(np.exp, np.divide)))
        found |= {"short weights": ("float32", weights, dtype), "float32 inside": ("float32", None, "float32"),
                  "float32 one by one": ("float32", OneByOne, "float32")}
    return found


METRICS = {                              # of the errors d and the sizes y of the exact values: each is held to one limit
    "budget": None,
    "ulp": lambda d, y, dtype: d / np.maximum(np.ldexp(UNIT[dtype], np.frexp(y)[1]), TINY[dtype]),
    "rtol with atol": lambda d, y, dtype: d / (y + ATOL[dtype]),
    "max-norm": lambda d, y, dtype: d / y.max(),
    "RMS": lambda d, y, dtype: np.sqrt(np.square(d).sum() / np.square(y).sum()),
}


class Run(NamedTuple):
    """One run, honest or of a mistake: what ran, where its error is largest, and what every metric says of it."""
    what: str
    case: str
    output: str
    metrics: dict

    @property
    def score(self):
        return self.metrics["budget"]

    def __str__(self):
        return f"{self.what}: {self.output} of {self.case}"


def judged(what, case, outputs, dtype, accumulate=None):
    """The Run that these outputs of a case are."""
    result = check(case, {name: round_to(np.asarray(y), dtype) for name, y in outputs.items()}, dtype, accumulate)
    arrays = [(y, case.expected[name]) for name, y in result.outputs.items()]
    metrics = {name: max(largest(f, *pair, dtype) for pair in arrays) for name, f in METRICS.items() if f}
    return Run(what, case.name, result.worst.name, dict(budget=result.score) | metrics)


def largest(metric, got, exact, dtype):
    """What a metric says of an array: inf where shapes or what is not finite differ, which no metric overlooks."""
    if got.shape != exact.shape or not np.all((got == exact) | np.isfinite(got - exact) | np.isnan(exact)):
        return np.inf
    seen = np.isfinite(exact)
    d, y = np.abs(got - exact)[seen], np.abs(exact[seen])
    return float(np.max(metric(d, y, dtype))) if d.any() and y.any() else 0.0


def texts(case):
    """Name -> (function, arguments) of all that computes something of a case, but loops: "one by one" stands for them."""
    module = case.module
    found = {name: (form, case.inputs) for name, form in cases.forms(module).items() if name != "loop"}
    if case.steps:
        found["steps"] = cases.named(module.steps, module.STEPS), cases.needs(module.steps, case.inputs)
    if case.gradients:
        found["vjp"] = module.vjp, case.cotangents | case.inputs
    return found


def honest(case, dtype):
    """Every honest Run of a case in a type. many_keys exists to refuse sums that grow one by one: it is not asked."""
    for name, (function, arguments) in texts(case).items():
        for way, (inside, system, accumulate) in ways(dtype).items():
            if case.name != "many_keys" or system not in (OneByOne, FromTheLast) or inside != dtype:
                given = {name: x.view(system) if system and isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
                         for name, x in cast(arguments, inside).items()}
                yield judged(f"{name}, {way}", case, function(**given), dtype, accumulate)


def wrong(case, slug, dtype):
    """The Run of a mistake on a case in a type, in a list that is empty if it touches nothing the case holds."""
    y = wrong_outputs(case, slug, dtype)
    return [judged(slug, case, y, dtype)] if y else []


def draw(name):
    """A random case of flash: its values exact to 64 bits and then rounded, K from 32 noisy runs of the definition."""
    n = int(name.split()[1])
    random, size, kind = np.random.default_rng(n), (1, 3, 8)[n % 3], KINDS[n // 3 % 4]
    Tq, Tk, dk, dv = (int(random.choice(s)) for s in ((1, 4, 8), (5, 16, 48, 128, 256), (4, 16, 64), (3, 8)))
    q, k, v = (random.normal(size=(1, 2, *shape)) for shape in ((Tq, dk), (Tk, dk), (Tk, dv)))
    if kind == "outliers":
        k, v = (x * np.where(random.random(x.shape) < 0.02, 30, 1) for x in (k, v))
    v = v + 50 if kind == "offset 50" else v - v.mean(2, keepdims=True) if kind == "cancelling" else v
    q, k, v = (round_to(x, "bfloat16") for x in (size * q, k, v))
    mask = random.random((1, 2, Tq, Tk)) < 0.7 if n % 2 else np.ones((1, 1, Tq, Tk), bool)
    x = dict(q=q, k=k, v=v, mask=mask, sink=np.array([0.0 if n % 5 == 1 else -np.inf]), scale=dk ** -0.5,
             query_block=4, key_block=16 if n % 4 < 2 else 64)
    dense = cases.named(flash.dense, flash.OUTPUTS)
    exact = {o: y.astype(np.float64) for o, y in dense(**cast(x, "longdouble")).items()}
    return cases.Case("flash", name, f"{kind}, logits x{size}", {}, {}, x, exact, conditioning=conditioning([dense], x))


def measure(some):
    """Type -> (honest runs, runs of mistakes) on some cases of one variant."""
    with np.errstate(all="ignore"):
        return {dtype: ([run for case in some for run in honest(case, dtype)],
                        [run for case in some for slug in mistakes(case.module) for run in wrong(case, slug, dtype)])
                for dtype in DTYPES}


def best(found, dtype, short=False):
    """The Run of every mistake on the case that shows it best, the least clear first.

    Mistakes that exact arithmetic would not make, of which float64 shows nothing, are left out; short asks for them.
    """
    by_score = {kind: sorted(found[kind][1], key=lambda run: run.score) for kind in ("float64", dtype)}
    clear = {run.what for run in by_score["float64"] if run.score > 1}
    return sorted(({run.what: run for run in by_score[dtype] if (run.what in clear) != short}).values(),
                  key=lambda run: run.score)


def limits(everything):
    """Variant, type, largest honest score and where, smallest score of a mistake on its best case and which."""
    for variant, found in everything.items():
        for dtype in DTYPES:
            top, low = max(found[dtype][0], key=lambda run: run.score), best(found, dtype)[0]
            yield variant, dtype, number(top.score), top, number(low.score), low


def margins(everything):
    """Type, mistakes, and the variant and name of each one that scores below 10 on its best case."""
    for dtype in DTYPES:
        runs = [(variant, run) for variant, found in everything.items() for run in best(found, dtype)]
        low = [f"{variant} {run.what} {number(run.score)}" for variant, run in runs if run.score < 10]
        yield dtype, len(runs), len(low), ", ".join(low)


def shares(everything):
    """Type, runs, and for every metric the share of wrong runs beyond the largest honest one.

    A wrong run is a mistake on a case in which, in float64, it moves an output by more than 1e-9 of the largest.
    """
    for dtype in DTYPES:
        right = [run for found in everything.values() for run in found[dtype][0]]
        false = [run for found in everything.values() for run, exact in zip(found[dtype][1], found["float64"][1])
                 if 1e-9 < exact.metrics["max-norm"] < np.inf]
        largest = {name: max(run.metrics[name] for run in right) for name in METRICS}
        caught = [np.mean([run.metrics[name] > most for run in false]) for name, most in largest.items()]
        yield dtype, len(right), len(false), *(f"{100 * share:.0f} %" for share in caught)
