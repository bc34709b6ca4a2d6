"""T5: attention with bucketed relative positions.     Raffel et al. 2020, arXiv:1910.10683, section 2.1: buckets, scale

    a_hij = scale q_hi . k_hj + table[bucket(j - p_i), h]                   p_i = i + offset; the paper has scale = 1
    z_hi  = sum_{j: mask_ij} exp(a_hij)                                                         lse_hi = log z_hi
    o_hi  = sum_{j: mask_ij} exp(a_hij) v_hj / z_hi

    bidirectional   n = R/2, d = |j - p_i|; n is added for j > p_i          causal   n = R, d = max(p_i - j, 0)
    bucket = d  where d < e = n/2,  else  min(n - 1, e + floor((n - e) log(d / e) / log(max_distance / e)))

The paper has the idea, its code the formula. One table serves all layers of a stack; attention of a decoder to an
encoder has none. Where code in the wild differs: logarithms in float32, which move a bucket for few settings (48
buckets, maximum 81, distance 54); round or ceil for floor; no upper bound; query minus key; a scale of 1/sqrt(dk).
"""
import numpy as np

from .. import kit
from ..core import per_head, scatter, softmax, unread
from ..masks import at_least, causal, grid
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", table="R H", mask="bool B? H? Tq? Tk?",
              bidirectional="bool", max_distance="int >=1", offset="int", scale="")
OUTPUTS = dict(o="B H Tq dv", lse="B H Tq")
STEPS = dict(bucket="Tq Tk", biased="B H Tq Tk")
CONVENTIONS = dict(mask="True = may attend", bias="not scaled", layout="B H T d; table (R, H)",
                   distance="key minus query, j - (i + offset)", halves="keys after the query have the upper one",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, of biased scores",
                   masked_values="a key that no query may attend to is never read")


def first_distances(n, max_distance):
    """(n,) the smallest distance of each bucket of one side: 0 to e - 1, then the least d >= e of each t < n - e with

        (n - e) log(d / e) >= t log(max_distance / e)       or       d^(n - e) e^t >= max_distance^t e^(n - e)

    in integers, exactly. Raises ValueError unless n >= 2 and max_distance > e = n // 2.
    """
    e, far = n // 2, int(max_distance)
    at_least(2, buckets=n)
    at_least(e + 1, max_distance=far)
    first, d = list(range(e)), e
    for t in range(n - e):
        while d ** (n - e) * e ** t < far ** t * e ** (n - e):
            d += 1
        first.append(d)
    return np.array(first)


def bucket(distance, buckets, max_distance, bidirectional):
    """The bucket 0..buckets - 1 of integer distances j - p_i, key minus query.

    Raises ValueError unless there are two buckets a side and max_distance is beyond the exact ones.
    """
    n = buckets // 2 if bidirectional else buckets
    d = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    b = np.searchsorted(first_distances(n, max_distance), d, side="right") - 1
    return b + n * (distance > 0) if bidirectional else b


def buckets_of(q, k, table, bidirectional, max_distance, offset):
    """(Tq, Tk) the row of the table for every pair."""
    i, j = grid(q.shape[2], k.shape[2])
    return bucket(j - i - offset, len(table), max_distance, bidirectional)


def dense(q, k, v, table, mask=True, *, bidirectional, max_distance=128, offset=0, scale):
    """o (B, H, Tq, dv) and lse (B, H, Tq), by the equations above. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    k, v = unread(k, mask), unread(v, mask)
    bias = table.T[:, buckets_of(q, k, table, bidirectional, max_distance, offset)]
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2) + bias, mask)
    return weights @ v, lse


def steps(q, k, table, mask=True, *, bidirectional, max_distance=128, offset=0, scale):
    """The bucket (Tq, Tk) of every pair, and the biased scores (B, H, Tq, Tk), NaN where mask hides one."""
    b = buckets_of(q, k, table, bidirectional, max_distance, offset)
    return b.astype(q.dtype), np.where(mask, scale * q @ unread(k, mask).swapaxes(-1, -2) + table.T[:, b], np.nan)


def by_distance(q, k, v, table, mask=True, *, bidirectional, max_distance=128, offset=0, scale):
    """Each of the Tq + Tk - 1 distances is bucketed and picked once; query i sees a run of them that ends i earlier."""
    n = sizes(INPUTS, locals())
    Tq, Tk = n["Tq"], n["Tk"]
    k, v = unread(k, mask), unread(v, mask)
    distances = np.arange(1 - Tq, Tk) - offset
    biases = np.take(table, bucket(distances, n["R"], max_distance, bidirectional), 0).T
    lines = np.stack([biases[:, Tq - 1 - i:Tq - 1 - i + Tk] for i in range(Tq)], 1)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2) + lines, mask)
    return weights @ v, lse


def loop(q, k, v, table, mask=True, *, bidirectional, max_distance=128, offset=0, scale):
    """`one_head` for every head, with the distances at which buckets begin."""
    n = sizes(INPUTS, locals())
    first = first_distances(n["R"] // 2 if bidirectional else n["R"], max_distance)
    return one_head(q, k, v, table, mask, bidirectional, first, offset, scale)


@per_head({name: INPUTS[name] for name in ("q", "k", "v", "table", "mask", "bidirectional", "offset", "scale")}
          | dict(first="int n"), OUTPUTS)
def one_head(q, k, v, table, mask, bidirectional, first, offset, scale):
    """One query at a time: a walk to the bucket of each key, its biased score, then the weighted sum of the values."""
    (Tq, dk), (Tk, dv), n = q.shape, v.shape, len(first)
    o, z, a = np.zeros((Tq, dv), q.dtype), np.zeros(Tq, q.dtype), np.zeros(Tk, q.dtype)
    lse = np.full(Tq, -np.inf, q.dtype)
    for i in range(Tq):
        m = lse[i]
        for j in range(Tk):
            if mask[i, j]:
                distance, row, half = i + offset - j, 0, 0
                if distance < 0 and bidirectional:
                    distance, half = -distance, n
                while row + 1 < n and distance >= first[row + 1]:
                    row += 1
                a[j] = table[half + row]
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


def vjp(do, dlse, q, k, v, table, mask=True, *, bidirectional, max_distance=128, offset=0, scale):
    """Gradients of q, k, v and table for cotangents do (B, H, Tq, dv) and dlse (B, H, Tq)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    q, k, v = unread(q, np.swapaxes(np.atleast_2d(mask), -1, -2)), unread(k, mask), unread(v, mask)
    b = buckets_of(q, k, table, bidirectional, max_distance, offset)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2) + table.T[:, b], mask)
    dp = do @ v.swapaxes(-1, -2)
    da = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return dict(dq=scale * da @ k, dk=scale * da.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do,
                dtable=scatter(da, b, len(table)).sum((0, 2)).T)


FORMS = dense, by_distance, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def distances(x):
    """j - p_i, (Tq, Tk)."""
    i, j = grid(*kit.lengths(x))
    return j - i - x["offset"]


def buckets(x, distance=None):
    """The right buckets, or those of other distances."""
    return bucket(distances(x) if distance is None else distance, len(x["table"]), x["max_distance"],
                  x["bidirectional"])


def bias_of(x):
    return x["table"].T[:, buckets(x)]


def picking(x, row):
    """The formula with other rows of the table; what is beyond it starts again."""
    return kit.attend(x, kit.scores(x) + x["table"].T[:, row % len(x["table"])])


def by_logarithm(x, rounding=np.floor, exact=lambda n, R: n // 2, log=np.log, base=np.log, clamped=True):
    """The formula with buckets computed in floats: another rounding, exact part or logarithm, or no end."""
    r, R = distances(x), len(x["table"])
    n, d, half = (R // 2, abs(r), R // 2 * (r > 0)) if x["bidirectional"] else (R, np.maximum(-r, 0), 0)
    e = exact(n, R)
    t = log(np.maximum(d / e, 1)) / base(x["max_distance"] / e) * (n - e)
    row = np.where(d < e, d, e + rounding(t)).astype(int)
    return picking(x, half + (np.minimum(row, n - 1) if clamped else row))


def short_log(r):
    """The logarithm, rounded to float32."""
    return np.log(r).astype(np.float32)


BUGS = dict(
    distance_sign=("query minus key: the halves change places", lambda x: picking(x, buckets(x, -distances(x)))),
    own_key_in_upper_half=("the key of the query itself counts as one after it", lambda x: picking(
        x, buckets(x) + len(x["table"]) // 2 * (distances(x) == 0)) if x["bidirectional"] else dense(**x)),
    causal_as_bidirectional=("the buckets of an encoder in a decoder", lambda x: but(x, bidirectional=True)),
    bidirectional_as_causal=("the buckets of a decoder in an encoder", lambda x: but(x, bidirectional=False)),
    causal_absolute=("causal buckets of the absolute distance: keys after the query leave bucket 0", lambda x: (
        dense(**x) if x["bidirectional"] else picking(x, buckets(x, -abs(distances(x)))))),
    offset_ignored=("queries are counted from 0", lambda x: but(x, offset=0)),
    offset_bottom_right=("the last query stands at the last key, whatever the offset",
                         lambda x: but(x, offset=x["k"].shape[2] - x["q"].shape[2])),
    one_more_exact=("one more distance has a bucket of its own",
                    lambda x: by_logarithm(x, exact=lambda n, R: n // 2 + 1)),
    exact_before_halving=("half of all buckets, not of one side, are exact: none is left for far distances",
                          lambda x: by_logarithm(x, exact=lambda n, R: R // 2)),
    edge_in_the_bucket_before=("a bucket begins after its first distance",
                               lambda x: by_logarithm(x, lambda t: np.maximum(np.ceil(t) - 1, 0))),
    bucket_rounded=("round in place of floor", lambda x: by_logarithm(x, np.round)),
    bucket_ceil=("ceil in place of floor", lambda x: by_logarithm(x, np.ceil)),
    bucket_log_base=("log2 is divided by a natural logarithm", lambda x: by_logarithm(x, log=np.log2)),
    bucket_in_float32=("logarithms in float32: floor just misses what is a whole number",
                       lambda x: by_logarithm(x, log=short_log, base=short_log)),
    max_distance_ignored=("128 whatever max_distance was asked for", lambda x: but(x, max_distance=128)),
    not_clamped=("the last bucket has no end: far distances read the other half, or beyond the table",
                 lambda x: by_logarithm(x, clamped=False)),
    table_read_as_columns=("memory of shape (R, H) is read as (H, R)",
                           lambda x: but(x, table=x["table"].reshape(x["table"].shape[::-1]).T)),
    scale_of_width=("1/sqrt(dk) whatever scale was asked for", lambda x: but(x, scale=x["q"].shape[3] ** -0.5)),
    **kit.bias_mistakes(dense, bias_of),
)
VJP_BUGS = dict(
    dtable_overwritten=(
        "pairs that share a bucket overwrite each other in dtable instead of adding up", lambda x: dict(
            dtable=kit.overwritten(kit.score_gradient(x, kit.scores(x) + bias_of(x)), buckets(x), len(x["table"])).T)),
    **kit.bias_gradient_mistakes(vjp, bias_of, "dtable"),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=5, Tk=6, dk=4, dv=7, R=8)
FAR = dict(B=1, H=2, Tq=1, dk=4, dv=3, R=32)
NEUTRAL = dict(mask=kit.no_mask, bidirectional=True, max_distance=5, offset=0, scale=0.25)


def meets_every_edge(x, y):
    """Every bucket of a side, at its first distance and just before, and distances beyond the last."""
    R = len(x["table"])
    first, r = first_distances(R // 2 if x["bidirectional"] else R, x["max_distance"]), distances(x)
    sides = (r, -r) if x["bidirectional"] else (-r,)
    return all(np.isin([*first, *(first[1:] - 1), x["max_distance"] + 1], side).all() for side in sides)


CASES = dict(
    basic=dict(
        why="an encoder: two exact distances a side, a bucket of two, and what is beyond; every size differs",
        sizes=SIZES,
        catches=("distance_sign", "own_key_in_upper_half", "bidirectional_as_causal", "one_more_exact",
                 "exact_before_halving", "bucket_rounded", "bucket_ceil", "bucket_log_base", "max_distance_ignored",
                 "not_clamped", "table_read_as_columns", "scale_of_width", "bias_ignored", "bias_added_twice",
                 "bias_sign", "bias_before_scale", "exp2_bias_not_rescaled", "bias_of_head_0", "scale_missing",
                 "softmax_over_queries", "lse_without_bias", "lse_base_2", "dtable_overwritten", "dtable_lost",
                 "dtable_scaled", "dtable_of_batch_0", "jacobian_term_missing", "dq_scale_missing", "dlse_ignored")),
    decoder=dict(
        why="causal buckets under a causal mask, the last query at the last key", sizes=SIZES | dict(Tk=12),
        bidirectional=False, max_distance=11, offset=7, mask=kit.causal_of, conventions=dict(causal="bottom-right"),
        catches=("causal_as_bidirectional", "distance_sign", "offset_ignored", "mask_dropped", "one_more_exact",
                 "max_distance_ignored")),
    scale_1=dict(
        why="scores that are not scaled, as in the paper", sizes=SIZES, scale=1.0, catches=("scale_of_width",)),
    every_edge=dict(
        why="32 buckets up to distance 128, both sides: at, before and after each edge", sizes=FAR | dict(Tk=261),
        light=True, max_distance=128, offset=130, change=lambda x: dict(v=x["v"] % 8), shows=meets_every_edge,
        catches=("edge_in_the_bucket_before", "bucket_rounded", "bucket_ceil", "not_clamped", "one_more_exact")),
    every_causal_edge=dict(
        why="32 causal buckets up to distance 128: at, before and after each edge", sizes=FAR | dict(Tk=131),
        light=True, bidirectional=False, max_distance=128, offset=130, change=lambda x: dict(v=x["v"] % 8),
        shows=meets_every_edge, catches=("bucket_rounded", "bucket_ceil", "not_clamped", "one_more_exact")),
    whole_edges=dict(
        why="log(4 / 2) is half of log(8 / 2): distance 4 begins the last bucket", sizes=SIZES | dict(Tk=9),
        light=True, max_distance=8, offset=3, catches=("edge_in_the_bucket_before", "one_more_exact")),
    whole_edge_in_float32=dict(
        why="48 buckets, maximum 81: distance 54 is in bucket 40, in float32 in 39", sizes=SIZES | dict(R=48),
        light=True, bidirectional=False, max_distance=81, offset=54, catches=("bucket_in_float32",)),
    all_after=dict(
        why="causal buckets without a mask: what follows a query shares bucket 0 with its own key", sizes=SIZES,
        light=True, bidirectional=False, catches=("causal_absolute", "causal_as_bidirectional")),
    fewest_buckets=dict(
        why="two buckets a side: distance 0, and all others", sizes=SIZES | dict(R=4), light=True, max_distance=3,
        catches=("own_key_in_upper_half", "distance_sign")),
    decode=dict(
        why="one query behind a cache", sizes=SIZES | dict(Tq=1, Tk=9), light=True, bidirectional=False, offset=8,
        catches=("offset_ignored",)),
    unfilled_cache=dict(
        why="the last query is not at the last key: what follows it is NaN, and hidden", sizes=SIZES | dict(Tk=9),
        bidirectional=False, mask=lambda n: causal(n.Tq, n.Tk, 2)[None, None], offset=2,
        change=lambda x: kit.nan_where(kit.hidden_keys(x["mask"]), x),
        catches=("offset_bottom_right", "offset_ignored", "masked_nan_poison")),
    empty_row=dict(
        why="a row without keys among others", sizes=SIZES, mask=kit.but_row_1, catches=("empty_row_nan",)),
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=dict(B=1, H=1, Tq=1, Tk=1, dk=1, dv=1, R=4), light=True,
        shows=kit.returns_v),
    no_keys=dict(
        why="Tk = 0 is legal: o = 0, lse = -inf", sizes=SIZES | dict(Tk=0), light=True, shows=kit.sees_nothing),
)
