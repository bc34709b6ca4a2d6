"""Grouped-query attention (GQA), and with it multi-head (MHA) and multi-query (MQA) attention.

Ainslie et al. 2023, arXiv:2305.13245, section 2.2; MQA: Shazeer 2019, arXiv:1911.02150, section 3

    g(h)  = h // G        G = Hq / Hkv query heads share one key and value head: G = 1 is MHA, Hkv = 1 is MQA
    s_hij = scale q_hi . k_g(h)j         z_hi = sum_{j: mask_hij} exp(s_hij)           lse_hi = log z_hi
    p_hij = exp(s_hij) / z_hi  where mask_hij, else 0                                  o_hi   = sum_j p_hij v_g(h)j

The papers leave open which heads share; every library repeats (h // G: neighbours share), and a checkpoint read with
tiled heads (h mod Hkv) is wrong without an error. The backward sums dk and dv over the heads of a group. Where code in
the wild differs: a row without keys (here o = 0, lse = -inf), and the axis along which keys are repeated.
"""
import numpy as np

from .. import kit
from ..core import per_head, repeat_heads, softmax, sum_groups, unread
from ..masks import causal, padding
from ..shapes import cotangents, sizes

INPUTS = dict(q="B Hq Tq dk", k="B Hkv Tk dk", v="B Hkv Tk dv", mask="bool B? Hq? Tq? Tk?", scale="")
OUTPUTS = dict(o="B Hq Tq dv", lse="B Hq Tq")
CONVENTIONS = dict(heads="query head h reads kv head h // (Hq/Hkv)", mask="True = may attend",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, of scaled scores", layout="B H T d",
                   masked_values="a key that no query of a group may attend to is never read")


def dense(q, k, v, mask=True, *, scale):
    """o (B, Hq, Tq, dv) and lse (B, Hq, Tq); ValueError where shapes do not fit or Hq is not a multiple of Hkv."""
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
    sizes(INPUTS | cotangents(OUTPUTS), locals())
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
    """x (B, H, T, d) -> (B, heads, T, d), each the mean of its group: MHA made into GQA, Ainslie et al. section 2.1."""
    return sum_groups(x, heads) / (x.shape[1] // heads)


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def mha(x, kv_head=lambda h, Hq, Hkv: h * Hkv // Hq):
    """The inputs as MHA has them: query head h gets a kv head of its own, a copy of kv_head(h, Hq, Hkv)."""
    Hq, Hkv = x["q"].shape[1], x["k"].shape[1]
    picked = kv_head(np.arange(Hq), Hq, Hkv)
    return x | {"k": x["k"][:, picked], "v": x["v"][:, picked]}


def repeat_keys(y, heads):
    """Each key G times in a row, and the long row cut into the G heads of a group."""
    B, Hkv, T, d = y.shape
    return np.repeat(y, heads // Hkv, axis=2).reshape(B, heads, T, d)


def groups(y, heads):
    """y (B, Hq, T, d) -> (B, heads, Hq/heads, T, d)."""
    B, Hq, T, d = y.shape
    return y.reshape(B, heads, Hq // heads, T, d)


def mask_of_head(x, head):
    """Query head h is given the mask of head(h, G)."""
    Hq, heads = x["q"].shape[1], x["mask"].shape[1]
    return x | {"mask": x["mask"][:, np.minimum(head(np.arange(Hq), Hq // x["k"].shape[1]), heads - 1)]}


def scores(x):
    """Scores (B, Hq, Tq, Tk), those of hidden keys included."""
    return x["scale"] * x["q"] @ mha(x)["k"].swapaxes(-1, -2)


def weights(x):
    return softmax(scores(x), x["mask"])[0]


BUGS = dict(
    heads_tiled=("query head h reads kv head h mod Hkv", lambda x: dense(**mha(x, lambda h, Hq, Hkv: h % Hkv))),
    heads_divided_by_kv_heads=("query head h reads kv head h // Hkv instead of h // (Hq/Hkv)", lambda x: dense(
        **mha(x, lambda h, Hq, Hkv: np.minimum(h // Hkv, Hkv - 1)))),
    kv_heads_reversed=("the last kv head serves the first group", lambda x: dense(
        **mha(x, lambda h, Hq, Hkv: Hkv - 1 - h * Hkv // Hq))),
    kv_head_0_for_all=("every query head reads kv head 0, as in MQA", lambda x: dense(
        **mha(x, lambda h, Hq, Hkv: 0 * h))),
    repeat_along_keys=("k and v are repeated along the sequence axis and reshaped", lambda x: dense(
        **x | {name: repeat_keys(x[name], x["q"].shape[1]) for name in "kv"})),
    output_heads_tiled=("the heads of o are written out as (G, Hkv) instead of (Hkv, G)", lambda x: (
        groups(dense(**x)[0], x["k"].shape[1]).swapaxes(1, 2).reshape(dense(**x)[0].shape),)),
    mask_of_head_0=("the mask of head 0 serves every head", lambda x: dense(**mask_of_head(x, lambda h, G: 0 * h))),
    mask_of_kv_head=("query head h is given the mask of head h // G", lambda x: dense(
        **mask_of_head(x, lambda h, G: h // G))),
    mask_of_first_in_group=("the first head of a group gives its mask to the whole group", lambda x: dense(
        **mask_of_head(x, lambda h, G: h - h % G))),
    mask_of_batch_0=("the mask of batch entry 0 serves every entry", lambda x: dense(**x | {"mask": x["mask"][:1]})),
    masked_nan_poison=("0 * NaN: a masked value is read", lambda x: (weights(x) @ mha(x)["v"],)),
    mask_dropped=("the mask is ignored", lambda x: dense(**x | {"mask": np.array(True)})),
    hidden_key_in_max=("the maximum is taken over hidden keys too: what is seen underflows", lambda x: (
        kit.shifted_by_hidden(scores(x), x["mask"]) @ kit.plain(mha(x)["v"]),)),
    hidden_key_overflows=("exp of a hidden score overflows before it is multiplied by 0", lambda x: (
        kit.hidden_times_zero(scores(x), x["mask"]) @ kit.plain(mha(x)["v"]),)),
    mask_polarity=("True is read as masked", lambda x: dense(**x | {"mask": ~x["mask"]})),
    causal_implied=("no mask is taken to mean causal", lambda x: dense(
        **x | {"mask": causal(*kit.lengths(x), "top-left") if x["mask"].all() else x["mask"]})),
    empty_row_nan=("a row without keys is 0/0", lambda x: kit.nan_at_empty_rows(x, dense(**x))),
    empty_row_uniform=("a row without keys gives the mean of all values", lambda x: (
        kit.at_empty_rows(dense(**x), kit.mean_value(mha(x)["v"]))[:1])),
    scale_missing=("the scores are not scaled", lambda x: dense(**x | {"scale": 1.0})),
    scale_applied_twice=("q is scaled and so are the scores", lambda x: dense(**x | {"scale": x["scale"] ** 2})),
    scale_ignored=("1/sqrt(dk) whatever scale was asked for", lambda x: dense(
        **x | {"scale": x["q"].shape[3] ** -0.5})),
    value_width_from_keys=("the loop over value channels stops at dk", lambda x: kit.width_of_keys(x, dense(**x))),
    strides_ignored=("a strided view is read as if it were contiguous", lambda x: dense(
        **x | kit.changed(x, "qkv", kit.memory_order))),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
)


def reduced(x, reduce):
    """dk and dv with reduce(d (B, Hq, Tk, channels), Hkv) in place of the sum over groups."""
    d = vjp(**mha(x))
    return {name: reduce(d[name], x["k"].shape[1]) for name in ("dk", "dv")}


def last_of_group(d, Hkv):
    return groups(d, Hkv)[:, :, -1]


def first_of_group(d, Hkv):
    return groups(d, Hkv)[:, :, 0]


VJP_BUGS = dict(
    group_gradient_last_head=("the last head of a group overwrites dk and dv of the others", lambda x: reduced(
        x, last_of_group)),
    group_gradient_first_head=("dk and dv are those of the first head of a group, not the sum over it", lambda x: (
        reduced(x, first_of_group))),
    group_gradient_mean=("dk and dv are means over the group instead of sums", lambda x: reduced(
        x, pool_heads)),
    group_gradient_tiled=("dk and dv are summed over the heads with the same h mod Hkv", lambda x: reduced(
        x, lambda d, Hkv: groups(d, d.shape[1] // Hkv).sum(1))),
    jacobian_term_missing=("dS = P dP without the row term", lambda x: dict(
        dq=kit.without_row_term(weights(x), x["do"], mha(x)["k"], mha(x)["v"], x["scale"]))),
    dq_scale_missing=("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dk_scale_missing=("dk is not multiplied by scale", lambda x: dict(dk=vjp(**x)["dk"] / x["scale"])),
    dlse_ignored=("the gradient that comes through lse is lost", lambda x: vjp(**x | {"dlse": 0 * x["dlse"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=3, Hq=6, Hkv=2, Tq=5, Tk=7, dk=4, dv=8)
NEUTRAL = dict(mask=kit.no_mask, scale=lambda n: n.dk ** -0.5)


def mask_per_head(n):
    """(1, Hq, Tq, Tk) with a hole in every fifth place, elsewhere for every head but 0 and 5."""
    h, i, j = np.ogrid[:n.Hq, :n.Tq, :n.Tk]
    return ((2 * h + i + 3 * j) % 5 > 0)[None]


def broadcast_heads(x):
    """o where NumPy broadcasting is the whole head map: Hkv = Hq or Hkv = 1."""
    return softmax(x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2), x["mask"])[0] @ x["v"]


CASES = dict(
    basic=dict(
        why="three query heads per kv head and two kv heads: every wrong head map shows", sizes=SIZES,
        catches=("heads_tiled", "heads_divided_by_kv_heads", "kv_heads_reversed", "kv_head_0_for_all",
                 "repeat_along_keys", "output_heads_tiled", "scale_missing", "scale_applied_twice",
                 "value_width_from_keys", "causal_implied", "lse_base_2", "group_gradient_last_head",
                 "group_gradient_first_head", "group_gradient_mean", "group_gradient_tiled")),
    three_kv_heads=dict(
        why="two query heads per kv head and three kv heads: group size and group count change places",
        sizes=SIZES | dict(Hkv=3), catches=(
            "heads_tiled", "heads_divided_by_kv_heads", "output_heads_tiled", "group_gradient_tiled")),
    mha=dict(
        why="Hkv = Hq is multi-head attention", sizes=SIZES | dict(Hkv=6), light=True,
        shows=lambda x, y: np.allclose(y["o"], broadcast_heads(x))),
    mqa=dict(
        why="Hkv = 1 is multi-query attention: every head reads the one kv head", sizes=SIZES | dict(Hkv=1),
        shows=lambda x, y: np.allclose(y["o"], broadcast_heads(x))),
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=dict(B=1, Hq=1, Hkv=1, Tq=1, Tk=1, dk=1, dv=1),
        shows=kit.returns_v),
    one_key=dict(
        why="with one key each query returns the value of its kv head", sizes=SIZES | dict(Tk=1), light=True,
        shows=lambda x, y: (y["o"] == repeat_heads(x["v"], 6)).all()),
    no_keys=dict(
        why="Tk = 0 is legal: o = 0, lse = -inf", sizes=SIZES | dict(Tk=0), light=True, shows=kit.sees_nothing),
    narrow_values=dict(
        why="dv may be smaller than dk", sizes=SIZES | dict(dk=16), light=True, shows=kit.narrow_values),
    scale_given=dict(
        why="a scale that is not 1/sqrt(dk) must be honoured, and a width that no 4 divides", light=True,
        sizes=SIZES | dict(dk=6), scale=0.75, catches=("scale_ignored",)),
    causal_wide=dict(
        why="a causal mask for queries that come after two cached keys", sizes=SIZES, light=True, mask=kit.causal_of,
        conventions=dict(causal="bottom-right"), catches=("mask_dropped", "mask_polarity", "repeat_along_keys")),
    causal_tall=dict(
        why="Tq > Tk at the bottom right: the first rows see nothing", sizes=SIZES | dict(Tk=2), mask=kit.causal_of,
        conventions=dict(causal="bottom-right"), catches=("empty_row_nan", "empty_row_uniform")),
    padding=dict(
        why="batch entries of different length", sizes=SIZES, light=True, mask=lambda n: padding([3, 7, 5], n.Tk),
        catches=("mask_of_batch_0",)),
    mask_per_head=dict(
        why="the heads of a group share keys but not their mask", sizes=SIZES, light=True, mask=mask_per_head,
        catches=("mask_of_head_0", "mask_of_kv_head", "mask_of_first_in_group")),
    everything=dict(
        why="a mask per head and batch entry, three kv heads and a given scale at once", sizes=SIZES | dict(Hkv=3),
        scale=0.75, mask=lambda n: mask_per_head(n) & padding([6, 3, 7], n.Tk),
        catches=("mask_of_first_in_group", "mask_of_batch_0", "heads_tiled", "scale_ignored")),
    masked_nan=dict(
        why="NaN in keys and values that nobody may attend to", sizes=SIZES, mask=lambda n: padding([4, 4, 4], n.Tk),
        change=lambda x: kit.nan_where(kit.hidden_keys(x["mask"]), x), catches=("masked_nan_poison",)),
    hidden_largest=dict(kit.HIDDEN_LARGEST, sizes=SIZES, mask=kit.causal_of),
    long=dict(kit.LONG, sizes=SIZES | dict(B=1, Hq=2, Hkv=1, Tq=9, Tk=205, dk=6, dv=3), mask=kit.causal_of),
    equal_widths=dict(kit.EQUAL_WIDTHS, sizes=SIZES | dict(dk=4, dv=4), mask=kit.causal_of),
    large_scores=dict(
        why="q k^T is over 65504 before it is scaled, and one key takes all the weight", sizes=SIZES, scale=0.5,
        change=lambda x: kit.ramp(x, 160, 160, -1),
        shows=lambda x, y: np.allclose(y["o"], repeat_heads(x["v"], 6)[:, :, :1])),
    strided=dict(
        why="q, k and v are views of (B, T, H, d) memory", sizes=SIZES, change=kit.strided,
        catches=("strides_ignored",)),
)
