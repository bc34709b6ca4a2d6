"""Grouped-query attention (GQA), and with it multi-head (MHA) and multi-query (MQA) attention.

Ainslie et al. 2023, arXiv:2305.13245, section 2.2; MQA: Shazeer 2019, arXiv:1911.02150, section 3

    g(h)   = h // G            G = Hq / Hkv query heads share one key and value head: G = 1 is MHA, Hkv = 1 is MQA
    s_hij  = scale q_hi . k_g(h)j                     z_hi = sum_{j: mask_hij} exp(s_hij)          lse_hi = log z_hi
    p_hij  = exp(s_hij) / z_hi  where mask_hij, else 0                                             o_hi = sum_j p_hij v_g(h)j

The papers say which heads share by a figure only; every library repeats (h // G, neighbours share), and a checkpoint read with
heads tiled (h mod Hkv) is wrong without an error. The backward sums dk and dv over the heads of a group. Where code in the
wild differs: a row without keys (here 0, lse -inf), the corner of the causal diagonal, the axis on which heads are repeated.
"""
import numpy as np

from ..core import per_head, repeat_heads, softmax, sum_groups, unread
from ..masks import causal, padding
from ..shapes import sizes

INPUTS = dict(q="B Hq Tq dk", k="B Hkv Tk dk", v="B Hkv Tk dv", mask="bool B? Hq? Tq? Tk?", scale="")
OUTPUTS = dict(o="B Hq Tq dv", lse="B Hq Tq")
CONVENTIONS = dict(heads="query head h reads kv head h // (Hq/Hkv)", mask="True = may attend",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, of scaled scores", layout="B H T d",
                   masked_values="a key that no query of a group may attend to is never read")


def dense(q, k, v, mask=True, *, scale):
    """o (B, Hq, Tq, dv) and lse (B, Hq, Tq); raises ValueError for a shape that does not fit, Hq not a multiple of Hkv included."""
    Hq = sizes(INPUTS, locals())["Hq"]
    k, v = unread(repeat_heads(k, Hq), mask), unread(repeat_heads(v, Hq), mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    return weights @ v, lse


def grouped(q, k, v, mask=True, *, scale):
    """Nothing is repeated: the G query heads of a kv head are one head with G Tq queries."""
    n = sizes(INPUTS, locals())
    B, Hq, Hkv, Tq, Tk = (n[a] for a in ("B", "Hq", "Hkv", "Tq", "Tk"))
    rows = Hq // Hkv * Tq
    mask = np.broadcast_to(mask, (B, Hq, Tq, Tk)).reshape(B, Hkv, rows, Tk)
    weights, lse = softmax(scale * q.reshape(B, Hkv, rows, n["dk"]) @ unread(k, mask).swapaxes(-1, -2), mask)
    return (weights @ unread(v, mask)).reshape(B, Hq, Tq, n["dv"]), lse.reshape(B, Hq, Tq)


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, mask, scale):
    """One query head h and the kv head h // (Hq/Hkv), which `per_head` hands it; one query at a time."""
    (Tq, dk), (Tk, dv) = q.shape, v.shape
    o, s, z = np.zeros((Tq, dv), q.dtype), np.zeros(Tk, q.dtype), np.zeros(Tq, q.dtype)
    m = np.full(Tq, -np.inf, q.dtype)
    for i in range(Tq):
        for j in range(Tk):
            if mask[i, j]:
                s[j] = 0
                for c in range(dk):
                    s[j] += scale * q[i, c] * k[j, c]
                if s[j].real > m[i].real:
                    m[i] = s[j]
        for j in range(Tk):
            if mask[i, j]:
                p = np.exp(s[j] - m[i])
                z[i] += p
                for c in range(dv):
                    o[i, c] += p * v[j, c]
        if m[i].real > -np.inf:
            o[i] /= z[i]
            m[i] += np.log(z[i])
    return o, m


def vjp(do, dlse, q, k, v, mask=True, *, scale):
    """Gradients of q, k, v for cotangents do (B, Hq, Tq, dv) and dlse (B, Hq, Tq); dk and dv are sums over groups."""
    Hq, Hkv = q.shape[1], k.shape[1]
    q = unread(q, np.swapaxes(np.atleast_2d(mask), -1, -2))
    k, v = unread(repeat_heads(k, Hq), mask), unread(repeat_heads(v, Hq), mask)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return dict(dq=scale * ds @ k, dk=sum_groups(scale * ds.swapaxes(-1, -2) @ q, Hkv),
                dv=sum_groups(p.swapaxes(-1, -2) @ do, Hkv))


FORMS = dense, grouped, loop


def pool_heads(x, heads):
    """x (B, H, T, d) -> (B, heads, T, d), each head the mean of its group: how MHA becomes GQA, Ainslie et al. section 2.1."""
    return sum_groups(x, heads) / (x.shape[1] // heads)


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def heads_read(x, kv_head):
    """Query head h reads kv head kv_head(h, Hq, Hkv): a wrong map is MHA with the wrong heads picked."""
    Hq, Hkv = x["q"].shape[1], x["k"].shape[1]
    picked = kv_head(np.arange(Hq), Hq, Hkv)
    return dense(**x | {"k": x["k"][:, picked], "v": x["v"][:, picked]})


def repeated_along_keys(y, heads):
    """Each key repeated G times in a row, and the long row cut into the heads of its group."""
    B, Hkv, T, d = y.shape
    return np.repeat(y, heads // Hkv, axis=2).reshape(B, heads, T, d)


def regrouped(o, heads):
    """Heads (Hkv, G) written out in the order (G, Hkv)."""
    B, Hq, T, d = o.shape
    return o.reshape(B, heads, Hq // heads, T, d).swapaxes(1, 2).reshape(o.shape)


def mask_of(x, head):
    """Query head h is given the mask of head(h, G)."""
    Hq, Hkv = x["q"].shape[1], x["k"].shape[1]
    picked = head(np.arange(Hq), Hq // Hkv)
    return dense(**x | {"mask": x["mask"][:, np.minimum(picked, x["mask"].shape[1] - 1)]})


def empty(x):
    """True (B?, Hq?, Tq, 1) for a query that may attend to nothing."""
    return ~np.broadcast_to(x["mask"], x["mask"].shape[:3] + x["k"].shape[2:3]).any(-1, keepdims=True)


def poisoned(x):
    """Weights of 0 times whatever stands in v."""
    return softmax(scores(x), x["mask"])[0] @ repeat_heads(x["v"], x["q"].shape[1])


def scores(x):
    return x["scale"] * x["q"] @ repeat_heads(x["k"], x["q"].shape[1]).swapaxes(-1, -2)


def memory_order(a):
    """The numbers as they lie in memory, read as if the array were contiguous."""
    return a.ravel(order="K").reshape(a.shape)


def mean_of_values(x):
    return repeat_heads(unread(x["v"], x["mask"]), x["q"].shape[1])


BUGS = dict(
    heads_tiled=("query head h reads kv head h mod Hkv", lambda x: heads_read(x, lambda h, Hq, Hkv: h % Hkv)),
    heads_divided_by_kv_heads=("query head h reads kv head h // Hkv instead of h // (Hq / Hkv)", lambda x: heads_read(
        x, lambda h, Hq, Hkv: np.minimum(h // Hkv, Hkv - 1))),
    kv_heads_reversed=("the last kv head serves the first group", lambda x: heads_read(
        x, lambda h, Hq, Hkv: Hkv - 1 - h * Hkv // Hq)),
    kv_head_0_for_all=("every query head reads kv head 0, as in MQA", lambda x: heads_read(x, lambda h, Hq, Hkv: 0 * h)),
)
