"""The verdict on an implementation: right or not, in which case, by how much, and which known mistake it is.

Budget, per element:  tol = 2 (u_io |exact| + u_acc K) + eta, with K the conditioning stored with the case, u_io and
u_acc the unit roundoffs of the type read and written and of the accumulator, eta the smallest subnormal.
score = error / tol.
NaN, infinities and zeros that mark absence are compared as patterns; shapes and dtypes exactly.
"""
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from ..names import AXES
from ..shapes import parse
from .cases import Case, load_cases
from .numbers import TINY, UNIT, cast, conditioning

FACTOR = 2


@dataclass
class Comparison:
    """One array against its exact value: score = largest error / tolerance, and where it is."""
    name: str
    score: float
    place: tuple = ()
    got: float = 0.0
    expected: float = 0.0
    problem: str = ""                   # a shape, dtype or missing output: no numbers to compare

    def where(self, case):
        """The place in words: batch 0, head 2, query 3, channel 1."""
        schema = case.module.OUTPUTS | getattr(case.module, "STEPS", {})
        text = schema.get(self.name) or case.module.INPUTS.get(self.name[1:], "")
        return ", ".join(f"{AXES.get(a, a)} {i}" for a, i in zip(parse(text).axes, self.place))


@dataclass
class Result:
    """The judgement on one case."""
    case: Case
    dtype: str
    comparisons: list = field(default_factory=list)
    outputs: dict = field(default_factory=dict)
    error: str = ""                     # the implementation raised
    unsupported: str = ""               # the implementation raised NotImplementedError

    @property
    def score(self):
        return max((c.score for c in self.comparisons), default=np.inf)

    @property
    def passed(self):
        return not self.error and not self.unsupported and bool(self.comparisons) and self.score <= 1

    @property
    def worst(self):
        return max(self.comparisons, key=lambda c: c.score)


def tolerance(exact, K, dtype="float64", accumulate=None):
    """The largest error an honest implementation may make, elementwise; accumulate defaults to the type itself."""
    with np.errstate(invalid="ignore"):
        return FACTOR * (UNIT[dtype] * np.abs(exact) + UNIT[accumulate or dtype] * K) + TINY[dtype]


def compare(name, got, exact, K, dtype, accumulate=None):
    """Comparison of one array. NaN in exact means that any value is right there; an infinity must be met exactly."""
    got = np.asarray(got)
    if got.shape != exact.shape:
        return Comparison(name, np.inf, problem=f"expected shape {exact.shape}, got {got.shape}")
    if got.dtype.kind not in "fV":
        return Comparison(name, np.inf, problem=f"expected floating numbers, got dtype {got.dtype}")
    if not got.size:
        return Comparison(name, 0.0)
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        score = np.abs(got - exact) / tolerance(exact, K, dtype, accumulate)
    score = np.where(np.isnan(score), np.inf, score)
    score = np.where((got == exact) | np.isnan(exact), 0, score)
    place = np.unravel_index(np.argmax(score), score.shape)
    return Comparison(name, float(score[place]), tuple(map(int, place)), float(got[place]), float(exact[place]))


def as_dict(case, outputs):
    """Outputs as a dict: a dict as it is, else an array or a tuple in the order of OUTPUTS, or the first of them."""
    if isinstance(outputs, dict):
        known = [*case.module.OUTPUTS, *getattr(case.module, "STEPS", {}), *("d" + name for name in case.inputs)]
        if set(outputs) - set(known):
            raise ValueError(f"outputs: expected names among {', '.join(known)}, got {', '.join(outputs)}")
        return {name: y for name, y in outputs.items() if name in case.expected}
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if not 1 <= len(outputs) <= len(case.outputs):
        wanted = f"1 to {len(case.outputs)} arrays ({', '.join(case.outputs)})"
        raise ValueError(f"outputs: expected {wanted}, got {len(outputs)}")
    return {name: y for name, y in zip(case.outputs, outputs) if y is not None}


def check(case, outputs, dtype=None, accumulate=None):
    """Judge the outputs of an implementation on a case.

    outputs: an array, a tuple in the order of OUTPUTS, or a dict that may hold outputs, gradients and steps by name.
    dtype: the type it read and wrote; by default that of its first output. accumulate: the type of its sums, by default
    the same. Returns a Result; raises ValueError for output names that do not exist.
    """
    outputs = {name: np.asarray(y) for name, y in as_dict(case, outputs).items()}
    dtype = dtype or str(next(iter(outputs.values()), np.array(0.0)).dtype)
    if dtype not in UNIT:
        raise ValueError(f"dtype: expected one of {', '.join(UNIT)}, got {dtype!r}")
    order = [name for name in case.expected if name in outputs]
    K = case.conditioning
    found = [compare(name, outputs[name], case.expected[name], K[name], dtype, accumulate) for name in order]
    return Result(case, dtype, found, outputs)


@dataclass
class Diagnosis:
    """What is known about failing results: the mistake that explains most of them, and how far the next one is."""
    mistake: str = ""                   # its name, "" when no known mistake matches
    explained: int = 0                  # failing cases it explains ...
    failing: int = 0                    # ... of so many
    same: list = field(default_factory=list)              # other mistakes that give the same numbers
    margin: float = np.inf              # distance of the next candidate, in budgets around it
    next: str = ""
    sentences: dict = field(default_factory=dict, repr=False)          # mistake -> what is wrong

    @property
    def candidates(self):
        """The mistakes that explain the failures equally well."""
        return {self.mistake, *self.same} - {""}

    def narrowed(self, other):
        """This diagnosis with only the candidates it shares with another one, of the same function in another type."""
        shared = self.candidates & other.candidates
        if not shared:
            return self
        best = other if other.mistake in shared else self
        name = best.mistake if best.mistake in shared else min(shared)
        return replace(best, mistake=name, same=sorted(shared - {name}))

    def __str__(self):
        if not self.mistake:
            return "no known mistake matches" if self.failing else "nothing to diagnose"
        text = f"{self.mistake}: {self.sentences[self.mistake]}"
        if self.failing > 1:
            text += f" (explains {self.explained} of {self.failing} failing cases)"
        if self.same:
            text += f"; the same numbers as {', '.join(self.same)}"
        if self.next and self.margin <= 1:
            return text + f"; {self.next} would explain that too, but not the passing cases"
        return text + (f"; the next candidate, {self.next}, is {self.margin:.3g} budgets away" if self.next else "")


def mistakes(module):
    """Slug -> (sentence, function of the inputs of a case, giving a dict of wrong outputs or gradients)."""
    forward = {slug: (text, _as_dict(wrong, module.OUTPUTS)) for slug, (text, wrong) in module.BUGS.items()}
    return forward | getattr(module, "VJP_BUGS", {})


def _as_dict(wrong, names):
    def call(x):
        y = wrong(x)
        return dict(zip(names, y if isinstance(y, tuple) else (y,)))
    return call


def wrong_outputs(case, slug, dtype):
    """What a mistake computes on a case in a number type, as float64; {} if it touches nothing the case holds."""
    call, arguments = _mistake_call(case, slug)
    with np.errstate(all="ignore"):
        return {name: np.asarray(y, np.float64) for name, y in call(**cast(arguments, dtype)).items()}


def _mistake_call(case, slug):
    """A mistake as a function of keyword arguments, and the arguments; gradients need cotangents, or there are none."""
    wrong, forward = mistakes(case.module)[slug][1], slug in case.module.BUGS
    if not forward and not case.gradients:
        return (lambda: {}), {}
    return (lambda **x: wrong(x)), case.inputs if forward else case.inputs | case.cotangents


@cache
def _mistaken(variant, case_name, slug, dtype):
    """Outputs of a mistake on a golden case in a number type, and their conditioning K."""
    case = next(c for c in load_cases(variant) if c.name == case_name)
    call, arguments = _mistake_call(case, slug)
    with np.errstate(all="ignore"):
        return wrong_outputs(case, slug, dtype), conditioning([call], arguments, runs=8)


def distance(result, slug, accumulate=None):
    """How far the outputs of a result are from those of a mistake, in units of the budget around the mistake.

    inf if a mistake says nothing about the outputs that failed, or nothing can be compared.
    """
    case, outputs = result.case, result.outputs
    wrong, K = _mistaken(case.variant, case.name, slug, result.dtype)
    common = [name for name in wrong if name in outputs and wrong[name].shape == outputs[name].shape]
    failed = {c.name for c in result.comparisons if c.score > 1}
    if not common or (failed and not failed & set(common)):
        return np.inf
    return max(_match(outputs[name], wrong[name], K[name], result.dtype, accumulate) for name in common)


def _match(got, wrong, K, dtype, accumulate):
    got = got.astype(np.float64)
    if not got.size:
        return 0.0
    if not np.array_equal(np.isnan(got), np.isnan(wrong)):
        return np.inf
    same = (got == wrong) | np.isnan(wrong)
    with np.errstate(all="ignore"):
        error = np.where(same, 0, np.abs(got - wrong) / (2 * tolerance(wrong, K, dtype, accumulate)))
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def diagnose(case, outputs, dtype=None, accumulate=None):
    """Name the mistake in outputs (as for `check`) from one case; a Diagnosis."""
    return diagnose_all([check(case, outputs, dtype, accumulate)], accumulate)


def diagnose_all(results, accumulate=None):
    """Name the mistake behind the results of one variant: it explains most failing cases, contradicts fewest passing.

    A mistake explains a case when the outputs lie within the budget around what the mistake computes there.
    """
    failing = [r for r in results if r.outputs and not r.passed and not r.unsupported]
    if not failing:
        return Diagnosis()
    slugs = mistakes(failing[0].case.module)
    far = {slug: [distance(r, slug, accumulate) for r in failing] for slug in slugs}
    explained = {slug: sum(d <= 1 for d in far[slug]) for slug in slugs}
    most = max(explained.values())
    if not most:
        return Diagnosis(failing=len(failing))
    best = [slug for slug in slugs if explained[slug] == most]
    against = {slug: _contradictions(slug, results, accumulate) for slug in best}
    best = [slug for slug in best if against[slug] == min(against.values())]
    name = min(best, key=lambda slug: np.median(far[slug]))
    there = [i for i, d in enumerate(far[name]) if d <= 1]
    rest = {slug: np.median([far[slug][i] for i in there]) for slug in slugs if slug not in best}
    near = min(rest, key=rest.get, default="")
    return Diagnosis(name, most, len(failing), [s for s in best if s != name], rest.get(near, np.inf), near,
                     {slug: text for slug, (text, _) in slugs.items()})


def _contradictions(slug, results, accumulate):
    """Passing cases in which the mistake would have given something else."""
    return sum(distance(r, slug, accumulate) > 1 for r in results if r.passed)
