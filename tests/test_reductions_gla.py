"""Gated linear attention, state space duality and Mamba-2: who becomes whom, and work that is linear in time."""
import numpy as np
import pytest

from attention_ref import gla, load_cases, mamba2, ssd
from attention_ref.conformance.numbers import count
from attention_ref.core import merge_heads, repeat_heads, split_heads
from attention_ref.masks import causal
from attention_ref.names import draw

ARRAYS = dict(gla=("q", "k", "v", "log_decay"), ssd=("x", "dt", "B", "C"), mamba2=("x",))
TIME = dict(gla=2, ssd=2, mamba2=1)
MODULES = dict(gla=gla, ssd=ssd, mamba2=mamba2)


def assert_close(got, expected):
    """assert_allclose for tuples of outputs, within rounding of numbers of order one to a hundred."""
    for y, z in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-12)


def basic(variant, **changes):
    return load_cases(variant, "basic")[0].in_dtype("float64") | changes


def tokens(variant, x, part):
    """The inputs of a case for some of its tokens."""
    at = (slice(None),) * TIME[variant] + (part,)
    return x | {name: x[name][at] for name in ARRAYS[variant]}


def zeros(x):
    return np.zeros_like(x["initial_state"])


# Gates

def test_without_decay_it_is_masked_linear_attention():
    x = basic("gla")
    x |= dict(log_decay=0 * x["log_decay"], initial_state=zeros(x))
    p = x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2) * causal(5, 5)
    assert_close(gla.recurrent(**x), (p @ x["v"], x["k"].swapaxes(-1, -2) @ x["v"]))


def test_one_gate_per_head_is_the_same_gate_in_every_channel():
    g = draw("log_decay", (2, 3, 5, 1))
    assert_close(gla.dense(**basic("gla", log_decay=g)), gla.dense(**basic("gla", log_decay=g.repeat(4, axis=3))))


def test_a_constant_decay_is_retention():
    x = basic("gla", log_decay=gla.retnet_decay(3))
    i, j = np.arange(5)[:, None], np.arange(5)
    gamma = (1 - 2.0 ** (-5 - np.arange(3)))[:, None, None]
    p = x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2) * np.where(j <= i, gamma ** (i - j), 0)
    x |= dict(initial_state=zeros(x))
    assert_close(gla.recurrent(**x)[:1], [p @ x["v"]])


def test_schedules_of_decays():
    assert np.exp(gla.retnet_decay(3)).ravel() == pytest.approx([31 / 32, 63 / 64, 127 / 128], rel=1e-15)
    assert -gla.lightning_decay(8).ravel() == pytest.approx(2.0 ** -np.arange(1, 9), rel=2e-5)
    first, last = gla.lightning_decay(4, 0, 5), gla.lightning_decay(4, 4, 5)
    assert first.shape == (4, 1, 1) and (first < last).all() and np.abs(last).max() < 1e-5


@pytest.mark.parametrize("form", gla.FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("t", range(5))
def test_a_gate_of_0_begins_a_new_sequence(form, t):
    x = basic("gla")
    x["log_decay"][:, :, t] = -np.inf
    before, after = (tokens("gla", x, part) for part in (slice(t), slice(t, None)))
    assert_close([form(**x)[0][:, :, :t]], [gla.recurrent(**before)[0]])
    o, state = form(**x)
    assert_close((o[:, :, t:], state), gla.recurrent(**after | dict(initial_state=zeros(x))))


def test_the_gradient_of_the_gates_from_those_of_queries_and_keys():
    """sum_{i>=t} (q dq - k dk) + (S_T dS_T summed over rows), the identity of the paper: no state is kept."""
    case = load_cases("gla", "basic")[0]
    x, d, state = case.inputs, case.gradients, case.outputs["final_state"]
    later = np.flip(np.flip(x["q"] * d["dq"] - x["k"] * d["dk"], 2).cumsum(2), 2)
    assert_close([d["dlog_decay"]], [later + (state * case.cotangents["dfinal_state"]).sum(-1)[:, :, None]])


# State space duality

def as_gla(x):
    """q = C, k = B, v = dt x and a gate per head and token."""
    H = x["x"].shape[1]
    return dict(q=repeat_heads(x["C"], H), k=repeat_heads(x["B"], H), v=x["dt"][..., None] * x["x"],
                log_decay=(x["dt"] * x["A"][:, None])[..., None], initial_state=x["initial_state"], scale=1.0)


@pytest.mark.parametrize("form", ssd.FORMS, ids=lambda form: form.__name__)
def test_ssd_is_gla(form):
    x = basic("ssd")
    o, state = gla.recurrent(**as_gla(x))
    assert_close(form(**x), (o + x["D"][:, None, None] * x["x"], state))


def test_ssd_is_one_matrix_whose_blocks_below_the_diagonal_have_rank_dk():
    """Column j of M is what a 1 at token j gives: 0 before it, and a past of any length is seen through dk numbers."""
    x = basic("ssd", D=np.zeros(6), initial_state=np.zeros((2, 6, 4, 5)))
    T, long = 12, {name: draw(name, (2, n, 12, *d)) for name, n, d in (("B", 3, (2,)), ("C", 3, (2,)), ("dt", 6, ()))}
    unit = np.broadcast_to(np.eye(T), (2, 6, T, T)) / long["dt"][..., None]
    M, _ = ssd.recurrent(**x | long | dict(x=unit, initial_state=np.zeros((2, 6, 2, T))))
    assert (np.triu(M, 1) == 0).all()
    ranks = [np.linalg.matrix_rank(M[..., i:, :i], rtol=1e-10) for i in range(2, T - 1)]
    assert np.max(ranks) == 2 and np.linalg.matrix_rank(M, rtol=1e-10).min() > T / 2


def test_a_step_of_0_leaves_the_state_alone():
    x = basic("ssd")
    y = x | {name: np.insert(x[name], 3, 9.0, axis=2) for name in ("x", "B", "C")}
    o, state = ssd.recurrent(**y | dict(dt=np.insert(x["dt"], 3, 0, axis=2)))
    assert_close((np.delete(o, 3, axis=2), state), ssd.recurrent(**x))


# Mamba-2

def test_mamba2_without_convolution_is_projections_ssd_and_norm():
    x = basic("mamba2")
    u = x["conv_bias"].size
    x |= dict(conv_state=np.zeros((2, 0, u)), conv_weight=np.ones((1, u)), conv_bias=np.zeros(u))
    p = x["x"] @ x["w_in"]
    z, (v, B, C), dt = p[..., :48], np.split(mamba2.silu(p[..., 48:48 + u]), [48, 69], axis=-1), p[..., 48 + u:]
    y, state = ssd.recurrent(split_heads(v, 6), np.log1p(np.exp(dt + x["dt_bias"])).swapaxes(1, 2), -np.exp(x["A_log"]),
                             split_heads(B, 3), split_heads(C, 3), x["D"], x["initial_state"])
    y = (merge_heads(y) * z / (1 + np.exp(-z))).reshape(2, 5, 3, 16)
    o = (y / np.sqrt((y ** 2).mean(-1, keepdims=True) + 1e-5)).reshape(2, 5, 48) * x["norm_weight"] @ x["w_o"]
    for form in mamba2.FORMS:
        assert_close(form(**x), (o, state, x["conv_state"]))


# Calls

@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("variant", MODULES)
def test_the_chunk_size_changes_nothing(variant, chunk_size):
    x = basic(variant)
    assert_close(MODULES[variant].chunkwise(**x | dict(chunk_size=chunk_size)), MODULES[variant].recurrent(**x))


@pytest.mark.parametrize("cut", range(1, 5))
@pytest.mark.parametrize("variant", MODULES)
def test_prefill_and_the_rest_are_the_whole(variant, cut):
    """The states after some tokens are all that the others need."""
    x, module = basic(variant), MODULES[variant]
    states = [name for name in module.INPUTS if name.endswith("_state")]
    o, *after = module.chunkwise(**tokens(variant, x, slice(cut)))
    rest, *last = module.dense(**tokens(variant, x, slice(cut, None)) | dict(zip(states, after)))
    assert_close([np.concatenate([o, rest], axis=TIME[variant]), *last], module.recurrent(**x))


def test_prefill_and_single_steps_are_the_whole():
    x = basic("gla")
    o, state = gla.dense(**tokens("gla", x, slice(3)))
    for t in (3, 4):
        y, state = gla.step(*(x[name][:, :, t] for name in ARRAYS["gla"]), state, scale=x["scale"])
        o = np.concatenate([o, y[:, :, None]], axis=2)
    assert_close((o, state), gla.recurrent(**x))


# Work

def long(T):
    q, k, g = (draw(name, (1, 1, T, 4)) for name in ("q", "k", "log_decay"))
    return dict(q=q, k=k, v=draw("k", (1, 1, T, 3)), log_decay=g, initial_state=np.zeros((1, 1, 4, 3)), scale=0.5)


@pytest.mark.parametrize("T", [1, 7, 64])
def test_the_recurrence_takes_five_operations_per_number_of_the_state(T):
    """Decay, product, sum, and a product and a sum to read."""
    assert count(gla.recurrent, **long(T)) == dict(flops=T * (5 * 4 * 3 + 3), exp=T * 4)
    x, state = long(T), np.zeros((1, 1, 4, 3))
    given = dict(x=x["v"], dt=x["q"][..., 0], A=-np.ones(1), B=x["k"], C=x["q"], D=np.ones(1), initial_state=state)
    assert count(ssd.recurrent, **given) == dict(flops=T * (5 * 4 * 3 + 3 * 3 + 1), exp=T)


def test_chunks_take_work_linear_in_time_and_all_pairs_do_not():
    def flops(form, T, **options):
        return count(form, **long(T), **options)["flops"]
    assert flops(gla.chunkwise, 64, chunk_size=8) == 8 * flops(gla.chunkwise, 8, chunk_size=8)
    assert flops(gla.dense, 128) > 3.8 * flops(gla.dense, 64)
    assert flops(gla.chunkwise, 64, chunk_size=8) < flops(gla.dense, 64) / 4
