"""jax.nn.dot_product_attention against the golden data, values and gradients, and where it reads it differently.

Its softmax runs in float32 whatever type comes in, so every comparison has the budget of float32.
"""
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from exact import agrees, changed, without_dlse

from attention_ref import check, diagnose, load_cases

SDPA, GQA, MASKED = ({case.name: case for case in load_cases(variant)} for variant in ("sdpa", "gqa", "masked"))


@pytest.fixture(autouse=True)
def float64():
    """float64 arrays for the length of a test; the setting of the process stays as it is."""
    with jax.enable_x64(True):
        yield


def attention(q, k, v, bias=None, mask=None, **options):
    """o and lse in our layout (B, H, T, d). There keys and values must be equally wide: channels of zeros are added."""
    dk, dv = q.shape[3], v.shape[3]
    add = [[(0, 0)] * 3 + [(0, max(dk, dv) - x.shape[3])] for x in (q, k, v)]
    wide = (jax.numpy.pad(x.swapaxes(1, 2), widths) for x, widths in zip((q, k, v), add))
    o, lse = jax.nn.dot_product_attention(*wide, bias, mask, return_residual=True, **options)
    return o.swapaxes(1, 2)[..., :dv], lse.swapaxes(1, 2)


@partial(jax.jit, static_argnames="is_causal")
def differentiated(x, do, **options):
    """o, lse, and the gradients of x for a cotangent of o: lse is given without a gradient."""
    o, vjp, lse = jax.vjp(lambda x: attention(**x, **options), x, has_aux=True)
    return dict(o=o, lse=lse) | {"d" + name: g for name, g in vjp(do)[0].items()}


def with_gradients(case, **options):
    x = {name: case.inputs[name] for name in ("q", "k", "v", "bias") if name in case.inputs}
    do = case.cotangents.get("do", np.zeros_like(case.outputs["o"]))
    found = differentiated(x, do, scale=case.inputs["scale"], **options)
    return {name: np.asarray(y) for name, y in found.items() if name in case.expected}


def expressible(case):
    """jax has no soft cap and no sink, gives rows without keys a meaning of its own, and reads masked values."""
    x = case.inputs
    extras = x.get("softcap") is not None or np.isfinite(x.get("sink", -np.inf)).any()
    return not extras and np.isfinite(case.outputs["lse"]).all() and not np.isnan(x["k"]).any()


@pytest.mark.parametrize("case", [c for c in (*SDPA.values(), *GQA.values()) if expressible(c)], ids=lambda c: c.id)
def test_golden(case):
    """GQA is in the shapes: fewer heads in k and v."""
    (B, H, Tq, _), Tk = case.inputs["q"].shape, case.inputs["k"].shape[2]
    mask = np.broadcast_to(case.inputs["mask"], (B, H, Tq, Tk))
    assert agrees(without_dlse(case), with_gradients(case, mask=mask), "float32")


def by_parameters(case):
    """The mask of a golden case of masked in the terms of jax; None if it has none.

    jax has neither segments nor dilation, and the diagonal of its causal mask and window starts at the top left.
    """
    x = case.inputs
    positions = x["causal"] or (x["left"], x["right"]) != (None, None)
    one_segment = len({*x["query_segments"].ravel(), *x["key_segments"].ravel()}) == 1
    if not expressible(case) or not one_segment or x["dilation"] > 1 or (positions and x["anchor"] != "top-left"):
        return None
    open_side = sum(x["q"].shape[2:3] + x["k"].shape[2:3])
    sides = tuple(open_side if x[side] is None else x[side] for side in ("left", "right"))
    return dict(is_causal=x["causal"], key_value_seq_lengths=x["lengths"].astype(np.int32), local_window_size=sides)


@pytest.mark.parametrize("case", [case for case in MASKED.values() if by_parameters(case)], ids=lambda c: c.name)
def test_masked(case):
    assert agrees(without_dlse(case), with_gradients(case, **by_parameters(case)), "float32")


@pytest.mark.parametrize("name", ["padding_window", "causal_padding_window"])
def test_masked_without_its_rows_without_keys(name):
    case = changed(MASKED[name], lengths=np.array([6, 5]))
    assert agrees(case, with_gradients(case, **by_parameters(case)), "float32")


def test_every_condition_of_masked_is_met():
    met = {name for name, case in MASKED.items() if by_parameters(case)}
    assert {"basic", "causal", "padding", "window", "causal_padding", "causal_window"} <= met


def test_rows_beyond_the_query_length_are_zero():
    """They are multiplied by 0 at the end; the others do not notice."""
    case, lengths = MASKED["padding"], np.array([2, 4], np.int32)
    o = with_gradients(case, **by_parameters(case), query_seq_lengths=lengths)["o"]
    inside = (np.arange(o.shape[2]) < lengths[:, None])[:, None, :, None]
    assert not np.where(inside, 0, o).any()
    assert check(case, np.where(inside, o, case.outputs["o"]), "float32").passed


def run(name, causal=False):
    """o and lse of jax on the inputs of a golden case; causal in place of the mask."""
    x = SDPA[name].inputs
    mask = None if causal else x["mask"]
    y = attention(x["q"], x["k"], x["v"], mask=mask, is_causal=causal, scale=x["scale"])
    return [np.asarray(part) for part in y]


def test_keys_and_values_must_be_equally_wide():
    x = SDPA["basic"].inputs
    with pytest.raises(ValueError, match="value shape should be"):
        jax.nn.dot_product_attention(*(x[name].swapaxes(1, 2) for name in "qkv"))


def test_is_causal_starts_at_the_top_left():
    o = run("causal_wide", causal=True)
    assert check(SDPA["causal_top_left"], o, "float32").passed
    assert diagnose(SDPA["causal_wide"], o, "float32").mistake == "causal_top_left"


def test_row_without_keys_is_the_mean_of_all_values():
    case = SDPA["empty_row"]
    assert diagnose(case, run("empty_row"), "float32").mistake == "empty_row_uniform"


def test_masked_nan_poisons():
    assert np.isnan(run("masked_nan")[0]).all() and np.isfinite(SDPA["masked_nan"].outputs["o"]).all()


def test_softmax_is_float32():
    y = run("basic")
    assert y[0].dtype == np.float64
    assert check(SDPA["basic"], y, "float32").passed and not check(SDPA["basic"], y, "float64").passed
