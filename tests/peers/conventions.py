"""How torch, jax and onnx read the formula where it leaves a choice, measured from those that are installed.

    python tests/peers/conventions.py        prints the table
"""
import importlib.util

import numpy as np

import attention_ref
from attention_ref.masks import ANCHORS, causal

# A peer is a function of q (Tq, d), k, v (Tk, d), mask (Tq, Tk) or None, is_causal, that returns o (Tq, d).


def ours(q, k, v, mask=None, is_causal=False):
    if is_causal:
        raise NotImplementedError
    mask = np.ones((len(q), len(k)), bool) if mask is None else mask
    return attention_ref.sdpa.dense(*batch(q, k, v), mask, scale=1.0)[0][0, 0]


def torch_sdpa(q, k, v, mask=None, is_causal=False):
    import torch
    mask = None if mask is None else torch.from_numpy(mask)
    x = map(torch.from_numpy, batch(q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*x, mask, is_causal=is_causal)[0, 0].numpy()


def torch_mha(need_weights):
    """nn.MultiheadAttention with one head whose projections are the identity."""
    def run(q, k, v, mask=None, is_causal=False):
        import torch
        if is_causal and mask is None:
            raise NotImplementedError
        one = np.eye(q.shape[1])
        layer = torch.nn.MultiheadAttention(len(one), 1, bias=False, batch_first=True, dtype=torch.float64)
        weights = dict(in_proj_weight=np.tile(one, (3, 1))) | {"out_proj.weight": one}
        layer.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
        mask = None if mask is None else torch.from_numpy(mask)
        o, _ = layer(*(torch.from_numpy(x[None]) for x in (q, k, v)), attn_mask=mask, need_weights=need_weights)
        return o[0].detach().numpy()
    return run


def jax_attention(q, k, v, mask=None, is_causal=False):
    import jax
    with jax.enable_x64(True):
        mask = None if mask is None else mask[None, None]
        x = (x[None, :, None] for x in (q, k, v))
        return np.asarray(jax.nn.dot_product_attention(*x, mask=mask, is_causal=is_causal))[0, :, 0]


def onnx_reference(q, k, v, mask=None, is_causal=False):
    from onnx_attention import run
    x = dict(zip("QKV", batch(q, k, v))) | ({} if mask is None else dict(attn_mask=mask))
    return run(x, dict(is_causal=int(is_causal)))["Y"][0, 0]


def batch(*arrays):
    return [x[None, None] for x in arrays]


PEERS = {
    "attention_ref sdpa": ours,
    "torch scaled_dot_product_attention": torch_sdpa,
    "torch nn.MultiheadAttention": torch_mha(False),
    "torch nn.MultiheadAttention, need_weights": torch_mha(True),
    "jax nn.dot_product_attention": jax_attention,
    "onnx Attention, reference": onnx_reference,
}


def weights(peer, Tq=2, Tk=3, **options):
    """(Tq, Tk): with queries of zero and one unit vector for each value, the output is the matrix of weights."""
    return peer(np.zeros((Tq, Tk)), np.ones((Tk, Tk)), np.eye(Tk), **options)


def causal_anchor(peer):
    try:
        seen = weights(peer, is_causal=True) > 0
    except NotImplementedError:
        return "none: pass a mask"
    return next((anchor for anchor in ANCHORS if np.array_equal(seen, causal(*seen.shape, anchor))), "neither")


def mask_polarity(peer):
    mask = np.array([[True, False, False]] * 2)
    readings = {"True = may attend": mask, "True = masked": ~mask}
    return next(text for text, seen in readings.items() if np.array_equal(weights(peer, mask=mask) > 0, seen))


def hiding(peer, hidden):
    """The mask in the peer's own polarity that hides these pairs."""
    return ~hidden if mask_polarity(peer) == "True = may attend" else hidden


def empty_row(peer):
    row = weights(peer, mask=hiding(peer, np.array([[False] * 3, [True] * 3])))[1]
    readings = {"NaN": np.nan, "0": 0, "mean of all values": 1 / 3}
    return next(text for text, value in readings.items() if np.allclose(row, value, equal_nan=True))


def masked_nan(peer):
    """What NaN in a value that no query may attend to does."""
    v = np.where([[False], [False], [True]], np.nan, np.eye(3))
    o = peer(np.zeros((2, 3)), np.ones((3, 3)), v, mask=hiding(peer, np.array([[False, False, True]] * 2)))
    return "NaN" if np.isnan(o).any() else "never read"


CONVENTIONS = {"causal, Tq < Tk": causal_anchor, "boolean mask": mask_polarity, "row without keys": empty_row,
               "NaN in a masked value": masked_nan}


def measured_conventions():
    """Peer -> convention -> what it does, with its version; peers that are not installed are left out."""
    found = {}
    for name, peer in PEERS.items():
        package = name.split()[0]
        if importlib.util.find_spec(package):
            version = importlib.import_module(package).__version__
            found[name] = {"version": version} | {what: measure(peer) for what, measure in CONVENTIONS.items()}
    return found


def table():
    """The measured conventions in Markdown."""
    rows = measured_conventions()
    head = ["", "version", *CONVENTIONS]
    lines = [head, ["---"] * len(head), *([name, *row.values()] for name, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
