"""Scaled dot-product attention.                        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1, eq. 1

    s_ij = scale q_i . k_j          a_ij = softcap tanh(s_ij / softcap) + bias_ij
    z_i  = sum_{j: mask_ij} exp(a_ij) + exp(sink)                           lse_i = log z_i
    p_ij = exp(a_ij) / z_i  where mask_ij, else 0                           o_i   = sum_j p_ij v_j

The paper has scale = 1/sqrt(dk) and no more. Soft cap: Gemma 2 (arXiv:2408.00118, section 2). Sink, one logit per head
in the denominator: gpt-oss (arXiv:2508.10925). Where code in the wild differs: a row without keys gives NaN or the mean
of V (here 0, lse -inf); the cap is applied after bias or mask; lse is in base 2; a sink is a token kept in the cache.
"""
import numpy as np

from .. import kit
from ..core import per_head, per_row, softmax, sum_to, unread
from ..masks import blocks, causal, graph, packed, padding, window
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", mask="bool B? H? Tq? Tk?", bias="B? H? Tq? Tk?", sink="H?",
              scale="", softcap="optional >0")
OUTPUTS = dict(o="B H Tq dv", lse="B H Tq")
STEPS = dict(scores="B H Tq Tk", capped="B H Tq Tk", biased="B H Tq Tk", weights="B H Tq Tk")
CONVENTIONS = dict(mask="True = may attend", softcap="before bias and mask",
                   empty_row="o = 0, lse = -inf, gradients 0; with a sink lse = sink, which alone has a gradient",
                   lse="natural log, of capped and biased scores, sink included", layout="B H T d",
                   masked_values="a key that no query may attend to is never read")


def logits(q, k, bias, scale, softcap):
    """Scores as they are, capped, and biased, each (B, H, Tq, Tk)."""
    scores = scale * q @ k.swapaxes(-1, -2)
    capped = scores if softcap is None else softcap * np.tanh(scores / softcap)
    return scores, capped, capped + bias


def dense(q, k, v, mask=True, bias=0.0, sink=-np.inf, *, scale, softcap=None):
    """o (B, H, Tq, dv) and lse (B, H, Tq), by the equations above. Raises ValueError for a shape that does not fit."""
    sizes(INPUTS, locals())
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(logits(q, k, bias, scale, softcap)[-1], mask, per_row(sink, q))
    return weights @ v, lse


def steps(q, k, v, mask=True, bias=0.0, sink=-np.inf, *, scale, softcap=None):
    """The named intermediates, each (B, H, Tq, Tk); NaN where mask hides a score, for nothing may depend on it."""
    k = unread(k, mask)
    a = logits(q, k, bias, scale, softcap)
    weights, _ = softmax(a[-1], mask, per_row(sink, q))
    scores, capped, biased = (np.where(mask, s, np.nan) for s in a)
    return scores, capped, biased, weights


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, mask, bias, sink, scale, softcap):
    """One query at a time: its row of logits and their maximum, then the weighted sum of the values it may see."""
    (Tq, dk), (Tk, dv) = q.shape, v.shape
    o, lse, a = np.zeros((Tq, dv), q.dtype), np.zeros(Tq, q.dtype), np.zeros(Tk, q.dtype)
    for i in range(Tq):
        m = sink
        for j in range(Tk):
            if mask[i, j]:
                a[j] = 0
                for c in range(dk):
                    a[j] += scale * q[i, c] * k[j, c]
                if softcap is not None:
                    a[j] = softcap * np.tanh(a[j] / softcap)
                a[j] += bias[i, j]
                if a[j].real > m.real:
                    m = a[j]
        if m.real == -np.inf:
            lse[i] = m
            continue
        z = np.exp(sink - m)
        for j in range(Tk):
            if mask[i, j]:
                p = np.exp(a[j] - m)
                z += p
                for c in range(dv):
                    o[i, c] += p * v[j, c]
        o[i] /= z
        lse[i] = m + np.log(z)
    return o, lse


def vjp(do, dlse, q, k, v, mask=True, bias=0.0, sink=-np.inf, *, scale, softcap=None):
    """Gradients of q, k, v, bias (its own shape) and sink for cotangents do (B, H, Tq, dv) and dlse (B, H, Tq)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    q, k, v = unread(q, np.swapaxes(np.atleast_2d(mask), -1, -2)), unread(k, mask), unread(v, mask)
    scores, _, biased = logits(q, k, bias, scale, softcap)
    p, lse = softmax(biased, mask, per_row(sink, q))
    dp = do @ v.swapaxes(-1, -2)
    row = (p * dp).sum(-1) - dlse                                           # = do . o - dlse
    da = p * (dp - row[..., None])
    ds = da if softcap is None else da * (1 - np.tanh(scores / softcap) ** 2)
    p_sink = np.exp(per_row(sink, q)[..., 0] - np.where(lse == -np.inf, 0, lse))
    return dict(dq=scale * ds @ k, dk=scale * ds.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do,
                dbias=sum_to(da, np.shape(bias)), dsink=sum_to(-(p_sink * row).sum((0, 2)), np.shape(sink)))


FORMS = dense, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def sink_of(x):
    return per_row(x["sink"], x["q"])


def raw(x, scale):
    """scale q k^T and nothing else, hidden keys included."""
    return scale * x["q"] @ kit.plain(x["k"]).swapaxes(-1, -2)


def cap(x, s):
    return s if x["softcap"] is None else x["softcap"] * np.tanh(s / x["softcap"])


def biased(x):
    """The right logits."""
    return cap(x, raw(x, x["scale"])) + x["bias"]


def finish(x, a, mask=None, sink=None):
    """The rest of the formula after logits a, with another mask or sink if given."""
    mask = x["mask"] if mask is None else mask
    weights, lse = softmax(a, mask, sink_of(x) if sink is None else sink)
    return weights @ kit.plain(x["v"]), lse


def finish_unguarded(x, a):
    """The same with a softmax as most code writes it: infinities go in, and a row of them is NaN."""
    m = np.maximum(a.max(-1, keepdims=True, initial=-np.inf), sink_of(x))
    e = np.exp(a - m)
    return (e / (e.sum(-1, keepdims=True) + np.exp(sink_of(x) - m)) @ kit.plain(x["v"]),)


def row_max(x):
    """The largest logit of each row (B, H, Tq, 1), 0 for a row without keys."""
    m = np.where(x["mask"], biased(x), -np.inf).max(-1, keepdims=True, initial=-np.inf)
    return np.where(m == -np.inf, 0, m)


def leaky_cap(x, scores, bias):
    """The cap after the mask: what was -inf becomes -softcap."""
    if x["softcap"] is None:
        return dense(**x)
    return finish(x, np.where(x["mask"], cap(x, scores), -x["softcap"]) + bias, np.array(True))


def sentinel(x):
    """-1e9 in the type of the scores."""
    return np.float64(-1e9).astype(x["q"].dtype)


def lowest(x):
    """The lowest number of the type where the mask hides, else 0."""
    return np.where(x["mask"], 0, np.finfo(x["q"].dtype).min).astype(x["q"].dtype)


def over_queries(x):
    a, mask = biased(x).swapaxes(-1, -2), x["mask"].swapaxes(-1, -2)
    return (softmax(a, mask)[0].swapaxes(-1, -2) @ kit.plain(x["v"]),)


def without_max(x):
    e = np.where(x["mask"], np.exp(biased(x)), 0)
    z = e.sum(-1, keepdims=True) + np.exp(sink_of(x))
    return e / np.where(z == 0, 1, z) @ kit.plain(x["v"]), np.log(z)[..., 0]


BUGS = dict(
    softmax_over_queries=("the weights sum to one over the queries instead of the keys", over_queries),
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    scale_applied_twice=("q is scaled and so are the scores", lambda x: but(x, scale=x["scale"] ** 2)),
    scale_by_d_model=("1/sqrt(H dk), the model width, instead of 1/sqrt(dk)",
                      lambda x: but(x, scale=x["scale"] * x["q"].shape[1] ** -0.5)),
    scale_by_num_heads=("1/sqrt(H) instead of 1/sqrt(dk)", lambda x: but(x, scale=x["q"].shape[1] ** -0.5)),
    scale_ignored=("1/sqrt(dk) whatever scale was asked for", lambda x: but(x, scale=x["q"].shape[3] ** -0.5)),
    score_overflow=("q k^T is formed before it is scaled and overflows float16",
                    lambda x: finish(x, cap(x, x["scale"] * raw(x, 1.0)) + x["bias"])),
    no_max_subtracted=("exp of the scores as they are, no maximum subtracted: large ones overflow", without_max),
    hidden_key_in_max=("the maximum is taken over hidden keys too: what is seen underflows", lambda x: (
        kit.shifted_by_hidden(biased(x), x["mask"], sink_of(x)) @ kit.plain(x["v"]),)),
    hidden_key_overflows=("exp of a hidden score overflows before it is multiplied by 0", lambda x: (
        kit.hidden_times_zero(biased(x), x["mask"], sink_of(x)) @ kit.plain(x["v"]),)),
    bias_ignored=("the bias is never added", lambda x: but(x, bias=np.zeros_like(x["bias"]))),
    bias_before_scale=("the bias is scaled together with the scores",
                       lambda x: finish(x, cap(x, raw(x, x["scale"]) + x["scale"] * x["bias"]))),
    bias_of_head_0=("the bias of head 0 serves every head", lambda x: but(x, bias=x["bias"][:, :1])),
    exp2_bias_not_rescaled=("exp2 with log2(e) in the scores but not in the bias",
                            lambda x: but(x, bias=x["bias"] * kit.LN2)),
    softcap_dropped=("the soft cap is accepted and never used", lambda x: but(x, softcap=None)),
    softcap_before_scale=("the cap acts on q k^T before it is scaled",
                          lambda x: finish(x, x["scale"] * cap(x, raw(x, 1.0)) + x["bias"])),
    softcap_after_bias=("the cap acts on scores plus bias",
                        lambda x: finish(x, cap(x, raw(x, x["scale"]) + x["bias"]))),
    softcap_after_mask=("a masked score of -inf becomes -softcap and leaks",
                        lambda x: leaky_cap(x, raw(x, x["scale"]), x["bias"])),
    softcap_after_additive_mask=("bias and mask are added before the cap: -inf becomes -softcap and leaks",
                                 lambda x: leaky_cap(x, raw(x, x["scale"]) + x["bias"], np.zeros_like(x["bias"]))),
    masked_nan_poison=("0 * NaN: a masked value is read", lambda x: (weights(x) @ x["v"],)),
    mask_dropped=("the mask is ignored", lambda x: but(x, mask=np.array(True))),
    mask_only_causal_kept=("padding or sequence borders are ignored, the causal part is kept",
                           lambda x: but(x, mask=kit.causal_part(x))),
    mask_polarity=("True is read as masked", lambda x: but(x, mask=~x["mask"])),
    mask_transposed=("the mask is read as (key, query): silent where it is square", lambda x: but(
        x, mask=kit.transposed_if_square(x["mask"]))),
    mask_added_as_0_1=("the boolean mask is added to the scores as 0 and 1",
                       lambda x: finish(x, biased(x) + x["mask"], np.array(True))),
    mask_carries_a_constant=("kept entries get 1 added instead of 0: seen in lse",
                             lambda x: but(x, bias=x["bias"] + 1)),
    mask_after_softmax=("softmax over all keys, then weights times mask: rows do not sum to one", lambda x: (
        softmax(biased(x), True, sink_of(x))[0] * x["mask"] @ kit.plain(x["v"]),)),
    mask_of_head_0=("the mask of head 0 serves every head", lambda x: but(x, mask=x["mask"][:, :1])),
    mask_of_batch_0=("the mask of batch entry 0 serves every entry", lambda x: but(x, mask=x["mask"][:1])),
    mask_head_batch_order=("heads are folded before the batch, masks after it",
                           lambda x: but(x, mask=kit.of_another_head(x["mask"], *x["q"].shape[:2]))),
    causal_top_left=("the causal diagonal starts at the top left instead of the bottom right",
                     lambda x: but(x, mask=kit.from_top_left(x))),
    causal_implied=("no mask is taken to mean causal",
                    lambda x: but(x, mask=causal(*kit.lengths(x), "top-left") if x["mask"].all() else x["mask"])),
    empty_row_nan=("a row without keys is 0/0", lambda x: kit.nan_at_empty_rows(x, dense(**x))),
    empty_row_uniform=("a row without keys gives the mean of all values",
                       lambda x: kit.at_empty_rows(dense(**x), kit.mean_value(x["v"]))[:1]),
    empty_row_lse_zero=("lse of a row without keys is 0",
                        lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    minus_inf_minus_inf=("lse of a row without keys is -inf - (-inf)",
                         lambda x: kit.at_empty_rows(dense(**x), lse=np.nan)),
    overflow_clean_up_unmasks=("infinities are replaced by 0, masked ones too", lambda x: finish(
        x, np.where(x["mask"] & np.isfinite(biased(x)), biased(x), 0), np.array(True))),
    sentinel_does_not_fit=("-1e9 in place of a masked score is -inf in float16: NaN where it was uniform",
                           lambda x: finish_unguarded(x, np.where(x["mask"], biased(x), sentinel(x)))),
    sentinel_added_does_not_fit=("-1e9 added to a masked score is -inf in float16: NaN where all keys were seen",
                                 lambda x: finish_unguarded(x, biased(x) + np.where(x["mask"], 0, sentinel(x)))),
    sentinel_plus_score=("the lowest number is added to a score and rounds to -inf",
                         lambda x: finish_unguarded(x, biased(x) + lowest(x))),
    low_precision_sum=("the row sum is accumulated one by one in the input type and stops growing", lambda x: (
        kit.sequential_softmax(np.where(x["mask"], biased(x), -np.inf), x["v"], sink_of(x)),)),
    value_width_from_keys=("the loop over value channels stops at dk", lambda x: kit.width_of_keys(x, dense(**x))),
    strides_ignored=("a strided view is read as if it were contiguous",
                     lambda x: but(x, **kit.changed(x, "qkv", kit.memory_order))),
    value_strides_ignored=("v alone is read as if it were contiguous",
                           lambda x: but(x, v=kit.memory_order(x["v"]))),
    sink_ignored=("the sink is not in the denominator", lambda x: but(x, sink=x["sink"] - np.inf)),
    sink_of_head_0=("the sink of head 0 serves every head", lambda x: but(x, sink=x["sink"][:1])),
    sink_scaled=("the sink logit is multiplied by scale", lambda x: but(x, sink=x["scale"] * x["sink"])),
    sink_not_shifted=("exp(sink) is added to a sum of exp(score - max)",
                      lambda x: finish(x, biased(x), sink=sink_of(x) + row_max(x))[:1]),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
    lse_without_max=("the row maximum is not added back to lse",
                     lambda x: (dense(**x)[0], dense(**x)[1] - row_max(x)[..., 0])),
    lse_without_bias=("lse is of the scores before the bias",
                      lambda x: (dense(**x)[0], but(x, bias=np.zeros_like(x["bias"]))[1])),
    lse_without_sink=("lse leaves the sink out", lambda x: (dense(**x)[0], but(x, sink=x["sink"] - np.inf)[1])),
)


def score_gradient(x):
    """d loss / d biased scores (B, H, Tq, Tk): the gradient of a bias that is not broadcast."""
    return vjp(**x | {"bias": x["bias"] + 0 * raw(x, 1.0)})["dbias"]


def weights(x):
    """The right weights."""
    return softmax(biased(x), x["mask"], sink_of(x))[0]


def nan_in_backward(x):
    """The row without keys has a NaN score gradient, which reaches dk of the whole head."""
    seen = np.isfinite(np.where(x["mask"], x["bias"], -np.inf))
    da = np.where(kit.empty_rows(seen), np.nan, score_gradient(x))
    everywhere = 0 * da.sum((-2, -1), keepdims=True)
    right = vjp(**x)
    return dict(dq=right["dq"] + 0 * da.sum(-1, keepdims=True), dk=right["dk"] + everywhere,
                dbias=sum_to(da, np.shape(x["bias"])))


def first_slice(x):
    return score_gradient(x)[tuple(slice(0, 1) if n == 1 else slice(None) for n in np.shape(x["bias"]))]


VJP_BUGS = dict(
    jacobian_term_missing=("dS = P dP without the row term", lambda x: dict(
        dq=kit.without_row_term(weights(x), x["do"], x["k"], x["v"], x["scale"]))),
    dq_scale_missing=("dQ is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dk_scale_missing=("dK is not multiplied by scale", lambda x: dict(dk=vjp(**x)["dk"] / x["scale"])),
    softcap_derivative_missing=("the factor 1 - tanh^2 of the cap is left out",
                                lambda x: dict(dq=x["scale"] * score_gradient(x) @ kit.plain(x["k"]))),
    bias_gradient_not_reduced=("dbias is a slice, not the sum, over the axes along which bias was broadcast",
                               lambda x: dict(dbias=first_slice(x))),
    masked_row_gradient_nan=("0 * NaN in the backward of a row without keys", nan_in_backward),
    dlse_ignored=("the gradient that comes through lse is lost", lambda x: vjp(**x | {"dlse": 0 * x["dlse"]})),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
    dsink_without_empty_rows=("a row without keys sends nothing to the sink", lambda x: dict(
        dsink=vjp(**x | {"dlse": np.where(kit.empty_rows(x["mask"])[..., 0], 0, x["dlse"])})["dsink"])),
    dsink_missing=("the sink gets no gradient", lambda x: dict(dsink=0 * vjp(**x)["dsink"])),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=5, Tk=6, dk=4, dv=7)
NEUTRAL = dict(mask=kit.no_mask, bias=np.zeros((1, 1, 1, 1)), sink=np.array([-np.inf]), scale=lambda n: n.dk ** -0.5,
               softcap=None)
EDGES = [(0, 1), (2, 1), (3, 1), (1, 2), (4, 2), (0, 4), (4, 4), (3, 0)]
PATTERN = np.array([[[1, 0], [0, 1]], [[0, 1], [1, 1]], [[1, 1], [1, 0]]], bool)


CASES = dict(
    basic=dict(
        why="every size differs and none is 1, so no axis can stand for another", sizes=SIZES,
        catches=("softmax_over_queries", "scale_missing", "scale_applied_twice", "scale_by_d_model",
                 "scale_by_num_heads", "value_width_from_keys", "lse_base_2", "lse_without_max", "causal_implied")),
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=dict(B=1, H=1, Tq=1, Tk=1, dk=1, dv=1), shows=kit.returns_v),
    one_key=dict(
        why="with one key every query returns its value", sizes=SIZES | dict(Tk=1), light=True, shows=kit.returns_v),
    no_keys=dict(
        why="Tk = 0 is legal: o = 0, lse = -inf", sizes=SIZES | dict(Tk=0), shows=kit.sees_nothing),
    narrow_values=dict(
        why="dv may be smaller than dk", sizes=SIZES | dict(dk=16, dv=4), light=True, shows=kit.narrow_values),
    scale_given=dict(
        why="a scale that is not 1/sqrt(dk) must be honoured, and a width that no 4 divides", sizes=SIZES | dict(dk=6),
        scale=0.25, catches=("scale_ignored",)),
    causal_wide=dict(
        why="Tq < Tk tells the causal anchors apart", sizes=SIZES | dict(Tk=8), light=True, mask=kit.causal_of,
        conventions=dict(causal="bottom-right"),
        catches=("causal_top_left", "mask_dropped", "mask_after_softmax", "mask_added_as_0_1",
                 "overflow_clean_up_unmasks", "mask_polarity")),
    causal_tall=dict(
        why="Tq > Tk at the bottom right: the first rows see nothing", sizes=SIZES | dict(Tq=8),
        mask=kit.causal_of, conventions=dict(causal="bottom-right"),
        shows=lambda x, y: (y["o"][:, :, :2] == 0).all() and (y["lse"][:, :, :2] == -np.inf).all()),
    causal_top_left=dict(
        why="the other anchor, as torch, jax and ONNX read is_causal", sizes=SIZES | dict(Tk=8), light=True,
        mask=lambda n: kit.causal_of(n, "top-left"), conventions=dict(causal="top-left"),
        shows=lambda x, y: (y["o"][:, :, 0] == x["v"][:, :, 0]).all()),
    padding=dict(
        why="batch entries of different length", sizes=SIZES, light=True, mask=lambda n: padding([3, 5], n.Tk),
        catches=("mask_of_batch_0", "mask_head_batch_order")),
    causal_and_padding=dict(
        why="two masks at once, with an empty row", sizes=SIZES | dict(Tq=8),
        mask=lambda n: kit.causal_of(n) & padding([3, 5], n.Tk), conventions=dict(causal="bottom-right"),
        catches=("mask_only_causal_kept",)),
    window=dict(
        why="a window with left 1, right 1 and dilation 2", sizes=SIZES | dict(Tq=6, Tk=8), light=True,
        mask=lambda n: window(n.Tq, n.Tk, 1, 1, dilation=2)[None, None],
        conventions=dict(window="keys beside the query's own", anchor="bottom-right"),
        shows=lambda x, y: np.ptp(x["mask"].sum(-1)) > 0 and (x["mask"].sum(-1) <= 3).all()),
    blocks_per_head=dict(
        why="a block mask that differs from head to head, last block short", sizes=SIZES, light=True,
        mask=lambda n: blocks(PATTERN, 4, n.Tq, n.Tk)[None], catches=("mask_of_head_0",)),
    graph=dict(
        why="a directed graph with a node that sees nobody", sizes=SIZES | dict(Tk=5), light=True,
        mask=lambda n: graph(EDGES, n.Tq)[None, None],
        shows=lambda x, y: (y["o"][:, :, 3] == 0).all() and (y["o"][:, :, 1] != 0).any()),
    packed=dict(
        why="two sequences in one row must not see each other", sizes=SIZES | dict(Tk=5), light=True,
        mask=lambda n: kit.causal_of(n) & packed([0, 0, 1, 1, 1], [0, 0, 1, 1, 1]),
        catches=("mask_only_causal_kept", "mask_transposed")),
    empty_row=dict(
        why="a row without keys among others", sizes=SIZES, mask=kit.but_row_1,
        catches=("empty_row_nan", "empty_row_uniform", "empty_row_lse_zero", "minus_inf_minus_inf",
                 "sentinel_does_not_fit", "sentinel_added_does_not_fit")),
    empty_row_low_scores=dict(
        why="a mask value added to scores of -32 rounds to -inf in float16", sizes=SIZES, light=True,
        mask=kit.but_row_1, scale=0.5, change=lambda x: kit.ramp(x, 4, -4, -1 / 8),
        shows=lambda x, y: (x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2) <= -32).all()),
    masked_nan=dict(
        why="NaN in keys and values that nobody may attend to", sizes=SIZES, mask=lambda n: padding([3, 3], n.Tk),
        change=lambda x: kit.nan_where(kit.hidden_keys(x["mask"]), x), catches=("masked_nan_poison",)),
    bias_full=dict(
        why="a bias for every pair", sizes=SIZES, bias=lambda n: draw("bias", (n.B, n.H, n.Tq, n.Tk)),
        catches=("bias_ignored", "bias_before_scale", "exp2_bias_not_rescaled", "lse_without_bias",
                 "mask_carries_a_constant")),
    bias_per_head=dict(
        why="one bias table per head, shared by the batch", sizes=SIZES,
        bias=lambda n: draw("bias", (1, n.H, n.Tq, n.Tk)),
        catches=("bias_gradient_not_reduced", "bias_of_head_0")),
    bias_per_key=dict(
        why="a bias per key, as an additive padding mask has", sizes=SIZES,
        bias=lambda n: draw("bias", (n.B, 1, 1, n.Tk)),
        catches=("bias_gradient_not_reduced",)),
    bias_per_query=dict(
        why="a constant added to a row moves lse and nothing else", sizes=SIZES, light=True,
        bias=lambda n: draw("bias", (1, 1, n.Tq, 1)),
        catches=("lse_without_bias",)),
    bias_minus_inf=dict(
        why="a bias of -inf excludes a pair, and a row of nothing else is a row without keys", sizes=SIZES,
        bias=lambda n: np.where(kit.causal_of(n) & kit.but_row_1(n), draw("bias", (1, 1, n.Tq, n.Tk)), -np.inf),
        shows=lambda x, y: (y["o"][:, :, 1] == 0).all() and (y["lse"][:, :, 1] == -np.inf).all()),
    softcap=dict(
        why="a cap of 1 under a causal mask and a bias", sizes=SIZES | dict(Tk=8), mask=kit.causal_of, softcap=1.0,
        bias=lambda n: draw("bias", (1, n.H, n.Tq, n.Tk)), conventions=dict(causal="bottom-right"),
        catches=("softcap_dropped", "softcap_before_scale", "softcap_after_bias", "softcap_after_mask",
                 "softcap_after_additive_mask", "softcap_derivative_missing")),
    sink=dict(
        why="one sink logit per head in the denominator", sizes=SIZES | dict(Tk=8), mask=kit.causal_of,
        sink=lambda n: draw("sink", (n.H,)) + 1, conventions=dict(causal="bottom-right"),
        catches=("sink_ignored", "sink_of_head_0", "sink_scaled", "sink_not_shifted", "lse_without_sink",
                 "dsink_missing")),
    sink_and_empty_row=dict(
        why="with a sink a row without keys is regular: o = 0, lse = sink", sizes=SIZES, mask=kit.but_row_1,
        sink=lambda n: draw("sink", (n.H,)) + 1, shows=lambda x, y: (y["lse"][:, :, 1] == x["sink"]).all(),
        catches=("dsink_without_empty_rows",)),
    everything=dict(
        why="mask per head and batch entry, bias, cap and sink at once", sizes=SIZES | dict(Tk=8), softcap=2.0,
        mask=lambda n: blocks(PATTERN, 4, n.Tq, n.Tk)[None] & padding([6, 8], n.Tk),
        bias=lambda n: draw("bias", (n.B, 1, n.Tq, n.Tk)), sink=lambda n: draw("sink", (n.H,)) - 1,
        catches=("mask_of_head_0", "mask_of_batch_0", "sink_scaled", "softcap_after_mask")),
    hidden_largest=dict(kit.HIDDEN_LARGEST, sizes=SIZES | dict(Tk=8), mask=kit.causal_of),
    long=dict(kit.LONG, sizes=SIZES | dict(B=1, H=1, Tq=9, Tk=205, dk=6, dv=3), mask=kit.causal_of),
    equal_widths=dict(kit.EQUAL_WIDTHS, sizes=SIZES | dict(dk=4, dv=4), mask=kit.causal_of),
    large_scores=dict(
        why="q k^T is over 65504 before it is scaled, and one key takes all the weight", sizes=SIZES, scale=0.5,
        change=lambda x: kit.ramp(x, 160, 160, -1),
        shows=lambda x, y: (x["q"] @ x["k"].swapaxes(-1, -2)).max() > 65504 and np.allclose(y["o"], x["v"][:, :, :1]),
        catches=("score_overflow", "no_max_subtracted")),
    many_keys=dict(
        why="8192 equal weights, exact in every type: a float16 sum that grows one by one stops at 2048", light=True,
        sizes=dict(B=1, H=1, Tq=1, Tk=8192, dk=1, dv=1),
        change=lambda x: dict(q=0 * x["q"], v=1 + x["v"] % 2),
        shows=lambda x, y: np.allclose(y["lse"], np.log(8192))),
    strided=dict(
        why="q, k and v are views of (B, T, H, d) memory", sizes=SIZES, change=kit.strided,
        catches=("strides_ignored", "value_strides_ignored")),
)
