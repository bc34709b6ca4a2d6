"""The ONNX operator Attention (opsets 23 to 25) in the terms of attention_ref: what a node means, and what it must return."""
import numpy as np
from onnx.helper import get_attribute_value

from attention_ref import sdpa
from attention_ref.core import merge_heads, repeat_heads, split_heads
from attention_ref.masks import grid, padding

STEP = "scores", "capped", "biased", "weights"           # what qk_matmul_output holds in mode 0, 1, 2, 3


def read(node, arrays, names):
    """Name of the schema -> array, for the inputs or outputs that a node has."""
    return {name: x for name, x in zip([name for name, used in zip(names, node) if used], arrays)}


def options(node):
    return {a.name: get_attribute_value(a) for a in node.attribute}


def heads(x, count):
    """(B, T, H*d) -> (B, H, T, d); four axes stay as they are."""
    return split_heads(x, count) if x.ndim == 3 else x


def arguments(x, a):
    """Inputs x and attributes a of a node -> q, k, v, mask, bias, scale, softcap, all keys present, in float64.

    The causal diagonal and the window start `offset` keys in: the length of the past, else the number of valid keys less
    Tq for each batch entry, else 0 (the top left).
    """
    x = {name: y if y.dtype == bool or name == "nonpad_kv_seqlen" else y.astype(np.float64) for name, y in x.items()}
    q, k, v = heads(x["Q"], a.get("q_num_heads")), *(heads(x[name], a.get("kv_num_heads")) for name in "KV")
    past, lengths = x.get("past_key"), x.get("nonpad_kv_seqlen")
    if past is not None:
        k, v = np.concatenate([past, k], 2), np.concatenate([x["past_value"], v], 2)
    Tq, Tk = q.shape[2], k.shape[2]
    mask, bias = split_mask(x.get("attn_mask", np.ones(Tk, bool)), Tk)
    i, j = grid(Tq, Tk)
    i = i + (past.shape[2] if past is not None else 0 if lengths is None else lengths.reshape(-1, 1, 1, 1) - Tq)
    left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
    mask = mask & (j <= i if a.get("is_causal") else True)
    mask = mask & (j >= i - left if left >= 0 else True) & (j <= i + right if right >= 0 else True)
    mask = mask & (True if lengths is None else padding(lengths, Tk))
    return dict(q=q, k=k, v=v, mask=np.broadcast_to(mask, mask.shape[:-2] + (Tq, Tk)), bias=bias,
                scale=a.get("scale", q.shape[3] ** -0.5), softcap=a.get("softcap", 0.0) or None)


def split_mask(mask, Tk):
    """attn_mask -> (mask, bias): -inf in a float mask hides, and so do the keys beyond a short mask."""
    hidden = False if mask.dtype == bool else -np.inf
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, Tk - mask.shape[-1])], constant_values=hidden)
    return (mask, np.array(0.0)) if mask.dtype == bool else (mask > -np.inf, np.where(mask > -np.inf, mask, 0))


def attention(q, k, v, mask, bias, scale, softcap):
    """o and every step by name, through sdpa. ONNX shows scores and capped scores of hidden keys too, and biased ones as -inf."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    o, _ = sdpa.dense(q, k, v, mask, bias, scale=scale, softcap=softcap)
    scores, capped, _, _ = sdpa.steps(q, k, v, True, bias, scale=scale, softcap=softcap)
    _, _, biased, weights = sdpa.steps(q, k, v, mask, bias, scale=scale, softcap=softcap)
    return dict(o=o, scores=scores, capped=capped, biased=np.where(mask, biased, -np.inf), weights=weights)


def named_outputs(y, a):
    """Outputs of a node -> name of ours -> array in our layout, the present key and value left out."""
    o = heads(y["Y"], a.get("q_num_heads"))
    return dict(o=o) | ({STEP[a.get("qk_matmul_output_mode", 0)]: y["qk_matmul_output"]} if "qk_matmul_output" in y else {})
