"""Disentangled attention of DeBERTa.                     He et al. 2021, arXiv:2006.03654, eq. 3 and 4, algorithm 1

    delta_ij = clip(i - j + S, 0, 2S - 1)       the row of distance i - j in a table of R = 2S rows
    s_ij = scale (q_i . k_j + q_i . pos_key[delta_ij] + k_j . pos_query[row])          scale = 1/sqrt(dk (1 + terms))
    row  = delta_ij in released code, delta_ji in eq. 4                        terms = how many tables there are, 0 to 2
    z_i  = sum_{j: mask_ij} exp(s_ij)                                                                   lse_i = log z_i
    p_ij = exp(s_ij) / z_i  where mask_ij, else 0                                               o_i = sum_j p_ij v_j

Tables come projected and split into heads; a table of zeros is a term that is not there. Versions 2 and 3 read
`bucket`(i - j, S, max_position) for i - j. Where code in the wild differs: Microsoft and transformers gather the last
term with delta_ij, keys as rows, and then transpose it, which a port that follows eq. 4 misses; a padded query, hidden
with its key, gives 0 at Microsoft and here, the mean over all keys in transformers.
"""
import numpy as np

from .. import kit
from ..core import per_head, scatter, softmax, unread
from ..masks import at_least, causal, grid, padding
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H T dk", k="B H T dk", v="B H T dv", pos_key="H R dk", pos_query="H R dk", mask="bool B? H? T? T?",
              scale="", p2c="str released|paper", max_position="optional int >=1")
OUTPUTS = dict(o="B H T dv", lse="B H T")
STEPS = dict(content="B H T T", content_position="B H T T", position_content="B H T T", weights="B H T T")
CONVENTIONS = dict(distance="query minus key, i - j", mask="True = may attend", layout="B H T d",
                   table="row S + distance, from -S in row 0 to S - 1 in the last; what is beyond is clipped",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, of scaled scores, all terms included",
                   masked_values="a key that no query may attend to is never read")


def bucket(distance, buckets, max_position):
    """Log buckets of integer distances: r up to |r| = mid = buckets // 2, then sign(r) (mid + n) with

        n = ceil((mid - 1) log(|r| / mid) / log((max_position - 1) / mid))

    found without rounding, as the least n with |r|^(mid - 1) mid^n <= (max_position - 1)^n mid^(mid - 1).
    Raises ValueError unless buckets >= 2 and max_position >= mid + 2.
    """
    mid, end = buckets // 2, max_position - 1
    at_least(2, buckets=buckets)
    at_least(mid + 2, max_position=max_position)
    r = np.abs(distance).astype(object)                                     # Python's integers have no largest
    n, step, power, beyond = 0 * r, 0, r ** (mid - 1), r > mid
    while beyond.any():
        n, step = n + beyond, step + 1
        beyond = power * mid ** step > end ** step * mid ** (mid - 1)
    return np.where(r <= mid, distance, np.sign(distance) * (mid + n)).astype(int)


def delta(T, S, max_position=None):
    """(T, T) the row that query i and key j have in a table of 2S rows, their distance bucketed if max_position."""
    i, j = grid(T, T)
    distance = np.arange(1 - T, T)
    if max_position is not None:
        distance = bucket(distance, S, max_position)
    return np.clip(distance + S, 0, 2 * S - 1)[i - j + T - 1]


def table_rows(q, pos_key, p2c, max_position):
    """(T, T) the row of pos_key for [query i, key j], and that of pos_query for [key j, query i]."""
    T, R = q.shape[2], pos_key.shape[1]
    if R % 2:
        raise ValueError(f"pos_key: expected an even number of rows, got {R}")
    row = delta(T, R // 2, max_position)
    return row, dict(released=row.T, paper=row)[p2c]


def terms(q, k, pos_key, pos_query, key_row, query_row):
    """The three products of eq. 4, each (B, H, T, T), not scaled."""
    content_position = (q[:, :, :, None] * pos_key[:, key_row]).sum(-1)
    position_content = (k[:, :, :, None] * pos_query[:, query_row]).sum(-1).swapaxes(-1, -2)
    return q @ k.swapaxes(-1, -2), content_position, position_content


def dense(q, k, v, pos_key, pos_query, mask=True, *, scale, p2c, max_position=None):
    """o (B, H, T, dv) and lse (B, H, T), by the equations above. Raises ValueError for a shape that does not fit."""
    sizes(INPUTS, locals())
    k, v = unread(k, mask), unread(v, mask)
    s = terms(q, k, pos_key, pos_query, *table_rows(q, pos_key, p2c, max_position))
    weights, lse = softmax(scale * sum(s), mask)
    return weights @ v, lse


def steps(q, k, v, pos_key, pos_query, mask=True, *, scale, p2c, max_position=None):
    """The terms and the weights, each (B, H, T, T); NaN where mask hides a score, for nothing may depend on it."""
    s = terms(q, unread(k, mask), pos_key, pos_query, *table_rows(q, pos_key, p2c, max_position))
    return *(np.where(mask, term, np.nan) for term in s), softmax(scale * sum(s), mask)[0]


def gathered(q, k, v, pos_key, pos_query, mask=True, *, scale, p2c, max_position=None):
    """Every query and key meets the tables once, (B, H, T, R); each pair picks its row from that."""
    sizes(INPUTS, locals())
    key_row, query_row = (row[None, None] for row in table_rows(q, pos_key, p2c, max_position))
    k, v = unread(k, mask), unread(v, mask)
    s = q @ k.swapaxes(-1, -2)
    s = s + np.take_along_axis(q @ pos_key.swapaxes(-1, -2), key_row, -1)
    s = s + np.take_along_axis(k @ pos_query.swapaxes(-1, -2), query_row, -1).swapaxes(-1, -2)
    weights, lse = softmax(scale * s, mask)
    return weights @ v, lse


def loop(q, k, v, pos_key, pos_query, mask=True, *, scale, p2c, max_position=None):
    """`one_head` for every head, with the rows, which are the same for all."""
    sizes(INPUTS, locals())
    return one_head(q, k, v, pos_key, pos_query, mask, *table_rows(q, pos_key, p2c, max_position), scale)


@per_head({name: INPUTS[name] for name in ("q", "k", "v", "pos_key", "pos_query", "mask")}
          | dict(key_row="int T T", query_row="int T T", scale=""), OUTPUTS)
def one_head(q, k, v, pos_key, pos_query, mask, key_row, query_row, scale):
    """One query at a time: its scores, each of three products, and their maximum, then the sum of the values."""
    (T, dk), dv = q.shape, v.shape[1]
    o, s, z = np.zeros((T, dv), q.dtype), np.zeros(T, q.dtype), np.zeros(T, q.dtype)
    m = np.full(T, -np.inf, q.dtype)
    for i in range(T):
        for j in range(T):
            if mask[i, j]:
                s[j] = 0
                for c in range(dk):
                    s[j] += scale * (q[i, c] * k[j, c] + q[i, c] * pos_key[key_row[i, j], c]
                                     + k[j, c] * pos_query[query_row[j, i], c])
                if s[j].real > m[i].real:
                    m[i] = s[j]
        for j in range(T):
            if mask[i, j]:
                p = np.exp(s[j] - m[i])
                z[i] += p
                for c in range(dv):
                    o[i, c] += p * v[j, c]
        if m[i].real > -np.inf:
            o[i] /= z[i]
            m[i] += np.log(z[i])
    return o, m


def vjp(do, dlse, q, k, v, pos_key, pos_query, mask=True, *, scale, p2c, max_position=None):
    """Gradients of q, k, v and both tables for cotangents do (B, H, T, dv) and dlse (B, H, T)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    q, k, v = unread(q, np.swapaxes(np.atleast_2d(mask), -1, -2)), unread(k, mask), unread(v, mask)
    key_row, query_row = table_rows(q, pos_key, p2c, max_position)
    p, _ = softmax(scale * sum(terms(q, k, pos_key, pos_query, key_row, query_row)), mask)
    dp = do @ v.swapaxes(-1, -2)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    R, dst = pos_key.shape[1], ds.swapaxes(-1, -2)
    of_key, of_query = scatter(ds, key_row, R), scatter(dst, query_row, R)
    return dict(dq=ds @ k + of_key @ pos_key, dk=dst @ q + of_query @ pos_query, dv=p.swapaxes(-1, -2) @ do,
                dpos_key=(of_key.swapaxes(-1, -2) @ q).sum(0), dpos_query=(of_query.swapaxes(-1, -2) @ k).sum(0))


FORMS = dense, gathered, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def rows(x):
    return table_rows(x["q"], x["pos_key"], x["p2c"], x["max_position"])


def parts(x, key_row=None, query_row=None):
    """The terms, hidden keys included, with other rows if given."""
    key_row, query_row = rows(x) if key_row is None else (key_row, query_row)
    return terms(x["q"], kit.plain(x["k"]), x["pos_key"], x["pos_query"], key_row, query_row)


def span(x):
    return x["pos_key"].shape[1] // 2


def distances(x):
    """i - j, or its bucket."""
    i, j = grid(*kit.lengths(x))
    return i - j if x["max_position"] is None else bucket(i - j, span(x), x["max_position"])


def with_rows(x, row):
    """The formula with other rows for (i, j)."""
    return kit.attend(x, x["scale"] * sum(parts(x, row, dict(released=row.T, paper=row)[x["p2c"]])))


def clipped(x, distance):
    return with_rows(x, np.clip(distance + span(x), 0, 2 * span(x) - 1))


def log_buckets(x, rounding=np.ceil, far=-1, log=np.log):
    """Buckets in float64, with another rounding, another end, or another logarithm in the numerator."""
    if x["max_position"] is None:
        return dense(**x)
    i, j = grid(*kit.lengths(x))
    r, mid = i - j, span(x) // 2
    n = rounding(log(np.maximum(abs(r) / mid, 1)) / np.log((x["max_position"] + far) / mid) * (mid - 1))
    return clipped(x, np.where(abs(r) <= mid, r, np.sign(r) * (mid + n)).astype(int))


def counted(x):
    """1 + the number of tables that are there."""
    return 1 + x["pos_key"].any() + x["pos_query"].any()


def of_the_key(x):
    """q_j in place of q_i meets row delta_ij."""
    key_row, query_row = rows(x)
    content, by_key, position_content = parts(x, key_row.T, query_row)
    return kit.attend(x, x["scale"] * (content + by_key.swapaxes(-1, -2) + position_content))


BUGS = dict(
    p2c_other_index=("the last term reads delta_ji where delta_ij is asked for, or the reverse",
                     lambda x: but(x, p2c=dict(released="paper", paper="released")[x["p2c"]])),
    distance_sign=("j - i in place of i - j", lambda x: clipped(x, -distances(x))),
    clipped_to_both_ends=("distances are clipped to -(S - 1), as on the other side: row 0 is never read",
                          lambda x: clipped(x, np.maximum(distances(x), 1 - span(x)))),
    not_clipped=("what is beyond the table is read from its other end",
                 lambda x: with_rows(x, (distances(x) + span(x)) % (2 * span(x)))),
    table_not_cut=("the centre is taken to be row min(T, S), of a table that was not cut to 2T rows",
                   lambda x: clipped(x, distances(x) + min(x["q"].shape[2], span(x)) - span(x))),
    buckets_ignored=("distances are clipped, not bucketed", lambda x: but(x, max_position=None)),
    bucket_floor=("floor in place of ceil", lambda x: log_buckets(x, np.floor)),
    bucket_log_base=("log2 is divided by a natural logarithm", lambda x: log_buckets(x, log=np.log2)),
    bucket_to_max_position=("max_position in place of max_position - 1", lambda x: log_buckets(x, far=0)),
    tables_swapped=("queries meet pos_query, keys pos_key",
                    lambda x: but(x, pos_key=x["pos_query"], pos_query=x["pos_key"])),
    c2p_of_the_key=("the table that q_i meets is gathered along the wrong axis: q_j meets it", of_the_key),
    p2c_not_transposed=("the last term is added with keys as rows", lambda x: kit.attend(
        x, x["scale"] * (parts(x)[0] + parts(x)[1] + parts(x)[2].swapaxes(-1, -2)))),
    c2p_missing=("queries meet no table", lambda x: but(x, pos_key=0 * x["pos_key"])),
    p2c_missing=("keys meet no table", lambda x: but(x, pos_query=0 * x["pos_query"])),
    c2p_twice=("the term of pos_key is added twice", lambda x: but(x, pos_key=2 * x["pos_key"])),
    positions_not_scaled=("only q k^T is scaled", lambda x: kit.attend(
        x, x["scale"] * parts(x)[0] + parts(x)[1] + parts(x)[2])),
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    scale_without_terms=("1/sqrt(dk): the terms are not counted",
                         lambda x: but(x, scale=x["scale"] * float(np.sqrt(counted(x))))),
    scale_of_three=("1/sqrt(3 dk) with one table too",
                    lambda x: but(x, scale=x["scale"] * float(np.sqrt(counted(x) / 3)))),
    tables_of_head_0=("the tables of head 0 serve every head", lambda x: but(
        x, **kit.changed(x, ("pos_key", "pos_query"), lambda table: np.repeat(table[:1], len(table), 0)))),
    mask_dropped=("the mask is ignored", lambda x: but(x, mask=np.array(True))),
    empty_row_uniform=("a padded query gives the mean of all values",
                       lambda x: kit.at_empty_rows(dense(**x), kit.mean_value(x["v"]))[:1]),
    masked_nan_poison=("0 * NaN: a masked value is read", lambda x: (
        softmax(x["scale"] * sum(parts(x)), x["mask"])[0] @ x["v"],)),
    lse_of_content=("lse is of q k^T alone", lambda x: (dense(**x)[0], kit.attend(x, x["scale"] * parts(x)[0])[1])),
)


def of_scores(x):
    """The right gradient of the unscaled scores (B, H, T, T)."""
    return x["scale"] * kit.score_gradient(x, x["scale"] * sum(parts(x)))


def overwritten(x):
    """dpos_key where of the keys that read a row for one query only the last counts."""
    ds, R = of_scores(x), 2 * span(x)
    row, _ = rows(x)
    y = scatter(0 * ds, row, R)
    for j in range(len(row)):
        y = np.where(row[:, j, None] == np.arange(R), ds[..., j, None], y)
    return (y.swapaxes(-1, -2) @ x["q"]).sum(0)


def of_batch_0(x):
    """dpos_key and dpos_query for cotangents that are 0 but for batch entry 0."""
    d = vjp(**x | kit.changed(x, ("do", "dlse"), lambda d: np.concatenate([d[:1], 0 * d[1:]])))
    return dict(dpos_key=d["dpos_key"], dpos_query=d["dpos_query"])


VJP_BUGS = dict(
    dq_of_content=("dq lacks what comes through pos_key", lambda x: dict(dq=of_scores(x) @ kit.plain(x["k"]))),
    table_gradient_overwritten=("keys beyond the clip overwrite each other in dpos_key instead of adding up",
                                lambda x: dict(dpos_key=overwritten(x))),
    table_gradient_of_batch_0=("dpos_key and dpos_query are those of batch entry 0", of_batch_0),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=5, R=6, dk=4, dv=7)
NEUTRAL = dict(mask=kit.no_mask, scale=0.25, max_position=None)


def padded(n):
    """Batch entries of 3 and 5 tokens: neither queries nor keys beyond see or are seen."""
    keys = padding([3, 5], n.T)
    return keys & keys.swapaxes(-1, -2)


def no_table(n):
    return np.zeros((n.H, n.R, n.dk))


CASES = dict(
    basic=dict(
        why="both tables, more tokens than they reach; every size differs and none is 1", sizes=SIZES, p2c="released",
        catches=("p2c_other_index", "distance_sign", "clipped_to_both_ends", "not_clipped", "tables_swapped",
                 "c2p_of_the_key", "p2c_not_transposed", "c2p_missing", "p2c_missing", "c2p_twice",
                 "positions_not_scaled", "scale_missing", "scale_without_terms", "tables_of_head_0",
                 "lse_of_content", "dq_of_content", "table_gradient_overwritten", "table_gradient_of_batch_0")),
    paper=dict(
        why="the last term as eq. 4 prints it", sizes=SIZES, p2c="paper",
        catches=("p2c_other_index", "p2c_not_transposed", "distance_sign")),
    short=dict(
        why="fewer tokens than the tables reach: they are not cut, or cut around row S", sizes=SIZES | dict(R=16),
        p2c="released", light=True, catches=("table_not_cut",)),
    just_fits=dict(
        why="T = S + 1: distance -S has a row of its own, S shares that of S - 1", sizes=SIZES | dict(T=4),
        p2c="released", light=True, catches=("clipped_to_both_ends", "not_clipped")),
    queries_meet_a_table=dict(
        why="one term, and the scale 1/sqrt(2 dk) of one", sizes=SIZES | dict(dk=8), pos_query=no_table,
        p2c="released", light=True, catches=("scale_of_three", "scale_without_terms", "tables_swapped")),
    keys_meet_a_table=dict(
        why="the other term alone", sizes=SIZES | dict(dk=8), pos_key=no_table, p2c="released", light=True,
        catches=("scale_of_three", "p2c_not_transposed", "distance_sign")),
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=SIZES | dict(T=1), p2c="released", light=True,
        shows=kit.returns_v),
    buckets=dict(
        why="distances of every bucket, at, before and after each edge and beyond the last", light=True,
        sizes=SIZES | dict(T=13, R=16), max_position=12, p2c="released",
        catches=("buckets_ignored", "bucket_floor", "bucket_log_base", "bucket_to_max_position")),
    buckets_and_padding=dict(
        why="buckets, the index of the paper and padding at once", sizes=SIZES | dict(T=6, R=8), max_position=5,
        p2c="paper", mask=padded, catches=("buckets_ignored", "mask_dropped")),
    causal=dict(
        why="a mask that hides one sign of distances", sizes=SIZES, mask=lambda n: causal(n.T, n.T)[None, None],
        p2c="released", light=True, catches=("mask_dropped", "distance_sign")),
    padded_rows=dict(
        why="padded queries see nothing: o = 0, lse = -inf", sizes=SIZES, mask=padded, p2c="released",
        catches=("empty_row_uniform", "mask_dropped")),
    masked_nan=dict(
        why="NaN in keys and values that nobody may attend to", sizes=SIZES, mask=lambda n: padding([3, 3], n.T),
        p2c="released", change=lambda x: kit.nan_where(kit.hidden_keys(x["mask"]), x),
        catches=("masked_nan_poison",)),
    equal_widths=dict(kit.EQUAL_WIDTHS, sizes=SIZES | dict(dv=4), mask=kit.causal_of, p2c="released"),
    strided=dict(
        why="q, k and v are views of (B, T, H, d) memory", sizes=SIZES, p2c="released", light=True,
        change=kit.strided, shows=lambda x, y: not x["q"].flags.c_contiguous),
)
