"""What a function computes, found by calling it: facts with their evidence, and the golden cases that it meets."""
from dataclasses import dataclass, field

import numpy as np

from .. import variants
from ..shapes import GRID, expand, head, parse
from . import behaviour, experiments, recovery
from .blackbox import LAYOUTS, Box
from .cases import load_cases
from .diagnosis import diagnose_all
from .experiments import Fact
from .isolation import NoAnswer, NotAsked
from .report import table
from .verify import check

EXPERIMENTS = (
    experiments.sizes, experiments.returns, experiments.independence, experiments.linear, experiments.normalised,
    experiments.support, experiments.causal_argument, experiments.hidden, experiments.order, recovery.kernel,
    recovery.scale, recovery.softcap, recovery.position, recovery.bias, recovery.mask, recovery.head_map,
    recovery.decay, behaviour.state, behaviour.determinism, behaviour.accumulation, behaviour.cost)


@dataclass
class Match:
    """What the function did on the golden cases of one variant."""
    variant: str
    passed: list                         # names of the cases it meets
    asked: int                           # cases that it could be asked
    mistakes: list                       # named mistakes that explain all that it fails of the cases it takes whole

    @property
    def share(self):
        return len(self.passed) / self.asked


@dataclass
class Probe:
    """All that was found: facts in order, experiments that the function broke, variants by how well they match."""
    facts: list
    broken: dict = field(default_factory=dict)
    matches: list = field(default_factory=list)

    def __getitem__(self, name):
        """The value of a fact by its name; KeyError if it was not found."""
        return {fact.name: fact.value for fact in self.facts}[name]


def probe(function, backend="numpy", progress=lambda text: None):
    """A Probe of a function of at least q, k, v, or of a `Callee` of it, called many times with small arrays.

    backend: numpy, torch, jax or cupy, whose arrays it takes. Experiments that it breaks are listed with what it
    raised. ValueError if it cannot be called at all, or its output has no layout that is known.
    """
    box = Box(function, backend)
    found = examine(box, progress)
    with np.errstate(all="ignore"):
        found.matches = matches(box, found.broken, progress)
    return found


def examine(box, progress=lambda text: None):
    """The Probe of a Box without golden cases: every experiment that can be asked."""
    found = Probe([layout(box)])
    with np.errstate(all="ignore"):
        for experiment in EXPERIMENTS:
            progress(experiment.__name__)
            try:
                fact = experiment(box)
            except (Exception, SystemExit) as error:
                found.broken[experiment.__name__] = experiments.raised(error)
                continue
            found.facts += [fact] if fact else []
    return found


def layout(box):
    """The layout it takes, and the parameters whose meaning is known."""
    names = ", ".join(f"{name} is {role}" for role, name in reversed(box.names.items()) if name != role)
    n = box.sizes()
    return Fact("layout", f"{box.layout}: {LAYOUTS[box.layout][0]}",
                f"B {n.B}, H {n.H}, Tq {n.Tq}, Tk {n.Tk} keeps its shape and its heads" + (f"; {names}" * bool(names)))


def matches(box, broken, progress):
    """Variants whose golden cases the function meets, those with many and with most of theirs first.

    Cases that had no answer are added to broken.
    """
    found = []
    for name, module in variants().items():
        if {"q", "k", "v"} <= set(module.INPUTS):
            progress(f"golden cases of {name}")
            found.append(match(box, name, broken))
    return sorted((m for m in found if m.passed), key=lambda m: -m.share * len(m.passed))


def match(box, variant, broken):
    """The Match with one variant. Cases that state what the function does not take are asked too, without it."""
    asked, fair = [], []
    for case in load_cases(variant):
        try:
            result = check(case, dict(o=answer(box, case)), box.width, box.inside)
        except NoAnswer as error:
            broken[case.id] = experiments.raised(error)
            continue
        except NotAsked as error:
            broken["other golden cases"] = f"not asked: {error}"
            break
        except Exception:                                # sizes that it does not take
            continue
        asked.append(result)
        left_out = [name for name in case.inputs if not box.takes(name) and not case.is_neutral(name)]
        if all(name == "scale" and case.inputs["scale"] == case.sizes["dk"] ** -0.5 for name in left_out):
            fair.append(result)
    diagnosis = diagnose_all(fair, box.inside)
    findings = [] if diagnosis.unexplained else diagnosis.findings
    return Match(variant, [r.case.name for r in asked if r.passed], len(asked),
                 [" or ".join([f.mistake, *f.same]) + f": {f.sentence}" for f in findings])


def answer(box, case):
    """o of a case; a function whose dv is dk gets the values in pieces, one without heads gets them one by one."""
    x = {name: value for name, value in case.inputs.items() if box.takes(name)}
    if "dv" in box.free or case.sizes["dv"] == case.sizes["dk"]:
        return by_head(box, case, x)
    pieces, dk = [], case.sizes["dk"]
    for c in range(0, case.sizes["dv"], dk):
        v = x["v"][..., c:c + dk]
        width = v.shape[-1]
        v = np.concatenate([v, np.zeros((*v.shape[:-1], dk - width))], -1)
        pieces.append(by_head(box, case, x | dict(v=v))[..., :width])
    return np.concatenate(pieces, -1)


def by_head(box, case, x):
    """o for the arguments x of a case, head by head if the function has no heads."""
    if box.sizes().H > 1:
        return box(**x)
    n, schema = case.sizes, case.module.INPUTS
    grid = {a: n[a] for a in GRID if a in n}
    axes = parse(case.module.OUTPUTS["o"]).axes
    o = np.zeros((*case.outputs["o"].shape[:-1], x["v"].shape[-1]))
    for place in np.ndindex(o.shape[:2]):
        at = dict(zip(axes, place))
        one = {name: head(schema[name], expand(schema[name], value, n, grid), at, n, np.dtype(float))
               for name, value in x.items() if isinstance(value, np.ndarray)}
        o[place] = box(**x | {name: value[None, None] if np.ndim(value) == 2 else value for name, value in one.items()})
    return o


def text(found):
    """What a person reads: the table of facts, what the function broke, and the variants it matches."""
    parts = [table(found.facts, ("what", "inferred", "evidence"))]
    if found.broken:
        broken = table(found.broken.items(), ("experiment or case", "error"))
        parts.append(f"not found, for the function raised or gave no answer:\n{broken}")
    if not found.matches:
        return "\n\n".join(parts + ["It meets no golden case."])
    rows = [(m.variant, f"{len(m.passed)} of {m.asked}", ", ".join(m.passed[:4]) + ", ..." * (len(m.passed) > 4))
            for m in found.matches]
    parts.append("golden cases that it meets:\n" + table(rows, ("variant", "cases", "which")))
    mistakes = [f"{m.variant}: {sentence}" for m in found.matches for sentence in m.mistakes]
    return "\n\n".join(parts + ["named mistakes:\n  " + "\n  ".join(mistakes)] * bool(mistakes))


def record(found):
    """The same as JSON can hold it."""
    matched = [dict(variant=m.variant, passed=m.passed, asked=m.asked, mistakes=m.mistakes) for m in found.matches]
    return dict(facts=[fact._asdict() for fact in found.facts], broken=found.broken, matches=matched)
