"""Sliding window and global tokens (Longformer).            Beltagy et al. 2020, arXiv:2004.05150, section 3.1, eq. 1

    local i     N(i) = { j kept : j = i + t D with |t| <= w, or j global }     s_ij = scale q_i . k_j         u_j = v_j
    global i    N(i) = { j kept }                                              s_ij = scale q'_i . k'_j       u_j = v'_j
    padded i    N(i) = {}
    z_i = sum_{j in N(i)} exp(s_ij)         lse_i = log z_i         o_i = sum_{j in N(i)} exp(s_ij) u_j / z_i

q', k', v' are q_global, k_global, v_global; D is the dilation of the head, w half a window. N(i) is a set: a global key
inside the window counts once. Where the paper is silent the code of its authors decides: a local query looks at a
global key by the local projections, and a padded query gives 0. Where code in the wild differs: a window of w keys is
w/2 each side (the paper, transformers) or w each side (the code of its authors); transformers has no dilation.
"""
import numpy as np

from .. import kit
from ..core import gather, per_head, softmax, unread
from ..masks import window
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H T dk", k="B H T dk", v="B H T dv", q_global="B H T dk", k_global="B H T dk", v_global="B H T dv",
              is_global="bool B T", keep="bool B T", half_window="int >=0", dilation="int H? >=1", scale="")
OUTPUTS = dict(o="B H T dv", lse="B H T")
STEPS = dict(scores="B H T T", weights="B H T T")
CONVENTIONS = dict(window="keys on each side of the query's own, in steps of dilation",
                   is_global="True = sees every token and is seen by all; on padding it means nothing",
                   keep="True = the token is there", empty_row="a padded query: o = 0, lse = -inf, gradients 0",
                   lse="natural log", layout="B H T d",
                   masked_values="what no row looks at is never read: padding, q of a global token, q_global of others")


def allowed(is_global, keep, half_window, dilation):
    """The keys of local rows (B, H or 1, T, T) and those of global rows (B, 1, T, T); other rows are empty."""
    T = keep.shape[1]
    near = window(T, T, half_window, half_window, np.reshape(dilation, (-1, 1, 1)))
    both_kept = keep[:, None, :, None] & keep[:, None, None, :]
    row, key = is_global[:, None, :, None], is_global[:, None, None, :]
    return both_kept & ~row & (near | key), both_kept & row


def attend(q, k, v, mask, scale):
    """o (B, H, T, dv) and lse (B, H, T) under a mask; a row without keys is 0 and -inf."""
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    return weights @ v, lse


def dense(q, k, v, q_global, k_global, v_global, is_global, keep, *, half_window, dilation=1, scale):
    """o (B, H, T, dv) and lse (B, H, T), by the equations above. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    local_keys, global_keys = allowed(is_global, keep, half_window, dilation)
    o, lse = attend(q, k, v, local_keys, scale)
    o_global, lse_global = attend(q_global, k_global, v_global, global_keys, scale)
    row = is_global[:, None]
    return np.where(row[..., None], o_global, o), np.where(row, lse_global, lse)


def steps(q, k, q_global, k_global, is_global, keep, *, half_window, dilation=1, scale):
    """scores, NaN for a pair that does not meet, and weights, each (B, H, T, T)."""
    local_keys, global_keys = allowed(is_global, keep, half_window, dilation)
    mask, k, k_global = local_keys | global_keys, unread(k, local_keys), unread(k_global, global_keys)
    scores = scale * np.where(is_global[:, None, :, None], q_global @ k_global.swapaxes(-1, -2), q @ k.swapaxes(-1, -2))
    return np.where(mask, scores, np.nan), softmax(scores, mask)[0]


def global_tokens(is_global, keep):
    """Positions (B, 1, G) of the global tokens, T where an entry has fewer, and the place (B, 1, T) of each, or -1."""
    T, found = keep.shape[1], is_global & keep
    positions = np.sort(np.where(found, np.arange(T), T), axis=1)[:, :found.sum(1).max(initial=0)]
    return positions[:, None], np.where(found, found.cumsum(1) - 1, -1)[:, None]


def band(q, k, v, q_global, k_global, v_global, is_global, keep, *, half_window, dilation=1, scale):
    """As dense, in O(T (w + G)): the diagonals and the global columns side by side in one softmax, then global rows."""
    T = sizes(INPUTS, locals())["T"]
    local, there = (keep & ~is_global)[:, None, :, None], keep[:, None, None]
    tokens, place = global_tokens(is_global, keep)
    k, v, k_global, v_global = (unread(x, there) for x in (k, v, k_global, v_global))
    w = min(half_window, max(0, T - 1))
    keys = [np.arange(T) + t * np.reshape(dilation, (-1, 1)) for t in range(-w, w + 1)]
    near = [np.where(gather(local, j)[..., 0], scale * (q * gather(k, j)).sum(-1), -np.inf) for j in keys]
    far = np.where((tokens < T)[:, :, None], scale * q @ gather(k, tokens).swapaxes(-1, -2), -np.inf)
    p, lse = softmax(np.concatenate([np.stack(near, -1), far], -1), local)
    o = sum(p[..., t, None] * gather(v, j) for t, j in enumerate(keys)) + p[..., len(keys):] @ gather(v, tokens)
    p, lse_global = softmax(scale * gather(q_global, tokens) @ k_global.swapaxes(-1, -2), there)
    return (np.where(local, o, gather(p @ v_global, place)),
            np.where(place < 0, lse, gather(lse_global[..., None], place)[..., 0]))


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, q_global, k_global, v_global, is_global, keep, half_window, dilation, scale):
    """One query at a time: N keys that are kept for a global one; G global keys, then its window, for a local one."""
    (T, dk), dv, reach = q.shape, v.shape[1], half_window * dilation
    o, z, a = np.zeros((T, dv), q.dtype), np.zeros(T, q.dtype), np.zeros(T, q.dtype)
    lse, kept, near, N, G = np.full(T, -np.inf, q.dtype), np.zeros(T, np.int64), np.zeros(T, np.int64), 0, 0
    for j in range(T):
        if keep[j]:
            kept[N] = j
            N += 1
            if is_global[j]:
                near[G] = j
                G += 1
    for i in range(T):
        if not keep[i]:
            continue
        Q, K, V, keys, n = (q_global, k_global, v_global, kept, N) if is_global[i] else (q, k, v, near, G)
        if not is_global[i]:
            for j in range(max(i % dilation, i - reach), min(T, i + reach + 1), dilation):
                if keep[j] and not is_global[j]:
                    keys[n] = j
                    n += 1
        m = lse[i]
        for e in range(n):
            a[e] = 0
            for c in range(dk):
                a[e] += scale * Q[i, c] * K[keys[e], c]
            if a[e].real > m.real:
                m = a[e]
        for e in range(n):
            p = np.exp(a[e] - m)
            z[i] += p
            for c in range(dv):
                o[i, c] += p * V[keys[e], c]
        o[i] /= z[i]
        lse[i] = m + np.log(z[i])
    return o, lse


def backward(do, dlse, q, k, v, mask, scale):
    """Gradients of q, k and v of `attend`; rows that the mask leaves empty send none."""
    q, k, v = unread(q, mask.swapaxes(-1, -2)), unread(k, mask), unread(v, mask)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do


def vjp(do, dlse, q, k, v, q_global, k_global, v_global, is_global, keep, *, half_window, dilation=1, scale):
    """Gradients of the six arrays for cotangents do (B, H, T, dv) and dlse (B, H, T): local rows, then global ones."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    local_keys, global_keys = allowed(is_global, keep, half_window, dilation)
    dq, dk, dv = backward(do, dlse, q, k, v, local_keys, scale)
    dq_global, dk_global, dv_global = backward(do, dlse, q_global, k_global, v_global, global_keys, scale)
    return dict(dq=dq, dk=dk, dv=dv, dq_global=dq_global, dk_global=dk_global, dv_global=dv_global)


FORMS = dense, band, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

LOCAL, GLOBAL = ("q", "k", "v"), ("q_global", "k_global", "v_global")


def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def masks_of(x, **changes):
    """The keys of local and of global rows of a case, or of changed arguments."""
    return allowed(*((x | changes)[name] for name in ("is_global", "keep", "half_window", "dilation")))


def join(x, local, wide):
    """(o, lse) of local rows and (o, lse) of global rows in one."""
    row = x["is_global"][:, None]
    return np.where(row[..., None], wide[0], local[0]), np.where(row, wide[1], local[1])


def rows(x, names, mask, scale=None):
    """Attention by the named projections under a wrong mask; NaN in what nobody may read counts as 0."""
    return attend(*(kit.plain(x[name]) for name in names), mask, x["scale"] if scale is None else scale)


def near(x):
    """(B, H or 1, T, T) the window alone, for every row."""
    return masks_of(x, is_global=np.zeros_like(x["is_global"]))[0]


def local_under(x, change):
    """The outputs when change(mask, key is global) is the mask of local rows, and all else is right."""
    mask, wide = masks_of(x)
    return join(x, rows(x, LOCAL, change(mask, x["is_global"][:, None, None])), rows(x, GLOBAL, wide))


def wide_under(x, names=GLOBAL, mask=None, scale=None):
    """The outputs when global rows take other projections, another mask or another scale, and all else is right."""
    local, wide = masks_of(x)
    return join(x, rows(x, LOCAL, local), rows(x, names, wide if mask is None else mask, scale))


def counted_twice(x):
    """The score of a global key that stands in the window enters the softmax twice: log 2 more."""
    mask, wide = masks_of(x)
    twice = (near(x) & x["is_global"][:, None, None]).astype(x["q"].dtype)
    q, k, v = (kit.plain(x[name]) for name in LOCAL)
    p, lse = softmax(x["scale"] * q @ k.swapaxes(-1, -2) + kit.LN2 * twice, mask)
    return join(x, (p @ v, lse), rows(x, GLOBAL, wide))


def keys_by_global_projection(x):
    """Local queries meet k_global and v_global at the global keys."""
    at, (mask, wide) = x["is_global"][:, None, :, None], masks_of(x)
    mixed = x | dict(k=np.where(at, x["k_global"], x["k"]), v=np.where(at, x["v_global"], x["v"]))
    return join(x, rows(mixed, LOCAL, mask), rows(x, GLOBAL, wide))


def two_softmaxes(x, share):
    """One softmax over the window and one over the global keys: o is their sum times share."""
    mask, wide = masks_of(x)
    key = x["is_global"][:, None, None]
    (a, _), (b, _) = rows(x, LOCAL, mask & ~key), rows(x, LOCAL, mask & key)
    return join(x, (share * (a + b), 0), rows(x, GLOBAL, wide))[:1]


def as_local(x):
    """What global rows would see if they were local: their window and the global keys."""
    key = (x["keep"] & x["is_global"])[:, None, None]
    return (near(x) | key) & key.swapaxes(-1, -2)


def batch_0(flags):
    """The flags of batch entry 0 for every entry."""
    return np.broadcast_to(flags[:1], flags.shape)


def at_padding(x, y, o, lse=-np.inf):
    """Right outputs but for those of padded queries."""
    pad = ~x["keep"][:, None]
    return np.where(pad[..., None], o, y[0]), np.where(pad, lse, y[1])


def padded_computed(x):
    """Padded queries are local rows like others."""
    mask, _ = masks_of(x, keep=np.ones_like(x["keep"]), is_global=x["is_global"] & x["keep"])
    return at_padding(x, dense(**x), *rows(x, LOCAL, mask & x["keep"][:, None, None]))


BUGS = dict(
    global_counted_twice=("a global key inside the window is in the softmax twice", counted_twice),
    global_keys_by_global_projection=("a local query looks at a global key by the global projections",
                                      keys_by_global_projection),
    global_columns_missing=("local rows see their window only",
                            lambda x: local_under(x, lambda mask, key: mask & near(x))),
    global_rows_missing=("a global query looks at its window and the global keys, like a local one",
                         lambda x: wide_under(x, LOCAL, as_local(x))),
    global_rows_by_local_projection=("global rows use the local projections", lambda x: wide_under(x, LOCAL)),
    global_rows_local_keys=("global rows use q_global, but the local keys and values",
                            lambda x: wide_under(x, ("q_global", "k", "v"))),
    global_rows_unscaled=("the scores of global rows are not scaled", lambda x: wide_under(x, scale=1.0)),
    global_of_batch_0=("the global tokens of batch entry 0 serve every entry",
                       lambda x: but(x, is_global=batch_0(x["is_global"]))),
    global_padding_seen=("a global flag on padding makes it a key of local rows", lambda x: local_under(
        x, lambda mask, key: mask | key & (x["keep"] & ~x["is_global"])[:, None, :, None])),
    window_one_sided=("the window has no right side", lambda x: local_under(
        x, lambda mask, key: mask & (key | np.tri(mask.shape[-1], dtype=bool)))),
    window_halved=("half_window is read as both sides together", lambda x: but(x, half_window=x["half_window"] // 2)),
    dilation_ignored=("the window has no gaps", lambda x: but(x, dilation=1)),
    dilation_of_head_0=("the dilation of head 0 serves every head",
                        lambda x: but(x, dilation=np.ravel(x["dilation"])[:1])),
    padding_seen_by_local_rows=("padded keys take part in the softmax of local rows", lambda x: local_under(
        x, lambda mask, key: masks_of(x, keep=np.ones_like(x["keep"]))[0] & x["keep"][:, None, :, None])),
    padding_seen_by_global_rows=("padded keys take part in the softmax of global rows", lambda x: wide_under(
        x, mask=(x["keep"] & x["is_global"])[:, None, :, None])),
    padding_of_batch_0=("the padding of batch entry 0 serves every entry", lambda x: but(x, keep=batch_0(x["keep"]))),
    padded_query_computed=("a padded query is computed like a local one", padded_computed),
    padded_query_uniform=("a padded query gives the mean of all values",
                          lambda x: at_padding(x, dense(**x), kit.mean_value(x["v"]))[:1]),
    padded_query_nan=("a padded query is 0/0", lambda x: at_padding(x, dense(**x), np.nan)[:1]),
    empty_row_lse_zero=("lse of a padded query is 0", lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    masked_nan_poison=("0 * NaN: a value that no row looks at is read", lambda x: join(
        x, *((softmax(x["scale"] * x[q] @ kit.plain(x[k]).swapaxes(-1, -2), mask)[0] @ x[v], 0)
             for (q, k, v), mask in zip((LOCAL, GLOBAL), masks_of(x))))[:1]),
    softmaxes_added=("the window and the global keys have a softmax each, and the results are added",
                     lambda x: two_softmaxes(x, 1.0)),
    softmaxes_averaged=("the window and the global keys have a softmax each, and the results are averaged",
                        lambda x: two_softmaxes(x, 0.5)),
    lse_of_window=("lse of local rows leaves the global keys out", lambda x: (
        dense(**x)[0], local_under(x, lambda mask, key: mask & near(x))[1])),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
)


def through_both(x):
    """Gradients when a global row sends its cotangents through the local result, which it overwrites, as well."""
    mask = masks_of(x)[0] | as_local(x)
    return dict(zip(("dq", "dk", "dv"), backward(x["do"], x["dlse"], x["q"], x["k"], x["v"], mask, x["scale"])))


def local_without_columns(x):
    """dk and dv when the weights on the global columns are taken as constants."""
    right, columns = vjp(**x), x["is_global"][:, None, :, None]
    return dict(dk=np.where(columns, 0, right["dk"]), dv=np.where(columns, 0, right["dv"]))


VJP_BUGS = dict(
    overwritten_rows_send_gradient=("a global row sends its gradient through the local result it overwrites too",
                                    through_both),
    global_columns_without_gradient=("local rows send no gradient to the global keys", local_without_columns),
    dq_scale_missing=("dQ is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dq_global_scale_missing=("the gradient of q_global is not multiplied by scale",
                             lambda x: dict(dq_global=vjp(**x)["dq_global"] / x["scale"])),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
    padded_query_gradient_nan=("0 * NaN in the backward of a padded query", lambda x: dict(
        dq=np.where(x["keep"][:, None, :, None], vjp(**x)["dq"], np.nan))),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=9, dk=4, dv=5)
NEUTRAL = dict(is_global=lambda n: np.zeros((n.B, n.T), bool), keep=lambda n: np.ones((n.B, n.T), bool),
               dilation=lambda n: np.ones(1, int), scale=lambda n: n.dk ** -0.5)
GLOBALS = np.array([[0, 0, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 1, 1, 0]], bool)
KEPT = np.array([[1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1, 1, 0]], bool)


def never_read(x):
    """NaN wherever no row looks: in keys and values, and in the queries of empty rows, of either kind."""
    local, wide = masks_of(x)
    return (kit.nan_where(kit.hidden_keys(local), x, "kv") | kit.nan_where(kit.empty_rows(local), x, "q")
            | kit.nan_where(kit.hidden_keys(wide), x, GLOBAL[1:]) | kit.nan_where(kit.empty_rows(wide), x, GLOBAL[:1]))


CASES = dict(
    basic=dict(
        why="every size differs and none is 1; one global token in one entry, three in the other, some in a window",
        sizes=SIZES, is_global=GLOBALS, half_window=2,
        catches=("global_counted_twice", "global_keys_by_global_projection", "global_columns_missing",
                 "global_rows_missing", "global_rows_by_local_projection", "global_rows_local_keys",
                 "global_rows_unscaled", "global_of_batch_0", "window_one_sided", "window_halved", "softmaxes_added",
                 "softmaxes_averaged", "lse_of_window", "lse_base_2", "scale_missing",
                 "overwritten_rows_send_gradient", "global_columns_without_gradient", "dq_scale_missing",
                 "dq_global_scale_missing", "dlse_sign")),
    padding=dict(
        why="padding at the end and in the middle, beside global tokens", sizes=SIZES, is_global=GLOBALS, keep=KEPT,
        half_window=1, catches=(
            "padding_seen_by_local_rows", "padding_seen_by_global_rows", "padding_of_batch_0", "padded_query_computed",
            "padded_query_uniform", "padded_query_nan", "empty_row_lse_zero", "padded_query_gradient_nan")),
    global_on_padding=dict(
        why="a global flag on padding means nothing", sizes=SIZES, light=True, keep=KEPT, half_window=1,
        is_global=GLOBALS | ~KEPT, catches=("global_padding_seen", "padded_query_uniform")),
    dilated=dict(
        why="gaps of another width for each head, and padding", sizes=SIZES, is_global=GLOBALS, keep=KEPT,
        half_window=2, dilation=np.array([2, 1, 3]), catches=("dilation_ignored", "dilation_of_head_0")),
    never_read=dict(
        why="NaN wherever no row looks", sizes=SIZES, is_global=GLOBALS, keep=KEPT, half_window=1, change=never_read,
        catches=("masked_nan_poison",)),
    no_globals=dict(
        why="without global tokens a window is left, and the global projections are never read", sizes=SIZES,
        light=True, half_window=1, change=never_read,
        shows=lambda x, y: all(np.isnan(x[name]).all() for name in GLOBAL), catches=("window_one_sided",)),
    all_global=dict(
        why="with all tokens global every row is full, and the local projections are never read", sizes=SIZES,
        light=True, is_global=np.ones((2, 9), bool), half_window=1, change=never_read,
        shows=lambda x, y: all(np.isnan(x[name]).all() for name in LOCAL)),
    first_token=dict(
        why="the first token alone is global, as a class token is", sizes=SIZES, light=True, half_window=2,
        is_global=np.arange(9) < np.ones((2, 1)), catches=("global_counted_twice", "global_columns_missing")),
    self_and_globals=dict(
        why="a window of the own key alone", sizes=SIZES, light=True, is_global=GLOBALS, half_window=0,
        catches=("global_columns_missing",)),
    hardly_any_token=dict(
        why="an entry without any token, and one with a single token: o is v there", sizes=SIZES, light=True,
        keep=np.arange(9) < np.array([[0], [1]]), is_global=GLOBALS[::-1], half_window=1,
        shows=lambda x, y: (y["o"][0] == 0).all() and (y["lse"][0] == -np.inf).all()
        and (y["o"][1, :, 0] == x["v"][1, :, 0]).all()),
    reaches_all=dict(
        why="just wide enough to hide nothing: global columns add nothing", sizes=SIZES, light=True,
        is_global=GLOBALS, half_window=8, shows=lambda x, y: (masks_of(x)[0] | masks_of(x)[1]).all(),
        catches=("global_counted_twice", "window_halved")),
    wider_than_tokens=dict(
        why="a window wider than the sequence", sizes=SIZES | dict(T=6), light=True, is_global=GLOBALS[:, :6],
        half_window=20, catches=("global_counted_twice",)),
    long=dict(
        why="more tokens than a few windows, in no multiple of one", sizes=SIZES | dict(B=1, H=1, T=23), light=True,
        half_window=3, is_global=np.isin(np.arange(23), (0, 7, 8, 20))[None], keep=(np.arange(23) < 22)[None],
        catches=("global_counted_twice", "padded_query_nan")),
    one_token=dict(
        why="a single token sees itself: o is v", sizes=dict(B=1, H=1, T=1, dk=1, dv=1), half_window=1, light=True,
        shows=kit.returns_v),
)
