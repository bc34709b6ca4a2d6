"""Relative position bias.                      Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155, section 3.2: the clip
                                                Liu et al. 2021, arXiv:2103.14030, section 3.2, eq. 4: a table of biases

    a_hij = scale q_hi . k_hj + table[h, index_ij]
    z_hi  = sum_{j: mask_ij} exp(a_hij)                                                         lse_hi = log z_hi
    o_hi  = sum_{j: mask_ij} exp(a_hij) v_hj / z_hi

The index is an input; it says which pairs share a row of the table, R of them, learned for every head.

    in a sequence    clip(j - p_i, -S, S) + S                p_i = i + offset, R = 2S + 1        `clipped_distance`
    in a window      (y_i - y_j + h - 1)(2w - 1) + x_i - x_j + w - 1     R = (2h - 1)(2w - 1)    `window_index`

Where code in the wild differs: Shaw counts key minus query, Swin query minus key; Swin keeps its table as (R, H); a
gather by a product with one-hot vectors reads every row, so NaN in one that no pair uses spreads.
"""
import numpy as np

from .. import kit
from ..core import per_head, scatter, softmax, unread
from ..masks import at_least, grid, packed
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", table="H R", index="int Tq Tk >=0 <R",
              mask="bool B? H? Tq? Tk?", scale="")
OUTPUTS = dict(o="B H Tq dv", lse="B H Tq")
STEPS = dict(distance_bias="H Tq Tk", biased="B H Tq Tk")
CONVENTIONS = dict(mask="True = may attend", bias="not scaled", layout="B H T d; table (H, R)",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, of biased scores",
                   masked_values="a key that no query may attend to, and a row that no pair has, are never read")


def clipped_distance(Tq, Tk, reach, offset=0):
    """(Tq, Tk) key minus query, j - (i + offset), from -reach in row 0 to reach in row 2 reach; beyond it is clipped.

    Raises ValueError unless reach >= 0.
    """
    at_least(0, reach=reach)
    i, j = grid(Tq, Tk)
    return np.clip(j - i - offset, -reach, reach) + reach


def window_index(height, width):
    """(T, T) for the T = height width tokens of a window of a picture, row by row: a row for every step (dy, dx).

    The step goes from the key to the query; dx varies fastest. Raises ValueError for an empty window.
    """
    at_least(1, height=height, width=width)
    y, x = np.divmod(np.arange(height * width), width)
    dy, dx = y[:, None] - y, x[:, None] - x
    return (dy + height - 1) * (2 * width - 1) + dx + width - 1


def dense(q, k, v, table, index, mask=True, *, scale):
    """o (B, H, Tq, dv) and lse (B, H, Tq), by the equations above. Raises ValueError for a shape that does not fit."""
    sizes(INPUTS, locals())
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2) + table[:, index], mask)
    return weights @ v, lse


def steps(q, k, table, index, mask=True, *, scale):
    """The bias (H, Tq, Tk) of every pair, and the biased scores (B, H, Tq, Tk), NaN where mask hides one."""
    biased = scale * q @ unread(k, mask).swapaxes(-1, -2) + table[:, index]
    return table[:, index], np.where(mask, biased, np.nan)


def rowwise(q, k, v, table, index, mask=True, *, scale):
    """One query after the other: each picks its own line of biases, and no (H, Tq, Tk) bias is stored."""
    n = sizes(INPUTS, locals())
    k, v, keep = unread(k, mask), unread(v, mask), np.broadcast_to(mask, [n[axis] for axis in ("B", "H", "Tq", "Tk")])
    o, lse = np.zeros((*q.shape[:3], n["dv"]), q.dtype), np.zeros(q.shape[:3], q.dtype)
    for i in range(n["Tq"]):
        s = (scale * k @ q[:, :, i, :, None])[..., 0] + np.take(table, index[i], 1)
        weights, lse[:, :, i] = softmax(s, keep[:, :, i])
        o[:, :, i] = (weights[:, :, None] @ v)[:, :, 0]
    return o, lse


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, table, index, mask, scale):
    """One query at a time: its biased scores and their maximum, then the weighted sum of the values it may see."""
    (Tq, dk), (Tk, dv) = q.shape, v.shape
    o, z, a = np.zeros((Tq, dv), q.dtype), np.zeros(Tq, q.dtype), np.zeros(Tk, q.dtype)
    lse = np.full(Tq, -np.inf, q.dtype)
    for i in range(Tq):
        m = lse[i]
        for j in range(Tk):
            if mask[i, j]:
                a[j] = table[index[i, j]]
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


def vjp(do, dlse, q, k, v, table, index, mask=True, *, scale):
    """Gradients of q, k, v and table for cotangents do (B, H, Tq, dv) and dlse (B, H, Tq)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    q, k, v = unread(q, np.swapaxes(np.atleast_2d(mask), -1, -2)), unread(k, mask), unread(v, mask)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2) + table[:, index], mask)
    dp = do @ v.swapaxes(-1, -2)
    da = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return dict(dq=scale * da @ k, dk=scale * da.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do,
                dtable=scatter(da, index, table.shape[1]).sum((0, 2)))


FORMS = dense, rowwise, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def bias_of(x):
    return x["table"][:, x["index"]]


def rows(x):
    return x["table"].shape[1]


def in_window(x, wrong):
    """The formula with wrong(dy, dx, height, width) in place of the index, where that is the one of a window."""
    T = x["k"].shape[2]
    for height in range(1, T + 1):
        width = T // height
        if height * width == T and np.array_equal(x["index"], window_index(height, width)):
            dy, dx = np.divmod(x["index"], 2 * width - 1)
            return but(x, index=wrong(dy, dx, height, width))
    return dense(**x)


def by_one_hot(x):
    """The bias by a product with one-hot vectors."""
    one_hot = (x["index"][..., None] == np.arange(rows(x))).astype(x["q"].dtype)
    return (one_hot @ x["table"].T).transpose(2, 0, 1)


BUGS = dict(
    index_mirrored=("the sign of the distance is the other one: the table is read from its end",
                    lambda x: but(x, index=rows(x) - 1 - x["index"])),
    index_one_off=("rows are counted from 1: each pair reads the row before its own, the first the last",
                   lambda x: but(x, index=(x["index"] - 1) % rows(x))),
    table_read_as_rows=("memory of shape (H, R) is read as (R, H)",
                        lambda x: but(x, table=x["table"].reshape(x["table"].shape[::-1]).T)),
    window_row_stride=("a step down is worth 2h - 1 rows of the table, not 2w - 1", lambda x: in_window(
        x, lambda dy, dx, h, w: (dy * (2 * h - 1) + dx) % rows(x))),
    window_axes_swapped=("steps down and steps across change places",
                         lambda x: in_window(x, lambda dy, dx, h, w: dx * (2 * h - 1) + dy)),
    window_offset_missing=("w - 1 is not added: a step to the left reads from the line above", lambda x: in_window(
        x, lambda dy, dx, h, w: (dy * (2 * w - 1) + dx - w + 1) % rows(x))),
    unread_row_poison=("a product with one-hot vectors reads every row: 0 * NaN",
                       lambda x: kit.attend(x, kit.scores(x) + by_one_hot(x))),
    **kit.bias_mistakes(dense, bias_of),
)
VJP_BUGS = dict(
    dtable_overwritten=("pairs that share a row overwrite each other in dtable instead of adding up",
                        lambda x: dict(dtable=kit.overwritten(
                            kit.score_gradient(x, kit.scores(x) + bias_of(x)), x["index"], rows(x)))),
    dtable_mean=("dtable is the mean over the pairs that share a row, not the sum", lambda x: dict(
        dtable=vjp(**x)["dtable"] / np.maximum(1, np.bincount(x["index"].ravel(), minlength=rows(x))).astype(
            x["q"].dtype))),
    **kit.bias_gradient_mistakes(vjp, bias_of, "dtable"),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=5, Tk=6, dk=4, dv=8, R=7)
WINDOW = SIZES | dict(Tq=6, Tk=6, R=15)
NEUTRAL = dict(mask=kit.no_mask, index=lambda n: clipped_distance(n.Tq, n.Tk, n.R // 2), scale=0.5)
IRREGULAR = np.array([[3, 0, 5, 5, 1, 0], [6, 6, 3, 1, 0, 5], [1, 3, 3, 3, 6, 0], [0, 5, 1, 6, 6, 3],
                      [5, 1, 0, 0, 3, 6]])


def unread_rows(x):
    """NaN in the rows of the table that no pair has."""
    return dict(table=np.where(np.isin(np.arange(rows(x)), x["index"]), x["table"], np.nan))


CASES = dict(
    basic=dict(
        why="distances -3 to 3 and what is beyond, on both sides; every size differs and none is 1", sizes=SIZES,
        catches=("index_mirrored", "index_one_off", "table_read_as_rows", "bias_ignored", "bias_added_twice",
                 "bias_sign", "bias_before_scale", "exp2_bias_not_rescaled", "bias_of_head_0", "scale_missing",
                 "softmax_over_queries", "lse_without_bias", "lse_base_2", "dtable_overwritten", "dtable_mean",
                 "dtable_lost", "dtable_scaled", "dtable_of_batch_0", "jacobian_term_missing", "dq_scale_missing",
                 "dlse_ignored")),
    window=dict(
        why="a window of 2 by 3 tokens of a picture", sizes=WINDOW, index=window_index(2, 3),
        catches=("window_row_stride", "window_axes_swapped", "window_offset_missing", "index_mirrored",
                 "table_read_as_rows")),
    tall_window=dict(
        why="3 by 2 tokens: as many rows, another index", sizes=WINDOW, light=True, index=window_index(3, 2),
        catches=("window_row_stride", "window_axes_swapped", "window_offset_missing")),
    shifted_window=dict(
        why="a window that wraps around the picture: its left two columns do not see the third", sizes=WINDOW,
        index=window_index(2, 3), mask=packed([0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 1])[None, None],
        catches=("mask_dropped", "window_row_stride", "dtable_overwritten")),
    cache=dict(
        why="two queries at the end of nine keys, causal: the clip is to one side", sizes=SIZES | dict(Tq=2, Tk=9),
        index=lambda n: clipped_distance(n.Tq, n.Tk, 3, n.Tk - n.Tq), mask=kit.causal_of, light=True,
        conventions=dict(causal="bottom-right"), catches=("index_mirrored", "mask_dropped")),
    all_distances=dict(
        why="a table that reaches the furthest pair: nothing is clipped", sizes=SIZES | dict(R=11), light=True,
        shows=lambda x, y: len(np.unique(x["index"])) == x["q"].shape[2] + x["k"].shape[2] - 1),
    irregular=dict(
        why="an index without structure; rows 2 and 4, which no pair has, are NaN", sizes=SIZES, index=IRREGULAR,
        change=unread_rows, catches=("unread_row_poison", "dtable_mean")),
    one_row=dict(
        why="one row for all pairs moves lse and nothing else", sizes=SIZES | dict(R=1), light=True,
        catches=("lse_without_bias", "bias_sign")),
    empty_row=dict(
        why="a row without keys among others", sizes=SIZES, mask=kit.but_row_1,
        catches=("empty_row_nan",)),
    masked_nan=dict(
        why="NaN in a key and a value that nobody may attend to", sizes=SIZES, light=True,
        mask=lambda n: (np.arange(n.Tk) != 2)[None, None, None], change=lambda x: kit.nan_where(
            kit.hidden_keys(x["mask"]), x), catches=("masked_nan_poison",)),
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=dict(B=1, H=1, Tq=1, Tk=1, dk=1, dv=1, R=1), light=True,
        shows=kit.returns_v),
    no_keys=dict(
        why="Tk = 0 is legal: o = 0, lse = -inf", sizes=SIZES | dict(Tk=0), light=True, shows=kit.sees_nothing),
)
