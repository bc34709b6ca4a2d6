"""Sliding-window attention, with gaps if asked.            Beltagy et al. 2020, arXiv:2004.05150, section 3.1: per head
                                                            Child et al. 2019, arXiv:1904.10509, section 4.3: causal

    N(i) = { j = p_i + t D :  -left <= t <= right,  0 <= j < length }                              p_i   = i + offset
    s_ij = scale q_i . k_j           z_i = sum_{j in N(i)} exp(s_ij)                                 lse_i = log z_i
    o_i  = sum_{j in N(i)} exp(s_ij) v_j / z_i

D is the dilation of the head, length that of the batch entry, and an open side of the window has no bound. The band of
scores has left + right + 1 entries a row, and its transpose is a band too: key j is seen from i = j - offset - t D.
Where code in the wild differs: a window w is w keys with the query's own (transformers), w before the own (the text of
Mistral 7B, arXiv:2310.06825, section 2), w each side (the code of Longformer) or w/2 (its paper); -1 is open. offset is
0 in jax, the length of the past in ONNX, Tk - Tq in flash-attention. Some see blocks: the own and its neighbours.
"""
import numpy as np

from .. import kit, masks
from ..core import gather, per_head, softmax, unread
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", lengths="int B >=0 <=Tk", left="optional int >=0",
              right="optional int >=0", dilation="int H? >=1", offset="int", scale="")
OUTPUTS = dict(o="B H Tq dv", lse="B H Tq")
STEPS = dict(scores="B H Tq Tk", weights="B H Tq Tk")
CONVENTIONS = dict(window="keys before and after the query's own, in steps of dilation; None is open",
                   offset="position of query 0 among the keys: 0 is top-left, Tk - Tq bottom-right",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log", layout="B H T d",
                   masked_values="a key that no query may attend to is never read")


def visible(Tq, Tk, lengths, left, right, dilation, offset):
    """(B, H or 1, Tq, Tk) True where key j is in N(i)."""
    return masks.window(Tq, Tk, left, right, np.reshape(dilation, (-1, 1, 1)), offset) & masks.padding(lengths, Tk)


def dense(q, k, v, lengths, *, left=None, right=None, dilation=1, offset, scale):
    """o (B, H, Tq, dv) and lse (B, H, Tq), by the equations above. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    mask = visible(q.shape[2], k.shape[2], lengths, left, right, dilation, offset)
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    return weights @ v, lse


def steps(q, k, lengths, *, left=None, right=None, dilation=1, offset, scale):
    """scores, NaN outside the window, and weights, each (B, H, Tq, Tk)."""
    mask = visible(q.shape[2], k.shape[2], lengths, left, right, dilation, offset)
    scores = scale * q @ unread(k, mask).swapaxes(-1, -2)
    return np.where(mask, scores, np.nan), softmax(scores, mask)[0]


def shifts(Tq, Tk, left, right, dilation, offset):
    """t D for each step t of the window, (W, H or 1, 1): how far a key on this diagonal stands from the query's own.

    No step reaches further than from the last query to the first key, or from the first query to the last key.
    """
    before, after = max(0, offset + Tq - 1), max(0, Tk - 1 - offset)
    first, last = before if left is None else min(left, before), after if right is None else min(right, after)
    return np.arange(-first, last + 1)[:, None, None] * np.reshape(dilation, (-1, 1))


def band_softmax(q, k, p, shift, lengths, scale):
    """Weights (B, H, Tq, W) on the W diagonals of the scores, and lse (B, H, Tq), for queries at positions p (Tq,)."""
    s = np.stack([scale * (q * gather(k, p + d)).sum(-1) for d in shift], -1)
    j = np.stack([p + d for d in shift], -1)
    return softmax(s, (0 <= j) & (j < lengths[:, None, None, None]))


def band(q, k, v, lengths, *, left=None, right=None, dilation=1, offset, scale):
    """As dense, one diagonal of the scores after the other: work and memory in proportion to Tq (left + right + 1)."""
    sizes(INPUTS, locals())
    Tq, Tk = q.shape[2], k.shape[2]
    p, shift = np.arange(Tq) + offset, shifts(Tq, Tk, left, right, dilation, offset)
    k, v = unread(k, masks.padding(lengths, Tk)), unread(v, masks.padding(lengths, Tk))
    weights, lse = band_softmax(q, k, p, shift, lengths, scale)
    return sum(weights[..., t, None] * gather(v, p + d) for t, d in enumerate(shift)), lse


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, lengths, left, right, dilation, offset, scale):
    """One query at a time: it visits the keys of its window and no other (p % dilation is never negative)."""
    (Tq, dk), (Tk, dv) = q.shape, v.shape
    o, z, a = np.zeros((Tq, dv), q.dtype), np.zeros(Tq, q.dtype), np.zeros(Tk, q.dtype)
    lse = np.full(Tq, -np.inf, q.dtype)
    for i in range(Tq):
        p = i + offset
        first = p % dilation if left is None else max(p % dilation, p - left * dilation)
        stop = lengths if right is None else min(lengths, p + right * dilation + 1)
        m = lse[i]
        for j in range(first, stop, dilation):
            a[j] = 0
            for c in range(dk):
                a[j] += scale * q[i, c] * k[j, c]
            if a[j].real > m.real:
                m = a[j]
        if m.real == -np.inf:
            continue
        for j in range(first, stop, dilation):
            e = np.exp(a[j] - m)
            z[i] += e
            for c in range(dv):
                o[i, c] += e * v[j, c]
        o[i] /= z[i]
        lse[i] = m + np.log(z[i])
    return o, lse


def vjp(do, dlse, q, k, v, lengths, *, left=None, right=None, dilation=1, offset, scale):
    """Gradients of q, k and v, diagonal by diagonal, for cotangents do (B, H, Tq, dv) and dlse (B, H, Tq).

    A query gathers from the keys of its window, j = p + t D, a key from the queries that see it, i = j - offset - t D.
    """
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    Tq, Tk = q.shape[2], k.shape[2]
    p, i, shift = np.arange(Tq) + offset, np.arange(Tk) - offset, shifts(Tq, Tk, left, right, dilation, offset)
    k, v = unread(k, masks.padding(lengths, Tk)), unread(v, masks.padding(lengths, Tk))
    weights, lse = band_softmax(q, k, p, shift, lengths, scale)
    q = np.where(lse[..., None] == -np.inf, 0, q)
    dw = np.stack([(do * gather(v, p + d)).sum(-1) for d in shift], -1)
    ds = weights * (dw - (weights * dw).sum(-1, keepdims=True) + dlse[..., None])
    return dict(dq=scale * sum(ds[..., t, None] * gather(k, p + d) for t, d in enumerate(shift)),
                dk=scale * sum(gather(ds[..., t, None] * q, i - d) for t, d in enumerate(shift)),
                dv=sum(gather(weights[..., t, None] * do, i - d) for t, d in enumerate(shift)))


FORMS = dense, band, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def mask_of(x, **changes):
    """The mask of a case, or of changed arguments."""
    return visible(*kit.lengths(x), **{name: (x | changes)[name] for name in list(INPUTS)[3:-1]})


def weights(x):
    """The right weights (B, H, Tq, Tk)."""
    return softmax(kit.scores(x), mask_of(x))[0]


def under(x, mask, sink=-np.inf):
    """The outputs under a wrong mask, or with one more key that has no value."""
    p, lse = softmax(kit.scores(x), mask, sink)
    return p @ kit.plain(x["v"]), lse


def sides(x, change):
    """left and right, changed where they are not open."""
    return {side: None if x[side] is None else change(x[side]) for side in ("left", "right")}


def positions(x):
    """The positions (Tq, 1) of the queries and (1, Tk) of the keys."""
    i, j = masks.grid(*kit.lengths(x))
    return i + x["offset"], j


def in_blocks(x):
    """The query's own block of keys, as wide as the larger side, and its neighbours; a side of 0 stays 0."""
    size = max(1, *(x[side] or 0 for side in ("left", "right")))
    p, j = positions(x)
    return mask_of(x, **sides(x, lambda n: None if n else 0), dilation=1) & (np.abs(j // size - p // size) <= 1)


def gaps_from_key_0(x):
    """The keys in reach of the window that are multiples of the dilation, wherever the query stands."""
    D = np.reshape(x["dilation"], (-1, 1, 1))
    return mask_of(x, **sides(x, lambda n: n * D), dilation=1) & (positions(x)[1] % D == 0)


def rolled(x):
    """The window on keys that lie in a ring: beyond an end the other end follows."""
    Tk = max(1, x["k"].shape[2])
    copies = [mask_of(x, lengths=x["lengths"] * 0 + Tk, offset=x["offset"] + n * Tk) for n in (-1, 0, 1)]
    return np.logical_or.reduce(copies) & masks.padding(x["lengths"], x["k"].shape[2])


def zeros_beyond(x):
    """Places of the window beyond the first and the last key hold zeros: each weighs exp(0), as a sink does."""
    if None in (x["left"], x["right"]):
        return dense(**x)
    j = positions(x)[0] + np.arange(-x["left"], x["right"] + 1) * np.reshape(x["dilation"], (-1, 1, 1))
    with np.errstate(divide="ignore"):
        sink = np.log(((j < 0) | (j >= x["k"].shape[2])).sum(-1, keepdims=True))
    return under(x, mask_of(x), sink)


def tail_lost(x):
    """Rows beyond the last whole block of left + 1 queries stay 0."""
    o, lse = dense(**x)
    Tq, block = o.shape[2], (x["left"] or 0) + 1
    return o * (np.arange(Tq) < Tq // block * block)[:, None], lse


def unless_short(x):
    """No mask but padding where left + 1 keys are all there are."""
    return x if x["left"] is None or x["k"].shape[2] > x["left"] + 1 else x | dict(left=None, right=None, dilation=1)


BUGS = dict(
    window_counts_self=("the query's own key counts as one of the keys of each side",
                        lambda x: but(x, **sides(x, lambda n: max(0, n - 1)))),
    window_one_more=("one key too many on the left", lambda x: but(x, left=sides(x, lambda n: n + 1)["left"])),
    window_right_exclusive=("the last key on the right is left out",
                            lambda x: but(x, right=sides(x, lambda n: max(0, n - 1))["right"])),
    window_halved=("half the keys on each side", lambda x: but(x, **sides(x, lambda n: n // 2))),
    window_mirrored=("left and right are exchanged", lambda x: but(x, left=x["right"], right=x["left"])),
    window_symmetric=("as many keys on the right as on the left", lambda x: but(x, right=x["left"])),
    window_left_dropped=("only the right side has a limit", lambda x: but(x, left=None)),
    window_right_dropped=("only the left side has a limit", lambda x: but(x, right=None)),
    window_dropped=("every key is seen", lambda x: but(x, left=None, right=None, dilation=1)),
    window_zero_is_open=("0 keys on a side is read as no limit",
                         lambda x: but(x, left=x["left"] or None, right=x["right"] or None)),
    window_top_left=("query 0 stands at key 0, whatever the offset", lambda x: but(x, offset=0)),
    window_bottom_right=("the last query stands at the last key, whatever the offset",
                         lambda x: but(x, offset=x["k"].shape[2] - x["q"].shape[2])),
    window_in_blocks=("the own block of keys and its neighbours instead of a window that slides",
                      lambda x: under(x, in_blocks(x))),
    wide_window_dropped=("where left + 1 keys are all there are the right side loses its limit too",
                         lambda x: dense(**unless_short(x))),
    tail_lost=("queries beyond the last whole block of left + 1 give 0", tail_lost),
    borders_wrap=("a place before the first key reads the last one, and the other way round",
                  lambda x: under(x, rolled(x))),
    borders_weigh=("places of the window beyond the keys are zeros and take weight", zeros_beyond),
    dilation_ignored=("the window has no gaps", lambda x: but(x, dilation=1)),
    dilation_in_tokens=("left and right count tokens, not steps of dilation", lambda x: under(x, mask_of(x) & mask_of(
        x, dilation=1))),
    dilation_of_head_0=("the dilation of head 0 serves every head",
                        lambda x: but(x, dilation=np.ravel(x["dilation"])[:1])),
    dilation_from_key_0=("the gaps are counted from key 0, not from the query", lambda x: under(x, gaps_from_key_0(x))),
    padding_dropped=("the keys beyond the length of a batch entry are seen",
                     lambda x: under(x, mask_of(x, lengths=np.full_like(x["lengths"], x["k"].shape[2])))),
    lengths_of_batch_0=("the length of batch entry 0 serves every entry",
                        lambda x: under(x, mask_of(x, lengths=np.full_like(x["lengths"], x["lengths"][0])))),
    masked_nan_poison=("0 * NaN: a value beyond the length, or outside every window, is read",
                       lambda x: (weights(x) @ x["v"],)),
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    empty_row_nan=("a row without keys is 0/0", lambda x: kit.nan_at_empty_rows(x, dense(**x))),
    empty_row_uniform=("a row without keys gives the mean of all values",
                       lambda x: kit.at_empty_rows(dense(**x), kit.mean_value(x["v"]))[:1]),
    empty_row_lse_zero=("lse of a row without keys is 0", lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
)


def rebuilt(x, **changes):
    """Gradients with weights rebuilt from the right lse under the mask of changed arguments, as kernels do it."""
    _, lse = dense(**{name: x[name] for name in INPUTS})
    k, v = kit.plain(x["k"]), kit.plain(x["v"])
    p = np.where(mask_of(x, **changes), np.exp(kit.scores(x) - np.where(lse == -np.inf, np.inf, lse)[..., None]), 0)
    dp = x["do"] @ v.swapaxes(-1, -2)
    ds = p * (dp - (weights(x) * dp).sum(-1, keepdims=True) + x["dlse"][..., None])
    return dict(dq=x["scale"] * ds @ k, dk=x["scale"] * ds.swapaxes(-1, -2) @ x["q"], dv=p.swapaxes(-1, -2) @ x["do"])


VJP_BUGS = dict(
    jacobian_term_missing=("dS = P dP without the row term", lambda x: dict(
        dq=kit.without_row_term(weights(x), x["do"], x["k"], x["v"], x["scale"]))),
    dq_scale_missing=("dQ is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dk_scale_missing=("dK is not multiplied by scale", lambda x: dict(dk=vjp(**x)["dk"] / x["scale"])),
    backward_mirrored=("the backward, which goes from key to key, exchanges left and right",
                       lambda x: rebuilt(x, left=x["right"], right=x["left"])),
    backward_forgets_window=("the backward rebuilds the weights from lse without the window",
                             lambda x: rebuilt(x, left=None, right=None, dilation=1)),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
    empty_row_gradient_nan=("0 * NaN in the backward of a row without keys", lambda x: dict(
        dq=np.where(kit.empty_rows(mask_of(x)), np.nan, vjp(**x)["dq"]))),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=7, Tk=9, dk=4, dv=5)
NEUTRAL = dict(lengths=lambda n: np.full(n.B, n.Tk), left=None, right=None, dilation=lambda n: np.ones(1, int),
               offset=lambda n: n.Tk - n.Tq, scale=lambda n: n.dk ** -0.5)


CASES = dict(
    basic=dict(
        why="every size differs and none is 1; two keys before the own, one after it", sizes=SIZES, left=2, right=1,
        catches=("window_counts_self", "window_one_more", "window_right_exclusive", "window_halved", "window_mirrored",
                 "window_symmetric", "window_left_dropped", "window_right_dropped", "window_dropped",
                 "window_top_left", "tail_lost", "scale_missing", "lse_base_2", "jacobian_term_missing",
                 "dq_scale_missing", "dk_scale_missing", "backward_mirrored", "backward_forgets_window", "dlse_sign")),
    causal_blocks=dict(
        why="causal, four keys with the own, and exactly two blocks of four queries", light=True, left=3, right=0,
        sizes=SIZES | dict(Tq=8), catches=("window_zero_is_open", "window_in_blocks", "window_symmetric")),
    one_more_than_blocks=dict(
        why="causal, and one query beyond two blocks of four", sizes=SIZES | dict(Tq=9, Tk=11), light=True, left=3,
        right=0, catches=("tail_lost", "window_in_blocks")),
    top_left=dict(
        why="query 0 stands at key 0, and more keys follow than queries", sizes=SIZES, light=True, left=1, right=2,
        offset=0, catches=("window_bottom_right", "borders_weigh", "borders_wrap")),
    dilated=dict(
        why="gaps of another width for each head, on both sides", sizes=SIZES, left=2, right=1,
        dilation=np.array([2, 1, 3]), catches=(
            "dilation_ignored", "dilation_in_tokens", "dilation_of_head_0", "dilation_from_key_0",
            "backward_mirrored")),
    open_left=dict(
        why="all keys before the own, one after it", sizes=SIZES, light=True, right=1,
        catches=("window_mirrored", "window_right_dropped")),
    strided=dict(
        why="every third key before the own: the second head of Child et al.", sizes=SIZES | dict(Tk=11), light=True,
        right=0, dilation=np.array([3]), catches=("dilation_ignored", "dilation_from_key_0")),
    padding=dict(
        why="batch entries of different length, with gaps", sizes=SIZES, left=1, right=2, dilation=np.array([1, 2, 1]),
        lengths=np.array([8, 5]), catches=("padding_dropped", "lengths_of_batch_0", "dilation_of_head_0")),
    empty_rows=dict(
        why="queries beyond the padding, and a batch entry without keys", sizes=SIZES, left=1, right=0,
        lengths=np.array([6, 0]),
        catches=("empty_row_nan", "empty_row_uniform", "empty_row_lse_zero", "empty_row_gradient_nan")),
    before_key_0=dict(
        why="with more queries than keys the first ones stand before key 0, and some see nothing", light=True,
        sizes=SIZES | dict(Tq=11, Tk=6), left=1, right=1, dilation=np.array([2]),
        shows=lambda x, y: (y["lse"][:, :, :3] == -np.inf).all() and (y["lse"][:, :, 3:] > -np.inf).all(),
        catches=("window_top_left", "borders_wrap", "empty_row_nan")),
    never_read=dict(
        why="NaN in the padding and in keys before every window", sizes=SIZES | dict(Tk=12), left=1, right=1,
        lengths=np.array([11, 9]), change=lambda x: kit.nan_where(kit.hidden_keys(mask_of(x)), x),
        catches=("masked_nan_poison",)),
    self_only=dict(
        why="no key beside the own: o is v", sizes=SIZES | dict(Tq=9), light=True, left=0, right=0,
        catches=("window_one_more", "window_zero_is_open"), shows=kit.returns_v),
    reaches_all=dict(
        why="just wide enough to hide nothing", sizes=SIZES | dict(Tq=9), light=True, left=8, right=8,
        shows=lambda x, y: mask_of(x).all(), catches=("borders_weigh", "window_halved")),
    misses_corners=dict(
        why="one key less on each side: two pairs are hidden", sizes=SIZES | dict(Tq=9), light=True, left=7, right=7,
        shows=lambda x, y: (~mask_of(x)[0]).sum() == 2, catches=("window_dropped", "window_one_more")),
    wider_than_keys=dict(
        why="a causal window longer than the sequence still hides what follows", sizes=SIZES | dict(Tq=9), light=True,
        left=20, right=0, catches=("wide_window_dropped", "window_right_dropped")),
    decode=dict(
        why="one query at the last key, dilated", sizes=SIZES | dict(Tq=1), light=True, left=2, right=0,
        dilation=np.array([1, 2, 3]), catches=("window_top_left", "dilation_in_tokens")),
)
