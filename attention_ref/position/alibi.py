"""ALiBi: attention with linear biases.       Press, Smith, Lewis 2022, arXiv:2108.12409, section 3 and figure 3

    p_i   = i + offset                  m_h = 2^(-8h/H), h = 1..H, for H a power of two; see `slopes` for other H
    a_hij = scale q_hi . k_hj - m_h |p_i - j|
    z_hi  = sum_{j: mask_ij} exp(a_hij)                                                         lse_hi = log z_hi
    o_hi  = sum_{j: mask_ij} exp(a_hij) v_hj / z_hi

For keys not after the query the bias is the m_h (j - p_i) of the paper, which is causal; with keys on both sides code
takes the absolute distance. Where code in the wild differs: the paper states its closed form for every H, released code
and checkpoints interpolate; Bloom and MPT add m_h j, or m_h (j - Tk + 1), which moves lse and, under a causal mask,
nothing else; Falcon scales scores and bias together, and rounds positions to bfloat16.
"""
import numpy as np

from .. import kit
from ..core import per_head, per_row, softmax, unread
from ..masks import at_least, causal, grid, padding
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", mask="bool B? H? Tq? Tk?", slopes="optional H",
              offset="int", scale="")
OUTPUTS = dict(o="B H Tq dv", lse="B H Tq")
STEPS = dict(distance_bias="H Tq Tk", biased="B H Tq Tk")
CONVENTIONS = dict(mask="True = may attend", slopes="None: those of `slopes`, rounded once from float64",
                   distance="absolute, from query position i + offset to key position j; not scaled",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, of biased scores", layout="B H T d",
                   masked_values="a key that no query may attend to is never read")


def closed_form(heads):
    """(heads,) 2^(-8h/heads), h = 1..heads, as section 3 has it: what models use for powers of two only."""
    at_least(1, heads=heads)
    return np.array([2.0 ** (-8 * h / heads) for h in range(1, heads + 1)])


def slopes(heads):
    """(heads,) as released: the closed form of n heads, n the largest power of two, then every other one of 2n heads.

    6 heads have 2^-2, 2^-4, 2^-6, 2^-8 of n = 4 and then 2^-1, 2^-3. Raises ValueError for no heads.
    """
    at_least(1, heads=heads)
    n = 2 ** (heads.bit_length() - 1)
    return np.concatenate([closed_form(n), closed_form(2 * n)[::2][:heads - n]])


def chosen(given, heads):
    """(heads,) the slopes that were given, or the published ones."""
    return slopes(heads) if given is None else given


def distance(offset, q, k):
    """|p_i - j|, (Tq, Tk), in the number system of q."""
    i, j = grid(q.shape[2], k.shape[2])
    return abs(i + offset - j).astype(q.dtype)


def bias(given, offset, q, k):
    """-m_h |p_i - j|, (H, Tq, Tk)."""
    return -per_row(chosen(given, q.shape[1]), q) * distance(offset, q, k)


def dense(q, k, v, mask=True, slopes=None, offset=0, *, scale):
    """o (B, H, Tq, dv) and lse (B, H, Tq), by the equations above. Raises ValueError for a shape that does not fit."""
    sizes(INPUTS, locals())
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2) + bias(slopes, offset, q, k), mask)
    return weights @ v, lse


def steps(q, k, mask=True, slopes=None, offset=0, *, scale):
    """The bias (H, Tq, Tk) of every pair, and the biased scores (B, H, Tq, Tk), NaN where mask hides one."""
    distance_bias = bias(slopes, offset, q, k)
    return distance_bias, np.where(mask, scale * q @ unread(k, mask).swapaxes(-1, -2) + distance_bias, np.nan)


def decode(q, k, v, mask=True, slopes=None, offset=0, *, scale):
    """One query after the other, as with a cache: each needs one line of distances, and no (Tq, Tk) bias is stored."""
    n = sizes(INPUTS, locals())
    k, v, keep = unread(k, mask), unread(v, mask), np.broadcast_to(mask, [n[axis] for axis in ("B", "H", "Tq", "Tk")])
    o, lse = np.zeros((*q.shape[:3], n["dv"]), q.dtype), np.zeros(q.shape[:3], q.dtype)
    m = chosen(slopes, n["H"]).astype(q.dtype)[:, None]
    for i in range(n["Tq"]):
        away = np.abs(np.arange(n["Tk"]) - (offset + i)).astype(q.dtype)
        s = (scale * k @ q[:, :, i, :, None])[..., 0] - m * away
        weights, lse[:, :, i] = softmax(s, keep[:, :, i])
        o[:, :, i] = (weights[:, :, None] @ v)[:, :, 0]
    return o, lse


def loop(q, k, v, mask=True, slopes=None, offset=0, *, scale):
    """`one_head` for every head, with its slope."""
    n = sizes(INPUTS, locals())
    return one_head(q, k, v, mask, chosen(slopes, n["H"]), offset, scale)


@per_head(INPUTS | dict(slopes="H"), OUTPUTS)
def one_head(q, k, v, mask, slopes, offset, scale):
    """One query at a time: its biased scores and their maximum, then the weighted sum of the values it may see."""
    (Tq, dk), (Tk, dv) = q.shape, v.shape
    o, z, a = np.zeros((Tq, dv), q.dtype), np.zeros(Tq, q.dtype), np.zeros(Tk, q.dtype)
    lse = np.full(Tq, -np.inf, q.dtype)
    for i in range(Tq):
        m = lse[i]
        for j in range(Tk):
            if mask[i, j]:
                distance = i + offset - j
                if distance < 0:
                    distance = -distance
                a[j] = -slopes * distance
                for c in range(dk):
                    a[j] += scale * q[i, c] * k[j, c]
                if a[j].real > m.real:
                    m = a[j]
        if m.real == -np.inf:
            continue
        for j in range(Tk):
            if mask[i, j]:
                p = np.exp(a[j] - m)
                z[i] += p
                for c in range(dv):
                    o[i, c] += p * v[j, c]
        o[i] /= z[i]
        lse[i] = m + np.log(z[i])
    return o, lse


def vjp(do, dlse, q, k, v, mask=True, slopes=None, offset=0, *, scale):
    """Gradients of q, k, v and of given slopes for cotangents do (B, H, Tq, dv) and dlse (B, H, Tq)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    q, k, v = unread(q, np.swapaxes(np.atleast_2d(mask), -1, -2)), unread(k, mask), unread(v, mask)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2) + bias(slopes, offset, q, k), mask)
    dp = do @ v.swapaxes(-1, -2)
    da = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    gradients = dict(dq=scale * da @ k, dk=scale * da.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do)
    if slopes is None:
        return gradients
    return gradients | dict(dslopes=-(da * distance(offset, q, k)).sum((0, 2, 3)))


FORMS = dense, decode, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def bias_of(x):
    return bias(x["slopes"], x["offset"], x["q"], x["k"])


def positions(x):
    """p_i (Tq, 1) and j (1, Tk)."""
    i, j = grid(*kit.lengths(x))
    return i + x["offset"], j


def at_distance(x, distance):
    """The formula with other distances, and signs."""
    m = per_row(chosen(x["slopes"], x["q"].shape[1]), x["q"])
    return kit.attend(x, kit.scores(x) - m * distance.astype(x["q"].dtype))


def signed(x):
    p, j = positions(x)
    return p - j


def published(x, wrong):
    """The formula with wrong(H, n) in place of the published slopes, n the largest power of two up to H."""
    if x["slopes"] is not None:
        return dense(**x)
    H = x["q"].shape[1]
    return but(x, slopes=wrong(H, 2 ** (H.bit_length() - 1)).astype(x["q"].dtype))


BUGS = dict(
    slopes_closed_form=("the closed form of the paper for a number of heads that is no power of two",
                        lambda x: published(x, lambda H, n: closed_form(H))),
    slopes_extra_first=("the extra slopes come before those of the power of two",
                        lambda x: published(x, lambda H, n: np.roll(slopes(H), H - n))),
    slopes_extra_in_a_row=("the extra slopes are the first of 2n heads, not every other one",
                           lambda x: published(x, lambda H, n: np.append(closed_form(n), closed_form(2 * n)[:H - n]))),
    slopes_extra_even=("of 2n heads every other one from the second on: slopes come twice",
                       lambda x: published(x, lambda H, n: np.append(closed_form(n), closed_form(n)[:H - n]))),
    slopes_of_next_power=("the closed form of the next power of two, cut off", lambda x: published(
        x, lambda H, n: closed_form(n if n == H else 2 * n)[:H])),
    slopes_from_zero=("heads are counted from 0: the first slope is 1", lambda x: published(
        x, lambda H, n: slopes(H) * 2.0 ** np.where(np.arange(H) < n, 8 / n, 4 / n))),
    slopes_given_ignored=("the published slopes whatever slopes were given", lambda x: but(x, slopes=None)),
    distance_signed=("m (j - p) for keys after the query too, which it then prefers",
                     lambda x: at_distance(x, signed(x))),
    key_only=("m j, without the position of the query", lambda x: at_distance(x, signed(x) - positions(x)[0])),
    distance_from_one=("the query's own key is at distance 1: seen in lse",
                       lambda x: at_distance(x, abs(signed(x)) + 1)),
    offset_ignored=("queries are counted from 0", lambda x: but(x, offset=0)),
    offset_bottom_right=("the last query stands at the last key, whatever the offset",
                         lambda x: but(x, offset=x["k"].shape[2] - x["q"].shape[2])),
    bias_of_query_length=("the bias is built over the queries: a single one gets none",
                          lambda x: but(x, slopes=0 * x["q"][0, :, 0, 0]) if x["q"].shape[2] == 1 else dense(**x)),
    positions_in_bfloat16=("positions above 256 are rounded to bfloat16: neighbours collide", lambda x: at_distance(
        x, abs(np.subtract(*(kit.rounded(p, 8) for p in positions(x)))))),
    **kit.bias_mistakes(dense, bias_of),
)


def signed_gradient(x):
    """dslopes for a bias of m (j - p), with weights that are right."""
    da = kit.score_gradient(x, kit.scores(x) + bias_of(x))
    return -(da * signed(x).astype(da.dtype)).sum((0, 2, 3))


VJP_BUGS = dict(
    dslopes_signed=("dslopes with the signed distance",
                    lambda x: {} if x["slopes"] is None else dict(dslopes=signed_gradient(x))),
    **kit.bias_gradient_mistakes(vjp, bias_of, "dslopes"),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=5, Tk=6, dk=4, dv=7)
NEUTRAL = dict(mask=kit.no_mask, slopes=None, offset=0, scale=0.5)
SLOPES = np.array([0.75, 0.25, 1.5])


CASES = dict(
    basic=dict(
        why="keys on both sides of three heads; every size differs and none is 1", sizes=SIZES,
        catches=("slopes_closed_form", "slopes_extra_first", "slopes_extra_even", "slopes_of_next_power",
                 "distance_signed", "bias_ignored", "bias_added_twice", "bias_sign", "bias_before_scale",
                 "exp2_bias_not_rescaled", "bias_of_head_0", "scale_missing", "softmax_over_queries",
                 "lse_without_bias", "lse_base_2", "jacobian_term_missing", "dq_scale_missing", "dlse_ignored")),
    causal=dict(
        why="two heads as the paper has them, the last query at the last key", sizes=SIZES | dict(H=2, Tk=8),
        mask=kit.causal_of, offset=3, conventions=dict(causal="bottom-right"),
        catches=("key_only", "distance_from_one", "offset_ignored", "mask_dropped", "slopes_from_zero")),
    six_heads=dict(
        why="four slopes and two between them", sizes=SIZES | dict(B=1, H=6), light=True,
        catches=("slopes_closed_form", "slopes_extra_first", "slopes_extra_in_a_row", "slopes_of_next_power")),
    twelve_heads=dict(
        why="eight slopes and four between them, none a power of two", sizes=SIZES | dict(B=1, H=12), light=True,
        catches=("slopes_closed_form", "slopes_extra_first", "slopes_extra_in_a_row")),
    one_head=dict(
        why="a single head has the slope 2^-8, not 1", sizes=SIZES | dict(H=1), light=True,
        catches=("slopes_from_zero",)),
    decode=dict(
        why="one query behind a cache", sizes=SIZES | dict(H=2, Tq=1, Tk=12), light=True, offset=11,
        catches=("bias_of_query_length", "offset_ignored")),
    unfilled_cache=dict(
        why="the last query is not at the last key: what follows it is NaN, and hidden", sizes=SIZES | dict(Tk=9),
        mask=lambda n: causal(n.Tq, n.Tk, 2)[None, None], offset=2,
        change=lambda x: kit.nan_where(kit.hidden_keys(x["mask"]), x),
        catches=("offset_bottom_right", "offset_ignored", "masked_nan_poison")),
    before_the_keys=dict(
        why="a negative offset: the first queries stand before all keys and see none", sizes=SIZES | dict(Tq=8),
        light=True, mask=kit.causal_of, offset=-2, conventions=dict(causal="bottom-right"),
        catches=("empty_row_nan", "offset_ignored")),
    learned=dict(
        why="slopes are given and have a gradient", sizes=SIZES, slopes=SLOPES,
        catches=("slopes_given_ignored", "dslopes_signed", "dslopes_lost", "dslopes_scaled",
                 "dslopes_of_batch_0")),
    learned_and_padded=dict(
        why="given slopes, one 0 and one negative, an offset, and batch entries of different length", sizes=SIZES,
        slopes=np.array([0.5, 0, -0.25]), offset=2, mask=lambda n: padding([3, 5], n.Tk),
        catches=("slopes_given_ignored", "dslopes_of_batch_0", "mask_dropped", "offset_bottom_right")),
    empty_row=dict(
        why="a row without keys among others", sizes=SIZES, slopes=SLOPES, mask=kit.but_row_1,
        catches=("empty_row_nan",)),
    far=dict(
        why="positions above 256, where bfloat16 has no odd numbers", sizes=SIZES | dict(B=1, H=2, Tq=3, Tk=267),
        light=True, offset=264, scale=0.125, slopes=np.array([1.5, 0.75]), mask=kit.causal_of,
        change=lambda x: dict(v=x["v"] % 8), conventions=dict(causal="bottom-right"),
        catches=("positions_in_bfloat16",)),
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=dict(B=1, H=1, Tq=1, Tk=1, dk=1, dv=1), light=True,
        shows=kit.returns_v),
    no_keys=dict(
        why="Tk = 0 is legal: o = 0, lse = -inf", sizes=SIZES | dict(Tk=0), light=True, shows=kit.sees_nothing),
)
