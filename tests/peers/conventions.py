"""How torch, jax, onnx and transformers read the formula where it leaves a choice, measured from what is installed.

    python tests/peers/conventions.py             prints what was measured
    python tests/peers/conventions.py --write     writes it where `attention-ref conventions` and docs/ read it

A peer is a function of q (Hq, Tq, d), k, v (Hkv, Tk, d) and of those options that it has: mask (Tq, Tk) boolean,
is_causal, grouped (Hq is not Hkv), window (keys before the query's own), softcap with bias (Tq, Tk), lse (returned
beside o). It returns o (Hq, Tq, d), or (o, lse). Without options its scores are q . k, unscaled.
"""
import importlib.util
import sys
import warnings
from inspect import signature

import numpy as np

from attention_ref import gqa, sdpa
from attention_ref.conformance import cases, conventions, tensors
from attention_ref.masks import causal

ROW = np.array([[True, False, False]] * 2)               # a mask: the first key alone


def ours_sdpa(q, k, v, mask=None, softcap=None, bias=0.0, lse=False):
    mask = np.ones((q.shape[1], k.shape[1]), bool) if mask is None else mask
    y = sdpa.dense(q[None], k[None], v[None], mask, np.float64(bias), scale=1.0, softcap=softcap)
    return (y[0][0], y[1][0]) if lse else y[0][0]


def ours_gqa(q, k, v, mask=None, grouped=False, lse=False):
    mask = np.ones((1, 1, q.shape[1], k.shape[1]), bool) if mask is None else mask[None, None]
    y = gqa.dense(q[None], k[None], v[None], mask, scale=1.0)
    return (y[0][0], y[1][0]) if lse else y[0][0]


def torch_sdpa(q, k, v, mask=None, is_causal=False, grouped=False):
    import torch
    mask = None if mask is None else torch.from_numpy(mask)
    x = (torch.from_numpy(x[None]) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(*x, mask, is_causal=is_causal, scale=1.0, enable_gqa=grouped)[0].numpy()


def torch_flex(q, k, v, mask=None, grouped=False, lse=False):
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
    seen = torch.from_numpy(np.ones((q.shape[1], k.shape[1]), bool) if mask is None else mask)
    blocks = create_block_mask(lambda b, h, i, j: seen[i, j], 1, 1, *seen.shape, device="cpu")
    with warnings.catch_warnings(action="ignore"):       # it says that it is not compiled
        o, more = flex_attention(*(torch.from_numpy(x[None]) for x in (q, k, v)), block_mask=blocks, scale=1.0,
                                 enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    return (o[0].numpy(), more.lse[0].numpy()) if lse else o[0].numpy()


def torch_mha(need_weights):
    """nn.MultiheadAttention with one head whose projections are the identity."""
    def run(q, k, v, mask=None):
        import torch
        one = np.eye(q.shape[2])
        layer = torch.nn.MultiheadAttention(len(one), 1, bias=False, batch_first=True, dtype=torch.float64)
        weights = dict(in_proj_weight=np.tile(one, (3, 1))) | {"out_proj.weight": one}
        layer.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
        mask = None if mask is None else torch.from_numpy(mask)
        return layer(*map(torch.from_numpy, (q, k, v)), attn_mask=mask, need_weights=need_weights)[0].detach().numpy()
    return run


def jax_attention(q, k, v, mask=None, is_causal=False, grouped=False, window=None, lse=False):
    import jax
    with jax.enable_x64(True):
        mask = None if mask is None else mask[None, None]
        x = (x.swapaxes(0, 1)[None] for x in (q, k, v))
        window = None if window is None else (window, 0)
        o, more = jax.nn.dot_product_attention(*x, mask=mask, is_causal=is_causal, scale=1.0, return_residual=True,
                                               local_window_size=window)
        o, more = np.asarray(o)[0].swapaxes(0, 1), np.asarray(more)[0].T
        return (o, more) if lse else o


def onnx_reference(q, k, v, mask=None, is_causal=False, grouped=False, window=None, softcap=None, bias=None, **engine):
    import onnx_attention
    mask = bias if mask is None else mask
    x = dict(Q=q[None], K=k[None], V=v[None]) | ({} if mask is None else dict(attn_mask=mask))
    a = dict(is_causal=int(is_causal), scale=1.0) | ({} if softcap is None else dict(softcap=softcap))
    a |= {} if window is None else dict(left_window_size=window, right_window_size=0)
    return onnx_attention.run(x, a, **engine)["Y"][0]


def onnxruntime_cpu(q, k, v, mask=None, is_causal=False, grouped=False, softcap=None, bias=None):
    """In float32, which is what it has kernels for."""
    import onnxruntime

    def session(model):
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    q, k, v, bias = (None if x is None else x.astype(np.float32) for x in (q, k, v, bias))
    return onnx_reference(q, k, v, mask, is_causal, grouped, None, softcap, bias, engine=session, opset=24)


def transformers_eager(q, k, v, mask=None, grouped=False, window=None, softcap=None, bias=0.0):
    """What models run with attn_implementation="eager", Gemma's, in float32, with masks made by masking_utils."""
    import torch
    from transformers import masking_utils
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    Tq, Tk = q.shape[1], k.shape[1]
    seen = torch.from_numpy(np.ones((Tq, Tk), bool) if mask is None else mask)
    sliding = masking_utils.sliding_window_causal_mask_function
    keep = (lambda b, h, i, j: seen[i, j]) if window is None else sliding(window)
    additive = masking_utils.eager_mask(1, Tq, Tk, mask_function=keep, allow_is_causal_skip=False)
    layer = torch.nn.Module()
    layer.num_key_value_groups = len(q) // len(k)
    x = (torch.from_numpy(x[None]).float() for x in (q, k, v))
    o, _ = eager_attention_forward(layer.eval(), *x, additive + torch.as_tensor(bias), scaling=1.0, softcap=softcap)
    return o[0].transpose(0, 1).numpy()


OURS = dict(sdpa=ours_sdpa, gqa=ours_gqa)
PEERS = {
    "torch scaled_dot_product_attention": torch_sdpa,
    "torch flex_attention": torch_flex,
    "torch nn.MultiheadAttention": torch_mha(False),
    "torch nn.MultiheadAttention (need_weights)": torch_mha(True),
    "jax nn.dot_product_attention": jax_attention,
    "onnx Attention (reference)": onnx_reference,
    "onnxruntime Attention (CPU)": onnxruntime_cpu,
    "transformers eager_attention_forward": transformers_eager,
}


# What is measured: a function of a peer that gives its reading, for a peer that has the options in its name

def call(peer, Tq=2, Tk=3, H=1, v=None, **options):
    """With queries of zero and one unit vector for each value, o is the matrix of weights (H, Tq, Tk)."""
    v = np.eye(Tk)[None] if v is None else v
    return peer(np.zeros((H, Tq, Tk)), np.ones((len(v), Tk, Tk)), v, **options)


def of_mask(peer):
    readings = dict(attend=ROW, masked=~ROW)
    return next(name for name, seen in readings.items() if np.array_equal(call(peer, mask=ROW)[0] > 0, seen))


def hiding(peer, hidden):
    """The mask in the peer's own polarity that hides these pairs."""
    return ~hidden if of_mask(peer) == "attend" else hidden


def of_is_causal(peer):
    seen = call(peer, is_causal=True)[0] > 0
    return next(anchor for anchor in ("bottom-right", "top-left") if np.array_equal(seen, causal(*seen.shape, anchor)))


def of_window(peer):
    """Whether a width of 1 lets a query see one key before its own."""
    seen = call(peer, Tq=3, window=1)[0][1] > 0
    return {2: "keys-beside", 1: "own-key-too"}[int(seen.sum())]


EMPTY = np.array([[False] * 3, [True] * 3])              # the second query sees nothing


def of_empty_row(peer):
    row = call(peer, mask=hiding(peer, EMPTY))[0, 1]
    readings = dict(nan=np.nan, zero=0, uniform=1 / 3)
    return next(name for name, value in readings.items() if np.allclose(row, value, equal_nan=True))


def of_empty_row_lse(peer):
    """The lse of a row whose scores are 0: a lowest number in place of -inf counts as -inf."""
    lse = call(peer, mask=hiding(peer, EMPTY), lse=True)[1][0, 1]
    return "nan" if np.isnan(lse) else "-inf" if lse < -1e30 else "+inf" if lse > 1e30 else {0.0: "zero"}[float(lse)]


def of_masked_nan(peer):
    v = np.where([[False], [False], [True]], np.nan, np.eye(3))[None]
    o = call(peer, v=v, mask=hiding(peer, np.array([[False, False, True]] * 2)))
    return "read" if np.isnan(o).any() else "unread"


def of_softcap(peer):
    """The weights of two keys with scores of 0 and biases of 0 and 2 under a cap of 1."""
    o = call(peer, Tq=1, Tk=2, softcap=1.0, bias=np.array([[0.0, 2.0]]))[0, 0]
    readings = dict(scores=2.0, biased=np.tanh(2.0))
    return next(name for name, logit in readings.items() if np.isclose(np.log(o[1] / o[0]), logit))


def of_lse(peer):
    lse = call(peer, Tk=4, lse=True)[1][0, 0]
    return next(name for name, log in dict([("e", np.log), ("2", np.log2)]).items() if np.isclose(lse, log(4)))


def of_heads(peer):
    """Which of two kv heads the second of four query heads reads."""
    o = call(peer, Tk=2, H=4, v=np.stack([np.zeros((2, 2)), np.ones((2, 2))]), grouped=True)[1, 0, 0]
    return {0.0: "h//group", 1.0: "h%Hkv"}[float(o)]


MEASURES = dict(mask_true=(of_mask, "mask"), causal_anchor=(of_is_causal, "is_causal"), window=(of_window, "window"),
                empty_row=(of_empty_row, "mask"), empty_row_lse=(of_empty_row_lse, "mask lse"),
                masked_nan=(of_masked_nan, "mask"), softcap=(of_softcap, "softcap"), lse_base=(of_lse, "lse"),
                kv_heads=(of_heads, "grouped"))


def readings(peer):
    """Convention -> reading, for what the options of a peer let it choose."""
    options = set(signature(peer).parameters)
    return {name: measure(peer) for name, (measure, needed) in MEASURES.items() if set(needed.split()) <= options}


def measured():
    """Name of a peer -> {"version": ..., convention: reading}, of those that are installed."""
    found = {}
    for name, peer in PEERS.items():
        package = name.split()[0]
        if importlib.util.find_spec(package):
            version = importlib.import_module(package).__version__.partition("+")[0]
            found[name] = dict(version=version) | readings(peer)
    return found


if __name__ == "__main__":
    everything = conventions.readers() | measured()      # what is not installed stays as it was measured
    text = cases.layout({name: everything[name] for name in PEERS if name in everything}, 1) + "\n"
    print(text, end="")
    if "--write" in sys.argv:
        tensors.write_whole(conventions.READERS, text.encode())
