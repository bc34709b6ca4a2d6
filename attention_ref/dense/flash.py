"""Attention in tiles: the online softmax, FlashAttention, and the split over keys with its merge.

Milakov & Gimelshein 2018, arXiv:1805.02867, Alg. 3; FlashAttention: Dao et al. 2022, arXiv:2205.14135, Alg. 1 and 4;
FlashAttention-2: Dao 2023, arXiv:2307.08691, Alg. 1 and 2; Flash-Decoding: Dao, Haziza, Massa, Sizov 2023

    s_ij  = scale q_i . k_j         z_i = sum_{j: mask_ij} exp(s_ij) + exp(sink)         lse_i = log z_i
    p_ij  = exp(s_ij) / z_i  where mask_ij, else 0                                       o_i   = sum_j p_ij v_j

    online    m = sink, z = 1, o = 0, then for every tile of keys:      at the end  o = o / z,  lse = m + log z
              m' = max(m, max_j s_ij)      c = exp(m - m')      p_ij = exp(s_ij - m')
              z  = c z + sum_j p_ij        o = c o + sum_j p_ij v_j                      m = m'
    merge     lse = log sum_p exp(lse_p)   o = sum_p exp(lse_p - lse) o_p                over disjoint sets p of keys
    backward  p_ij = exp(s_ij - lse_i)     D_i = do_i . o_i - dlse_i                     ds_ij = p_ij (do_i . v_j - D_i)

The definition has no tiles, and no tile size changes the result. Where code in the wild differs: o is divided by z
after every tile (2022) or once (2023); a row without keys (here o = 0, lse = -inf) gets lse = +inf from CUDA kernels
and 0 from the CPU kernel of torch, and neither may be merged; some kernels that use exp2 keep lse in base 2.
"""
import numpy as np

from .. import kit
from ..core import per_head, per_row, softmax, sum_to, unread
from ..masks import blocks, padding
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", mask="bool B? H? Tq? Tk?", sink="H?", scale="",
              query_block="int >=1", key_block="int >=1")
OUTPUTS = dict(o="B H Tq dv", lse="B H Tq")
CONVENTIONS = dict(mask="True = may attend", empty_row="o = 0, lse = -inf, gradients 0", layout="B H T d",
                   lse="natural log, sink included", sink="counted once, however many tiles there are",
                   tiles="the last one may be short", masked_values="a key that no query may attend to is never read")


def dense(q, k, v, mask=True, sink=-np.inf, *, scale, query_block=64, key_block=64):
    """o (B, H, Tq, dv) and lse (B, H, Tq), as in the definition; raises ValueError for a shape that does not fit."""
    sizes(INPUTS, locals())
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2), mask, per_row(sink, q))
    return weights @ v, lse


def tiles(T, block):
    """The positions 0..T-1 in runs of `block`; the last may be short."""
    return [np.arange(start, min(start + block, T)) for start in range(0, T, block)]


def tile(mask, i, j):
    """The mask (..., n, m) at query positions i (n,) and key positions j (m,).

    mask is a boolean array, broadcastable to (B, H, Tq, Tk), or a function of i (n, 1) and j (m,) that returns the
    tile, as lambda i, j: j <= i does: then nothing of size Tq Tk is ever stored.
    """
    if callable(mask):
        return mask(i[:, None], j)
    mask = np.atleast_2d(mask)
    return mask[..., np.minimum(i, mask.shape[-2] - 1)[:, None], np.minimum(j, mask.shape[-1] - 1)]


def tiled_sizes(schema, arguments):
    """The sizes of a call in which mask may be a function; raises ValueError as `sizes` does."""
    return sizes(schema, arguments | dict(mask=True) if callable(arguments["mask"]) else arguments)


def finite(m):
    """A maximum to subtract: 0 where there is none."""
    return np.where(m == -np.inf, 0, m)


def online(q, k, v, mask=True, sink=-np.inf, *, scale, query_block=64, key_block=64):
    """As dense, tile by tile in O(Tq + Tk) memory; mask may be a function (see `tile`)."""
    n = tiled_sizes(INPUTS, locals())
    out, lse = np.zeros((*q.shape[:3], n["dv"]), q.dtype), np.zeros(q.shape[:3], q.dtype)
    for i in tiles(n["Tq"], query_block):
        m, z, o = per_row(sink, q), 1.0, 0.0
        for j in tiles(n["Tk"], key_block):
            keep = tile(mask, i, j)
            k_j, v_j = unread(k[:, :, j], keep), unread(v[:, :, j], keep)
            s = np.where(keep, scale * q[:, :, i] @ k_j.swapaxes(-1, -2), -np.inf)
            new = np.maximum(m, s.max(-1, keepdims=True))
            c, p = np.exp(m - finite(new)), np.exp(s - finite(new))
            z = c * z + p.sum(-1, keepdims=True)
            o = c * o + p @ v_j
            m = new
        z = np.where(m == -np.inf, 1, z)                                    # no key and no sink: o = 0, lse = -inf
        out[:, :, i], lse[:, :, i] = o / z, (m + np.log(z))[..., 0]
    return out, lse


def merge(o, lse):
    """Attention to all keys from attention to disjoint sets of them: o [(B, H, Tq, dv), ...] and lse [(B, H, Tq), ...].

    It is attention to the parts, with logits lse_p (natural log) and values o_p: associative and commutative. A set
    without keys, lse_p = -inf, is not read. A sink belongs to exactly one part. Raises ValueError where shapes differ.
    """
    o, lse = np.stack(o, -2), np.stack(lse, -1)
    sizes(dict(o="B H Tq parts dv", lse="B H Tq parts"), locals())
    logits = lse[..., None, :]
    weights, total = softmax(logits)
    return (weights @ unread(o, logits != -np.inf))[..., 0, :], total[..., 0]


def merge_vjp(do, dlse, o, lse):
    """Gradients of `merge`, lists: do_p = w_p do, dlse_p = w_p (do . (o_p - o) + dlse) with w_p = exp(lse_p - lse)."""
    whole, total = merge(o, lse)
    w = [np.exp(part - finite(total)) for part in lse]
    return dict(do=[w_p[..., None] * do for w_p in w],
                dlse=[w_p * ((do * (o_p - whole)).sum(-1) + dlse) for w_p, o_p in zip(w, o)])


def parts(q, k, v, keep, sink, scale, key_block):
    """Partial (o, lse) to be merged: the sink, a part without keys, then every tile of keys attended on its own."""
    return [dense(q, k[:, :, :0], v[:, :, :0], sink=sink, scale=scale),
            *(dense(q, k[:, :, j], v[:, :, j], keep[..., j], scale=scale) for j in tiles(k.shape[2], key_block))]


def split(q, k, v, mask=True, sink=-np.inf, *, scale, query_block=64, key_block=64):
    """As dense: each tile of keys on its own, as parallel workers do it, then merged; mask as for `online`."""
    n = tiled_sizes(INPUTS, locals())
    out, lse = np.zeros((*q.shape[:3], n["dv"]), q.dtype), np.zeros(q.shape[:3], q.dtype)
    for i in tiles(n["Tq"], query_block):
        keep = tile(mask, i, np.arange(n["Tk"]))
        out[:, :, i], lse[:, :, i] = merge(*zip(*parts(q[:, :, i], k, v, keep, sink, scale, key_block)))
    return out, lse


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, mask, sink, scale, query_block, key_block):
    """One query at a time, one pass over its keys; z = 1 is the sink, and the first key wipes it if there is none."""
    (Tq, dk), (Tk, dv) = q.shape, v.shape
    o, lse = np.zeros((Tq, dv), q.dtype), np.zeros(Tq, q.dtype)
    for i in range(Tq):
        m, z = sink, 1.0
        for j in range(Tk):
            if mask[i, j]:
                s = 0.0
                for c in range(dk):
                    s += scale * q[i, c] * k[j, c]
                if s.real > m.real:
                    r = np.exp(m - s)
                    m, z = s, r * z
                    for c in range(dv):
                        o[i, c] *= r
                p = np.exp(s - m)
                z += p
                for c in range(dv):
                    o[i, c] += p * v[j, c]
        for c in range(dv):
            o[i, c] /= z
        lse[i] = m + np.log(z)
    return o, lse


def for_backward(lse):
    """lse with +inf for a row without keys, so that exp(s - lse) = 0."""
    return np.where(lse == -np.inf, np.inf, lse)


def backward(do, D, lse, q, k, v, mask, *, scale, query_block, key_block):
    """dq, dk, dv tile by tile from do, D (B, H, Tq) and lse (B, H, Tq) as `for_backward` gives it."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in tiles(k.shape[2], key_block):
        for i in tiles(q.shape[2], query_block):
            keep = tile(mask, i, j)
            q_i, do_i = unread(q[:, :, i], keep.swapaxes(-1, -2)), do[:, :, i]
            k_j, v_j = unread(k[:, :, j], keep), unread(v[:, :, j], keep)
            s = np.where(keep, scale * q_i @ k_j.swapaxes(-1, -2), -np.inf)
            p = np.exp(s - lse[:, :, i, None])
            ds = p * (do_i @ v_j.swapaxes(-1, -2) - D[:, :, i, None])
            dq[:, :, i] += scale * ds @ k_j
            dk[:, :, j] += scale * ds.swapaxes(-1, -2) @ q_i
            dv[:, :, j] += p.swapaxes(-1, -2) @ do_i
    return dq, dk, dv


def vjp(do, dlse, q, k, v, mask=True, sink=-np.inf, *, scale, query_block=64, key_block=64):
    """Gradients of q, k, v and sink for cotangents do (B, H, Tq, dv) and dlse (B, H, Tq): p is never stored.

    The forward keeps o and lse, and the backward computes every tile of p anew; mask as for `online`.
    """
    tiled_sizes(INPUTS | cotangents(OUTPUTS), locals())
    options = dict(scale=scale, query_block=query_block, key_block=key_block)
    o, lse = online(q, k, v, mask, sink, **options)
    D, lse = (do * o).sum(-1) - dlse, for_backward(lse)
    dq, dk, dv = backward(do, D, lse, q, k, v, mask, **options)
    p_sink = np.exp(per_row(sink, q)[..., 0] - lse)
    return dict(dq=dq, dk=dk, dv=dv, dsink=sum_to(-(p_sink * D).sum((0, 2)), np.shape(sink)))


FORMS = dense, online, split, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def positions(x):
    """Query positions (Tq,) and key positions (Tk,)."""
    return tuple(map(np.arange, kit.lengths(x)))


def raw(x):
    """Scores (B, H, Tq, Tk), those of hidden keys included."""
    return x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2)


def scores(x):
    """Scores (B, H, Tq, Tk), -inf where masked."""
    return np.where(x["mask"], raw(x), -np.inf)


def all_parts(x):
    """Of the sink and of every tile of keys: o (B, H, Tq, P, dv), lse and row maximum (B, H, Tq, P)."""
    keep = tile(x["mask"], *positions(x))
    o, lse = zip(*parts(x["q"], x["k"], x["v"], keep, x["sink"], x["scale"], x["key_block"]))
    m = [lse[0], *(scores(x)[..., j].max(-1) for j in tiles(x["k"].shape[2], x["key_block"]))]
    return np.stack(o, -2), np.stack(lse, -1), np.stack(m, -1)


def merged(x, change):
    """The merge after change(lse, m) of what the tiles report."""
    o, lse, m = all_parts(x)
    lse = np.concatenate([lse[..., :1], change(lse[..., 1:], m[..., 1:])], -1)
    return merge(np.moveaxis(o, -2, 0), np.moveaxis(lse, -1, 0))


def accumulated(x, shift_o, shift_z):
    """The sums o and z of all tiles, each tile shifted by shift(m): rightly by one and the same number."""
    o, lse, m = all_parts(x)
    z = np.exp(lse - finite(shift_z(m))).sum(-1)
    o = (np.exp(lse - finite(shift_o(m)))[..., None] * o).sum(-2)
    return o / np.where(z == 0, 1, z)[..., None], finite(shift_z(m)[..., -1]) + np.log(z)


def final(m):
    return m.max(-1, keepdims=True, initial=-np.inf)


def running(m):
    return np.maximum.accumulate(m, -1)


def of_last_tile(m):
    return m[..., -1:]


def first(i, block):
    return i - i % block


def last(i, block):
    return first(i, block) + block - 1


def mask_at(x, at_query, at_key):
    """The mask read at other positions: at_query(i, query_block) and at_key(j, key_block)."""
    i, j = positions(x)
    return tile(x["mask"], at_query(i, x["query_block"]), at_key(j, x["key_block"]))


def keys(x, pick):
    """The inputs with only the keys at positions pick(j, key_block), j all positions."""
    i, j = positions(x)
    j = pick(j, x["key_block"])
    return x | {"k": x["k"][:, :, j], "v": x["v"][:, :, j], "mask": tile(x["mask"], i, j)}


def lse_added(x):
    """Tile after tile is merged, the sink before them if there is one, and lse is added up."""
    o, lse, _ = all_parts(x)
    start = int((lse[..., 0] == -np.inf).all() and lse.shape[-1] > 1)
    y, total = o[..., start, :], lse[..., start]
    for part in range(start + 1, lse.shape[-1]):
        y, _ = merge([y, o[..., part, :]], [total, lse[..., part]])
        total = total + lse[..., part]
    return y, total


def first_tile_nan(x):
    rows = (running(all_parts(x)[2])[..., 1:2] == -np.inf).any(-1, keepdims=True)
    return (np.where(rows, np.nan, dense(**x)[0]),)


BUGS = dict(
    o_not_rescaled=("o is not rescaled when the running maximum moves", lambda x: accumulated(x, running, final)),
    z_not_rescaled=("the row sum is not rescaled when the running maximum moves", lambda x: accumulated(
        x, final, running)),
    nothing_rescaled=("neither o nor the row sum is rescaled when the running maximum moves", lambda x: accumulated(
        x, running, running)),
    tile_maximum_alone=("the shift is the maximum of the tile, not the running one: rescaling overflows", lambda x: (
        accumulated(x, of_last_tile, of_last_tile))),
    first_tile_nan=("the running maximum is -inf after a tile without keys: exp(-inf + inf)", first_tile_nan),
    tail_not_masked=("the last tile is filled up with zeros, and these keys enter with score 0", lambda x: dense(
        **x | {"sink": np.logaddexp(x["sink"], float(np.log(-x["k"].shape[2] % x["key_block"])))})),
    tail_dropped=("only whole tiles of keys are visited", lambda x: dense(
        **keys(x, lambda j, block: j[:first(len(j), block)]))),
    tail_overlaps=("the last tile is moved back to fit, and keys are counted twice", lambda x: dense(
        **keys(x, lambda j, block: np.append(j, j[-block:-(len(j) % block)])))),
    mask_positions_in_tile=("the mask is asked for positions counted from the start of the tile", lambda x: dense(
        **x | {"mask": mask_at(x, np.remainder, np.remainder)})),
    diagonal_tile_skipped=("a tile is skipped if its first query may not attend to its first key", lambda x: dense(
        **x | {"mask": x["mask"] & mask_at(x, first, first)})),
    diagonal_tile_unmasked=("a tile that its last query may enter is attended without a mask", lambda x: dense(
        **x | {"mask": mask_at(x, last, first)})),
    mask_dropped=("the mask is ignored", lambda x: dense(**x | {"mask": np.array(True)})),
    causal_top_left=("the causal diagonal starts at the top left instead of the bottom right", lambda x: dense(
        **x | {"mask": kit.from_top_left(x)})),
    weights_normalised_per_tile=("the softmax is over each tile on its own, and the results are added", lambda x: (
        all_parts(x)[0].sum(-2),)),
    merge_by_average=("parts are merged by their plain average", lambda x: (
        all_parts(x)[0].sum(-2) / max(1, all_parts(x)[0].shape[-2] - 1),)),
    merge_base_2_lse=("a merge with exp is given lse in base 2", lambda x: merged(
        x, lambda lse, m: lse / kit.LN2)),
    merge_exp2_of_natural_lse=("a merge with exp2 is given natural lse", lambda x: merged(
        x, lambda lse, m: lse * kit.LN2)[:1]),
    merge_lse_without_max=("parts report log sum exp(s - m) without their maximum m", lambda x: merged(
        x, lambda lse, m: lse - finite(m))),
    merge_adds_lse=("the lse of a merge is the sum of those of its parts", lse_added),
    empty_part_lse_zero=("a part without keys reports lse 0 and is merged with weight exp(0)", lambda x: merged(
        x, lambda lse, m: np.where(lse == -np.inf, 0, lse))),
    empty_part_lse_plus_inf=("a part without keys reports lse +inf, as for a backward, and is merged", lambda x: merged(
        x, lambda lse, m: for_backward(lse))),
    sink_per_tile=("the sink is counted once per tile of keys", lambda x: dense(
        **x | {"sink": x["sink"] + float(np.log(max(1, -(-x["k"].shape[2] // x["key_block"]))))})),
    sink_ignored=("the sink is not in the denominator", lambda x: dense(**x | {"sink": x["sink"] - np.inf})),
    sink_not_shifted=("exp(sink), or the 1 of softmax-plus-one, is added to a sum of exp(s - max)", lambda x: (
        softmax(scores(x), sink=per_row(x["sink"], x["q"]) + final(scores(x)))[0] @ unread(x["v"], x["mask"]),)),
    lse_without_sink=("lse leaves the sink out", lambda x: (
        dense(**x)[0], dense(**x | {"sink": x["sink"] - np.inf})[1])),
    lse_without_max=("the running maximum is not added back to lse", lambda x: (
        dense(**x)[0], dense(**x)[1] - finite(final(all_parts(x)[2]))[..., 0])),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
    not_normalised=("o is not divided by the row sum at the end", lambda x: (
        dense(**x)[0] * np.exp(dense(**x)[1] - finite(final(all_parts(x)[2]))[..., 0])[..., None],)),
    exp2_scale_not_rescaled=("exp2 of scores that were not multiplied by log2(e)", lambda x: dense(
        **x | {"scale": x["scale"] * kit.LN2})[:1]),
    scale_missing=("the scores are not scaled", lambda x: dense(**x | {"scale": 1.0})),
    score_overflow=("q k^T is formed before it is scaled and overflows float16", lambda x: (
        softmax(x["scale"] * (x["q"] @ x["k"].swapaxes(-1, -2)), x["mask"], per_row(x["sink"], x["q"]))[0]
        @ unread(x["v"], x["mask"]),)),
    hidden_key_in_max=("the maximum is taken over hidden keys too: what is seen underflows", lambda x: (
        kit.shifted_by_hidden(raw(x), x["mask"], per_row(x["sink"], x["q"])) @ kit.plain(x["v"]),)),
    hidden_key_overflows=("exp of a hidden score overflows before it is multiplied by 0", lambda x: (
        kit.hidden_times_zero(raw(x), x["mask"], per_row(x["sink"], x["q"])) @ kit.plain(x["v"]),)),
    low_precision_sum=("the row sum is accumulated one by one in the input type and stops growing", lambda x: (
        kit.sequential_softmax(scores(x), x["v"], per_row(x["sink"], x["q"])),)),
    empty_row_nan=("a row without keys is 0/0", lambda x: kit.nan_at_empty_rows(x, dense(**x))),
    empty_row_uniform=("masked scores are the lowest number: a row without keys is the mean of all values", lambda x: (
        kit.at_empty_rows(dense(**x), kit.mean_value(x["v"]))[:1])),
    empty_row_lse_zero=("lse of a row without keys is 0", lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    empty_row_lse_plus_inf=("lse of a row without keys is +inf", lambda x: kit.at_empty_rows(
        dense(**x), lse=np.inf)),
    minus_inf_minus_inf=("lse of a row without keys is -inf - (-inf)", lambda x: kit.at_empty_rows(
        dense(**x), lse=np.nan)),
    masked_nan_poison=("0 * NaN: a masked value is read", lambda x: (
        softmax(scores(x), sink=per_row(x["sink"], x["q"]))[0] @ x["v"],)),
    strides_ignored=("a strided view is read as if it were contiguous", lambda x: dense(
        **x | kit.changed(x, "qkv", kit.memory_order))),
)


def given(x):
    """What the tiled backward is given, rightly."""
    o, lse = dense(**{name: x[name] for name in INPUTS})
    same = {name: x[name] for name in ("do", "q", "k", "v", "mask", "scale", "query_block", "key_block")}
    return same | dict(D=(x["do"] * o).sum(-1) - x["dlse"], lse=for_backward(lse))


def rerun(x, **wrong):
    """The gradients of the tiled backward with something wrong in what it is given."""
    return dict(zip(("dq", "dk", "dv"), backward(**given(x) | wrong)))


def row_term_per_tile(x):
    dq, right, (o, lse, _) = np.zeros_like(x["q"]), given(x), all_parts(x)
    for part, j in enumerate(tiles(x["k"].shape[2], x["key_block"]), 1):
        D = np.exp(lse[..., part] - right["lse"]) * (x["do"] * o[..., part, :]).sum(-1) - x["dlse"]
        dq += rerun(keys(x, lambda *_: j), D=D, lse=right["lse"])["dq"]
    return dict(dq=dq)


def filled_up(j, block):
    """Positions j with the last of them repeated to a whole number of tiles."""
    return np.append(j, np.repeat(j[-1:], -len(j) % block))


def dq_overwritten(x):
    right = given(x)
    return dict(dq=rerun(keys(x, lambda j, block: j[first(len(j) - 1, block):]), D=right["D"], lse=right["lse"])["dq"])


def dk_dv_overwritten(x):
    Tq = x["q"].shape[2]
    rows = np.arange(Tq) >= first(Tq - 1, x["query_block"])
    wrong = rerun(x, do=np.where(rows[:, None], x["do"], 0), D=np.where(rows, given(x)["D"], 0))
    return dict(dk=wrong["dk"], dv=wrong["dv"])


VJP_BUGS = dict(
    jacobian_term_missing=("dS = P dP without the row term D", lambda x: rerun(x, D=0 * x["dlse"])),
    row_term_per_tile=("D is the sum of p dp over the tile instead of the row", row_term_per_tile),
    p_without_sum=("p is computed anew with the row maximum instead of lse", lambda x: rerun(
        x, lse=for_backward(final(all_parts(x)[2])[..., 0]))),
    p_from_base_2_lse=("p = exp(s - lse) of an lse in base 2", lambda x: rerun(x, lse=given(x)["lse"] / kit.LN2)),
    p_without_sink=("p is computed anew with an lse that leaves the sink out", lambda x: rerun(
        x, lse=given(x | {"sink": x["sink"] - np.inf})["lse"])),
    masked_row_gradient_nan=("lse of a row without keys is -inf in exp(s - lse)", lambda x: rerun(
        x, lse=np.where(given(x)["lse"] == np.inf, -np.inf, given(x)["lse"]))),
    dq_overwritten=("dq is that of the last tile of keys instead of the sum", dq_overwritten),
    tail_repeats_last_key=("the last tile is filled up with the last key, which enters dq again", lambda x: dict(
        dq=rerun(keys(x, filled_up), D=given(x)["D"], lse=given(x)["lse"])["dq"])),
    dk_dv_overwritten=("dk and dv are those of the last tile of queries instead of the sum", dk_dv_overwritten),
    dq_scale_missing=("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dk_scale_missing=("dk is not multiplied by scale", lambda x: dict(dk=vjp(**x)["dk"] / x["scale"])),
    dlse_ignored=("the gradient that comes through lse is lost", lambda x: vjp(**x | {"dlse": 0 * x["dlse"]})),
    dlse_sign=("dlse is added to D instead of subtracted", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
    dsink_missing=("the sink gets no gradient", lambda x: dict(dsink=0 * vjp(**x)["dsink"])),
    dsink_sign=("dsink has the sign of a key's gradient", lambda x: dict(dsink=-vjp(**x)["dsink"])),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=7, Tk=15, dk=4, dv=8, query_block=5, key_block=6)
NEUTRAL = dict(mask=kit.no_mask, sink=np.array([-np.inf]), scale=lambda n: n.dk ** -0.5,
               query_block=lambda n: n.query_block, key_block=lambda n: n.key_block)
PATTERN = np.array([[[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [1, 0, 0]], [[0, 0, 1], [1, 1, 1]]], bool)


def later_and_later(n):
    """Query i sees the keys from 2 i on."""
    return (np.arange(n.Tk) >= 2 * np.arange(n.Tq)[:, None])[None, None]


def nan_where_unread(x):
    return kit.nan_where(kit.hidden_keys(x["mask"]), x) | kit.nan_where(kit.empty_rows(x["mask"]), x, "q")


CASES = dict(
    basic=dict(
        why="every size differs and none is 1, and the last tiles are short", sizes=SIZES,
        catches=("o_not_rescaled", "z_not_rescaled", "nothing_rescaled", "tail_not_masked", "tail_dropped",
                 "tail_overlaps", "weights_normalised_per_tile", "merge_by_average", "merge_base_2_lse",
                 "merge_exp2_of_natural_lse", "merge_lse_without_max", "merge_adds_lse", "lse_without_max",
                 "lse_base_2", "not_normalised", "exp2_scale_not_rescaled", "scale_missing", "row_term_per_tile",
                 "p_without_sum", "p_from_base_2_lse", "dq_overwritten", "tail_repeats_last_key", "dk_dv_overwritten")),
    tiles_divide=dict(
        why="tiles that divide the lengths: no tail", sizes=SIZES | dict(Tq=10, key_block=5), light=True,
        shows=lambda x, y: x["q"].shape[2] % x["query_block"] == x["k"].shape[2] % x["key_block"] == 0),
    tile_beyond=dict(
        why="one tile, larger than the sequence", sizes=SIZES | dict(query_block=16, key_block=16), light=True,
        catches=("tail_not_masked", "tail_dropped")),
    tile_of_one=dict(
        why="tiles of one query and one key: the online softmax as first published",
        sizes=SIZES | dict(query_block=1, key_block=1),
        catches=("o_not_rescaled", "weights_normalised_per_tile")),
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=SIZES | dict(B=1, H=1, Tq=1, Tk=1, dk=1, dv=1),
        shows=kit.returns_v),
    no_keys=dict(
        why="Tk = 0 is legal, no tile at all: o = 0, lse = -inf", sizes=SIZES | dict(Tk=0),
        shows=kit.sees_nothing),
    decode=dict(
        why="one query, its keys split in parts of unequal size", sizes=SIZES | dict(Tq=1), light=True,
        catches=("merge_by_average", "merge_base_2_lse", "merge_lse_without_max", "causal_top_left")),
    causal_wide=dict(
        why="Tq < Tk: the diagonal crosses tiles that are not square", sizes=SIZES, mask=kit.causal_of,
        conventions=dict(causal="bottom-right"),
        catches=("mask_dropped", "causal_top_left", "mask_positions_in_tile", "diagonal_tile_skipped",
                 "diagonal_tile_unmasked")),
    causal_tall=dict(
        why="Tq > Tk at the bottom right: a whole tile of queries sees nothing", sizes=SIZES | dict(Tq=13, Tk=8),
        mask=kit.causal_of, conventions=dict(causal="bottom-right"),
        catches=("empty_row_nan", "empty_part_lse_zero", "causal_top_left")),
    first_tile_masked=dict(
        why="rows whose first keys come with the second or third tile", sizes=SIZES, mask=later_and_later,
        catches=("first_tile_nan", "empty_part_lse_zero", "empty_part_lse_plus_inf")),
    empty_row=dict(
        why="a row without keys in any tile", sizes=SIZES, mask=kit.but_row_1,
        catches=("empty_row_nan", "empty_row_uniform", "empty_row_lse_zero", "empty_row_lse_plus_inf",
                 "minus_inf_minus_inf", "masked_row_gradient_nan")),
    sink=dict(
        why="one sink logit per head, counted once however many tiles there are", sizes=SIZES, mask=kit.causal_of,
        sink=lambda n: draw("sink", (n.H,)) + 1, conventions=dict(causal="bottom-right"),
        catches=("sink_per_tile", "sink_ignored", "sink_not_shifted", "lse_without_sink", "p_without_sink",
                 "dsink_missing", "dsink_sign")),
    sink_and_empty_row=dict(
        why="with a sink a row without keys is regular: o = 0, lse = sink", sizes=SIZES, light=True, mask=kit.but_row_1,
        sink=lambda n: draw("sink", (n.H,)) + 1, shows=lambda x, y: (y["lse"][:, :, 1] == x["sink"]).all()),
    softmax_plus_one=dict(
        why="a sink of 0 adds 1 to the sum of exp(s), not to that of exp(s - max)", sizes=SIZES,
        light=True, sink=np.zeros(1), catches=("sink_not_shifted", "sink_per_tile")),
    everything=dict(
        why="a mask per head and batch entry that empties tiles here and there, a sink and a given scale at once",
        sizes=SIZES, scale=0.75, sink=lambda n: draw("sink", (n.H,)) - 1,
        mask=lambda n: blocks(PATTERN, 5, n.Tq, n.Tk)[None] & padding([9, 15], n.Tk),
        catches=("sink_per_tile", "empty_part_lse_zero", "mask_positions_in_tile")),
    masked_nan=dict(
        why="NaN in keys and values nobody may attend to, half a tile and a whole one, and in a query that sees none",
        sizes=SIZES, mask=lambda n: padding([8, 8], n.Tk) & kit.but_row_1(n), change=nan_where_unread,
        catches=("masked_nan_poison",)),
    hidden_largest=dict(kit.HIDDEN_LARGEST, sizes=SIZES, mask=kit.causal_of),
    long=dict(kit.LONG, sizes=SIZES | dict(B=1, H=1, Tq=9, Tk=205, dk=6, dv=3, key_block=32), mask=kit.causal_of),
    equal_widths=dict(kit.EQUAL_WIDTHS, sizes=SIZES | dict(dk=4, dv=4), mask=kit.causal_of),
    large_scores=dict(
        why="q k^T is over 65504 before it is scaled; scores near 50000 rise, and the last key takes all the weight",
        sizes=SIZES, scale=0.5, change=lambda x: kit.ramp(x, 160, 146, 2),
        catches=("score_overflow",)),
    falling_scores=dict(
        why="scores fall by 1536 from the first tile to the last: exp(1536) overflows every type", sizes=SIZES,
        light=True, scale=0.5, change=lambda x: kit.ramp(x, 32, 24, -2),
        catches=("tile_maximum_alone",)),
    many_keys=dict(
        why="8192 equal weights, exact in every type: a float16 sum that grows one by one stops at 2048", light=True,
        sizes=dict(B=1, H=1, Tq=1, Tk=8192, dk=1, dv=1, query_block=2, key_block=1024),
        q=lambda n: np.zeros((n.B, n.H, n.Tq, n.dk)), change=lambda x: dict(v=1 + x["v"] % 2),
        catches=("low_precision_sum",)),
    strided=dict(
        why="q, k and v are views of (B, T, H, d) memory", sizes=SIZES, change=kit.strided,
        catches=("strides_ignored",)),
)
