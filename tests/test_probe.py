"""The probe: what it says of functions whose formula is known, of planted mistakes, and of functions that break."""
import json
import sys

import numpy as np
import pytest

from attention_ref import gqa, kv_cache, ring_cache, sdpa
from attention_ref.conformance import behaviour
from attention_ref.conformance.blackbox import Box
from attention_ref.conformance.cli import main
from attention_ref.conformance.experiments import describe
from attention_ref.conformance.probe import EXPERIMENTS, examine, probe, text
from attention_ref.masks import blocks, causal, window


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(behaviour, "LENGTHS", (32, 64))


def found(function, backend="numpy"):
    return examine(Box(function, backend))


# Functions, as people write them

def softmax(s, axis=-1):
    e = np.exp(s - s.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def scores(q, k):
    return q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5


def plain(q, k, v):
    return softmax(scores(q, k)) @ v


def hidden_by(mask):
    """Attention under a mask that is a function of Tq and Tk."""
    def attend(q, k, v):
        return softmax(np.where(mask(q.shape[-2], k.shape[-2]), scores(q, k), -1e30)) @ v
    return attend


def sequence_first(query, key, value):
    assert query.ndim == 3
    return plain(*(x.swapaxes(0, 1) for x in (query, key, value))).swapaxes(0, 1)


def flat(q, k, v):
    assert q.ndim == 2
    return plain(q, k, v)


def tokens_before_heads(q, k, v):
    return plain(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def packed(q, k, v, num_heads):
    o = plain(*(x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2) for x in (q, k, v)))
    return o.swapaxes(1, 2).reshape(*q.shape[:2], -1)


def capped(q, k, v):
    return softmax(5 * np.tanh(scores(q, k) / 5)) @ v


def alibi(q, k, v):
    i, j = np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2])
    slopes = 2.0 ** -np.arange(1, q.shape[1] + 1)
    return softmax(scores(q, k) - slopes[:, None, None] * abs(i - j)) @ v


def turned(x):
    angle = np.arange(x.shape[-2])[:, None] * 100.0 ** -np.linspace(0, 1, x.shape[-1] // 2)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def rotary(q, k, v):
    return plain(turned(q), turned(k), v)


def retention(q, k, v):
    d = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])
    return (q @ k.swapaxes(-1, -2) * np.where(d >= 0, 0.9 ** np.maximum(d, 0), 0)) @ v


def gated(q, k, v, g, initial_state):
    o, S = np.zeros(v.shape), initial_state.copy()
    for t in range(q.shape[2]):
        S = np.exp(g[:, :, t, None, None]) * S + k[:, :, t, :, None] * v[:, :, t, None]
        o[:, :, t] = (q[:, :, t, None] @ S)[:, :, 0]
    return o, S


def delta(q, k, v, beta):
    k = k / np.sqrt((k * k).sum(-1, keepdims=True))
    o, S = np.zeros(v.shape), np.zeros((*k.shape[:2], k.shape[-1], v.shape[-1]))
    for t in range(q.shape[2]):
        kt, b = k[:, :, t, :, None], beta[:, :, t, None, None]
        S = S + b * kt * (v[:, :, t, None] - kt.swapaxes(-1, -2) @ S)
        o[:, :, t] = (q[:, :, t, None] @ S)[:, :, 0]
    return o


def top_three(q, k, v):
    s = scores(q, k)
    return softmax(np.where(s >= np.sort(s)[..., -3:-2], s, -np.inf)) @ v


def with_sink(q, k, v):
    e = np.exp(scores(q, k))
    return e / (1 + e.sum(-1, keepdims=True)) @ v


def base_two(q, k, v, scale):
    s = scale * q @ k.swapaxes(-1, -2) * np.log2(np.e)
    z = np.exp2(s).sum(-1)
    return np.exp2(s) / z[..., None] @ v, np.log2(z)


def true_hides(q, k, v, mask=None, sm_scale=None):
    s = q @ k.swapaxes(-1, -2) * (sm_scale or 1)
    return softmax(s if mask is None else np.where(mask, -1e9, s)) @ v


def bias_first(q, k, v, bias=0.0):
    return softmax((q @ k.swapaxes(-1, -2) + bias) / q.shape[-1] ** 0.5) @ v


def unit_output(q, k, v):
    o = plain(q, k, v)
    return o / np.sqrt((o * o).mean(-1, keepdims=True))


def inside_float32(q, k, v):
    return plain(*(x.astype(np.float32) for x in (q, k, v))).astype(np.float64)


def one_by_one(q, k, v):
    e, total, z = np.exp(scores(q, k)), q[..., :1] @ v[..., :1, :] * 0, 0
    for j in range(k.shape[-2]):
        total, z = total + e[..., j:j + 1] * v[..., j:j + 1, :], z + e[..., j:j + 1]
    return total / z


def dropped_out(q, k, v):
    return plain(q, k, v) * np.random.default_rng().random()


def overwriting(q, k, v):
    q *= q.shape[-1] ** -0.5
    return softmax(q @ k.swapaxes(-1, -2)) @ v


def tiled(q, k, v):
    times = q.shape[1] // k.shape[1]
    assert times * k.shape[1] == q.shape[1]
    return plain(q, np.tile(k, (1, times, 1, 1)), np.tile(v, (1, times, 1, 1)))


def over_queries(q, k, v):
    return softmax(scores(q, k), axis=-2) @ v


def by_d_model(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / (q.shape[1] * q.shape[3]) ** 0.5) @ v


def masked_late(q, k, v, attn_mask=True):
    return softmax(scores(q, k)) * attn_mask @ v


def causal_late(q, k, v):
    return softmax(scores(q, k)) * causal(q.shape[-2], k.shape[-2], "top-left") @ v


KNOWN = {
    "plain": (plain, {"layout": "BHTD", "sizes": "Tq and Tk may differ: yes; dk and dv may differ: yes",
                      "returns": "one array", "linear in v": "yes", "normalised": "over keys", "support": "full",
                      "order": "keys may be permuted; queries may be permuted", "weights": "exponential in q.k",
                      "scale": "1/sqrt(dk)", "softcap": "none", "position": "does not count",
                      "kv heads": "must be as many", "determinism": "the same bits every time"}),
    "bottom right": (hidden_by(lambda Tq, Tk: causal(Tq, Tk)),
                     {"support": "causal, anchor bottom-right", "hidden keys": "change nothing; NaN in them comes thr",
                      "order": "keys have an order; queries have an order"}),
    "window": (hidden_by(lambda Tq, Tk: window(Tq, Tk, 3, 0)), {"support": "window, left 3, right 0, anchor bottom-r"}),
    "wide window": (hidden_by(lambda Tq, Tk: window(Tq, Tk, 6, 0)), {"support": "window, left 6, right 0, anchor bot"}),
    "two sides": (hidden_by(lambda Tq, Tk: window(Tq, Tk, 2, 4, anchor="top-left")),
                  {"support": "window, left 2, right 4, anchor top-left"}),
    "blocks": (hidden_by(lambda Tq, Tk: blocks(np.eye(-(-Tq // 4), -(-Tk // 4), dtype=bool), 4, Tq, Tk)),
               {"support": "blocks of 4, diagonal"}),
    "sequence first": (sequence_first, {"layout": "TBD", "scale": "1/sqrt(dk)"}),
    "other names": (lambda a, b, c, sm_scale: softmax(sm_scale * a @ b.swapaxes(-1, -2)) @ c,
                    {"scale": "1/sqrt(dk) (given as 1/sqrt(dk)); the argument is the scale"}),
    "2-D": (flat, {"layout": "TD", "normalised": "over keys"}),
    "BTHD": (tokens_before_heads, {"layout": "BTHD", "support": "full"}),
    "packed": (packed, {"layout": "packed", "scale": "1/sqrt(dk)"}),
    "capped": (capped, {"softcap": "5 tanh(s / 5)", "scale": "1/sqrt(dk)"}),
    "alibi": (alibi, {"position": "adds -slope |i - j|, as in ALiBi", "scale": "1/sqrt(dk)"}),
    "rotary": (rotary, {"support": "full", "weights": "neither exponential nor linear in q.k",
                        "order": "keys have an order", "position": "turns q and k (rotary)"}),
    "retention": (retention, {"weights": "linear in q", "normalised": "over no axis", "decay": "0.9, 0.9, 0.9 a step"}),
    "gated": (gated, {"decay": "none; 0.7408, 0.7408, 0.7408 for g = -0.3", "support": "causal",
                      "initial state": "the first output gets 1 q S; the returned state carries on"}),
    "delta": (delta, {"weights": "linear in q", "support": "causal", "linear in v": "yes"}),
    "top three": (top_three, {"support": "depends on the data, 3 keys for every query"}),
    "sink": (with_sink, {"normalised": "over keys, a part of it on nothing", "scale": "1/sqrt(dk)"}),
    "base two": (base_two, {"returns": "2 arrays, the second the log-sum-exp in base two",
                            "scale": "1/sqrt(dk) (given as 1/sqrt(dk)); the argument is the scale"}),
    "True hides": (true_hides, {"mask (mask)": "True hides; a row without keys gives the mean of all values",
                                "scale": "1; the argument is the scale"}),
    "bias first": (bias_first, {"bias (bias)": "before the scale"}),
    "unit output": (unit_output, {"linear in v": "no"}),
    "float32 inside": (inside_float32, {"sums": "in float32 even for float64", "scale": "1/sqrt(dk)"}),
    "dropout": (dropped_out, {"determinism": "differs from call to call"}),
    "overwriting": (overwriting, {"determinism": "the same bits every time; arguments are overwritten"}),
    "empty cache": (kv_cache.dense, {"support": "causal, Tq = Tk", "kv heads": "repeated (0 0 1 1)"}),
    "ring cache": (ring_cache.dense, {"support": "window, left 7, right 0, Tq = Tk"}),
    "gqa": (gqa.dense, {"kv heads": "repeated", "mask (mask)": "True keeps; a row without keys gives 0",
                        "bias (mask)": "takes no numbers",
                        "returns": "2 arrays, the second the log-sum-exp in base e"}),
    "sdpa": (sdpa.dense, {"softcap": "none; an argument of 2 caps at 2", "bias (bias)": "after the scale"}),
}
PLANTED = {
    "softmax over queries": (over_queries, {
        "normalised": "over queries", "independence": "batch entries and heads apart; queries move each other"}),
    "top-left": (hidden_by(lambda Tq, Tk: causal(Tq, Tk, "top-left")), {"support": "causal, anchor top-left"}),
    "scale of d_model": (by_d_model, {"scale": "1/sqrt(H dk)"}),
    "tiled heads": (tiled, {"kv heads": "tiled"}),
    "mask after softmax": (masked_late, {
        "mask (attn_mask)": "True keeps; what is left does not sum to 1: masked after the softmax"}),
    "causal after softmax": (causal_late, {"support": "causal, anchor top-left",
                                           "hidden keys": "move the result, as in a mask after the softmax"}),
}


@pytest.mark.parametrize("name", KNOWN | PLANTED)
def test_what_is_inferred(name):
    function, expected = (KNOWN | PLANTED)[name]
    p = found(function)
    assert not p.broken
    for fact, value in expected.items():
        assert p[fact].startswith(value), f"{fact}: {p[fact]}"
    assert all(fact.evidence for fact in p.facts)


def test_torch():
    torch = pytest.importorskip("torch")
    p = found(torch.nn.functional.scaled_dot_product_attention, "torch")
    assert not p.broken and p["layout"].startswith("BHTD") and p["scale"] == "1/sqrt(dk); the argument is the scale"
    assert p["is_causal=True"] == "causal, anchor top-left" and p["bias (attn_mask)"] == "after the scale"
    assert p["mask (attn_mask)"].startswith("True keeps") and p["kv heads"].startswith("repeated")


@pytest.fixture
def few(monkeypatch):
    """A few of the experiments, for JAX compiles every operation for every shape."""
    names = "linear support causal_argument kernel scale accumulation".split()
    module = sys.modules["attention_ref.conformance.probe"]
    monkeypatch.setattr(module, "EXPERIMENTS", [e for e in EXPERIMENTS if e.__name__ in names])


def test_jax(few):
    jax = pytest.importorskip("jax")
    p = found(jax.nn.dot_product_attention, "jax")
    assert not p.broken and p["layout"].startswith("BTHD") and p["scale"] == "1/sqrt(dk); the argument is the scale"
    assert p["is_causal=True"] == "causal, anchor top-left" and p["sums"] == "in float32 even for float64"


def test_a_jax_function_of_ones_own(few):
    jnp = pytest.importorskip("jax.numpy")

    def attend(query, key, value):
        s = query @ key.swapaxes(-1, -2)
        e = jnp.exp(jnp.where(jnp.tri(*s.shape[-2:], dtype=bool), s, -jnp.inf))
        return e / e.sum(-1, keepdims=True) @ value
    p = found(attend, "jax")
    assert not p.broken and p["support"] == "causal, anchor top-left" and p["scale"] == "1"


def test_sums_that_grow(monkeypatch):
    monkeypatch.setattr(behaviour, "LENGTHS", (64, 256, 2048))
    monkeypatch.setattr(behaviour, "PATIENCE", 60)
    boxes = [Box(f) for f in (one_by_one, plain)]
    long = [behaviour.unit_error(box, 2048, "float32") for box in boxes]
    assert long[0] > 2 * long[1], long
    assert "grows as T^" in behaviour.accumulation(boxes[0]).value
    assert "hardly grows" in behaviour.accumulation(boxes[1]).value


def test_cost(monkeypatch):
    monkeypatch.setattr(behaviour, "LENGTHS", (64, 128, 256, 512))
    memory = [behaviour.cost(Box(f)).value.split("memory T^")[1] for f in (plain, one_at_a_time)]
    assert float(memory[0]) > 1.7 and float(memory[1]) < 1.3


def one_at_a_time(q, k, v):
    o = np.zeros((*q.shape[:-1], v.shape[-1]))
    for i in range(q.shape[-2]):
        o[..., i:i + 1, :] = plain(q[..., i:i + 1, :], k, v)
    return o


@pytest.mark.parametrize("mask, text", [
    (causal(6, 6, "top-left"), "causal, Tq = Tk"),
    (window(9, 14, 4, 0, 2), "window, left 4, right 0, dilation 2, anchor bottom-right"),
    (blocks(np.tri(3, 4, dtype=bool), 3, 8, 11), "blocks of 3, causal"), (np.eye(5, 8)[::-1] > 0, "another pattern")])
def test_words_for_patterns(mask, text):
    assert describe(mask)[0].startswith(text)


# Golden cases

@pytest.mark.parametrize("function, best, mistake", [
    (sdpa.dense, "sdpa", None), (gqa.dense, "gqa", None), (tiled, "flash", "heads_tiled"),
    (lambda q, k, v, mask, scale: sdpa.dense(q, k, v, ~mask, scale=scale), None, "mask_polarity")])
def test_matches(function, best, mistake):
    p = probe(function)
    assert best is None or p.matches[0].variant == best
    named = [sentence for m in p.matches for sentence in m.mistakes]
    assert any(mistake in sentence for sentence in named) if mistake else not p.matches[0].mistakes
    if best and not mistake:
        assert p.matches[0].share == 1


# Functions that break

def fragile(q, k, v):
    if q.shape[-2] > 16 or not k.any():
        raise RuntimeError("too\nmuch")
    return plain(q, k, v)


def test_experiments_that_break_are_listed():
    p = found(fragile)
    assert p["normalised"] == "over keys"
    assert {"cost", "kernel"} <= set(p.broken) and p.broken["cost"] == "RuntimeError: too"
    assert "RuntimeError: too" in text(p)


def leaving(q, k, v):
    if q.shape[-2] > 16:
        sys.exit(0)
    return plain(q, k, v)


def test_a_function_that_leaves():
    assert found(leaving).broken["cost"].startswith("SystemExit")


@pytest.mark.parametrize("function, message", [
    (lambda q, k: q, "impl: expected a function of at least q, k, v, got one of (q, k)"),
    (lambda q, k, v, flux: q, "impl: must be given flux, which has no neutral value that is known"),
    (lambda q, k, v: 1 / 0, "impl: no layout .* with equal sizes it raised ZeroDivisionError: division by zero"),
    (lambda q, k, v: q.sum(), "impl: no layout of q, k, v gives an output of their shape"),
    (lambda q, k, v: None, "impl: no layout"), (lambda q, k, v: "text", "impl: no layout"),
    (lambda q, k, v: v * np.nan, "impl: no layout")])
def test_what_cannot_be_probed(function, message):
    with pytest.raises(ValueError, match=message.replace("(q, k)", r"\(q, k\)")):
        Box(function)


def test_no_such_backend():
    with pytest.raises(ValueError, match="backend: expected one of numpy, torch, jax, cupy, got 'mxnet'"):
        Box(plain, "mxnet")


# The command

def test_command(capsys):
    assert main(["probe", "--impl", "attention_ref.dense.gqa:dense"]) == 0
    out = capsys.readouterr().out
    assert "kv heads" in out and "repeated (0 0 1 1)" in out and "golden cases that it meets:" in out


def test_command_json(capsys):
    assert main(["probe", "--impl", "attention_ref.dense.gqa:dense", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"name": "weights", "value": "exponential in q.k"}.items() <= next(
        f for f in found["facts"] if f["name"] == "weights").items()
    assert found["matches"][0]["variant"] == "gqa" and found["broken"] == {}
    assert len(found["facts"]) <= len(EXPERIMENTS) + 1


def test_command_that_cannot_run(capsys):
    assert main(["probe", "--impl", "nowhere:f"]) == 2
    assert "cannot import nowhere" in capsys.readouterr().err
