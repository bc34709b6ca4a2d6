"""Who becomes whom under which setting: every kinship between variants is an equality that runs."""
import numpy as np
import pytest

from attention_ref import cross, flash, gqa, kv_cache, load_cases, masked, multi_head, ring_cache, sdpa
from attention_ref.core import repeat_heads, split_heads
from attention_ref.masks import causal, window
from attention_ref.names import draw

ONE = np.ones((1, 1, 1, 1), bool)


def assert_close(got, expected):
    """assert_allclose for outputs or tuples of them, within rounding of numbers of order one."""
    for y, z in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-13)


def qkv(B=2, H=3, Tq=5, Tk=6, dk=4, dv=7, Hkv=None):
    return draw("q", (B, H, Tq, dk)), draw("k", (B, Hkv or H, Tk, dk)), draw("v", (B, Hkv or H, Tk, dv))


def tokens(heads=3, D=8, T=5, dk=4, dv=7):
    """x, w_q, w_k, w_v, w_o with scores small enough to tell weights apart."""
    shapes = dict(x=(2, T, D), w_q=(D, heads * dk), w_k=(D, heads * dk), w_v=(D, heads * dv), w_o=(heads * dv, D))
    return {name: draw(name, shape) / 4 for name, shape in shapes.items()}


@pytest.mark.parametrize("query_block, key_block", [(1, 1), (2, 4), (5, 3), (64, 64)])
@pytest.mark.parametrize("form", [flash.online, flash.split])
def test_flash_is_sdpa_for_every_tile(form, query_block, key_block):
    q, k, v = qkv()
    sink = draw("sink", (3,))
    assert_close(form(q, k, v, causal(5, 6), sink, scale=0.5, query_block=query_block, key_block=key_block),
          sdpa.dense(q, k, v, causal(5, 6), sink=sink, scale=0.5))


@pytest.mark.parametrize("cut", range(7))
def test_two_halves_merge_into_the_whole(cut):
    q, k, v = qkv()
    halves = [sdpa.dense(q, k[:, :, part], v[:, :, part], scale=0.5) for part in (slice(cut), slice(cut, None))]
    assert_close(flash.merge(*zip(*halves)), sdpa.dense(q, k, v, scale=0.5))


def test_masked_without_conditions_is_sdpa():
    q, k, v = qkv()
    parts = np.array([6, 6]), np.zeros((2, 5), int), np.zeros((2, 6), int)
    assert_close(masked.dense(q, k, v, *parts, anchor="top-left", scale=0.5), sdpa.dense(q, k, v, scale=0.5))


@pytest.mark.parametrize("anchor", ["top-left", "bottom-right"])
def test_masked_causal_and_window_are_sdpa_with_those_masks(anchor):
    q, k, v = qkv()
    parts = np.array([6, 6]), np.zeros((2, 5), int), np.zeros((2, 6), int)
    mask = causal(5, 6, anchor) & window(5, 6, 2, 1, anchor=anchor)
    assert_close(masked.dense(q, k, v, *parts, anchor=anchor, causal=True, left=2, right=1, scale=0.5),
          sdpa.dense(q, k, v, mask, scale=0.5))


def test_window_of_nothing_beside_itself_returns_v():
    q, k, v = qkv(Tq=6)
    o, _ = sdpa.dense(q, k, v, window(6, 6, 0, 0), scale=0.5)
    assert np.array_equal(o, v)


def test_gqa_with_as_many_kv_heads_is_sdpa():
    q, k, v = qkv()
    assert_close(gqa.dense(q, k, v, causal(5, 6), scale=0.5), sdpa.dense(q, k, v, causal(5, 6), scale=0.5))


@pytest.mark.parametrize("Hkv", [1, 2, 3, 6])
def test_gqa_is_sdpa_on_repeated_heads(Hkv):
    q, k, v = qkv(H=6, Hkv=Hkv)
    assert_close(gqa.grouped(q, k, v, causal(5, 6), scale=0.5),
          sdpa.dense(q, repeat_heads(k, 6), repeat_heads(v, 6), causal(5, 6), scale=0.5))


def test_one_head_with_identity_weights_is_sdpa():
    x, eye = draw("x", (2, 5, 4)), np.eye(4)
    o, _ = sdpa.dense(*[x[:, None]] * 3, causal(5, 5), scale=0.5)
    assert_close([multi_head.dense(x, eye, eye, eye, eye, causal(5, 5), heads=1, scale=0.5)], [o[:, 0]])


def test_projections_per_head_are_the_fused_ones():
    t = tokens()
    fused = split_heads(t["x"] @ t["w_q"], 3)
    assert_close([np.stack([t["x"] @ w for w in np.split(t["w_q"], 3, axis=1)], axis=1)], [fused])
    assert_close([multi_head.per_head_sum(**t, heads=3, scale=0.5)], [multi_head.dense(**t, heads=3, scale=0.5)])


def test_cross_attention_to_itself_is_self_attention():
    t = tokens()
    assert_close([cross.dense(t["x"], t["x"], **{n: t[n] for n in ("w_q", "w_k", "w_v", "w_o")}, heads=3, scale=0.5)],
          [multi_head.dense(**t, heads=3, scale=0.5)])


def test_a_bias_of_keys_moves_nothing_and_a_bias_of_values_moves_by_itself():
    """A bias is one more row of W for a feature of x that is 1."""
    t = tokens()
    x = np.concatenate([t["x"], np.ones((2, 5, 1))], -1)

    def with_bias(**bias):
        w = {n: np.vstack([t[n], bias.get(n, np.zeros((1, t[n].shape[1])))]) for n in ("w_q", "w_k", "w_v")}
        return cross.dense(x, x, **w, w_o=np.hstack([t["w_o"], np.zeros((21, 1))]), heads=3, scale=0.5)[..., :8]
    b_v = draw("q", (1, 21))
    assert_close([with_bias(w_k=draw("q", (1, 12)))], [with_bias()])
    assert_close([with_bias(w_v=b_v)], [with_bias() + b_v @ t["w_o"]])


def calls(variant, q, k, v, state, cuts):
    """Feed the tokens to a cache call by call; the outputs side by side."""
    outputs, n = [], np.zeros(len(q), int)
    for start, stop in zip([0, *cuts], [*cuts, q.shape[2]]):
        part = slice(start, stop)
        o, *state = variant.dense(q[:, :, part], k[:, :, part], v[:, :, part], *state, n, scale=0.5)
        outputs.append(o)
        n = n + stop - start
    return [np.concatenate(outputs, 2)]


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4, 5], [2, 5]], ids=str)
def test_prefill_and_decode_are_the_full_pass(cuts):
    q, k, v = qkv(H=6, Hkv=2, Tq=6)
    full, _ = gqa.dense(q, k, v, causal(6, 6), scale=0.5)
    empty = [np.full((2, 2, 8, d), np.nan) for d in (4, 7)]
    assert_close(calls(kv_cache, q, k, v, empty, cuts), [full])


@pytest.mark.parametrize("W", [1, 2, 3, 5, 6, 9])
@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4, 5], [2, 5]], ids=str)
def test_a_ring_of_w_slots_is_a_window_of_w_keys(W, cuts):
    q, k, v = qkv(H=6, Hkv=2, Tq=6)
    full, _ = gqa.dense(q, k, v, window(6, 6, W - 1, 0), scale=0.5)
    empty = [np.full((2, 2, W, d), np.nan) for d in (4, 7)]
    assert_close(calls(ring_cache, q, k, v, empty, cuts), [full])


def test_a_sink_is_one_more_key_without_a_value():
    q, k, v = qkv()
    sink = draw("sink", (3,))
    wide = [np.concatenate([x, np.zeros((2, 3, 1, d))], 2) for x, d in ((k, 4), (v, 7))]
    bias = np.zeros((1, 3, 1, 7))
    bias[0, :, 0, -1] = sink
    assert_close(sdpa.dense(q, *wide, ONE, bias, scale=0.5), sdpa.dense(q, k, v, sink=sink, scale=0.5))


def test_a_wide_cap_is_no_cap():
    q, k, v = qkv()
    for y, z in zip(sdpa.dense(q, k, v, scale=0.5, softcap=1e6), sdpa.dense(q, k, v, scale=0.5)):
        np.testing.assert_allclose(y, z, rtol=1e-9)


def test_flash_backward_is_the_dense_backward():
    case = next(c for c in load_cases("sdpa") if c.name == "sink")
    x = {name: case.inputs[name] for name in ("q", "k", "v", "mask", "sink", "scale")}
    tiled = flash.vjp(**case.cotangents, **x, query_block=2, key_block=3)
    dense = sdpa.vjp(**case.cotangents, **x)
    assert_close([tiled[g] for g in tiled], [dense[g] for g in tiled])
