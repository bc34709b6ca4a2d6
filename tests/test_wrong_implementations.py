"""Wrong implementations as people write them, each on its own, are refused and named; right ones pass.

They share no code with the BUGS tables: plain NumPy on one batch entry and head, or torch-style one-liners.
"""
import numpy as np
import pytest

from attention_ref import load_cases
from attention_ref.conformance.implementations import judge


def rows(q, k, v, mask, bias, sink, attend):
    """Apply attend(q (dk,), keys, values, keep, bias, sink) to every query of every head."""
    B, H, Tq, _ = q.shape
    mask, bias = (np.broadcast_to(x, (B, H, Tq, k.shape[2])) for x in (mask, bias))
    sink = np.broadcast_to(sink, (H,))
    o = np.zeros((B, H, Tq, v.shape[3]), q.dtype)
    for b, h, i in np.ndindex(B, H, Tq):
        o[b, h, i] = attend(q[b, h, i], k[b, h], v[b, h], mask[b, h, i], bias[b, h, i], sink[h])
    return o


def weighted(scores, v, sink):
    """Softmax over one list of scores, with a sink."""
    top = max(scores.max(initial=-np.inf), sink)
    if top == -np.inf:
        return np.zeros(v.shape[1])
    e = np.exp(scores - top)
    return (e / (e.sum() + np.exp(sink - top))) @ v


def right(q, k, v, mask, bias, sink, scale, softcap):
    def attend(q, k, v, keep, bias, sink):
        s = k[keep] @ (scale * q)
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        return weighted(s + bias[keep], v[keep], sink)
    return rows(q, k, v, mask, bias, sink, attend)


def scale_from_model_width(q, k, v, mask, bias, sink, scale, softcap):
    width = q.shape[1] * q.shape[3]
    return right(q, k, v, mask, bias, sink, width ** -0.5, softcap)


def causal_flag_from_the_top_left(q, k, v, mask, bias, sink, scale, softcap):
    Tq, Tk = q.shape[2], k.shape[2]
    is_causal = mask.ndim == 4 and mask.shape[:2] == (1, 1) and all(
        mask[0, 0, i, j] == (j - i <= Tk - Tq) for i in range(Tq) for j in range(Tk))
    mask = np.tril(np.ones((Tq, Tk), bool)) if is_causal else mask
    return right(q, k, v, mask, bias, sink, scale, softcap)


def softmax_down_the_columns(q, k, v, mask, bias, scale):
    s = np.where(mask, np.einsum("bhid,bhjd->bhij", q, k) * scale + bias, -1e30)
    e = np.exp(s - s.max(axis=2, keepdims=True))
    return e / e.sum(axis=2, keepdims=True) @ v


def minus_1e9_in_half(q, k, v, mask, bias, scale):
    s = np.einsum("bhid,bhjd->bhij", q * scale, k) + bias + np.where(mask, 0.0, -1e9).astype(q.dtype)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v


def cap_after_mask(q, k, v, mask, bias, scale, softcap):
    s = np.where(mask, q @ k.transpose(0, 1, 3, 2) * scale, -np.inf)
    s = s if softcap is None else np.tanh(s / softcap) * softcap
    s = s + bias
    top = s.max(-1, keepdims=True, initial=-1e300)
    e = np.exp(s - top)
    return np.divide(e, e.sum(-1, keepdims=True), where=e.sum(-1, keepdims=True) > 0, out=np.zeros_like(e)) @ v


def cap_of_everything(q, k, v, mask, bias, scale, softcap):
    s = q @ k.transpose(0, 1, 3, 2) * scale + np.where(mask, bias, -np.inf)
    s = s if softcap is None else np.tanh(s / softcap) * softcap
    top = s.max(-1, keepdims=True, initial=-1e300)
    e = np.exp(s - top)
    return np.divide(e, e.sum(-1, keepdims=True), where=e.sum(-1, keepdims=True) > 0, out=np.zeros_like(e)) @ v


def inverted_mask(q, k, v, mask, bias, sink, scale, softcap):
    return right(q, k, v, np.logical_not(mask), bias, sink, scale, softcap)


def forgets_the_sink(q, k, v, mask, bias, sink, scale, softcap):
    return right(q, k, v, mask, bias, np.full_like(sink, -np.inf), scale, softcap)


def base_2(q, k, v, mask, bias, sink, scale, softcap):
    """exp2 of everything, with log2(e) folded into the scale only."""
    def attend(q, k, v, keep, bias, sink):
        s = k[keep] @ q * scale
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        s = s * np.log2(np.e) + bias[keep]
        return weighted(s * np.log(2), v[keep], sink)
    return rows(q, k, v, mask, bias, sink, attend)


def tiled_heads(q, k, v, mask, scale):
    G = q.shape[1] // k.shape[1]
    k, v = np.tile(k, (1, G, 1, 1)), np.tile(v, (1, G, 1, 1))
    return right(q, k, v, mask, np.zeros((1, 1, 1, 1)), -np.inf, scale, None)


WRONG = [
    ("sdpa", scale_from_model_width, "scale_by_d_model", "float64"),
    ("sdpa", scale_from_model_width, "scale_by_d_model", "float16"),
    ("sdpa", causal_flag_from_the_top_left, "causal_top_left", "float64"),
    ("sdpa", causal_flag_from_the_top_left, "causal_top_left", "float16"),
    ("sdpa", softmax_down_the_columns, "softmax_over_queries", "float64"),
    ("sdpa", softmax_down_the_columns, "softmax_over_queries", "float16"),
    ("sdpa", minus_1e9_in_half, "sentinel_added_does_not_fit", "float16"),
    ("sdpa", cap_after_mask, "softcap_after_mask", "float64"),
    ("sdpa", cap_after_mask, "softcap_after_mask", "float16"),
    ("sdpa", cap_of_everything, "softcap_after_additive_mask", "float64"),
    ("sdpa", inverted_mask, "mask_polarity", "float32"),
    ("sdpa", forgets_the_sink, "sink_ignored", "float32"),
    ("sdpa", base_2, "exp2_bias_not_rescaled", "float32"),
    ("gqa", tiled_heads, "heads_tiled", "float64"),
    ("gqa", tiled_heads, "heads_tiled", "float16"),
]


@pytest.mark.parametrize("variant, function, mistake, dtype", WRONG, ids=[f"{f.__name__}-{d}" for _, f, _, d in WRONG])
def test_wrong_is_refused_and_named(variant, function, mistake, dtype):
    results, diagnosis = judge(function, load_cases(variant), dtype)
    assert any(not r.passed and not r.unsupported for r in results)
    assert mistake in diagnosis.mistakes, str(diagnosis)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_right_is_accepted(dtype):
    """An honest implementation that never touches a masked key."""
    results, diagnosis = judge(right, load_cases("sdpa"), dtype)
    assert all(r.passed for r in results), str(diagnosis)
