"""The shared pieces of recurrent variants: gates, scans, triangular solves, in every number system; sums in schemas."""
import numpy as np
import pytest

from attention_ref.conformance import numbers
from attention_ref.core import (
    decay_between, scan, scan_back, sigmoid, softplus, solve_unit_lower, solve_unit_upper)
from attention_ref.names import tab
from attention_ref.shapes import size_of, sizes


def test_softplus_and_sigmoid_do_not_overflow():
    x = np.array([-60000, -12, -1, 0, 1, 12, 60000])
    for dtype in "float16", "float32", "float64":
        with np.errstate(over="raise"):
            y, s = softplus(x.astype(dtype)), sigmoid(x.astype(dtype))
        assert y.dtype == s.dtype == dtype
        rtol = 2e-2 if dtype == "float16" else 2e-6
        np.testing.assert_allclose(y, np.logaddexp(0, x), rtol)
        np.testing.assert_allclose(s[1:], 1 / (1 + np.exp(-x[1:].astype(float))), rtol)


def test_the_slope_of_softplus_is_sigmoid():
    x = np.array([-100.0, -3, 0, 3, 100])
    slope = numbers.complex_step(lambda x: dict(y=softplus(x)), dict(x=x), dict(x=np.ones(5)))["y"]
    np.testing.assert_allclose(slope, sigmoid(x), rtol=1e-14)
    slope = numbers.complex_step(lambda x: dict(y=sigmoid(x)), dict(x=x), dict(x=np.ones(5)))["y"]
    np.testing.assert_allclose(slope, sigmoid(x) * sigmoid(-x), rtol=1e-14)


def test_an_axis_may_be_a_sum_of_products():
    schema = dict(a="H dk", b="2*H*dk+G*dk+1", c="G+1")
    x = dict(a=np.zeros((10, 4)), b=np.zeros(80 + 5 * 4 + 1), c=np.zeros(6))
    assert sizes(schema, x) == dict(H=10, dk=4, G=5) and size_of("2*H*dk+1", dict(H=3, dk=4)) == 25
    for wrong in 100, 102, 80, 3:
        with pytest.raises(ValueError, match=r"b: expected shape \(2\*H\*dk\+G\*dk\+1\) with H = 10, dk = 4, got"):
            sizes(schema, x | dict(b=np.zeros(wrong)))
    with pytest.raises(ValueError, match="c: expected shape .* with G = 5, got"):
        sizes(schema, x | dict(c=np.zeros(5)))


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


def test_a_scan_is_the_product_of_the_gates_applied_to_what_was_written():
    a, w, s = np.abs(tab((2, 3, 5, 4), 3, 1)), tab((2, 3, 5, 4), 5, 2), tab((2, 3, 4), 7, 3)
    d = decay_between(np.concatenate([np.ones((2, 3, 1, 4)), a], axis=2))
    every = np.concatenate([s[:, :, None], w], axis=2)
    np.testing.assert_allclose(scan(a, w, s), (d * every[:, :, None]).sum(3), atol=1e-15)
    assert scan(a[:, :, :0], w[:, :, :0], s).shape == (2, 3, 1, 4)


def test_scan_back_is_the_transpose_of_scan():
    a, w, s, dw = np.abs(tab((1, 1, 5, 4), 3, 1)), *(tab((1, 1, n, 4), 5, n) for n in (5, 1, 5))
    s, ds = s[:, :, 0], tab((1, 1, 4), 2, 9)
    y, d = scan(a, w, s)[:, :, 1:], scan_back(a, dw, ds)
    assert (y * dw).sum() + (y[:, :, -1] * ds).sum() == pytest.approx((w * d[:, :, 1:]).sum() + (s * d[:, :, 0]).sum())


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
    a = x["a"][:, None]
    for y in (decay_between(a), scan(a, a, a[:, :, 0]), scan_back(a, a, a[:, :, 0]), softplus(a), sigmoid(a),
              solve_unit_lower(x["n"], x["r"]), solve_unit_upper(x["n"], x["r"])):
        assert y.dtype == x["a"].dtype
        assert type(y) is type(x["a"]), f"{system} came back as {type(y).__name__}"
