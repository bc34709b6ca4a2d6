"""The budget, put to the test: honest implementations stay within it, mistakes do not.

An honest implementation is the text of a form, of the steps or of the VJP in another arithmetic: sums in another order,
exponentials in base 2, weights or every result rounded to the type that is stored, float32 inside. All run on the
golden cases of every variant, the forms on 200 random draws of every variant as well: golden cases with other data,
and for flash, online softmax included, up to 256 keys.

    python -m attention_ref.conformance.budget             print what was measured
    python -m attention_ref.conformance.budget --write     write it into docs/budget.md, and the figure
"""
import re
import sys
import time
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import variants
from ..names import NAMES
from . import cases
from .diagnosis import mistakes, wrong_outputs
from .numbers import TINY, UNIT, Numbers, cast, conditioning, round_to
from .report import number
from .verify import check

ROOT = Path(__file__).parents[2]
DOC, FIGURE = ROOT / "docs" / "budget.md", ROOT / "figures" / "budget_honest_against_wrong.svg"
DTYPES = "float64", "float32", "float16", "bfloat16"
DRAWS = "random draws"
LEAST = dict(float32=10, bfloat16=3)                     # what a mistake must score on its best case
FAINT = {                                                # mistakes that score less in bfloat16, and why
    ("cross", "scale_ignored"): "the sums of W_O over heads and channels cancel: K is far larger than o",
    ("multi_head", "scale_ignored"): "the same",
    ("rope", "angles_in_bfloat16"): "where everything is rounded to bfloat16 it is no mistake",
    ("rope", "angles_in_float16"): "the same",
    ("flash", "p_without_sink"): "it moves no gradient by more than 4 per cent of the largest",
}


# Honest implementations

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


def texts(case):
    """Name -> (function, arguments) of what computes something of a case, but loops: "one by one" is what they do."""
    module = case.module
    found = {name: (form, case.inputs) for name, form in cases.forms(module).items() if name != "loop"}
    if case.steps:
        found["steps"] = cases.named(module.steps, module.STEPS), cases.needs(module.steps, case.inputs)
    if case.gradients:
        found["vjp"] = module.vjp, case.cotangents | case.inputs
    return found


def honest(case, dtype):
    """Every honest Run of a case in a type; many_keys exists to refuse float16 sums that grow one by one."""
    for name, (function, arguments) in texts(case).items():
        for way, (inside, system, accumulate) in ways(dtype).items():
            if case.name != "many_keys" or inside != "float16" or system not in (OneByOne, FromTheLast):
                given = {name: x.view(system) if system and isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
                         for name, x in cast(arguments, inside).items()}
                yield judged(f"{name}, {way}", case, function(**given), dtype, accumulate)


def draw(n):
    """Random case number n of flash: its values exact to 64 bits, then rounded; K from 32 noisy runs of dense."""
    random, size = np.random.default_rng(n), (1, 3, 8)[n % 3]
    kind = ("plain", "offset 50", "outliers", "cancelling")[n // 3 % 4]
    Tq, Tk, dk, dv = (int(random.choice(s)) for s in ((1, 4, 8), (5, 16, 48, 128, 256), (4, 16, 64), (3, 8)))
    q, k, v = (random.normal(size=(1, 2, *shape)) for shape in ((Tq, dk), (Tk, dk), (Tk, dv)))
    if kind == "outliers":
        k, v = (x * np.where(random.random(x.shape) < 0.02, 30, 1) for x in (k, v))
    v = v + 50 if kind == "offset 50" else v - v.mean(2, keepdims=True) if kind == "cancelling" else v
    q, k, v = (round_to(x, "bfloat16") for x in (size * q, k, v))
    mask = random.random((1, 2, Tq, Tk)) < 0.7 if n % 2 else np.ones((1, 1, Tq, Tk), bool)
    return solved(f"draw {n}", f"{kind}, logits x{size}", dict(
        q=q, k=k, v=v, mask=mask, sink=np.array([0.0 if n % 5 == 1 else -np.inf]), scale=dk ** -0.5, query_block=4,
        key_block=16 if n % 4 < 2 else 64))


SIGNED = {">": np.abs, "0": np.abs, "<": lambda x: -np.abs(x)}         # by the first letter of a domain: "0..2", "<= 0"


@cache
def redraw(variant, n):
    """Random case number n of any variant: a golden case, all its finite numbers normal and as large as they were.

    What has one sign keeps it. Left out are the cases that are their numbers: scores that overflow, 8192 equal ones.
    """
    random, golden = np.random.default_rng(n), cases.load_cases(variant)
    golden = [case for case in golden if case.name not in ("large_scores", "many_keys")]
    case, inputs = golden[n % len(golden)], {}
    for name, x in case.inputs.items():
        if isinstance(x, np.ndarray) and x.dtype.kind == "f":
            size = max(0.5, np.max(np.abs(x), where=np.isfinite(x), initial=0) / 2)
            drawn = SIGNED.get(NAMES[name].domain[0], np.positive)(size * random.normal(size=x.shape))
            x = np.where(np.isfinite(x), round_to(drawn, "bfloat16"), x)
        inputs[name] = x
    every = [form for name, form in cases.forms(case.module).items() if name != "loop"]
    return solved(f"draw {n}", case.name, inputs, variant, every)


def solved(name, why, inputs, variant="flash", forms=None):
    """The case of a variant with these inputs; K from noisy runs of the forms, of the definition alone if not given."""
    module = variants()[variant]
    dense = cases.named(module.FORMS[0], module.OUTPUTS)
    exact = {o: y.astype(np.float64) for o, y in dense(**cast(inputs, "longdouble")).items()}
    return cases.Case(variant, name, why, {}, {}, inputs, exact,
                      conditioning=conditioning(forms or [dense], inputs))


# What is measured of them, and of mistakes

ATOL = dict(float64=1.0, float32=7.7, float16=0.01, bfloat16=6e-4)                    # atol / rtol of torch.testing
METRICS = {                               # what is held to one limit, of the errors d and the sizes y of exact values
    "budget": None,
    "ulp": lambda d, y, dtype: d / np.maximum(np.ldexp(UNIT[dtype], np.frexp(y)[1]), TINY[dtype]),
    "rtol and atol": lambda d, y, dtype: d / (y + ATOL[dtype]),
    "max-norm": lambda d, y, dtype: d / y.max(),
}


class Run(NamedTuple):
    """One run, honest or of a mistake: what ran on which case, and the largest error in every metric."""
    what: str
    case: str
    metrics: dict

    score = property(lambda self: self.metrics["budget"])


score = attrgetter("score")


def judged(what, case, outputs, dtype, accumulate=None):
    """The Run that these outputs of a case are."""
    result = check(case, {name: round_to(np.asarray(y), dtype) for name, y in outputs.items()}, dtype, accumulate)
    arrays = [(y, case.expected[name]) for name, y in result.outputs.items()]
    metrics = {name: max(largest(f, *pair, dtype) for pair in arrays) for name, f in METRICS.items() if f}
    return Run(what, case.name, dict(budget=result.score) | metrics)


def largest(metric, got, exact, dtype):
    """What a metric says of an array: inf where shapes or what is not finite differ, which no metric overlooks."""
    if got.shape != exact.shape or not np.all((got == exact) | np.isfinite(got - exact) | np.isnan(exact)):
        return np.inf
    seen = np.isfinite(exact)
    d, y = np.abs(got - exact)[seen], np.abs(exact[seen])
    return float(np.max(metric(d, y, dtype))) if d.any() and y.any() else 0.0


def honest_draws(variant, dtype, draws=range(200)):
    """The honest runs of random draws of a variant, by number, in a type."""
    with np.errstate(all="ignore"):
        return [run for n in draws for run in honest(redraw(variant, n), dtype)]


def wrong(case, dtype, slugs=None):
    """The Run of every mistake, or of some of them, that touches something the case holds."""
    outputs = {slug: wrong_outputs(case, slug, dtype) for slug in slugs or mistakes(case.module)}
    return [judged(slug, case, y, dtype) for slug, y in outputs.items() if y]


def measure(some):
    """Type -> (honest runs, runs of mistakes) on some cases of one variant."""
    with np.errstate(all="ignore"):
        return {dtype: ([run for case in some for run in honest(case, dtype)],
                        [run for case in some for run in wrong(case, dtype)]) for dtype in DTYPES}


def best(found, dtype):
    """Mistake -> its Run on the case that shows it best."""
    return {run.what: run for run in sorted(found[dtype][1], key=score)}


def real(found):
    """The mistakes that are wrong in float64 too; the others are made by a short type only."""
    return {slug for slug, run in best(found, "float64").items() if run.score > 1}


# The document

def limits(everything):
    """Variant, type, the largest honest score and whose, the smallest score of a real mistake and which."""
    for variant, found in everything.items():
        for dtype in DTYPES:
            top, shown = max(found[dtype][0], key=score), best(found, dtype)
            low = min((shown[slug] for slug in real(found)), key=score)
            wrong_cells = (number(low.score), low.what) if variant != DRAWS else ("", "")
            yield variant, dtype, number(top.score), top.what, *wrong_cells


def margins(golden):
    """Type, variant, name and score of every mistake below 10 on its best case, and whether it is real."""
    for dtype in DTYPES:
        for variant, found in golden.items():
            for slug, run in best(found, dtype).items():
                if run.score < 10:
                    yield dtype, variant, slug, number(run.score), "yes" if slug in real(found) else "no"


def faint(golden):
    """Variant, name and score in bfloat16 of the mistakes that are excused, and why."""
    for (variant, slug), why in FAINT.items():
        if variant in golden:
            yield variant, slug, number(best(golden[variant], "bfloat16")[slug].score), why


def drawn(draws):
    """Variant, and the largest score of an honest run on its random draws in every type."""
    for variant, runs in draws.items():
        yield variant, *(number(max(map(score, runs[dtype]))) for dtype in DTYPES)


def shares(everything):
    """Cases, type, honest and wrong runs, and for every metric the share of wrong ones beyond all honest ones.

    A wrong run is a mistake on a case in which, in float64, it moves an output by more than 1e-9 of the largest.
    """
    for left_out in ("none", "large_scores"):
        for dtype in DTYPES:
            right = [run for found in everything.values() for run in found[dtype][0]]
            false = [run for found in everything.values() for run, exact in zip(found[dtype][1], found["float64"][1])
                     if 1e-9 < exact.metrics["max-norm"] < np.inf]
            right, false = ([run for run in runs if left_out != run.case] for runs in (right, false))
            limit = {name: max(run.metrics[name] for run in right) for name in METRICS}
            beyond = [np.mean([run.metrics[name] > limit[name] for run in false]) for name in METRICS]
            yield left_out, dtype, len(right), len(false), *(f"{100 * share:.0f} %" for share in beyond)


def tables(everything, golden, draws):
    """The measured parts of the document: marker -> Markdown table."""
    def table(lines, *heads):
        return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (heads, ["---"] * len(heads), *lines))
    return dict(limits=table(limits(everything), "variant", "type", "honest", "largest", "wrong", "smallest"),
                draws=table(drawn(draws), "variant", *DTYPES),
                margins=table(margins(golden), "type", "variant", "mistake", "score", "wrong in float64 too"),
                faint=table(faint(golden), "variant", "mistake", "score in bfloat16", "why"),
                shares=table(shares(everything), "left out", "type", "honest runs", "wrong runs", *METRICS))


def figure(everything, golden):
    """How often every score occurs, honest runs and mistakes on their best case, one panel per type."""
    from .. import plot
    drawing, axes = plot.subplots(rows=len(DTYPES), size=(7, 1.2))
    edges = 10 ** np.arange(-5, 17.1, 0.25)
    for axis, dtype in zip(axes, DTYPES):
        right = [run.score for found in everything.values() for run in found[dtype][0]]
        false = [best(found, dtype)[slug].score for found in golden.values() for slug in real(found)]
        for scores, colour, hatch in (right, plot.COLOURS[0], None), (false, plot.COLOURS[1], "////"):
            counts = np.histogram(np.clip(scores, edges[0], edges[-2]), edges)[0]
            axis.stairs(counts / counts.max(), edges, fill=True, facecolor=colour, edgecolor="white", hatch=hatch)
        axis.axvline(1, color="black", linewidth=1)
        axis.text(0.7, 1.15, f"honest: up to {number(max(right))}", ha="right", color=plot.COLOURS[0])
        axis.text(1.4, 1.15, f"{len(false)} mistakes: from {number(min(false))}", color=plot.COLOURS[1])
        axis.set(xscale="log", xlim=(edges[0], edges[-1]), ylim=(0, 1.5), yticks=[], ylabel=dtype)
        axis.set_xticks(10.0 ** np.arange(-5, 16, 5), ["0", "1", *(f"$10^{{{n}}}$" for n in (5, 10, 15))])
        axis.set_xticks([], minor=True)
    axes[-1].set_xlabel("error / budget (right end: NaN)")
    return drawing


def write(everything, golden, draws):
    """Put the tables after their markers in the document, and draw the figure with its alternative text."""
    text = DOC.read_text()
    for name, table in tables(everything, golden, draws).items():
        text = re.sub(rf"(<!-- {name}: .*-->\n)\n(\|.*\n)*\n?", lambda found: f"{found[1]}\n{table}\n", text)
    DOC.write_text(text)
    alt = " ".join(re.search(rf"!\[([^]]*)\]\(../figures/{FIGURE.name}\)", text)[1].split())
    figure(everything, golden).savefig(FIGURE, format="svg", metadata={"Date": None, "Title": alt})


def main():
    """Measure everything and print it; with --write, write it."""
    golden, start = {}, time.time()
    for name in variants():
        print(f"{time.time() - start:4.0f} s  {name}", file=sys.stderr, flush=True)
        golden[name] = measure(cases.load_cases(name))
    print(f"{time.time() - start:4.0f} s  {DRAWS}", file=sys.stderr, flush=True)
    everything = golden | {DRAWS: measure([draw(n) for n in range(200)])}
    draws = {name: {dtype: honest_draws(name, dtype) for dtype in DTYPES} for name in variants()}
    print("\n".join(tables(everything, golden, draws).values()))
    if "--write" in sys.argv:
        write(everything, golden, draws)


if __name__ == "__main__":
    main()
