"""Make golden data: draw, certify, find out which mistakes each case catches, prove why it exists, write."""
import numpy as np

from .. import variants
from . import cases
from .diagnosis import mistakes, wrong_outputs
from .verify import check

TYPES = "float32", "float16"


def catches(case):
    """The mistakes whose outputs fail this case in float32 or float16."""
    return [slug for slug in mistakes(case.module) if any(caught(case, slug, dtype) > 1 for dtype in TYPES)]


def caught(case, slug, dtype):
    """The score of a mistake on a case; 0 if it touches nothing that the case holds."""
    outputs = wrong_outputs(case, slug, dtype)
    return check(case, outputs, dtype).score if outputs else 0.0


def prove(case):
    """Raise AssertionError unless the case has the property, or catches the mistakes, for which it exists."""
    recipe = case.module.CASES[case.name]
    if "shows" not in recipe and not recipe.get("catches"):
        raise AssertionError(f"{case.id}: its why has no proof")
    if "shows" in recipe and not np.all(recipe["shows"](case.inputs, case.outputs)):
        raise AssertionError(f"{case.id}: does not show that {case.why}")
    missed = set(recipe.get("catches", ())) - set(case.catches)
    if missed:
        raise AssertionError(f"{case.id}: does not catch {', '.join(sorted(missed))}")


def build(variant):
    """Every case of a variant, computed, certified and proved."""
    module = variants()[variant]
    made = [cases.compute(cases.draw_case(module, name)) for name in module.CASES]
    for case in made:
        case.catches = catches(case)
        prove(case)
    return made


def remake(names, folder=cases.GOLDEN, progress=print):
    """Write the golden files of the named variants into folder, one variant after the other, then the index."""
    for name in names:
        made = build(name)
        cases.write(variants()[name], made, folder)
        bits = max(case.bits for case in made)
        progress(f"{name}: {len(made)} cases, certified with up to {bits} bits")
    cases.write_index(folder)
