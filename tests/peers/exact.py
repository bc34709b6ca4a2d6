"""Cases that the golden data does not hold, made from those it does, and the judgement on what a peer returned."""
from dataclasses import replace
from functools import cache

import numpy as np

from attention_ref import check
from attention_ref.conformance.cases import load_cases, named, needs
from attention_ref.conformance.numbers import certified, conditioning


def changed(case, **changes):
    """The case with some inputs or cotangents replaced, its exact outputs and their conditioning computed anew."""
    inputs = case.inputs | {name: changes[name] for name in case.inputs if name in changes}
    cotangents = case.cotangents | {name: changes[name] for name in case.cotangents if name in changes}
    if set(changes) - set(inputs | cotangents):
        raise ValueError(f"{case.id} has no {', '.join(set(changes) - set(inputs | cotangents))}")
    module, found, K = case.module, {}, {}
    parts = dict(outputs=(named(module.FORMS[0], module.OUTPUTS), inputs))
    if case.steps:
        parts["steps"] = named(module.steps, module.STEPS), needs(module.steps, inputs)
    if cotangents:
        parts["gradients"] = module.vjp, cotangents | inputs
    for part, (function, arguments) in parts.items():
        found[part] = certified(function, arguments)[0]
        K |= conditioning([function], arguments)
    return replace(case, inputs=inputs, cotangents=cotangents, conditioning=K, **found)


@cache
def _without_dlse(variant, name):
    case = next(c for c in load_cases(variant) if c.name == name)
    return changed(case, dlse=0 * case.cotangents["dlse"]) if case.cotangents else case


def without_dlse(case):
    """A golden case as an implementation without a gradient through lse has it: the cotangent of lse is zero."""
    return _without_dlse(case.variant, case.name)


def without_nan(cases):
    """The cases that hold no NaN: peers read what is hidden."""
    return [case for case in cases if not any(np.isnan(x).any() for x in case.inputs.values()
                                              if isinstance(x, np.ndarray))]


def agrees(case, found, dtype="float64"):
    """True if all that was found lies within the budget of the case; else the test fails and says where it does not."""
    worst = [c for c in check(case, found, dtype).comparisons if c.score > 1]
    assert not worst, [(c.name, c.score, c.where(case), c.got, c.expected, c.problem) for c in worst]
    return check(case, found, dtype).passed
