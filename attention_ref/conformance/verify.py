"""The verdict on outputs: right or not, where, and by how much.

Budget, per element:  tol = 2 (u_io |exact| + u_acc K) + eta, with K the conditioning stored with the case, u_io and
u_acc the unit roundoffs of the type read and written and of the accumulator, eta the smallest subnormal.
score = error / tol.
NaN and infinities are compared as patterns, shapes exactly; `implementations.run` also asks for the type of the inputs.
"""
from dataclasses import dataclass, field

import numpy as np

from ..names import AXES
from ..shapes import parse
from .cases import Case
from .numbers import TINY, UNIT, round_to

FACTOR = 2
TIERS = dict(strict=1.0, fast=4.0, loose=32.0)           # the largest score that passes, of an honest run it is below 1


@dataclass
class Comparison:
    """One array against its exact value: score = largest error / tolerance, and where it is."""
    name: str
    score: float
    place: tuple = ()
    got: float = 0.0
    expected: float = 0.0
    problem: str = ""                   # a shape, dtype or missing output: no numbers to compare
    scores: np.ndarray = field(default=None, repr=False, compare=False)      # error / tolerance of every element

    def axes(self, case):
        """The symbols of the axes of the place; a gradient may lack leading ones, as its input does."""
        schema = case.module.OUTPUTS | getattr(case.module, "STEPS", {})
        found = parse(schema.get(self.name) or case.module.INPUTS.get(self.name[1:], "")).axes
        return found[len(found) - len(self.place):]

    def where(self, case):
        """The place in words: batch 0, head 2, query 3, channel 1."""
        return ", ".join(f"{AXES.get(a, a)} {i}" for a, i in zip(self.axes(case), self.place))


@dataclass
class Result:
    """The judgement on one case."""
    case: Case
    dtype: str
    comparisons: list = field(default_factory=list)
    outputs: dict = field(default_factory=dict)
    error: str = ""                     # the implementation raised
    unsupported: str = ""               # the implementation raised NotImplementedError
    not_asked: str = ""                 # why it was not asked: neither right nor wrong, and the run is incomplete
    used: tuple = ()                    # the cotangents that reached its gradients, () if all: see `with_rest`

    @property
    def score(self):
        return max((c.score for c in self.comparisons), default=np.inf)

    @property
    def passed(self):
        said_no = self.error or self.unsupported or self.not_asked
        return not said_no and bool(self.comparisons) and self.score <= self.case.limit

    @property
    def failed(self):
        return not self.passed and not self.unsupported and not self.not_asked

    @property
    def has_wrong_numbers(self):
        """Whether numbers are out of budget, not only a shape or a type."""
        return any(c.score > self.case.limit and not c.problem for c in self.comparisons)

    @property
    def worst(self):
        return max(self.comparisons, key=lambda c: c.score)


def tolerance(exact, K, dtype="float64", accumulate=None):
    """The largest error an honest implementation may make, elementwise; accumulate defaults to the type itself."""
    with np.errstate(invalid="ignore"):
        return FACTOR * (UNIT[dtype] * np.abs(exact) + UNIT[accumulate or dtype] * K) + TINY[dtype]


def compare(name, got, exact, K, dtype, accumulate=None):
    """Comparison of one array. An infinity must be met exactly, and NaN where K is NaN; any other NaN allows all."""
    got = np.asarray(got)
    if got.shape != exact.shape:
        return Comparison(name, np.inf, problem=f"expected shape {exact.shape}, got {got.shape}")
    if got.dtype.kind not in "fV":
        return Comparison(name, np.inf, problem=f"expected floating numbers, got dtype {got.dtype}")
    if not got.size:
        return Comparison(name, 0.0)
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        scores = np.abs(got - exact) / tolerance(exact, K, dtype, accumulate)
    scores = np.where(np.isnan(scores), np.inf, scores)
    free = np.isnan(exact) & (np.isnan(got) | ~np.isnan(K))
    too_large = np.isinf(got) & (got == round_to(exact, dtype))
    scores = np.where((got == exact) | free | too_large, 0, scores)
    place = tuple(map(int, np.unravel_index(np.argmax(scores), scores.shape)))
    return Comparison(name, float(scores[place]), place, float(got[place]), float(exact[place]), scores=scores)


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


def types_of(outputs):
    """Name -> number type of outputs by name."""
    return {name: str(y.dtype) for name, y in outputs.items()}


def widest(types):
    """The widest of the floating types among these, float64 if there are none at all."""
    return min(types, key=lambda dtype: UNIT.get(dtype, np.inf), default="float64")


def check(case, outputs, dtype=None, accumulate=None):
    """Judge the outputs of an implementation on a case.

    outputs: an array, a tuple in the order of OUTPUTS, or a dict that may hold outputs, gradients and steps by name.
    dtype: the type it read and wrote; by default the widest of its outputs. accumulate: the type of its sums, by
    default the same. Returns a Result; raises ValueError for output names that do not exist.
    """
    outputs = {name: np.array(y) for name, y in as_dict(case, outputs).items()}
    dtype = dtype or widest(types_of(outputs).values())
    for argument, value in dict(dtype=dtype, accumulate=accumulate or dtype).items():
        if value not in UNIT:
            raise ValueError(f"{argument}: expected one of {', '.join(UNIT)}, got {value!r}")
    if UNIT[accumulate or dtype] > UNIT[dtype]:
        raise ValueError(f"accumulate: expected a type no narrower than {dtype}, got {accumulate!r}")
    order = [name for name in case.expected if name in outputs]
    K = case.conditioning
    found = [compare(name, outputs[name], case.expected[name], K[name], dtype, accumulate) for name in order]
    return Result(case, dtype, found, outputs)
