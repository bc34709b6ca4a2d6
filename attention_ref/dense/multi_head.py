"""Multi-head self-attention.                         Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2, MultiHead

    head_h = softmax(scale (X W_Q^h) (X W_K^h)^T where mask) X W_V^h
    o = [head_0 ... head_{H-1}] W_O = sum_h head_h W_O^h          W_Q = [W_Q^0 ... W_Q^{H-1}], W_K and W_V alike

Head h owns columns h dk to (h+1) dk - 1 of W_Q and W_K, and h dv to (h+1) dv - 1 of the columns of W_V and rows of W_O.
The paper has scale = 1/sqrt(dk), dk = dv = D/H (free here, as in Llama and T5) and no biases. A bias is one more row of
W for a feature of X that is 1: b_K then moves no output and has no gradient, b_V adds b_V W_O. Where code in the wild
differs: W is stored as (out, in) by torch and Hugging Face, as (in, out) by GPT-2 and here; packed as [W_Q|W_K|W_V] by
torch and GPT-2, as [q|k|v] per head by Bloom and GPT-NeoX; torch averages the weights it gives over heads, and in its
MultiheadAttention True means masked; a query without keys gives NaN or the mean of V (here its heads are 0).
"""
import numpy as np

from .. import kit
from ..core import merge_heads, softmax, split_heads, unread
from ..masks import padding, window
from ..shapes import cotangents, sizes
from . import cross, sdpa

INPUTS = dict(x="B T D", w_q="D H*dk", w_k="D H*dk", w_v="D H*dv", w_o="H*dv D", mask="bool B? H? T? T?",
              heads="int =H", scale="")
OUTPUTS = dict(o="B T D")
STEPS = dict(q="B H T dk", k="B H T dk", v="B H T dv", scores="B H T T", weights="B H T T", concat="B T H*dv")
CONVENTIONS = cross.CONVENTIONS | dict(
    masked_values="a token that attends to nothing and that no token attends to is never read")


def dense(x, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """o (B, T, D). Raises ValueError for a shape that does not fit, a width of W that H does not divide included."""
    sizes(INPUTS, locals())
    q, k, v = (split_heads(x @ w, heads) for w in (w_q, w_k, w_v))
    y, _ = sdpa.dense(q, k, v, mask, scale=scale)
    return merge_heads(y) @ w_o


def steps(x, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """q, k, v, scores and weights of every head, and the heads side by side, before W_O."""
    return cross.steps(x, x, w_q, w_k, w_v, w_o, mask, heads=heads, scale=scale)


def per_head_sum(x, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """Nothing is concatenated: every head has its four matrices, and o is a sum over heads."""
    n = sizes(INPUTS, locals())
    o, mask = 0, np.broadcast_to(mask, [n[axis] for axis in ("B", "H", "T", "T")])
    for h, (wq, wk, wv, wo) in enumerate(cross.of_each_head(w_q, w_k, w_v, w_o, heads)):
        weights, _ = softmax(scale * (x @ wq) @ (x @ wk).swapaxes(-1, -2), mask[:, h])
        o = o + weights @ unread(x @ wv, mask[:, h]) @ wo
    return o


def loop(x, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """The scalar loop of cross-attention, on one sequence."""
    sizes(INPUTS, locals())
    return cross.loop(x, x, w_q, w_k, w_v, w_o, mask, heads, scale)


def vjp(do, x, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    """Gradients of x and the four weights: dx = dq W_Q^T + dk W_K^T + dv W_V^T, for x is read three times."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    g = cross.vjp(do, x, x, w_q, w_k, w_v, w_o, mask, heads=heads, scale=scale)
    return dict(dx=g.pop("dx") + g.pop("dz")) | g


FORMS = dense, per_head_sum, loop


# Mistakes: those of cross-attention that one sequence can have, and its own.

def alone(x):
    """The inputs of a case for cross-attention."""
    return x | dict(z=x["x"])


def of_one_sequence(bugs):
    return {slug: (sentence, lambda x, wrong=wrong: wrong(alone(x))) for slug, (sentence, wrong) in bugs.items()}


def packed_per_head(x):
    """[W_Q|W_K|W_V] cut into [q|k|v] for each head; nothing where dv is not dk."""
    w = np.concatenate([x["w_q"], x["w_k"], x["w_v"]], axis=1)
    if x["w_v"].shape != x["w_q"].shape:
        return {}
    parts = w.reshape(len(w), x["heads"], 3, -1)
    return {name: parts[:, :, i].reshape(len(w), -1) for i, name in enumerate(("w_q", "w_k", "w_v"))}


BUGS = of_one_sequence(cross.BLOCK_BUGS | dict(
    mask_only_causal_kept=cross.in_the_heads("mask_only_causal_kept"))) | dict(
    mask_transposed=("the mask is read as (key, query)", lambda x: dense(**x | {"mask": x["mask"].swapaxes(-1, -2)})),
    w_q_and_w_k_swapped=("queries and keys are exchanged: the scores are transposed",
                         lambda x: dense(**x | {"w_q": x["w_k"], "w_k": x["w_q"]})),
    packed_per_head=("[W_Q|W_K|W_V] is read as [q|k|v] per head", lambda x: dense(**x | packed_per_head(x))),
)


def paths(x):
    """The three parts of dx: through queries, keys and values."""
    return [d @ x[w].T for d, w in zip(cross.vjp_of_heads(**alone(x)), ("w_q", "w_k", "w_v"))]


VJP_BUGS = of_one_sequence(cross.BLOCK_VJP_BUGS) | dict(
    dx_without_queries=("dX lacks the path through the queries", lambda x: dict(dx=sum(paths(x)[1:]))),
    dx_without_keys=("dX lacks the path through the keys", lambda x: dict(dx=sum(paths(x)[::2]))),
    dx_without_values=("dX lacks the path through the values", lambda x: dict(dx=sum(paths(x)[:2]))),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=5, D=8, dk=4, dv=7)
NEUTRAL = dict(mask=kit.no_mask, heads=lambda n: n.H, scale=lambda n: n.dk ** -0.5)


def real(lengths, n):
    """(B, 1, T, T) pairs of tokens of which neither is padding."""
    return padding(lengths, n.T) & padding(lengths, n.T).swapaxes(-1, -2)


CASES = dict(
    basic=dict(
        why="every size differs and none is 1, H does not divide D, and dk, dv and D / H differ; cross with z = x",
        sizes=SIZES, shows=lambda x, y: np.allclose(y["o"], cross.dense(**alone(x)), 1e-14),
        catches=("softmax_over_queries", "scale_missing", "scale_applied_twice", "scale_by_d_model",
                 "scale_by_d_over_heads", "scale_by_num_heads", "heads_split_interleaved", "heads_interleaved",
                 "heads_split_by_view", "heads_merged_by_view", "heads_by_view", "shared_head_projection",
                 "w_o_missing", "causal_implied", "w_q_and_w_k_swapped", "value_width_from_keys",
                 "jacobian_term_missing", "dq_scale_missing", "dk_scale_missing", "dx_without_queries",
                 "dx_without_keys", "dx_without_values", "dw_averaged", "dw_transposed", "dw_o_merged_by_view")),
    one_token=dict(
        why="a single token has weight 1: o = x W_V W_O", sizes=dict.fromkeys(SIZES, 1),
        shows=lambda x, y: (y["o"] == x["x"] @ x["w_v"] @ x["w_o"]).all()),
    one_head=dict(
        why="one head is plain attention and W_O", sizes=SIZES | dict(H=1), light=True,
        shows=lambda x, y: np.allclose(y["o"], cross.one_head(alone(x)), 1e-14)),
    square=dict(
        why="D = H dk = H dv, as in the paper: transposed and packed weights fit", sizes=SIZES | dict(D=12, dv=4),
        catches=("linear_weight_transposed", "features_split_first", "w_o_missing", "packed_per_head",
                 "dw_transposed")),
    narrow_values=dict(
        why="dv may be smaller than dk", sizes=SIZES | dict(dk=16, dv=4), light=True,
        shows=lambda x, y: x["w_v"].shape[1] < x["w_k"].shape[1]),
    scale_given=dict(
        why="a scale that is not 1/sqrt(dk) must be honoured, and a width that no 4 divides", light=True,
        sizes=SIZES | dict(dk=6), scale=0.75, catches=("scale_ignored",)),
    causal=dict(
        why="no token sees a later one: the first has only itself", sizes=SIZES, mask=kit.causal_of,
        shows=lambda x, y: np.allclose(y["o"][:, 0], (x["x"] @ x["w_v"] @ x["w_o"])[:, 0], 1e-14),
        catches=("mask_transposed", "mask_dropped", "mask_polarity", "mask_added_as_0_1", "mask_after_softmax")),
    padding=dict(
        why="batch entries of different length", sizes=SIZES, light=True, mask=lambda n: padding([3, 5], n.T),
        catches=("mask_of_batch_0", "mask_head_batch_order")),
    causal_and_padding=dict(
        why="two masks at once, with a given scale", sizes=SIZES, scale=0.75,
        mask=lambda n: kit.causal_of(n) & padding([2, 4], n.T), catches=("mask_only_causal_kept", "mask_of_batch_0")),
    window_per_head=dict(
        why="head h sees h tokens before its own: head 0 gives each token its own value", sizes=SIZES, light=True,
        mask=lambda n: np.stack([window(n.T, n.T, h, 0) for h in range(n.H)])[None], catches=("mask_of_head_0",)),
    left_padding=dict(
        why="a causal mask over padding on the left leaves queries without keys", sizes=SIZES,
        mask=lambda n: kit.causal_of(n) & ~padding([0, 2], n.T), shows=lambda x, y: (y["o"][1, :2] == 0).all(),
        catches=("empty_row_nan", "empty_row_uniform", "masked_row_gradient_nan")),
    masked_nan=dict(
        why="NaN in padding, which neither asks nor is read", sizes=SIZES, mask=lambda n: real([3, 3], n),
        change=lambda x: kit.nan_where(kit.hidden_keys(x["mask"])[:, 0], x, "x"),
        catches=("masked_nan_poison",)),
    biases=dict(
        why="a feature that is 1 makes the last rows of W biases: b_K does nothing, b_V adds b_V W_O", sizes=SIZES,
        light=True, change=lambda x: dict(x=cross.last_feature(x["x"], 1)),
        shows=lambda x, y: cross.biases(alone(x), y["o"])),
    large_scores=dict(
        why="Q K^T is over 65504 before it is scaled, and the first token takes all the weight", sizes=SIZES,
        change=cross.large, shows=lambda x, y: np.allclose(y["o"], (x["x"] @ x["w_v"] @ x["w_o"])[:, :1]),
        catches=("score_overflow",)),
    strided=dict(
        why="tokens lie in memory as (T, B, D), weights as (out, in)", sizes=SIZES, change=cross.strided,
        catches=("strides_ignored",)),
)
