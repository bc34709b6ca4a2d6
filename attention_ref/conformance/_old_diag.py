"""Which known mistake it is: every mistake of a variant is run on the failing cases, and the nearest is named.

A mistake explains a failing case when the outputs lie within the budget around what the mistake computes there, in the
same number type; it contradicts a passing case in which it would have given something else.
"""
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from .cases import load_cases
from .numbers import cast, conditioning
from .verify import check, tolerance


@dataclass
class Finding:
    """One mistake, the failing cases it explains, and how clearly."""
    mistake: str
    sentence: str
    cases: list                         # names of the failing cases it explains
    same: list                          # other mistakes that give the same numbers there
    margin: float                       # distance of the next candidate, in budgets around it
    next: str

    @property
    def candidates(self):
        """All the mistakes that it may be."""
        return {self.mistake, *self.same}

    def __str__(self):
        more = f" and {len(self.cases) - 3} more" if len(self.cases) > 3 else ""
        text = f"{self.mistake}: {self.sentence} (explains {', '.join(self.cases[:3])}{more})"
        if self.same:
            text += f"; the same numbers as {', '.join(self.same)}"
        if not self.next:
            return text
        if self.margin <= 1:
            return text + f"; {self.next} would give that too, but contradicts other cases"
        return text + f"; the next candidate, {self.next}, is {self.margin:.3g} budgets away"


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

    def narrowed(self, other, sentences):
        """This diagnosis, keeping of every ambiguous finding what another one, made in another type, also allows."""
        allowed = set().union(*(f.candidates for f in other.findings))
        return replace(self, findings=[_narrow(f, allowed, sentences) for f in self.findings])

    def __str__(self):
        if not self.failing:
            return "nothing to diagnose"
        lines = [str(f) for f in self.findings]
        if self.unexplained:
            lines.append(f"no known mistake matches {', '.join(self.unexplained)}")
        return "\n".join(lines)


def _narrow(finding, allowed, sentences):
    left = sorted(finding.candidates & allowed)
    if not finding.same or not left:
        return finding
    name = finding.mistake if finding.mistake in left else left[0]
    return replace(finding, mistake=name, sentence=sentences[name], same=[s for s in left if s != name])


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
    """Name the mistakes in outputs (as for `check`) from one case; a Diagnosis."""
    return diagnose_all([check(case, outputs, dtype, accumulate)], accumulate)


def diagnose_all(results, accumulate=None):
    """Name the mistakes behind the results of one variant.

    The first mistake is the one that explains most failing cases less those it contradicts; then the same for the cases
    that are left, until no known mistake explains more than it contradicts.
    """
    failing = {r.case.name: r for r in results if r.outputs and not r.passed and not r.unsupported}
    if not failing:
        return Diagnosis()
    slugs = mistakes(results[0].case.module)
    far = {slug: {name: distance(r, slug, accumulate) for name, r in failing.items()} for slug in slugs}
    against = {slug: _contradictions(slug, results, accumulate) for slug in slugs if min(far[slug].values()) <= 1}
    findings, left = [], list(failing)
    while left:
        explained = {slug: [name for name in left if far[slug][name] <= 1] for slug in against}
        worth = {slug: len(names) - against[slug] for slug, names in explained.items() if names}
        if max(worth.values(), default=0) <= 0:
            break
        findings.append(_finding(worth, explained, far, slugs))
        left = [name for name in left if name not in findings[-1].cases]
    return Diagnosis(len(failing), findings, left)


def _finding(worth, explained, far, slugs):
    """The best candidate, those that cannot be told from it, and the nearest that can."""
    def typical(slug, names):
        return float(np.median([far[slug][name] for name in names]))
    best = [slug for slug in worth if worth[slug] == max(worth.values())]
    name = max(best, key=lambda slug: len(explained[slug]))
    same = [slug for slug in best if slug != name and explained[slug] == explained[name]]
    rest = {slug: typical(slug, explained[name]) for slug in slugs if slug != name and slug not in same}
    near = min(rest, key=rest.get, default="")
    return Finding(name, slugs[name][0], explained[name], same, rest.get(near, np.inf), near)


def _contradictions(slug, results, accumulate):
    """The number of passing cases in which the mistake would have given something else."""
    return sum(distance(r, slug, accumulate) > 1 for r in results if r.passed)
