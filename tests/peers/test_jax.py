"""jax.nn.dot_product_attention against the golden data, values and gradients, and where it reads the formula differently.

Its softmax runs in float32 whatever type comes in, so every comparison has the budget of float32.
"""
import numpy as np
import pytest

jax = pytest.importorskip("jax")

from exact import changed, without_lse

from attention_ref import check, diagnose, load_cases
from attention_ref.masks import causal, window

SDPA = {case.name: case for case in load_cases("sdpa")}


@pytest.fixture(autouse=True)
def float64():
    """float64 arrays for the length of a test; the setting of the process stays as it is."""
    with jax.enable_x64(True):
        yield


def attention(q, k, v, bias=None, mask=None, **options):
    """o and lse in our layout (B, H, T, d); there keys and values must be equally wide, so channels of zeros are added."""
    dk, dv = q.shape[3], v.shape[3]
    wide = (jax.numpy.pad(x.swapaxes(1, 2), [(0, 0)] * 3 + [(0, max(dk, dv) - x.shape[3])]) for x in (q, k, v))
    o, lse = jax.nn.dot_product_attention(*wide, bias, mask, return_residual=True, **options)
    return o.swapaxes(1, 2)[..., :dv], lse.swapaxes(1, 2)


def with_gradients(case, names, **options):
    """Outputs and gradients for the cotangent of o: lse is given without a gradient."""
    @jax.jit
    def run(x, do):
        (o, vjp, lse) = jax.vjp(lambda x: attention(**x, **options), x, has_aux=True)
        return dict(o=o, lse=lse) | {"d" + name: g for name, g in vjp(do)[0].items()}
    found = run({name: case.inputs[name] for name in names}, case.cotangents.get("do", np.zeros_like(case.outputs["o"])))
    return {name: np.asarray(y) for name, y in found.items() if name in case.expected}


def agrees(case, found):
    result = check(case, found, "float32")
    assert result.passed, [(c.name, c.score, c.where(case), c.got, c.expected, c.problem) for c in result.comparisons if c.score > 1]
    return True


def expressible(case):
    """jax has no soft cap and no sink, gives rows without keys a meaning of its own, and reads masked values."""
    x = case.inputs
    return x["softcap"] is None and np.isfinite(case.outputs["lse"]).all() and (x["sink"] == -np.inf).all() and not np.isnan(x["k"]).any()


PLAIN = [case for case in SDPA.values() if expressible(case)]


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_sdpa(case):
    x = case.inputs
    case = changed(case, dlse=0 * case.cotangents["dlse"]) if case.cotangents else case
    assert agrees(case, with_gradients(case, ["q", "k", "v", "bias"], mask=x["mask"], scale=x["scale"]))


def run(name, causal=False, **options):
    """jax on the inputs of a golden case; causal in place of the mask."""
    x = SDPA[name].inputs
    mask = None if causal else x["mask"]
    return [np.asarray(y) for y in attention(x["q"], x["k"], x["v"], mask=mask, is_causal=causal, scale=x["scale"], **options)]


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
    o, _ = run("masked_nan")
    found = diagnose(SDPA["masked_nan"], o, "float32")
    assert np.isnan(o).all() and "masked_nan_poison" in [found.mistake, *found.same]


def test_softmax_is_float32():
    y = run("basic")
    assert y[0].dtype == np.float64
    assert check(SDPA["basic"], y, "float32").passed and not check(SDPA["basic"], y, "float64").passed
