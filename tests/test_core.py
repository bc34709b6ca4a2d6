"""The shared pieces of recurrent variants: products of gates and triangular solves, in every number system."""
import numpy as np
import pytest

from attention_ref.conformance import numbers
from attention_ref.core import decay_between, solve_unit_lower, solve_unit_upper
from attention_ref.names import tab


def test_decay_between_is_the_product_of_the_gates():
    a = np.abs(tab((2, 5, 3), 3, 1))
    d = decay_between(a)
    for i in range(5):
        for j in range(5):
            expected = a[:, j + 1:i + 1].prod(1) if j <= i else np.zeros((2, 3))
            np.testing.assert_allclose(d[:, i, j], expected, rtol=1e-15)


def test_a_gate_of_zero_is_exact():
    a = np.array([0.5, 0.0, 0.25])[:, None]
    assert decay_between(a)[..., 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0.25, 1]]


def test_unit_triangular_solves():
    n, r = tab((2, 4, 4), 3, 1), tab((2, 4, 3), 5, 2)
    lower = np.tril(n, -1) + np.eye(4)
    np.testing.assert_allclose(lower @ solve_unit_lower(n, r), r, atol=1e-14)
    np.testing.assert_allclose(lower.swapaxes(-1, -2) @ solve_unit_upper(n, r), r, atol=1e-14)


def test_equal_unit_keys_do_not_explode():
    """With n all 1 below the diagonal the inverse has entries 1 and -1, and powers of n have entries of 10^9."""
    n = np.ones((64, 64), np.float32)
    x = solve_unit_lower(n, np.eye(64, dtype=np.float32))
    assert np.array_equal(x, np.eye(64) - np.eye(64, k=-1))


@pytest.mark.parametrize("system", numbers.SYSTEMS)
def test_in_every_number_system(system):
    x = numbers.cast(dict(a=tab((1, 4, 2), 3, 1), n=tab((1, 4, 4), 3, 1), r=tab((1, 4, 3), 5, 2)), system)
    for y in decay_between(x["a"]), solve_unit_lower(x["n"], x["r"]), solve_unit_upper(x["n"], x["r"]):
        assert y.dtype == x["a"].dtype
        assert type(y) is type(x["a"]), f"{system} came back as {type(y).__name__}"
