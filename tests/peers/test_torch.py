"""torch against the golden data, values and gradients, and where it reads the formula differently."""
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exact import without_lse
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_ref import check, diagnose, load_cases

DTYPES = "float64", "float32"


def tensors(case, names, dtype="float64"):
    """Inputs of a case as tensors of dtype that record gradients."""
    x = case.in_dtype(dtype)
    return {name: torch.from_numpy(x[name]).requires_grad_() for name in names}


def with_gradients(case, outputs, leaves):
    """Outputs (name -> tensor) and the gradients of leaves for the cotangents of the case, as arrays to be checked."""
    found = {name: y.detach().numpy() for name, y in outputs.items()}
    if case.cotangents:
        cotangents = [torch.from_numpy(case.cotangents["d" + name]).to(y.dtype) for name, y in outputs.items()]
        gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), cotangents, materialize_grads=True)
        found |= {"d" + name: g.numpy() for name, g in zip(leaves, gradients)}
    return found


def agrees(case, outputs, leaves, dtype="float64"):
    """True if the outputs and gradients lie within the budget of the case; else the test fails and says why."""
    result = check(case, with_gradients(case, outputs, leaves), dtype)
    assert result.passed, [(c.name, c.score, c.where(case), c.got, c.expected, c.problem) for c in result.comparisons if c.score > 1]
    return True


def ids(case):
    return case.name


# F.scaled_dot_product_attention

def expressible(case):
    """torch has no soft cap and no sink, and reads masked values."""
    x = case.inputs
    return x["softcap"] is None and (x["sink"] == -np.inf).all() and not np.isnan(x["k"]).any()


def serial(case):
    """many_keys with room for a sum that grows one by one: each of its Tk additions may err by u of the sum so far.

    The golden budget lets errors grow with the root of Tk. In float32 torch adds 6000 equal rounded weights in order.
    """
    return replace(case, conditioning=case.conditioning | dict(o=case.sizes["Tk"] * np.abs(case.outputs["o"])))


SDPA = {case.name: case for case in load_cases("sdpa")}
PLAIN = [serial(case) if case.name == "many_keys" else case for case in SDPA.values() if expressible(case)]


def attention(q, k, v, *arguments, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, *arguments, **options)


def test_all_but_five_cases_are_expressible():
    assert {c.name for c in SDPA.values() if not expressible(c)} == {"softcap", "sink", "sink_and_empty_row", "everything", "masked_nan"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in PLAIN if not c.inputs["bias"].any()], ids=ids)
def test_boolean_mask(case, dtype):
    x = tensors(case, "qkv", dtype)
    o = attention(*x.values(), torch.from_numpy(case.inputs["mask"]), scale=case.inputs["scale"])
    assert agrees(without_lse(case), dict(o=o), x, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PLAIN, ids=ids)
def test_float_mask_is_bias(case, dtype):
    x = tensors(case, ["q", "k", "v", "bias"], dtype)
    mask = torch.where(torch.from_numpy(case.inputs["mask"]), x["bias"], -torch.inf)
    o = attention(x["q"], x["k"], x["v"], mask, scale=case.inputs["scale"])
    assert agrees(without_lse(case), dict(o=o), x, dtype)


def run(name, causal=False, **options):
    """torch on the inputs of a golden case; causal in place of the mask."""
    x = SDPA[name].inputs
    q, k, v, mask = (torch.from_numpy(x[name]) for name in ("q", "k", "v", "mask"))
    return attention(q, k, v, None if causal else mask, is_causal=causal, scale=x["scale"], **options).numpy()


def test_is_causal_starts_at_the_top_left():
    o = run("causal_wide", causal=True)
    assert check(SDPA["causal_top_left"], o).passed and not check(SDPA["causal_wide"], o).passed
    assert diagnose(SDPA["causal_wide"], o).mistake == "causal_top_left"


def test_masked_nan_poisons():
    o = run("masked_nan")
    found = diagnose(SDPA["masked_nan"], o)
    assert np.isnan(o).all() and "masked_nan_poison" in [found.mistake, *found.same]


def test_row_without_keys_is_zero():
    for name in "empty_row", "causal_tall", "no_keys":
        empty = SDPA[name].outputs["lse"] == -np.inf
        assert empty.any() and (run(name)[empty] == 0).all()


def test_lse_is_not_returned():
    assert isinstance(run("basic"), np.ndarray)


# The formula in torch, for what scaled_dot_product_attention lacks

def formula(q, k, v, bias, sink, mask, scale, softcap):
    """Soft cap, bias, mask and sink, o and lse, with autograd for the gradients."""
    a = scale * q @ k.mT
    a = (a if softcap is None else softcap * torch.tanh(a / softcap)) + bias
    a = a.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(torch.cat([a, sink.reshape(-1, 1, 1).expand(*a.shape[:2], a.shape[2], 1)], -1), -1)
    return torch.exp(a - lse[..., None]) @ v, lse


REGULAR = [c for c in SDPA.values() if np.isfinite(c.outputs["lse"]).all() and not np.isnan(c.inputs["k"]).any()]


@pytest.mark.parametrize("case", REGULAR, ids=ids)
def test_autograd_of_the_formula(case):
    x = tensors(case, ["q", "k", "v", "bias", "sink"])
    o, lse = formula(**x, mask=torch.from_numpy(case.inputs["mask"]), scale=case.inputs["scale"], softcap=case.inputs["softcap"])
    assert agrees(case, dict(o=o, lse=lse), x)


def test_the_formula_meets_every_extra():
    extras = {"softcap", "sink", "sink_and_empty_row", "everything", "bias_full", "bias_per_head", "bias_per_key", "bias_per_query"}
    assert extras <= {c.name for c in REGULAR}
