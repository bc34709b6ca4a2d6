"""Every form of every variant keeps its number type and meets the certified value within the measured budget."""
import numpy as np
import pytest

from attention_ref import check, load_cases, variants
from attention_ref.conformance import cases, numbers, suite

FORMS = [(name, form) for name, module in variants().items() for form in module.FORMS]
IDS = [f"{name}-{form.__name__}" for name, form in FORMS]


def smallest(variant):
    """The golden case with the fewest numbers, among those in which something is seen."""
    seen = [c for c in load_cases(variant) if all(y.size for y in c.outputs.values())]
    return min(seen, key=lambda c: sum(np.size(x) for x in c.inputs.values()))


@pytest.mark.parametrize("variant, form", FORMS, ids=IDS)
def test_form_meets_the_certified_value(variant, form):
    call = cases.named(form, variants()[variant].OUTPUTS)
    for dtype in suite.types_of(form):
        for case in load_cases(variant):
            result = check(case, call(**case.in_dtype(dtype)), dtype)
            assert result.passed, f"{case.id} in {dtype}: {result.worst}"


@pytest.mark.parametrize("variant", variants())
def test_steps_and_gradients_meet_the_certified_value(variant):
    module = variants()[variant]
    for dtype in suite.NUMPY:
        for case in load_cases(variant):
            found = {}
            if case.steps:
                found |= cases.named(module.steps, module.STEPS)(**cases.needs(module.steps, case.in_dtype(dtype)))
            if case.gradients:
                found |= module.vjp(**numbers.cast(case.cotangents | case.inputs, dtype))
            if found:
                result = check(case, found, dtype)
                assert result.passed, f"{case.id} in {dtype}: {result.worst}"
                assert all(y.dtype == dtype for y in found.values()), f"{case.id}: {dtype} is not kept"


@pytest.mark.parametrize("system", numbers.SYSTEMS)
@pytest.mark.parametrize("variant, form", FORMS, ids=IDS)
def test_one_text_in_every_number_system(variant, form, system):
    case = smallest(variant)
    outputs = cases.named(form, case.module.OUTPUTS)(**case.in_dtype(system))
    dtype = dict(balls=object, noisy=np.float64).get(system, system)
    for name, y in outputs.items():
        assert y.dtype == dtype, f"{name} came back as {y.dtype}"
        if system == "balls":
            assert numbers._round(numbers.every_to_ball(y), "mid") == pytest.approx(case.outputs[name], rel=1e-15)
        else:
            got = np.real(np.asarray(y)).astype(np.float64)
            loose = "float16" if system == "float16" else "float32"
            assert np.all((np.abs(got - case.outputs[name]) <= numbers.UNIT[loose] * 64 * (
                np.abs(case.outputs[name]) + case.conditioning[name])) | (got == case.outputs[name]))


@pytest.mark.parametrize("variant", variants())
def test_golden_inputs_lie_on_the_bfloat16_grid(variant):
    for case in load_cases(variant):
        for name, x in case.inputs.items():
            if isinstance(x, (float, np.ndarray)) and np.asarray(x).dtype.kind == "f":
                assert np.array_equal(numbers.round_to(x, "bfloat16"), x, equal_nan=True), f"{case.id}: {name}"
