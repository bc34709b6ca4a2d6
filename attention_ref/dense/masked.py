"""Attention whose mask is given by its parameters.        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3: causal
                                              Beltagy et al. 2020, arXiv:2004.05150, section 3.1: window and dilation

    keep_ij = [j < length] [segment_i = segment_j] [not causal or j <= p_i] [-left D <= j - p_i <= right D, D | j - p_i]
    p_i     = i + offset      offset = 0 at the top left, length - Tq at the bottom right
    z_i     = sum_{j: keep_ij} exp(scale q_i . k_j)                                            lse_i = log z_i
    o_i     = sum_{j: keep_ij} exp(scale q_i . k_j) v_j / z_i

length is that of the batch entry, D the dilation; an open side of the window has no bound. Where code in the wild
differs: the diagonal starts at the top left in torch and jax, at the bottom right in flash-attention 2.1, which counts
true queries as well as true keys, and in ONNX after the past, at the bottom right of nonpad_kv_seqlen, or else at the
top left. A window w is w keys with the query's own (transformers), w each side (its bidirectional masks), w/2 each side
(Longformer), w before the own (the text of Mistral 7B, arXiv:2310.06825, section 2); -1 is open. Packed kernels count
positions inside a sequence: the same keys where queries and keys are packed alike.
"""
import numpy as np

from .. import kit, masks
from ..core import per_head, softmax, unread
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H Tq dk", k="B H Tk dk", v="B H Tk dv", lengths="int B >=0 <=Tk", query_segments="int B Tq",
              key_segments="int B Tk", anchor="str top-left|bottom-right", causal="bool", left="optional int >=0",
              right="optional int >=0", dilation="int >=1", scale="")
OUTPUTS = dict(o="B H Tq dv", lse="B H Tq")
CONVENTIONS = dict(anchor="bottom-right is where the keys of a batch entry end; causal and window share the anchor",
                   window="keys before and after the query's own, in steps of dilation; None is open",
                   segments="equal numbers see each other; positions run on through a row",
                   padded_query="counted in Tq and computed; one in a segment without keys is an empty row",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log", layout="B H T d",
                   masked_values="a key that no query may attend to is never read")


def conditions(lengths, query_segments, key_segments, anchor, causal, left, right, dilation):
    """The four factors of keep, each broadcastable to (B, 1, Tq, Tk)."""
    Tq, Tk = query_segments.shape[1], key_segments.shape[1]
    offset = masks.diagonal(Tq, lengths[:, None, None, None], anchor)
    return dict(padding=masks.padding(lengths, Tk),
                segments=masks.packed(query_segments, key_segments)[:, None],
                causal=masks.causal(Tq, Tk, offset) | (not causal),
                window=masks.window(Tq, Tk, left, right, dilation, offset))


def keep(padding, segments, causal, window):
    """(B, 1, Tq, Tk) True where a query may attend to a key."""
    return padding & segments & causal & window


def attend(q, k, v, mask, scale):
    """o and lse under a mask that is an array."""
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    return weights @ v, lse


def dense(q, k, v, lengths, query_segments, key_segments, *, anchor, causal=False, left=None, right=None, dilation=1,
          scale):
    """o (B, H, Tq, dv) and lse (B, H, Tq), by the equations above. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    mask = keep(**conditions(lengths, query_segments, key_segments, anchor, causal, left, right, dilation))
    return attend(q, k, v, mask, scale)


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    """One query at a time, no mask: it visits the keys of its window only (p % dilation is never negative)."""
    (Tq, dk), (Tk, dv) = q.shape, v.shape
    o, z, a = np.zeros((Tq, dv), q.dtype), np.zeros(Tq, q.dtype), np.zeros(Tk, q.dtype)
    lse = np.full(Tq, -np.inf, q.dtype)
    for i in range(Tq):
        p = i + lengths - Tq if anchor == "bottom-right" else i
        first = p % dilation if left is None else max(p % dilation, p - left * dilation)
        stop = min(lengths, p + 1) if causal else lengths
        if right is not None:
            stop = min(stop, p + right * dilation + 1)
        m = lse[i]
        for j in range(first, stop, dilation):
            if query_segments[i] == key_segments[j]:
                a[j] = 0
                for c in range(dk):
                    a[j] += scale * q[i, c] * k[j, c]
                if a[j].real > m.real:
                    m = a[j]
        if m.real == -np.inf:
            continue
        for j in range(first, stop, dilation):
            if query_segments[i] == key_segments[j]:
                e = np.exp(a[j] - m)
                z[i] += e
                for c in range(dv):
                    o[i, c] += e * v[j, c]
        o[i] /= z[i]
        lse[i] = m + np.log(z[i])
    return o, lse


def vjp(do, dlse, q, k, v, lengths, query_segments, key_segments, *, anchor, causal=False, left=None, right=None,
        dilation=1, scale):
    """Gradients of q, k and v for cotangents do (B, H, Tq, dv) and dlse (B, H, Tq)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    mask = keep(**conditions(lengths, query_segments, key_segments, anchor, causal, left, right, dilation))
    q, k, v = unread(q, mask.swapaxes(-1, -2)), unread(k, mask), unread(v, mask)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    return gradients(do, dlse, q, k, v, p, scale)


def gradients(do, dlse, q, k, v, p, scale):
    """The gradients, given the weights p (B, H, Tq, Tk)."""
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return dict(dq=scale * ds @ k, dk=scale * ds.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do)


FORMS = dense, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

CONDITIONS = "padding", "segments", "causal", "window"


def parts(x):
    """The four conditions of a case."""
    return conditions(**{name: x[name] for name in list(INPUTS)[3:-1]})


def mask_of(x, **other):
    """The mask of a case, with other conditions in place of some."""
    return keep(**parts(x) | other)


def under(x, mask):
    """The outputs under a wrong mask."""
    return attend(x["q"], x["k"], x["v"], mask, x["scale"])


def but(x, **changed):
    """The outputs with other arguments in place of some."""
    return dense(**x | changed)


def but_only(names, x, **changed):
    """The outputs when these conditions are built from other arguments, and the rest is right."""
    wrong = parts(x | changed)
    return under(x, mask_of(x, **{name: wrong[name] for name in names}))


def only_beside(x, name, others):
    """The mask with one condition only where others hide something."""
    return mask_of(x) if any(not parts(x)[on].all() for on in others) else without(x, name)


def without(x, name, on=None):
    """The mask that lacks one condition; with `on`, only where that other condition hides something."""
    return mask_of(x, **{} if on and parts(x)[on].all() else {name: np.array(True)})


def offset(x):
    """The position of query 0, 0 or (B, 1, 1, 1)."""
    return masks.diagonal(kit.lengths(x)[0], x["lengths"][:, None, None, None], x["anchor"])


def positions(x):
    """The positions p (B or 1, 1, Tq, 1) of the queries and j (1, Tk) of the keys."""
    i, j = masks.grid(*kit.lengths(x))
    return i + offset(x), j


def every(x, length):
    """The same length for every batch entry."""
    return np.full_like(x["lengths"], length)


def sides(x, change):
    """left and right, changed where they are not open."""
    return {side: None if x[side] is None else change(x[side]) for side in ("left", "right")}


def left_exclusive(x):
    """True but for keys left steps before the query, if left is not open."""
    p, j = positions(x)
    return np.array(True) if x["left"] is None else j > p - x["left"] * x["dilation"]


def in_blocks(x):
    """The keys of the query's own block of left + 1 keys, if left is not open."""
    if x["left"] is None:
        return mask_of(x)
    p, j = positions(x)
    return mask_of(x, window=p // (x["left"] + 1) == j // (x["left"] + 1))


def gaps_from_key_0(x):
    wide = parts(x | sides(x, lambda n: n * x["dilation"]) | {"dilation": 1})["window"]
    return mask_of(x, window=wide & (positions(x)[1] % x["dilation"] == 0))


def at_the_end(x):
    """The keys stand at the end of the row, the padding before them."""
    Tk = x["k"].shape[2]
    return mask_of(x, padding=~masks.padding(Tk - x["lengths"], Tk))


def queries_too(x):
    """Queries from position `length` on are hidden like the keys there."""
    Tq = x["q"].shape[2]
    return mask_of(x) & masks.padding(np.minimum(x["lengths"], Tq), Tq).swapaxes(-1, -2)


def scores(x):
    return x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2)


def weighted(x, p):
    """o for wrong weights."""
    return (p @ unread(x["v"], mask_of(x)),)


def lowest_for_each(x):
    """The lowest number of the type is added once for every condition that hides a key; no guard for infinities."""
    a = scores(x) + sum(np.where(part, 0, np.finfo(x["q"].dtype).min) for part in parts(x).values())
    e = np.exp(a - a.max(-1, keepdims=True, initial=-np.inf))
    return weighted(x, e / e.sum(-1, keepdims=True))


BUGS = dict(
    causal_top_left=("the diagonal starts at the top left instead of the bottom right",
                     lambda x: but(x, anchor="top-left")),
    causal_bottom_right=("the diagonal starts at the bottom right instead of the top left",
                         lambda x: but(x, anchor="bottom-right")),
    causal_strict=("a query does not see its own key", lambda x: but_only(["causal"], x, anchor=offset(x) - 1)),
    causal_one_ahead=("a query sees the key after its own", lambda x: but_only(["causal"], x, anchor=offset(x) + 1)),
    causal_implied=("no mask is taken to mean causal", lambda x: but(x, causal=x["causal"] or bool(mask_of(x).all()))),
    aligned_to_padding=("bottom-right is where the padding ends, not the keys",
                        lambda x: but_only(["causal", "window"], x, lengths=every(x, x["k"].shape[2]))),
    aligned_to_longest=("bottom-right is where the longest batch entry ends",
                        lambda x: but_only(["causal", "window"], x, lengths=every(x, x["lengths"].max()))),
    window_top_left=("the window is counted from the top left, whatever the anchor",
                     lambda x: but_only(["window"], x, anchor="top-left")),
    window_counts_self=("the query's own key counts as one of the keys of each side",
                        lambda x: but(x, **sides(x, lambda n: max(0, n - 1)))),
    window_left_exclusive=("the farthest key on the left is left out: left keys with the query's own", lambda x: under(
        x, mask_of(x) & left_exclusive(x))),
    window_one_more=("one key too many on the left", lambda x: but(x, left=sides(x, lambda n: n + 1)["left"])),
    window_right_exclusive=("the last key on the right is left out",
                            lambda x: but(x, right=sides(x, lambda n: max(0, n - 1))["right"])),
    window_left_dropped=("only the right side has a limit", lambda x: but(x, left=None)),
    window_right_dropped=("only the left side has a limit", lambda x: but(x, right=None)),
    window_mirrored=("left and right are exchanged", lambda x: but(x, left=x["right"], right=x["left"])),
    window_symmetric=("as many keys on the right as on the left", lambda x: but(x, right=x["left"])),
    window_halved=("half the keys on each side", lambda x: but(x, **sides(x, lambda n: n // 2))),
    window_in_blocks=("blocks of left + 1 keys side by side instead of a window that slides",
                      lambda x: under(x, in_blocks(x))),
    window_zero_is_open=("0 keys on a side is read as no limit",
                         lambda x: but(x, left=x["left"] or None, right=x["right"] or None)),
    window_open_is_zero=("no limit on a side is read as 0 keys",
                         lambda x: but(x, left=x["left"] or 0, right=x["right"] or 0)),
    window_right_beats_causal=("keys on the right are seen although the mask is causal",
                               lambda x: but(x, causal=x["causal"] and not x["right"])),
    dilation_ignored=("the window has no gaps", lambda x: but(x, dilation=1)),
    dilation_in_tokens=("left and right count tokens, not steps of dilation",
                        lambda x: but(x, **sides(x, lambda n: n // x["dilation"]))),
    dilation_from_key_0=("the gaps are counted from key 0, not from the query", lambda x: under(x, gaps_from_key_0(x))),
    lengths_of_batch_0=("the length of batch entry 0 serves every entry",
                        lambda x: but(x, lengths=every(x, x["lengths"][0]))),
    lengths_longest=("the longest length serves every entry", lambda x: but(x, lengths=every(x, x["lengths"].max()))),
    lengths_head_batch_order=("heads are folded before the batch, lengths after it",
                              lambda x: under(x, kit.of_another_head(mask_of(x), *x["q"].shape[:2]))),
    padding_one_late=("the first key of the padding is seen",
                      lambda x: but_only(["padding"], x, lengths=np.minimum(x["lengths"] + 1, x["k"].shape[2]))),
    padding_on_the_left=("the last keys are kept, not the first", lambda x: under(x, at_the_end(x))),
    padding_hides_queries=("queries beyond the length of the keys are hidden too", lambda x: under(x, queries_too(x))),
    segments_of_batch_0=("the segments of batch entry 0 serve every entry",
                         lambda x: under(x, mask_of(x, segments=parts(x)["segments"][:1]))),
    segment_0_is_padding=("segment number 0 is read as padding",
                          lambda x: under(x, mask_of(x) & (x["key_segments"] != 0)[:, None, None])),
    segments_before_seen=("a query sees segments with a smaller number too", lambda x: under(x, mask_of(
        x, segments=(x["query_segments"][:, :, None] >= x["key_segments"][:, None, :])[:, None]))),
    mask_polarity=("the keys to keep are hidden, the others kept", lambda x: under(x, ~mask_of(x))),
    mask_added_as_0_1=("the mask is added to the scores as 0 and 1",
                       lambda x: weighted(x, softmax(scores(x) + mask_of(x))[0])),
    mask_after_softmax=("softmax over all keys, then weights times mask: rows do not sum to one",
                        lambda x: weighted(x, softmax(scores(x))[0] * mask_of(x))),
    hidden_key_in_max=("the maximum is taken over hidden keys too: what is seen underflows",
                       lambda x: weighted(x, kit.shifted_by_hidden(scores(x), mask_of(x)))),
    hidden_key_overflows=("exp of a hidden score overflows before it is multiplied by 0",
                          lambda x: weighted(x, kit.hidden_times_zero(scores(x), mask_of(x)))),
    masked_nan_poison=("0 * NaN: a masked value is read", lambda x: (softmax(scores(x), mask_of(x))[0] @ x["v"],)),
    sentinel_added_twice=("lowest number + lowest number = -inf: NaN for a row hidden twice", lowest_for_each),
    empty_row_nan=("a row without keys is 0/0", lambda x: kit.at_empty_rows(dense(**x), np.nan)),
    empty_row_uniform=("a row without keys gives the mean of all values",
                       lambda x: kit.at_empty_rows(dense(**x), kit.mean_value(x["v"]))[:1]),
    empty_row_lse_zero=("lse of a row without keys is 0", lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    empty_row_lse_infinite=("lse of a row without keys is +inf", lambda x: kit.at_empty_rows(dense(**x), lse=np.inf)),
    causal_needs_padding=("causal is applied only where there is padding",
                          lambda x: under(x, only_beside(x, "causal", ["padding"]))),
    window_needs_another=("the window is applied only where something else hides keys",
                          lambda x: under(x, only_beside(x, "window", CONDITIONS[:3]))),
    lse_of_hidden_keys=("lse is taken before the mask", lambda x: (dense(**x)[0], softmax(scores(x))[1])),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    strides_ignored=("a strided view is read as if it were contiguous",
                     lambda x: but(x, **kit.changed(x, "qkv", kit.memory_order))),
)
BUGS |= {f"{name}_dropped": (f"{name} is accepted and never used", lambda x, name=name: under(x, without(x, name)))
         for name in CONDITIONS}
BUGS |= {f"{on}_forgets_{name}": (f"the path for {on} leaves {name} out",
                                  lambda x, name=name, on=on: under(x, without(x, name, on)))
         for on in CONDITIONS for name in CONDITIONS if on != name}


def from_weights(x, p):
    """The gradients for wrong weights."""
    return gradients(x["do"], x["dlse"], x["q"], x["k"], x["v"], p, x["scale"])


def rebuilt(x, name):
    """Weights rebuilt from lse under a mask that lacks one condition."""
    _, lse = dense(**{argument: x[argument] for argument in INPUTS})
    p = np.exp(scores(x) - np.where(lse == -np.inf, np.inf, lse)[..., None])
    return np.where(without(x, name), p, 0)


def uniform_if_empty(x):
    """The weights under a mask that is added as a large number."""
    mask = mask_of(x)
    return np.where(kit.empty_rows(mask), 1 / max(1, mask.shape[-1]), softmax(scores(x), mask)[0])


VJP_BUGS = dict(
    jacobian_term_missing=("dS = P dP without the row term", lambda x: dict(dq=kit.without_row_term(
        softmax(scores(x), mask_of(x))[0], x["do"], x["k"], x["v"], x["scale"]))),
    dq_scale_missing=("dQ is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dk_scale_missing=("dK is not multiplied by scale", lambda x: dict(dk=vjp(**x)["dk"] / x["scale"])),
    dlse_ignored=("the gradient that comes through lse is lost", lambda x: vjp(**x | {"dlse": 0 * x["dlse"]})),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
    empty_row_gradient_nan=("0 * NaN in the backward of a row without keys", lambda x: dict(
        dq=np.where(kit.empty_rows(mask_of(x)), np.nan, vjp(**x)["dq"]))),
    empty_row_gradient_uniform=("a row without keys sends its gradient to all keys",
                                lambda x: from_weights(x, uniform_if_empty(x))),
)
VJP_BUGS |= {f"backward_forgets_{name}": (f"the backward rebuilds the weights from lse without {name}",
                                          lambda x, name=name: from_weights(x, rebuilt(x, name)))
             for name in CONDITIONS}

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, Tq=5, Tk=7, dk=4, dv=6)
NEUTRAL = dict(lengths=lambda n: np.full(n.B, n.Tk), query_segments=lambda n: np.zeros((n.B, n.Tq), int),
               key_segments=lambda n: np.zeros((n.B, n.Tk), int), anchor="top-left", causal=False, left=None,
               right=None, dilation=1, scale=lambda n: n.dk ** -0.5)
ON = dict(causal=dict(causal=True), padding=dict(lengths=np.array([6, 3])), window=dict(left=1, right=2),
          segments=dict(query_segments=np.array([[0, 0, 0, 1, 1], [2, 2, 0, 0, 4]]),
                        key_segments=np.array([[0, 0, 1, 1, 1, 1, 0], [2, 2, 2, 0, 0, 4, 4]])))


def together(names, anchor, catches):
    """The case with these conditions on; gradients for each of them alone and for all."""
    recipe = dict(why=f"{' and '.join(names)}, from the {anchor}", sizes=SIZES, light=1 < len(names) < len(ON),
                  anchor=anchor, catches=catches)
    for name in names:
        recipe |= ON[name]
    return recipe


def losses(names):
    """Every way to lose one of these conditions, everywhere or beside another."""
    return [f"{name}_dropped" for name in names] + [f"{on}_forgets_{off}" for on in names for off in names if on != off]


def packed_as(*rows):
    return dict(query_segments=np.array(rows), key_segments=np.array(rows))


TOGETHER = [tuple(name for bit, name in enumerate(ON) if choice >> bit & 1) for choice in range(1, 2 ** len(ON))]
CASES = dict(
    basic=dict(
        why="every size differs and none is 1; nothing is hidden", sizes=SIZES,
        catches=("causal_implied", "window_open_is_zero", "segment_0_is_padding", "scale_missing", "lse_base_2")))
CASES |= {"_".join(names): together(names, "top-left", losses(names)) for names in TOGETHER}
CASES |= {"_".join(names) + "_bottom_right": together(names, "bottom-right", ("causal_top_left",))
          for names in TOGETHER if "causal" in names or "window" in names}
CASES |= dict(
    one_token=dict(
        why="a single key has weight 1: o is v", sizes=dict(B=1, H=1, Tq=1, Tk=1, dk=1, dv=1), causal=True,
        shows=kit.returns_v),
    no_keys=dict(
        why="Tk = 0 is legal: o = 0, lse = -inf", sizes=SIZES | dict(Tk=0), light=True, anchor="bottom-right",
        causal=True, shows=kit.sees_nothing),
    causal_tall=dict(
        why="Tq > Tk at the top left: the last queries see every key", sizes=SIZES | dict(Tq=9), light=True,
        causal=True, catches=("causal_bottom_right", "causal_needs_padding")),
    causal_tall_bottom_right=dict(
        why="Tq > Tk at the bottom right: the first queries see nothing, the next one key 0",
        sizes=SIZES | dict(Tq=9), light=True, causal=True, anchor="bottom-right",
        shows=lambda x, y: (y["lse"][:, :, :2] == -np.inf).all() and (y["o"][:, :, 2] == x["v"][:, :, 0]).all()),
    decode=dict(
        why="one query at the end of each row, and a window", sizes=SIZES | dict(Tq=1), light=True,
        anchor="bottom-right", causal=True, left=1, lengths=np.array([6, 3]),
        catches=("causal_top_left", "window_top_left", "aligned_to_padding", "aligned_to_longest", "lengths_longest")),
    window_self=dict(
        why="a window of no key beside the own returns V", sizes=SIZES, light=True, left=0, right=0,
        catches=("window_zero_is_open", "window_one_more"), shows=lambda x, y: (y["o"] == x["v"][:, :, :5]).all()),
    window_left_only=dict(
        why="one key to the left, all to the right", sizes=SIZES, light=True, left=1,
        catches=("window_left_dropped", "window_counts_self", "window_left_exclusive", "window_mirrored",
                 "window_needs_another")),
    window_right_only=dict(
        why="one key to the right, all to the left", sizes=SIZES, light=True, right=1,
        catches=("window_right_dropped", "window_right_exclusive", "window_symmetric")),
    window_reaches_all=dict(
        why="just wide enough to hide nothing", sizes=SIZES, light=True, left=4, right=6,
        shows=lambda x, y: mask_of(x).all()),
    window_misses_corners=dict(
        why="one key less on each side: two pairs are hidden", sizes=SIZES, light=True, left=3, right=5,
        shows=lambda x, y: (~mask_of(x)[0]).sum() == 2, catches=("window_dropped",)),
    window_past_the_keys=dict(
        why="queries whose window lies beyond the last key see nothing", sizes=SIZES | dict(Tq=10), light=True, left=1,
        right=0,
        shows=lambda x, y: (y["lse"][:, :, 8:] == -np.inf).all() and (y["o"][:, :, 7] == x["v"][:, :, 6]).all()),
)
CASES |= {f"sliding_4_in_{T}": dict(
    why=f"a causal window of 4 keys on {T}", sizes=SIZES | dict(Tq=T, Tk=T), light=True, causal=True, left=3,
    shows=lambda x, y: (mask_of(x) ^ without(x, "window"))[0].sum() == max(0, x["k"].shape[2] - 4)) for T in (3, 4, 5)}
CASES |= dict(
    dilated=dict(
        why="gaps between the keys of a window", sizes=SIZES, light=True, left=1, right=2, dilation=2,
        catches=("dilation_ignored", "dilation_in_tokens", "dilation_from_key_0")),
    dilated_open=dict(
        why="gaps without a limit", sizes=SIZES | dict(Tk=11), light=True, dilation=3,
        catches=("dilation_ignored", "dilation_from_key_0")),
    dilated_causal_padding=dict(
        why="the gaps are counted from the position of the query, which may be before key 0", sizes=SIZES, causal=True,
        left=2, dilation=2, anchor="bottom-right", lengths=np.array([6, 3]),
        catches=("dilation_ignored", "dilation_in_tokens", "dilation_from_key_0", "aligned_to_padding")),
    length_zero=dict(
        why="a batch entry without keys, hidden by causal as well", sizes=SIZES, causal=True, anchor="bottom-right",
        lengths=np.array([0, 5]), shows=lambda x, y: (y["o"][0] == 0).all() and (y["lse"][0] == -np.inf).all(),
        catches=("empty_row_nan", "empty_row_uniform", "empty_row_lse_zero", "empty_row_lse_infinite",
                 "sentinel_added_twice", "empty_row_gradient_nan", "empty_row_gradient_uniform")),
    length_one=dict(
        why="one key left: every query returns its value", sizes=SIZES, light=True, lengths=np.array([7, 1]),
        catches=("lengths_of_batch_0", "padding_one_late"), shows=lambda x, y: (y["o"][1] == x["v"][1, :, :1]).all()),
    packed=dict(
        why="sequences end to end in a row; the first token of each sees only itself", sizes=SIZES | dict(Tq=7),
        light=True, causal=True, **packed_as([0, 0, 0, 1, 1, 2, 2], [5, 5, 6, 6, 6, 6, 6]),
        catches=("segments_dropped", "segments_of_batch_0", "segments_before_seen"),
        shows=lambda x, y: (y["o"][0, :, [0, 3, 5]] == x["v"][0, :, [0, 3, 5]]).all()),
    packed_ones=dict(
        why="sequences of one token: o is v", sizes=SIZES | dict(Tq=7), light=True,
        **packed_as(range(7), range(6, -1, -1)), shows=kit.returns_v),
    padded_queries=dict(
        why="queries in a segment that no key has", sizes=SIZES, light=True,
        query_segments=np.array([[0, 0, 0, -1, -1], [0, 0, 0, 0, -1]]),
        shows=lambda x, y: (y["o"][0, :, 3:] == 0).all() and (y["o"][1, :, 3] != 0).any()),
    masked_nan=dict(
        why="NaN in keys and values that nobody may attend to", sizes=SIZES,
        change=lambda x: kit.nan_where(kit.hidden_keys(mask_of(x)), x),
        **ON["padding"], **ON["segments"], catches=("masked_nan_poison",)),
    strided=dict(
        why="q, k and v are views of (B, T, H, d) memory", sizes=SIZES, **ON["causal"], **ON["padding"],
        change=kit.strided, catches=("strides_ignored",)),
    hidden_largest=dict(kit.HIDDEN_LARGEST, sizes=SIZES, causal=True, anchor="bottom-right"),
    long=dict(kit.LONG, sizes=SIZES | dict(B=1, H=1, Tq=9, Tk=205, dk=6, dv=3), causal=True, anchor="bottom-right"),
    equal_widths=dict(kit.EQUAL_WIDTHS, sizes=SIZES | dict(dk=4, dv=4), causal=True, anchor="bottom-right"),
    large_scores=dict(
        why="q k^T is over 65504 before it is scaled, and one key takes all the weight", sizes=SIZES, scale=0.5,
        causal=True, change=lambda x: kit.ramp(x, 160, 160, -1),
        shows=lambda x, y: np.allclose(y["o"], x["v"][:, :, :1])),
)
