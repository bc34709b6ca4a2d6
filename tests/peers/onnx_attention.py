"""The ONNX operator Attention (opsets 23 to 25) in the terms of attention_ref: what a node means and must return."""
import numpy as np
import onnx_nodes
from onnx import helper
from onnx.reference import ReferenceEvaluator

from attention_ref import gqa, kv_cache, masked, sdpa
from attention_ref.core import repeat_heads, split_heads
from attention_ref.masks import grid, padding

INPUTS = "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"
OUTPUTS = "Y", "present_key", "present_value", "qk_matmul_output"
ATTRIBUTES = {"is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode",
              "right_window_size", "scale", "softcap", "softmax_precision"}
STEP = "scores", "capped", "biased", "weights"           # what qk_matmul_output holds in mode 0, 1, 2, 3


def unpack(case):
    """Inputs, attributes and outputs of a node test case, by name."""
    x, attributes, outputs = onnx_nodes.unpack(case, INPUTS)
    return x, attributes, onnx_nodes.present(OUTPUTS, case.model.graph.node[0].output, outputs)


def heads(x, count):
    """(B, T, H*d) -> (B, H, T, d); four axes stay as they are."""
    return split_heads(x, count) if x.ndim == 3 else x


def arguments(x, a):
    """Inputs x and attributes a of a node -> q, k, v, mask, bias, scale, softcap in float64; the past is in k and v.

    The causal diagonal and the window start some keys in: the length of the past, else the number of valid keys less Tq
    for each batch entry, else 0 (the top left). softmax_precision changes rounding only.
    """
    if set(a) - ATTRIBUTES or set(x) - set(INPUTS):
        raise ValueError(f"not known: {(set(a) | set(x)) - ATTRIBUTES - set(INPUTS)}")
    x = {name: y if y.dtype.kind in "bi" else y.astype(np.float64) for name, y in x.items()}
    q, k, v = heads(x["Q"], a.get("q_num_heads")), *(heads(x[name], a.get("kv_num_heads")) for name in "KV")
    past, lengths = x.get("past_key"), x.get("nonpad_kv_seqlen")
    if past is not None:
        k, v = np.concatenate([past, k], 2), np.concatenate([x["past_value"], v], 2)
    Tq, Tk = q.shape[2], k.shape[2]
    mask, bias = split_mask(x.get("attn_mask", np.ones(Tk, bool)), Tk)
    i, j = grid(Tq, Tk)
    i = i + (past.shape[2] if past is not None else 0 if lengths is None else lengths.reshape(-1, 1, 1, 1) - Tq)
    left, right = window(a)
    mask = mask & (not a.get("is_causal") or j <= i)
    mask = mask & (left is None or j >= i - left) & (right is None or j <= i + right)
    mask = mask & (lengths is None or padding(lengths, Tk))
    return dict(q=q, k=k, v=v, mask=np.broadcast_to(mask, mask.shape[:-2] + (Tq, Tk)), bias=bias,
                scale=a.get("scale", q.shape[3] ** -0.5), softcap=a.get("softcap", 0.0) or None)


def window(a):
    """(left, right) with None for an open side, which is -1 in ONNX."""
    return [None if a.get(f"{side}_window_size", -1) < 0 else a[f"{side}_window_size"] for side in ("left", "right")]


def split_mask(mask, Tk):
    """attn_mask -> (mask, bias): -inf in a float mask hides, and so do the keys beyond a short mask."""
    hidden = False if mask.dtype == bool else -np.inf
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, Tk - mask.shape[-1])], constant_values=hidden)
    return (mask, np.array(0.0)) if mask.dtype == bool else (mask > -np.inf, np.where(mask > -np.inf, mask, 0))


def attention(q, k, v, mask, bias, scale, softcap):
    """Outputs and steps by name, through sdpa. ONNX shows the scores of hidden keys too, and biased ones as -inf."""
    present_key, present_value = k, v
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    o, _ = sdpa.dense(q, k, v, mask, bias, scale=scale, softcap=softcap)
    scores, capped, _, _ = sdpa.steps(q, k, v, True, bias, scale=scale, softcap=softcap)
    _, _, biased, weights = sdpa.steps(q, k, v, mask, bias, scale=scale, softcap=softcap)
    steps = dict(scores=scores, capped=capped, biased=np.where(mask, biased, -np.inf), weights=weights)
    return dict(o=o, present_key=present_key, present_value=present_value) | steps


# The other variants: functions of inputs x, attributes a and arguments g of a node, None where they do not express it.

def by_gqa(x, a, g):
    """Any mask, neither bias nor soft cap."""
    if g["softcap"] is None and not g["bias"].any():
        return dict(o=gqa.dense(g["q"], g["k"], g["v"], g["mask"], scale=g["scale"])[0])


def by_masked(x, a, g):
    """Lengths, causal and window; behind a past only if each query brings a key, for the last stands at the last."""
    (B, H, Tq, _), Tk = g["q"].shape, g["k"].shape[2]
    past = x["past_key"].shape[2] if "past_key" in x else None
    if "attn_mask" in x or g["softcap"] is not None or past not in (None, Tk - Tq):
        return None
    cached = past is not None or "nonpad_kv_seqlen" in x
    left, right = window(a)
    return dict(o=masked.dense(
        g["q"], repeat_heads(g["k"], H), repeat_heads(g["v"], H), x.get("nonpad_kv_seqlen", np.full(B, Tk)),
        np.zeros((B, Tq), int), np.zeros((B, Tk), int), anchor="bottom-right" if cached else "top-left",
        causal=bool(a.get("is_causal")), left=left, right=right, scale=g["scale"])[0])


def by_kv_cache(x, a, g):
    """Causal, one new key per query: those at the end of a grown cache, or the last valid ones of a static cache."""
    Tq, Tk = g["q"].shape[2], g["k"].shape[2]
    present = x.get("nonpad_kv_seqlen", np.full(len(g["q"]), x["past_key"].shape[2] + Tq if "past_key" in x else 0))
    past_length, fits = present - Tq, (Tq <= present).all() and (present == Tk).all() | ("past_key" not in x)
    if not fits or not a.get("is_causal") or "attn_mask" in x or set(a) - {"is_causal", "scale"}:
        return None
    new = [kv_cache.read(g[name], past_length, Tq) for name in "kv"]
    past = [kv_cache.write(g[name], np.full_like(y, np.nan), past_length) for name, y in zip("kv", new)]
    return dict(zip(kv_cache.OUTPUTS, kv_cache.dense(g["q"], *new, *past, past_length, scale=g["scale"])))


def named_outputs(y, a):
    """Outputs of a node by our names and in our layout."""
    ours = {"Y": "o", "qk_matmul_output": STEP[a.get("qk_matmul_output_mode", 0)]}
    return {ours.get(name, name): heads(x, a.get("q_num_heads")) for name, x in y.items()}


def run(x, a, opset=25, engine=ReferenceEvaluator):
    """Outputs by name for inputs x and attributes a; the engine is the reference implementation in the onnx package."""
    names = ["Y", "", "", "qk_matmul_output"] if "qk_matmul_output_mode" in a else ["Y"]
    node = helper.make_node("Attention", [name if name in x else "" for name in INPUTS], names, **a)
    types = {name: helper.np_dtype_to_tensor_dtype(y.dtype) for name, y in x.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], y.shape) for name, y in x.items()]
    outputs = [helper.make_tensor_value_info(name, types["Q"], None) for name in names if name]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return dict(zip(filter(None, names), engine(model).run(None, x)))
