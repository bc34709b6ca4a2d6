"""Multi-head cross-attention.                        Vaswani et al. 2017, arXiv:1706.03762, sections 3.2.2 and 3.2.3

    Q = X W_Q      K = Z W_K      V = Z W_V           X (Tq, D) asks; Z (Tk, Dz), another sequence, is read
    head_h = softmax(scale Q_h K_h^T where mask) V_h  _h: columns h d to (h+1) d - 1, d = dk for Q and K, dv for V
    o = [head_0 ... head_{H-1}] W_O

In a decoder Z is what the encoder gave, so K and V are the same for every token that is made. The mask is the padding
of Z; nothing is causal between two sequences. With Z = X this is self-attention: see multi_head, also for biases and
for how libraries store W. Where code in the wild differs: torch calls Dz kdim and vdim, and its True means masked; T5
adds no relative position bias here; a query without keys gives NaN or the mean of V (here its heads are 0).
"""
import numpy as np

from .. import kit
from ..core import merge_heads, per_head, softmax, split_heads, unread
from ..masks import causal, padding
from ..shapes import cotangents, sizes
from . import sdpa

INPUTS = dict(x="B Tq D", z="B Tk Dz", w_q="D H*dk", w_k="Dz H*dk", w_v="Dz H*dv", w_o="H*dv D",
              mask="bool B? H? Tq? Tk?", heads="int =H", scale="")
OUTPUTS = dict(o="B Tq D")
STEPS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", scores="B H Tq Tk", weights="B H Tq Tk", concat="B Tq H*dv")
CONVENTIONS = dict(mask="True = may attend", empty_row="a head without keys is 0, its gradients too",
                   projections="(in, out): Q = X W_Q",
                   heads="head h owns contiguous columns of W_Q, W_K and W_V and contiguous rows of W_O",
                   masked_values="a token of z that no query may attend to is never read")


def project(x, z, w_q, w_k, w_v, heads):
    """Queries (B, H, Tq, dk) of x, keys (B, H, Tk, dk) and values (B, H, Tk, dv) of z."""
    return split_heads(x @ w_q, heads), split_heads(z @ w_k, heads), split_heads(z @ w_v, heads)


def dense(x, z, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """o (B, Tq, D). Raises ValueError for a shape that does not fit, a width of W that H does not divide included."""
    sizes(INPUTS, locals())
    q, k, v = project(x, z, w_q, w_k, w_v, heads)
    y, _ = sdpa.dense(q, k, v, mask, scale=scale)
    return merge_heads(y) @ w_o


def steps(x, z, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """q, k, v, scores and weights of every head, and the heads side by side, before W_O."""
    q, k, v = project(x, z, w_q, w_k, w_v, heads)
    scores, *_, weights = sdpa.steps(q, k, v, mask, scale=scale)
    return q, k, v, scores, weights, merge_heads(weights @ unread(v, mask))


def of_each_head(w_q, w_k, w_v, w_o, heads):
    """The matrices of head 0, of head 1, and so on: (D, dk), (Dz, dk), (Dz, dv), (dv, D)."""
    return zip(*(np.split(w, heads, axis=1) for w in (w_q, w_k, w_v)), np.split(w_o, heads, axis=0))


def absorbed(x, z, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """Heads attend to z itself, W_K on the query's side, W_V after the sum (DeepSeek-V2, arXiv:2405.04434, 2.1.2)."""
    n = sizes(INPUTS, locals())
    o, mask = 0, np.broadcast_to(mask, [n[axis] for axis in ("B", "H", "Tq", "Tk")])
    for h, (wq, wk, wv, wo) in enumerate(of_each_head(w_q, w_k, w_v, w_o, heads)):
        weights, _ = softmax(scale * x @ wq @ wk.T @ z.swapaxes(-1, -2), mask[:, h])
        o = o + weights @ unread(z, mask[:, h]) @ wv @ wo
    return o


@per_head(INPUTS, OUTPUTS)
def loop(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    """One batch entry, head by head: project, attend, add what the head gives to o."""
    (Tq, D), (Tk, Dz), dk, dv = x.shape, z.shape, w_q.shape[1] // heads, w_v.shape[1] // heads
    o, s = np.zeros((Tq, D), x.dtype), np.zeros(Tk, x.dtype)
    for h in range(heads):
        q, k, v = np.zeros((Tq, dk), x.dtype), np.zeros((Tk, dk), x.dtype), np.zeros((Tk, dv), x.dtype)
        m, total, y = np.full(Tq, -np.inf, x.dtype), np.zeros(Tq, x.dtype), np.zeros((Tq, dv), x.dtype)
        for j in range(Tk):
            for e in range(Dz):
                for c in range(dk):
                    k[j, c] += z[j, e] * w_k[e, h * dk + c]
                for c in range(dv):
                    v[j, c] += z[j, e] * w_v[e, h * dv + c]
        for i in range(Tq):
            for e in range(D):
                for c in range(dk):
                    q[i, c] += x[i, e] * w_q[e, h * dk + c]
            for j in range(Tk):
                if mask[h, i, j]:
                    s[j] = 0
                    for c in range(dk):
                        s[j] += scale * q[i, c] * k[j, c]
                    if s[j].real > m[i].real:
                        m[i] = s[j]
            for j in range(Tk):
                if mask[h, i, j]:
                    p = np.exp(s[j] - m[i])
                    total[i] += p
                    for c in range(dv):
                        y[i, c] += p * v[j, c]
            if total[i].real > 0:
                for c in range(dv):
                    for e in range(D):
                        o[i, e] += y[i, c] / total[i] * w_o[h * dv + c, e]
    return o


def vjp_of_heads(do, x, z, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """Gradients of Q (B, Tq, H dk), K (B, Tk, H dk) and V (B, Tk, H dv) for the cotangent do (B, Tq, D)."""
    q, k, v = project(x, z, w_q, w_k, w_v, heads)
    do = split_heads(do @ w_o.T, heads)
    g = sdpa.vjp(do, np.zeros_like(do[..., 0]), q, k, v, mask, scale=scale)
    return tuple(merge_heads(g[name]) for name in ("dq", "dk", "dv"))


def of_weight(x, dy):
    """The gradient of w (m, n) in y = x w, from x (B, T, m) and dy (B, T, n): a sum over all tokens of the batch."""
    return (x.swapaxes(-1, -2) @ dy).sum(0)


def tokens_read(x, z, mask):
    """x and z with zeros for queries that see no key in any head and for keys that no query sees in any head."""
    mask = np.array(mask, ndmin=4).any(1)
    return unread(x, mask.swapaxes(-1, -2)), unread(z, mask)


def vjp(do, x, z, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """Gradients of x, z and the four weights for the cotangent do (B, Tq, D)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    dq, dk, dv = vjp_of_heads(do, x, z, w_q, w_k, w_v, w_o, mask, heads=heads, scale=scale)
    *_, concat = steps(x, z, w_q, w_k, w_v, w_o, mask, heads=heads, scale=scale)
    x, z = tokens_read(x, z, mask)
    return dict(dx=dq @ w_q.T, dz=dk @ w_k.T + dv @ w_v.T, dw_q=of_weight(x, dq), dw_k=of_weight(z, dk),
                dw_v=of_weight(z, dv), dw_o=of_weight(concat, do))


FORMS = dense, absorbed, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

WEIGHTS = "w_q", "w_k", "w_v", "w_o"


def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def attend(x, split=split_heads, merge=merge_heads, core=sdpa.dense, v_from="z"):
    """The formula with another way to split or merge heads, another core, or values from the other sequence."""
    q, k, v = (split(x[a] @ x[w], x["heads"]) for a, w in (("x", "w_q"), ("z", "w_k"), (v_from, "w_v")))
    return (merge(core(q, k, v, x["mask"], scale=x["scale"])[0]) @ x["w_o"],)


def in_the_heads(slug):
    """A mistake of sdpa, made inside the block."""
    sentence, wrong = sdpa.BUGS[slug]

    def core(q, k, v, mask, scale):
        none = dict(bias=np.zeros((1, 1, 1, 1), q.dtype), sink=np.full(1, -np.inf, q.dtype), softcap=None)
        return wrong(dict(q=q, k=k, v=v, mask=mask, scale=scale) | none)
    return sentence, lambda x: attend(x, core=core)


def interleaved(x, heads):
    """(B, T, d*H) -> (B, H, T, d): head h takes columns h, h + H, h + 2 H ..."""
    B, T, width = x.shape
    return x.reshape(B, T, width // heads, heads).transpose(0, 3, 1, 2)


def merge_interleaved(x):
    B, H, T, d = x.shape
    return x.transpose(0, 2, 3, 1).reshape(B, T, d * H)


def by_view(x, heads):
    B, T, width = x.shape
    return x.reshape(B, heads, T, width // heads)


def merge_by_view(x):
    B, H, T, d = x.shape
    return x.reshape(B, T, H * d)


def head_0_for_all(x):
    H = x["heads"]
    return kit.changed(x, WEIGHTS[:3], lambda w: np.concatenate([w[:, :w.shape[1] // H]] * H, axis=1))


def split_first(x):
    """W_Q, W_K and W_V when head h reads its H-th of the features; nothing where heads do not divide them."""
    H = x["heads"]
    if x["x"].shape[2] % H or x["z"].shape[2] % H:
        return {}

    def own(w):
        e, c = np.ogrid[:w.shape[0], :w.shape[1]]
        return np.where(e * H // w.shape[0] == c * H // w.shape[1], w, 0)
    return kit.changed(x, WEIGHTS[:3], own)


def same_shape(x):
    return x["x"].shape == x["z"].shape


def every_pair(x):
    """The mask (B?, H?, Tq, Tk)."""
    return x["mask"] & np.ones((x["x"].shape[1], x["z"].shape[1]), bool)


def as_many_as_queries(x):
    """(B?, H?, 1, Tk) the first keys, as many as there are queries that attend to anything."""
    return np.arange(x["z"].shape[1]) < every_pair(x).any(-1).sum(-1)[..., None, None]


BLOCK_BUGS = {slug: in_the_heads(slug) for slug in (
    "softmax_over_queries", "scale_missing", "scale_applied_twice", "scale_by_num_heads", "scale_ignored",
    "score_overflow", "masked_nan_poison", "mask_dropped", "mask_polarity", "mask_added_as_0_1", "mask_after_softmax",
    "mask_of_head_0", "mask_of_batch_0", "mask_head_batch_order", "causal_implied", "empty_row_nan",
    "empty_row_uniform", "value_width_from_keys")} | dict(
    scale_by_d_model=("1/sqrt(D), the model width, instead of 1/sqrt(dk)",
                      lambda x: but(x, scale=x["x"].shape[2] ** -0.5)),
    scale_by_d_over_heads=("1/sqrt(D // H), though the heads are not D // H wide",
                           lambda x: but(x, scale=(x["x"].shape[2] // x["heads"]) ** -0.5)),
    linear_weight_transposed=("a weight stored as (out, in) is used as (in, out): silent where it is square",
                              lambda x: but(x, **kit.changed(x, WEIGHTS, kit.transposed_if_square))),
    heads_split_interleaved=("head h takes columns h, h + H, ...: a reshape to (B, T, d, H)",
                             lambda x: attend(x, interleaved)),
    heads_interleaved=("heads are interleaved when they are split and when they are merged",
                       lambda x: attend(x, interleaved, merge_interleaved)),
    heads_split_by_view=("(B, T, H d) is reshaped to (B, H, T, d) without a transpose", lambda x: attend(x, by_view)),
    heads_merged_by_view=("(B, H, T, d) is reshaped to (B, T, H d) without a transpose",
                          lambda x: attend(x, merge=merge_by_view)),
    heads_by_view=("heads are split and merged by a reshape without a transpose: a head mixes tokens",
                   lambda x: attend(x, by_view, merge_by_view)),
    features_split_first=("tokens are cut into heads before the projection: a head sees its share of the features",
                          lambda x: but(x, **split_first(x))),
    shared_head_projection=("every head projects with the matrices of head 0", lambda x: but(x, **head_0_for_all(x))),
    w_o_missing=("the concatenated heads are the output, W_O is forgotten", lambda x: steps(**x)[-1:]),
    strides_ignored=("a strided view is read as if it were contiguous",
                     lambda x: but(x, **kit.changed(x, ("x", "z", *WEIGHTS), kit.memory_order))),
)
BUGS = BLOCK_BUGS | dict(
    keys_and_values_from_x=("keys and values come from the sequence that asks: self-attention",
                            lambda x: but(x, z=x["x"] if same_shape(x) else x["z"])),
    values_from_x=("values come from the sequence that asks, keys from the other",
                   lambda x: attend(x, v_from="x" if same_shape(x) else "z")),
    causal_across=("a causal mask is laid across the two sequences",
                   lambda x: but(x, mask=x["mask"] & causal(x["x"].shape[1], x["z"].shape[1], "top-left"))),
    padding_of_wrong_side=("the lengths of the queries are taken for those of the keys",
                           lambda x: but(x, mask=as_many_as_queries(x))),
)


def middle(x):
    """The steps of a case, by name."""
    return dict(zip(STEPS, steps(**{name: x[name] for name in INPUTS})))


def without_row_term(x):
    """dW_Q when the softmax Jacobian lacks its row term."""
    s, mask = middle(x), x["mask"]
    dq = kit.without_row_term(s["weights"], split_heads(x["do"] @ x["w_o"].T, x["heads"]), s["k"], s["v"], x["scale"])
    return dict(dw_q=of_weight(tokens_read(x["x"], x["z"], mask)[0], merge_heads(dq)))


def merged_by_view(x):
    concat = merge_by_view(split_heads(middle(x)["concat"], x["heads"]))
    return dict(dw_o=of_weight(concat, x["do"]))


def weight_gradients(x, change):
    return kit.changed(vjp(**x), ["d" + name for name in WEIGHTS], change)


BLOCK_VJP_BUGS = dict(
    jacobian_term_missing=("dS = P dP without the row term", without_row_term),
    dq_scale_missing=("dQ is not multiplied by scale", lambda x: dict(dw_q=vjp(**x)["dw_q"] / x["scale"])),
    dk_scale_missing=("dK is not multiplied by scale", lambda x: dict(dw_k=vjp(**x)["dw_k"] / x["scale"])),
    dw_o_merged_by_view=("dW_O is formed from heads merged without a transpose", merged_by_view),
    dw_averaged=("weight gradients are the mean over the batch, not the sum",
                 lambda x: weight_gradients(x, lambda g: g / len(x["x"]))),
    dw_transposed=("weight gradients come as (out, in)", lambda x: weight_gradients(x, np.transpose)),
    masked_row_gradient_nan=("0 * NaN in the backward of a query without keys reaches dW_Q",
                             lambda x: dict(dw_q=vjp(**x)["dw_q"] * (1 if every_pair(x).any(-1).all() else np.nan))),
)
VJP_BUGS = BLOCK_VJP_BUGS | dict(
    keys_and_values_detached=("K and V are made outside of what is differentiated: no gradient of Z, W_K and W_V",
                              lambda x: {name: 0 * vjp(**x)[name] for name in ("dz", "dw_k", "dw_v")}),
    dz_without_keys=("dZ lacks the path through the keys", lambda x: dict(dz=vjp_of_heads(**x)[2] @ x["w_v"].T)),
    dz_without_values=("dZ lacks the path through the values", lambda x: dict(dz=vjp_of_heads(**x)[1] @ x["w_k"].T)),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=5, Tk=8, D=10, Dz=9, dk=4, dv=7)
NEUTRAL = dict(mask=kit.no_mask, heads=lambda n: n.H, scale=lambda n: n.dk ** -0.5)


def own_keys(n):
    """(1, H, 1, Tk) head h sees every H-th key, from h on."""
    return (np.arange(n.Tk) % n.H == np.arange(n.H)[:, None])[None, :, None]


def last_feature(a, value, axis=-1):
    """a with its last feature (or, on axis 0, its last row) replaced by a number."""
    a = a.copy()
    np.moveaxis(a, axis, 0)[-1] = value
    return a


def one_head(x):
    """Plain attention of the projections, then W_O."""
    q, k, v = (a[:, None] for a in (x["x"] @ x["w_q"], x["z"] @ x["w_k"], x["z"] @ x["w_v"]))
    return sdpa.dense(q, k, v, x["mask"], scale=x["scale"])[0][:, 0] @ x["w_o"]


def biases(x, o):
    """b_K, the last row of W_K, moves no output and has no gradient; b_V, that of W_V, adds b_V W_O."""
    without_b_k, without_b_v = (but(x, **{name: last_feature(x[name], 0, axis=0)}) for name in ("w_k", "w_v"))
    db_k, b_v = vjp(o, **x)["dw_k"][-1], x["w_v"][-1]
    return np.allclose([without_b_k, without_b_v + b_v @ x["w_o"]], o, 1e-13) and np.allclose(db_k, 0, atol=1e-12)


def numbered(x):
    """Feature 0 of every token is 1, feature 1 its position."""
    x = x.copy()
    x[..., 0], x[..., 1] = 1, np.arange(x.shape[1])
    return x


def first_rows(w, *rows):
    """A weight that is 0 but for its first rows, each constant."""
    return np.concatenate([np.full((1, w.shape[1]), a) for a in rows] + [0 * w[len(rows):]])


def large(x):
    """q = 160 and k = 160 - j in every channel."""
    weights = dict(w_q=first_rows(x["w_q"], 160.0), w_k=first_rows(x["w_k"], 160.0, -1.0))
    return weights | kit.changed(x, ("x", "z"), numbered)


def strided(x):
    """The same numbers in the memory of other libraries: tokens as (T, B, D), weights as (out, in)."""
    return kit.strided(x, ("x", "z"), (0, 1)) | kit.changed(x, WEIGHTS, np.asfortranarray)


CASES = dict(
    basic=dict(
        why="every size differs and none is 1, H does not divide D, and dk, dv and D / H differ", sizes=SIZES,
        catches=("softmax_over_queries", "scale_missing", "scale_applied_twice", "scale_by_d_model",
                 "scale_by_d_over_heads", "scale_by_num_heads", "heads_split_interleaved", "heads_interleaved",
                 "heads_split_by_view", "heads_merged_by_view", "heads_by_view", "shared_head_projection",
                 "w_o_missing", "causal_implied", "causal_across", "value_width_from_keys",
                 "jacobian_term_missing", "dq_scale_missing", "dk_scale_missing", "dz_without_keys",
                 "dz_without_values", "keys_and_values_detached", "dw_averaged", "dw_transposed",
                 "dw_o_merged_by_view")),
    one_token=dict(
        why="a single token has weight 1: o = z W_V W_O", sizes=dict.fromkeys(SIZES, 1),
        shows=lambda x, y: (y["o"] == x["z"] @ x["w_v"] @ x["w_o"]).all()),
    one_query=dict(
        why="one query, as when a decoder makes a token", sizes=SIZES | dict(Tq=1), light=True,
        catches=("softmax_over_queries",)),
    one_key=dict(
        why="with one key every query gets its value", sizes=SIZES | dict(Tk=1), light=True,
        shows=lambda x, y: np.allclose(y["o"], x["z"] @ x["w_v"] @ x["w_o"], 1e-14)),
    no_keys=dict(
        why="an empty sequence may be read: o = 0", sizes=SIZES | dict(Tk=0), light=True,
        shows=lambda x, y: (y["o"] == 0).all()),
    one_head=dict(
        why="one head is plain attention and W_O", sizes=SIZES | dict(H=1), light=True,
        shows=lambda x, y: np.allclose(y["o"], one_head(x), 1e-14)),
    square=dict(
        why="D = Dz = H dk = H dv: a transposed weight fits", sizes=SIZES | dict(D=12, Dz=12, dv=4),
        catches=("linear_weight_transposed", "features_split_first", "w_o_missing", "dw_transposed")),
    same_shape=dict(
        why="two sequences of one shape: either could stand for the other", sizes=SIZES | dict(Tk=5, Dz=10), light=True,
        catches=("keys_and_values_from_x", "values_from_x")),
    narrow_values=dict(
        why="dv may be smaller than dk", sizes=SIZES | dict(dk=16, dv=4), light=True,
        shows=lambda x, y: x["w_v"].shape[1] < x["w_k"].shape[1]),
    scale_given=dict(
        why="a scale that is not 1/sqrt(dk) must be honoured, and a width that no 4 divides", light=True,
        sizes=SIZES | dict(dk=6), scale=0.75, catches=("scale_ignored",)),
    padding=dict(
        why="both sequences are padded, each to its own lengths", sizes=SIZES, light=True,
        mask=lambda n: padding([4, 5], n.Tq).swapaxes(-1, -2) & padding([6, 3], n.Tk),
        catches=("padding_of_wrong_side", "mask_of_batch_0", "mask_head_batch_order", "mask_dropped", "mask_polarity",
                 "mask_added_as_0_1", "mask_after_softmax")),
    mask_per_head=dict(
        why="every head sees other keys, under padding and with a given scale", sizes=SIZES, scale=0.75,
        mask=lambda n: own_keys(n) & padding([8, 5], n.Tk), catches=("mask_of_head_0", "mask_of_batch_0")),
    empty_row=dict(
        why="a query without keys among others", sizes=SIZES, mask=lambda n: kit.but_row_1(n).any(-1, keepdims=True),
        catches=("empty_row_nan", "empty_row_uniform", "masked_row_gradient_nan")),
    masked_nan=dict(
        why="NaN in tokens that nobody may read", sizes=SIZES, mask=lambda n: padding([3, 3], n.Tk),
        change=lambda x: kit.nan_where(kit.hidden_keys(x["mask"])[:, 0], x, "z"),
        catches=("masked_nan_poison",)),
    biases=dict(
        why="a feature that is 1 makes the last rows of W_K and W_V biases: b_K does nothing, b_V adds b_V W_O",
        sizes=SIZES, light=True, change=lambda x: dict(z=last_feature(x["z"], 1)),
        shows=lambda x, y: biases(x, y["o"])),
    large_scores=dict(
        why="Q K^T is over 65504 before it is scaled, and the first key takes all the weight", sizes=SIZES,
        change=large, shows=lambda x, y: np.allclose(y["o"], (x["z"] @ x["w_v"] @ x["w_o"])[:, :1]),
        catches=("score_overflow",)),
    strided=dict(
        why="tokens lie in memory as (T, B, D), weights as (out, in)", sizes=SIZES, change=strided,
        catches=("strides_ignored",)),
)
