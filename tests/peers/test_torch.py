"""torch against the golden data, values and gradients, and where it reads the formula differently."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exact import agrees, without_dlse
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_cases import tensors, with_gradients

from attention_ref import check, diagnose, load_cases

DTYPES = "float64", "float32"


def ids(case):
    return case.name


# F.scaled_dot_product_attention

def expressible(case):
    """torch has no soft cap and no sink, and reads masked values."""
    x = case.inputs
    return x["softcap"] is None and (x["sink"] == -np.inf).all() and not np.isnan(x["k"]).any()


SDPA = {case.name: case for case in load_cases("sdpa")}
PLAIN = [case for case in SDPA.values() if expressible(case)]


def attention(q, k, v, *arguments, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, *arguments, **options)


def test_most_cases_are_expressible():
    assert len(PLAIN) > len(SDPA) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in PLAIN if not c.inputs["bias"].any()], ids=ids)
def test_boolean_mask(case, dtype):
    x = tensors(case, "qkv", dtype)
    o = attention(*x.values(), torch.from_numpy(case.inputs["mask"]), scale=case.inputs["scale"])
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PLAIN, ids=ids)
def test_float_mask_is_bias(case, dtype):
    x = tensors(case, ["q", "k", "v", "bias"], dtype)
    mask = torch.where(torch.from_numpy(case.inputs["mask"]), x["bias"], -torch.inf)
    o = attention(x["q"], x["k"], x["v"], mask, scale=case.inputs["scale"])
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x), dtype)


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
    assert np.isnan(run("masked_nan")).all() and np.isfinite(SDPA["masked_nan"].outputs["o"]).all()


def test_row_without_keys_is_zero():
    for name in "empty_row", "causal_tall", "no_keys":
        empty = SDPA[name].outputs["lse"] == -np.inf
        assert empty.any() and (run(name)[empty] == 0).all()


GQA = {case.name: case for case in load_cases("gqa")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in GQA.values() if not np.isnan(c.inputs["k"]).any()], ids=ids)
def test_enable_gqa(case, dtype):
    x = tensors(case, "qkv", dtype)
    o = attention(*x.values(), torch.from_numpy(case.inputs["mask"]), scale=case.inputs["scale"], enable_gqa=True)
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x), dtype)


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
    options = {name: case.inputs[name] for name in ("scale", "softcap")}
    o, lse = formula(**x, mask=torch.from_numpy(case.inputs["mask"]), **options)
    assert agrees(case, with_gradients(case, dict(o=o, lse=lse), x))


def test_the_formula_meets_every_extra():
    extras = {"softcap", "sink", "sink_and_empty_row", "everything"}
    assert extras | {f"bias_{of}" for of in ("full", "per_head", "per_key", "per_query")} <= {c.name for c in REGULAR}


# nn.MultiheadAttention

BLOCKS = {case.id: case for variant in ("multi_head", "cross") for case in load_cases(variant)}
WEIGHTS = "w_q", "w_k", "w_v", "w_o"


def read_by_torch(case):
    """torch reads masked tokens, and refuses a sequence without any."""
    read = case.inputs["x"], case.inputs.get("z", case.inputs["x"])
    return all(x.size and not np.isnan(x).any() for x in read)


REGULAR_BLOCKS = [case for case in BLOCKS.values() if read_by_torch(case)]


def columns(w, heads, width):
    """(D, H*d) -> (D, H*width): channels of zeros behind those of each head."""
    w = w.reshape(len(w), heads, -1)
    return functional.pad(w, (0, width - w.shape[2])).flatten(1)


def wider(x, width):
    """x with features of zeros behind its own."""
    return functional.pad(x, (0, width - x.shape[-1]))


def multihead(x, w_q, w_k, w_v, w_o, heads, scale, z=None, biases=None, **options):
    """o and weights of nn.MultiheadAttention, whose weights are ours transposed and whose scale is fixed.

    Its heads have width D / H, keys and values alike: zeros fill what a case leaves over.
    """
    D, width = w_o.shape[1], max(-(-w_o.shape[1] // heads), w_q.shape[1] // heads, w_v.shape[1] // heads)
    E, factor = heads * width, scale * width ** 0.5
    x, z = wider(x, E), wider(x, E) if z is None else z
    q, k, v = (columns(w, heads, width).mT for w in (factor * w_q, w_k, w_v))
    q, k, v = wider(q, E), wider(k, z.shape[2]), wider(v, z.shape[2])
    Dz, packed = z.shape[2], dict(in_proj_weight=torch.cat([q, k, v])) if z.shape[2] == E else {}
    layer = torch.nn.MultiheadAttention(E, heads, bias=biases is not None, kdim=Dz, vdim=Dz, batch_first=True)
    parameters = packed or dict(q_proj_weight=q, k_proj_weight=k, v_proj_weight=v)
    parameters |= {"out_proj.weight": wider(columns(w_o.mT, heads, width).mT, E).mT}
    if biases is not None:
        b_q, b_k, b_v = (columns(b[None], heads, width)[0] for b in biases)
        parameters |= {"in_proj_bias": torch.cat([factor * b_q, b_k, b_v]), "out_proj.bias": torch.zeros_like(x[0, 0])}
    o, weights = torch.func.functional_call(layer, parameters, (x, z, z), options)
    return o[..., :D], weights


def grid_mask(case):
    """The mask of a case for every head, (B, H, Tq, Tk)."""
    x = case.inputs
    return np.broadcast_to(x["mask"], (len(x["x"]), x["heads"], x["x"].shape[1], x.get("z", x["x"]).shape[1]))


def call(case, leaves, **options):
    """The layer under the mask of a case, in which True is masked."""
    mask = dict(attn_mask=torch.from_numpy(~grid_mask(case)).flatten(0, 1))
    return multihead(**leaves, heads=case.inputs["heads"], scale=case.inputs["scale"], **mask | options)


def leaves_of(case, dtype="float64"):
    return tensors(case, [name for name in ("x", "z", *WEIGHTS) if name in case.inputs], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", REGULAR_BLOCKS, ids=lambda c: c.id)
def test_multihead(case, dtype):
    x = leaves_of(case, dtype)
    assert agrees(case, with_gradients(case, dict(o=call(case, x, need_weights=False)[0]), x), dtype)


WITHOUT_EMPTY_ROWS = [case for case in REGULAR_BLOCKS if case.steps and grid_mask(case).any(-1).all()]
PADDED = [case for case in REGULAR_BLOCKS if case.inputs["mask"].shape[1:3] == (1, 1) and not case.inputs["mask"].all()]


@pytest.mark.parametrize("case", WITHOUT_EMPTY_ROWS, ids=lambda c: c.id)
def test_multihead_with_weights(case):
    """Weights of each head, and on demand, by default, their mean over the heads."""
    x = leaves_of(case)
    o, weights = call(case, x, average_attn_weights=False)
    assert agrees(case, with_gradients(case, dict(o=o), x)) and agrees(case, dict(weights=weights.detach().numpy()))
    _, mean = call(case, x)
    assert torch.equal(mean, weights.mean(1))


@pytest.mark.parametrize("case", PADDED, ids=lambda c: c.id)
def test_multihead_key_padding_mask(case):
    """True is masked here too."""
    x, keys = leaves_of(case), torch.from_numpy(case.inputs["mask"][:, 0, 0])
    o, _ = call(case, x, attn_mask=None, key_padding_mask=~keys, need_weights=False)
    assert agrees(case, with_gradients(case, dict(o=o), x))
    inverted, _ = call(case, x, attn_mask=None, key_padding_mask=keys, need_weights=False)
    assert diagnose(case, inverted.detach().numpy()).mistake == "mask_polarity"


@pytest.mark.parametrize("id", ["multi_head/biases", "cross/biases"])
def test_multihead_biases(id):
    """A bias is the last row of a weight for a feature that is 1; cross-attention has it for keys and values only."""
    case = BLOCKS[id]
    x = leaves_of(case)
    split = ["w_k", "w_v", *(["w_q"] if "z" not in x else [])]
    zero = torch.zeros(x["w_q"].shape[1], dtype=torch.float64)
    biases = [x[name][-1] if name in split else zero for name in ("w_q", "w_k", "w_v")]
    tokens = "z" if "z" in x else "x"
    assert (x[tokens][..., -1] == 1).all()
    plain = x | {tokens: x[tokens][..., :-1]} | {name: x[name][:-1] for name in split}
    assert agrees(case, with_gradients(case, dict(o=call(case, plain, biases=biases, need_weights=False)[0]), x))


def test_multihead_rows_without_keys():
    """0 without weights; NaN with them, in the same layer."""
    case = BLOCKS["cross/empty_row"]
    empty = ~grid_mask(case).any((1, 3))
    o, _ = call(case, leaves_of(case), need_weights=False)
    assert empty.any() and (o.detach().numpy()[empty] == 0).all()
    o, weights = call(case, leaves_of(case), average_attn_weights=False)
    assert o[torch.from_numpy(empty)].isnan().all() and weights.isnan().any()


def test_multihead_refuses_no_keys():
    case = BLOCKS["cross/no_keys"]
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        call(case, leaves_of(case), need_weights=False)
