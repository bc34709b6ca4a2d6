"""Identities that need no oracle: they hold for the formula whatever its values are."""
import numpy as np
import pytest

from attention_ref import load_cases, sdpa
from attention_ref.masks import causal

CASES = {case.name: case for case in load_cases("sdpa")}
CLEAN = [name for name, case in CASES.items() if np.isfinite(case.inputs["k"]).all() and case.sizes["Tk"] > 1]
RNG = np.random.default_rng(0)


def run(name, **changes):
    return sdpa.dense(**CASES[name].inputs | changes)


@pytest.mark.parametrize("name", CASES)
def test_weights_sum_to_one_less_the_sink(name):
    x = CASES[name].inputs
    *_, weights = sdpa.steps(**x)
    _, lse = sdpa.dense(**x)
    sink = np.broadcast_to(x["sink"], x["q"].shape[1])[None, :, None]
    with np.errstate(invalid="ignore"):
        expected = np.where(lse == -np.inf, 0, 1 - np.exp(sink - lse))
    np.testing.assert_allclose(weights.sum(-1), expected, rtol=0, atol=1e-15 * (weights.shape[-1] + 1))


@pytest.mark.parametrize("name", CASES)
def test_hidden_keys_have_weight_zero(name):
    x = CASES[name].inputs
    *_, weights = sdpa.steps(**x)
    assert (weights[np.broadcast_to(~x["mask"], weights.shape)] == 0).all()


@pytest.mark.parametrize("name", CLEAN)
def test_a_constant_added_to_a_row_moves_only_lse(name):
    x = CASES[name].inputs
    o, lse = run(name)
    sink = np.broadcast_to(x["sink"], x["q"].shape[1])
    moved, moved_lse = run(name, bias=x["bias"] + 3.0, sink=sink + 3.0)
    np.testing.assert_allclose(moved, o, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(moved_lse, lse + 3.0, rtol=1e-13)


@pytest.mark.parametrize("name", CLEAN)
def test_the_order_of_keys_does_not_matter(name):
    x, order = CASES[name].inputs, RNG.permutation(CASES[name].sizes["Tk"])
    bias = x["bias"][..., order] if x["bias"].shape[-1] > 1 else x["bias"]
    moved = run(name, k=x["k"][:, :, order], v=x["v"][:, :, order], mask=x["mask"][..., order], bias=bias)
    for got, expected in zip(moved, run(name)):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CLEAN)
def test_values_of_one_give_the_weight_that_the_sink_leaves(name):
    o, _ = run(name, v=np.ones_like(CASES[name].inputs["v"]))
    np.testing.assert_allclose(o, np.broadcast_to(sdpa.steps(**CASES[name].inputs)[3].sum(-1)[..., None], o.shape),
                               rtol=1e-13)


@pytest.mark.parametrize("anchor", ["top-left", "bottom-right"])
def test_the_future_cannot_be_felt(anchor):
    x = CASES["causal_wide"].inputs
    Tq, Tk = x["q"].shape[2], x["k"].shape[2]
    mask = causal(Tq, Tk, anchor)[None, None]
    before = run("causal_wide", mask=mask)
    for j in range(Tk):
        k, v = x["k"].copy(), x["v"].copy()
        k[:, :, j] += 1
        v[:, :, j] -= 1
        after = run("causal_wide", mask=mask, k=k, v=v)
        blind, seeing = ~mask[0, 0, :, j], mask[0, 0, :, j]
        for got, expected in zip(after, before):
            assert np.array_equal(got[:, :, blind], expected[:, :, blind])
            assert not seeing.any() or (got[:, :, seeing] != expected[:, :, seeing]).any()


def test_constant_cotangent_hides_the_query_gradient():
    """Why cotangents are not all ones: with equal row sums of V, dq is then exactly zero whatever the formula."""
    x = CASES["basic"].inputs
    v = x["v"] - x["v"].mean(-1, keepdims=True)
    do, dlse = np.ones((*x["q"].shape[:3], v.shape[3])), np.zeros(x["q"].shape[:3])
    assert np.abs(sdpa.vjp(do, dlse, **x | {"v": v})["dq"]).max() < 1e-13
    assert np.abs(CASES["basic"].gradients["dq"]).max() > 0.1
