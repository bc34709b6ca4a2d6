"""Which known mistake it is: every mistake of a variant is run on the failing cases, and the nearest is named.

A mistake explains a failing case when it fails it too and the outputs lie within the budget around what it computes
there, in the same number type; it contradicts a passing case that it fails with other outputs. Only outputs that differ
need a budget, and with it the conditioning of the mistake, which is what takes time.
"""
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from .call import with_rest
from .cases import by_name, load_cases
from .numbers import UNIT, cast, conditioning, round_to
from .verify import Result, check, tolerance


@dataclass
class Finding:
    """One mistake, the failing cases it explains, and how clearly."""
    mistake: str
    sentence: str
    results: list                       # the failing results it explains
    same: list                          # other mistakes that give the same numbers there
    others: list                        # mistakes that give something else there, or contradict more
    accumulate: str | None = None

    @property
    def cases(self):
        """The names of the cases it explains."""
        return [r.case.name for r in self.results]

    @property
    def next(self):
        """The nearest of the others and its distance, in budgets around it; ("", inf) if there is none."""
        far = {slug: np.median([distance(r, slug, self.accumulate) for r in self.results]) for slug in self.others}
        return min(far.items(), key=lambda item: item[1], default=("", np.inf))

    @property
    def candidates(self):
        """All the mistakes that it may be."""
        return {self.mistake, *self.same}

    def shows_in(self, dtype):
        """Whether a run in another number type would fail one of its cases, too."""
        return any(_touches(self.mistake, r, dtype) for r in self.results)

    def told_from(self, other, unsupported=()):
        """The smallest golden case, and a number type, in which another mistake gives something else; None if none.

        unsupported: names of cases that cannot be run.
        """
        first, seen = self.results[0], set().union(*(r.outputs for r in self.results))
        golden = [case for case in golden_cases(first.case.variant).values() if case.name not in unsupported]
        golden = sorted(golden, key=lambda case: sum(map(np.size, case.inputs.values())))
        for dtype in dict.fromkeys([first.dtype, "float64", "float32", "float16"]):
            for case in golden:
                if _differ_on(case, self.mistake, other, dtype, seen, first.used):
                    return case.name, dtype
        return None

    def __str__(self):
        more = f" and {len(self.cases) - 3} more" if len(self.cases) > 3 else ""
        text = f"{self.mistake}: {self.sentence} (explains {', '.join(self.cases[:3])}{more})"
        if self.same:
            text += f"; the same numbers as {', '.join(self.same)}"
        name, margin = self.next
        if not name:
            return text
        if margin <= 1:
            return text + f"; {name} would give that too, but explains less or contradicts other cases"
        return text + f"; the next candidate, {name}, is {margin:.3g} budgets away"


@dataclass
class Diagnosis:
    """The mistakes found behind failing results, the one that explains most first."""
    failing: int = 0
    findings: list = field(default_factory=list)
    unexplained: list = field(default_factory=list)       # names of the failing cases that no known mistake explains

    @property
    def mistake(self):
        """The name of the first mistake, "" if none is known."""
        return self.findings[0].mistake if self.findings else ""

    @property
    def mistakes(self):
        """The names of all mistakes found, none of which shares its numbers with another."""
        return [f.mistake for f in self.findings if not f.same]

    def of(self, name):
        """The part of this diagnosis that is about one failing case."""
        findings = [replace(f, results=[r for r in f.results if r.case.name == name]) for f in self.findings]
        return Diagnosis(1, [f for f in findings if f.results], [name] * (name in self.unexplained))

    def narrowed(self, results):
        """This diagnosis without the names that results of the same run in another number type refute."""
        findings = [left for f in self.findings for left in _narrow(f, results)]
        named = {name for f in findings for name in f.cases}
        lost = [name for f in self.findings for name in f.cases if name not in named]
        return replace(self, findings=findings, unexplained=lost + self.unexplained)

    def __str__(self):
        if not self.failing:
            return "nothing to diagnose"
        lines = [str(f) for f in self.findings]
        if self.unexplained:
            lines.append(f"no known mistake matches {', '.join(self.unexplained)}")
        return "\n".join(lines)


def _narrow(finding, results):
    """The Findings in place of one: those of its names that explain most of its cases in another type, too.

    Where none explains any and the type is wider, it is what the results in that type are diagnosed as.
    """
    failing = [r for r in _wrong(results) if r.case.name in finding.cases]
    passing = [r for r in results if r.passed and r.case.name in finding.cases]
    found = {slug: _worth(slug, failing, passing, None, -np.inf) for slug in (finding.mistake, *finding.same)}
    if failing and not any(names for names, _ in found.values()):
        wider = UNIT[failing[0].dtype] < UNIT[finding.results[0].dtype]
        return diagnose_all(failing + [r for r in results if r.passed]).findings if wider else [finding]
    most = max(worth for _, worth in found.values())
    name, *same = [slug for slug, (_, worth) in found.items() if worth == most]
    sentence = mistakes(finding.results[0].case.module)[name][0]
    return [replace(finding, mistake=name, sentence=sentence, same=same)]


def _differ_on(case, one, other, dtype, seen, used):
    """Whether neither of two mistakes gives a rounding of what the other gives, of the outputs that are seen."""
    wrong = [golden_mistake(case.variant, case.name, slug, dtype, used) for slug in (one, other)]
    first, second = (Result(case, dtype, outputs={name: y for name, y in outputs.items() if name in seen}, used=used)
                     for outputs in wrong)
    return all((first.outputs, second.outputs)) and min(distance(first, other), distance(second, one)) > 1


def mistakes(module):
    """Slug -> (sentence, function of the inputs of a case, giving a dict of wrong outputs or gradients)."""
    def forward(wrong):
        return lambda x: by_name(module.OUTPUTS, wrong(x))
    outputs = {slug: (text, forward(wrong)) for slug, (text, wrong) in module.BUGS.items()}
    return outputs | getattr(module, "VJP_BUGS", {})


def port_outputs(case, slug, dtype):
    """What a port with a mistake gives on a golden case in a number type, as float64.

    It is what the mistake computes in that type, each number half a budget off, up or down by a chance that is always
    the same; where the mistake gets the case right, nothing is moved.
    """
    wrong, random, moved = golden_mistake(case.variant, case.name, slug, dtype), np.random.default_rng(0), {}
    if not _fails(case.variant, case.name, slug, dtype, frozenset(wrong), ()):
        return wrong
    for name, y in wrong.items():
        with np.errstate(all="ignore"):
            budget = tolerance(y, _conditioning(case.variant, case.name, slug, ())[name], dtype)
            other = y + random.choice((-0.5, 0.5), y.shape) * budget
        moved[name] = round_to(np.where(np.isfinite(other), other, y), dtype)
    return moved


def wrong_outputs(case, slug, dtype, used=()):
    """What a mistake computes on a case in a number type, as float64; {} if it touches nothing the case holds.

    used: the cotangents that a wrong backward is given, () for all; the part of the others is right.
    """
    call, arguments = _mistake_call(case, slug, used)
    with np.errstate(all="ignore"):
        return {name: np.asarray(y, np.float64) for name, y in call(**cast(arguments, dtype)).items()}


def _mistake_call(case, slug, used):
    """A mistake as a function of keyword arguments, and the arguments; gradients need cotangents, or there are none."""
    wrong, forward = mistakes(case.module)[slug][1], slug in case.module.BUGS
    if not forward and not case.gradients:
        return (lambda: {}), {}
    if forward:
        return (lambda **x: wrong(x)), case.inputs
    taken = {name: d if name in (used or case.cotangents) else 0 * d for name, d in case.cotangents.items()}
    return (lambda **x: with_rest(case, wrong(x), used or case.cotangents)), case.inputs | taken


@cache
def golden_cases(variant):
    """The golden cases of a variant by name."""
    return {case.name: case for case in load_cases(variant)}


@cache
def golden_mistake(variant, name, slug, dtype, used=()):
    """`wrong_outputs` on a golden case, computed once."""
    return wrong_outputs(golden_cases(variant)[name], slug, dtype, used)


@cache
def _fails(variant, name, slug, dtype, seen, used):
    """Whether a mistake itself fails a golden case, by one of the outputs that are seen and by more than rounding."""
    wrong = {output: y for output, y in golden_mistake(variant, name, slug, dtype, used).items() if output in seen}
    return bool(wrong) and not check(golden_cases(variant)[name], wrong, dtype).passed


@cache
def _near_truth(variant, name, slug, dtype, accumulate, seen, used):
    """Whether the right outputs lie within the budget around a mistake: then only its very numbers name it."""
    case = golden_cases(variant)[name]
    right = {output: y for output, y in case.expected.items() if output in seen}
    return distance(Result(case, dtype, outputs=right, used=used), slug, accumulate) <= 1


@cache
def _conditioning(variant, name, slug, used):
    """K of what a mistake computes on a golden case."""
    call, arguments = _mistake_call(golden_cases(variant)[name], slug, used)
    with np.errstate(all="ignore"):
        return conditioning([call], arguments, runs=4)


def _pairs(result, slug):
    """Name -> (what a result has, what a mistake gives) where both can be compared.

    {} if the mistake says nothing about the outputs that failed.
    """
    got, case = result.outputs, result.case
    wrong = golden_mistake(case.variant, case.name, slug, result.dtype, result.used)
    pairs = {name: (got[name].astype(np.float64), y) for name, y in wrong.items()
             if name in got and got[name].shape == y.shape}
    failed = {c.name for c in result.comparisons if c.score > case.limit}
    return pairs if not failed or failed & set(pairs) else {}


def _differ(pair):
    return not np.array_equal(*pair, equal_nan=True)


def distance(result, slug, accumulate=None):
    """How far the outputs of a result are from those of a mistake, in units of the budget around the mistake.

    inf if a mistake says nothing about the outputs that failed, or nothing can be compared.
    """
    pairs, case = _pairs(result, slug), result.case
    if not pairs or any(_differ(map(np.isnan, pair)) for pair in pairs.values()):
        return np.inf
    unlike = {name: pair for name, pair in pairs.items() if _differ(pair)}
    K = _conditioning(case.variant, case.name, slug, result.used) if unlike else {}
    return max((_match(*pair, K[name], result.dtype, accumulate) for name, pair in unlike.items()), default=0.0)


def _match(got, wrong, K, dtype, accumulate):
    same = (got == wrong) | np.isnan(wrong)
    with np.errstate(all="ignore"):
        error = np.where(same, 0, np.abs(got - wrong) / (2 * tolerance(wrong, K, dtype, accumulate)))
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def bearing(result, slug, accumulate=None):
    """What the outputs of a result say of a mistake: 1 they are its own, -1 they are not, 0 they may be.

    They may be where right outputs lie within the budget around the mistake too, unless they are as wrong as it is.
    None where it gets the case right.
    """
    if not _touches(slug, result):
        return None
    far = distance(result, slug, accumulate)
    if far == 0 or far > 1:
        return 1 if far == 0 else -1
    case, seen = result.case, frozenset(result.outputs)
    near = _near_truth(case.variant, case.name, slug, result.dtype, accumulate, seen, result.used)
    return 0 if near and not _as_wrong(result, slug) else 1


def _as_wrong(result, slug):
    """Whether a result and a mistake that loses digits err alike: by far, and by less than what is still right."""
    case, pairs = result.case, _pairs(result, slug)
    own = check(case, {name: y for name, (_, y) in pairs.items()}, result.dtype).score
    if not 10 <= min(own, result.score) <= max(own, result.score) <= 10 * min(own, result.score) < np.inf:
        return False
    K = _conditioning(case.variant, case.name, slug, result.used)
    budgets = {name: tolerance(y, K[name], result.dtype) for name, (_, y) in pairs.items()}
    return all(np.max(budgets[name], initial=0) < np.abs(y).max(initial=0) / 16 for name, (_, y) in pairs.items())


def _touches(slug, result, dtype=None):
    """Whether a mistake gets the case of a result wrong, in its number type or in another."""
    case, seen = result.case, frozenset(result.outputs)
    return _fails(case.variant, case.name, slug, dtype or result.dtype, seen, result.used)


def diagnose(case, outputs, dtype=None, accumulate=None):
    """Name the mistakes in outputs (as for `check`) from one case; a Diagnosis."""
    return diagnose_all([check(case, outputs, dtype, accumulate)], accumulate)


def diagnose_run(results, again, accumulate=None):
    """Name the mistakes behind the results of one run; what another number type refutes is not named.

    again: number type -> Results of the same run in that type; asked where mistakes give the same numbers, or where
    the one that is named cannot show in that type.
    """
    diagnosis = diagnose_all(results, accumulate)
    for dtype in ("float32", "float64"):
        if dtype != results[0].dtype and any(f.same or not f.shows_in(dtype) for f in diagnosis.findings):
            diagnosis = diagnosis.narrowed(again(dtype))
    return diagnosis


def diagnose_all(results, accumulate=None):
    """Name the mistakes behind the results of one variant.

    The first mistake is the one that explains most failing cases less those it contradicts; then the same for the cases
    that are left, until no known mistake explains more than it contradicts.
    """
    left, passing, findings = _wrong(results), [r for r in results if r.passed], []
    failing = len(left)
    while left:
        finding = _best(left, passing, accumulate)
        if not finding:
            break
        findings.append(finding)
        left = [r for r in left if r.case.name not in finding.cases]
    return Diagnosis(failing, findings, [r.case.name for r in left])


def _wrong(results):
    """Those with numbers that a mistake may explain."""
    return [r for r in results if r.outputs and r.failed and r.has_wrong_numbers]


def _best(failing, passing, accumulate):
    """The Finding that explains most failing results less the passing ones it contradicts; None if none is worth it."""
    slugs, explained, least = mistakes(failing[0].case.module), {}, 1
    for slug in sorted(slugs, key=lambda slug: not _identical(failing[0], slug)):
        names, worth = _worth(slug, failing, passing, accumulate, least)
        if worth >= least:
            explained = (explained if worth == least else {}) | {slug: names}
            least = worth
    if not explained:
        return None
    name = max(filter(explained.get, slugs), key=lambda slug: len(explained[slug]))
    same = [slug for slug in slugs if slug != name and explained.get(slug) == explained[name]]
    others = [slug for slug in slugs if slug not in (name, *same)]
    results = [r for r in failing if r.case.name in explained[name]]
    return Finding(name, slugs[name][0], results, same, others, accumulate)


def _identical(result, slug):
    pairs = _pairs(result, slug)
    return bool(pairs) and not any(map(_differ, pairs.values()))


def _worth(slug, failing, passing, accumulate, least):
    """The failing cases that a mistake explains, and their number less the passing cases it contradicts.

    It stops where the number can no longer be `least`: most mistakes get a failing case right, or are far from one.
    """
    touched = [r for r in failing if _touches(slug, r)]
    names, worth = [], len(touched)
    for r in touched + passing:
        if worth < least:
            break
        said = bearing(r, slug, accumulate)
        if not r.passed and said >= 0:
            names.append(r.case.name)
        worth -= said == -1 if r.passed else said < 1
    return names, worth
