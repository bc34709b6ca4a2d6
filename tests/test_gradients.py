"""Every VJP meets a complex step through the definition, for every input of every golden case."""
import numpy as np
import pytest

from attention_ref import load_cases, variants
from attention_ref.conformance.teach import gradient_errors

CASES = [case for name, module in variants().items() if hasattr(module, "vjp") for case in load_cases(name)
         if case.gradients]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_vjp_meets_complex_step(case):
    errors = gradient_errors(case)
    assert errors and max(errors.values()) < 1e-13, errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_floating_input_has_a_gradient_of_its_shape(case):
    arrays = {name: x for name, x in case.inputs.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"}
    assert set(case.gradients) == {"d" + name for name in arrays}
    assert all(case.gradients["d" + name].shape == x.shape for name, x in arrays.items())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cotangents_are_not_constant(case):
    big = [d for d in case.cotangents.values() if d.size > 3]
    assert all(np.ptp(d) > 0 for d in big)
