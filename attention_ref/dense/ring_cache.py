"""Decoding with a rolling cache: sliding-window attention over W keys, kept in a ring of W slots.

Jiang et al. 2023 (Mistral 7B), arXiv:2310.06825, section 2; the write is ONNX TensorScatter-24, circular

    p    = past_length_b + t           position of new token t of row b, counted from the first token the row ever saw
    o_bt = sum_i softmax_i(scale q_bt . key_bi) value_bi     positions i from max(0, p - W + 1) to p: W keys with itself
    slot p mod W of the ring holds position p, until position p + W takes its place           grouped heads as in gqa

A slot that no token has reached holds garbage, NaN perhaps: it is kept and never read. The softmax does not care for
the order of slots, so one new token sees whatever was written; of several, the later ones take the slots of keys that
the earlier ones still see. Where code in the wild differs: the paper's text reads as W + 1 keys (p - W to p);
transformers keeps the W tokens in order of position and shifts them; W may leave the token itself out of the count.
"""
import numpy as np

from .. import kit
from ..core import per_head, sum_groups
from ..masks import causal, grid, window
from ..shapes import cotangents, sizes
from . import gqa

INPUTS = dict(q="B Hq T dk", k="B Hkv T dk", v="B Hkv T dv", ring_key="B Hkv W dk", ring_value="B Hkv W dv",
              past_length="int B >=0", scale="")
OUTPUTS = dict(o="B Hq T dv", present_key="B Hkv W dk", present_value="B Hkv W dv")
CONVENTIONS = dict(heads=gqa.CONVENTIONS["heads"], window="W keys, the token's own included", layout="B H T d",
                   cache="position p, counted from 0 per row, in slot p mod W",
                   masked_values="a slot never written is never read")


def dense(q, k, v, ring_key, ring_value, past_length, *, scale):
    """o (B, Hq, T, dv) and the rings after the call, T larger than W or not; ValueError where an input does not fit."""
    T = sizes(INPUTS, locals())["T"]
    x = line(q, k, v, ring_key, ring_value, past_length, scale)
    return gqa.dense(**x)[0], *(turn(y[:, :, T:], -(past_length + T)) for y in (x["k"], x["v"]))


def turn(ring, steps):
    """ring (B, Hkv, W, d) with slot (j + steps[b]) mod W at place j; by past_length: oldest token first."""
    W = ring.shape[2]
    slots = (np.arange(W) + steps[:, None]) % W
    return np.take_along_axis(ring, slots[:, None, :, None], axis=2)


def line(q, k, v, ring_key, ring_value, past_length, scale):
    """The call as gqa sees it: the last W tokens and the T new ones, place j holding position past_length - W + j."""
    W, T = ring_key.shape[2], q.shape[2]
    exists = np.arange(W + T) >= W - past_length[:, None, None, None]
    return dict(q=q, k=np.concatenate([turn(ring_key, past_length), k], axis=2),
                v=np.concatenate([turn(ring_value, past_length), v], axis=2),
                mask=window(T, W + T, left=W - 1, right=0) & exists, scale=scale)


def decode(q, k, v, ring_key, ring_value, past_length, *, scale):
    """One token at a time: its key and value over the oldest in the ring, then one query over all slots written."""
    sizes(INPUTS, locals())
    key, value, o = ring_key.copy(), ring_value.copy(), []
    rows, slots = np.arange(len(q)), np.arange(key.shape[2])
    for t in range(q.shape[2]):
        position = past_length + t
        slot = position % len(slots)
        key[rows, :, slot], value[rows, :, slot] = k[:, :, t], v[:, :, t]
        written = slots <= position[:, None]
        o.append(gqa.grouped(q[:, :, t:t + 1], key, value, written[:, None, None], scale=scale)[0])
    return np.concatenate(o, axis=2), key, value


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, ring_key, ring_value, past_length, scale):
    """Query head h with the ring of kv head h // (Hq/Hkv): write slot p mod W, then read the slots written so far."""
    (T, dk), (W, dv) = q.shape, ring_value.shape
    key, value = ring_key.copy(), ring_value.copy()
    o, s, z = np.zeros((T, dv), q.dtype), np.zeros(W, q.dtype), np.zeros(T, q.dtype)
    m = np.full(T, -np.inf, q.dtype)
    for t in range(T):
        p = past_length + t
        for c in range(dk):
            key[p % W, c] = k[t, c]
        for c in range(dv):
            value[p % W, c] = v[t, c]
        written = min(p + 1, W)
        for j in range(written):
            s[j] = 0
            for c in range(dk):
                s[j] += scale * q[t, c] * key[j, c]
            if s[j].real > m[t].real:
                m[t] = s[j]
        for j in range(written):
            e = np.exp(s[j] - m[t])
            z[t] += e
            for c in range(dv):
                o[t, c] += e * value[j, c]
        o[t] /= z[t]
    return o, key, value


def vjp(do, dpresent_key, dpresent_value, q, k, v, ring_key, ring_value, past_length, *, scale):
    """Gradients of q, k, v and both rings for cotangents of o and of both rings after the call."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    x = line(q, k, v, ring_key, ring_value, past_length, scale)
    d = gqa.vjp(do, np.zeros_like(do[..., 0]), **x)
    return dict(dq=d["dq"]) | shares(d["dk"], d["dv"], dpresent_key, dpresent_value, past_length)


def shares(dkey, dvalue, dpresent_key, dpresent_value, past_length):
    """The line has the present rings at its end; its first W places are the past rings, the rest the new tokens."""
    W = dpresent_key.shape[2]
    T = dkey.shape[2] - W
    dkey[:, :, T:] += turn(dpresent_key, past_length + T)
    dvalue[:, :, T:] += turn(dpresent_value, past_length + T)
    return dict(dk=dkey[:, :, W:], dring_key=turn(dkey[:, :, :W], -past_length),
                dv=dvalue[:, :, W:], dring_value=turn(dvalue[:, :, :W], -past_length))


FORMS = dense, decode, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

ARRAYS = "q", "k", "v", "ring_key", "ring_value"


def masked(x, keep):
    """Right rings, and o where position p sees position i if keep(p, i, n, W); n tokens came before the call."""
    y, n, W = line(**x), x["past_length"][:, None, None, None], x["ring_key"].shape[2]
    t, j = grid(*y["mask"].shape[2:])
    mask = np.broadcast_to(keep(n + t, n - W + j, n, W), y["mask"].shape)
    one_by_one = [gqa.dense(**y | {"q": x["q"][:, :, i:i + 1], "mask": mask[:, :, i:i + 1]})[0] for i in t[:, 0]]
    return kit.with_o(dense(**x), np.concatenate(one_by_one, axis=2))


def with_rings(x, change):
    """The right o beside rings wrong by change."""
    o, key, value = dense(**x)
    return o, change(key), change(value)


def placed(x, slot, unused=0):
    """One token after the other, token t at position p in slot(p, t, W), the last slots unused."""
    key, value, o = x["ring_key"].copy(), x["ring_value"].copy(), []
    rows, W = np.arange(len(key)), key.shape[2]
    for t in range(x["q"].shape[2]):
        p = x["past_length"] + t
        j = slot(p, t, W)
        key[rows, :, j], value[rows, :, j] = x["k"][:, :, t], x["v"][:, :, t]
        written = (np.arange(W) <= np.minimum(p, W - unused - 1)[:, None])[:, None, None]
        o.append(gqa.dense(x["q"][:, :, t:t + 1], key, value, written, scale=x["scale"])[0])
    return np.concatenate(o, axis=2), key, value


def in_slot_order(x):
    """The line of keys and values with the ring as it lies, slot 0 first."""
    return line(**x | {name: turn(x[name], -x["past_length"]) for name in ("ring_key", "ring_value")})


def turns(x):
    """Tokens seen after the call, for a ring that is full; a ring that is not lies in order, 0."""
    seen = x["past_length"] + x["q"].shape[2]
    return np.where(seen > x["ring_key"].shape[2], seen, 0)


def written(x):
    """(B, 1, W, 1) True for a slot that some token has reached after the call."""
    return (np.arange(x["ring_key"].shape[2]) < x["past_length"][:, None] + x["q"].shape[2])[:, None, :, None]


BUGS = dict(
    window_plus_one=("W keys before the token's own, W + 1 in all", lambda x: masked(
        x, lambda p, i, n, W: (0 <= i) & (p - W <= i) & (i <= p))),
    window_minus_one=("W - 1 keys, the token's own included", lambda x: masked(
        x, lambda p, i, n, W: (0 <= i) & (p - W + 1 < i) & (i <= p))),
    window_dropped=("the new tokens see the whole ring and each other, however far back", lambda x: masked(
        x, lambda p, i, n, W: (0 <= i) & (i <= p))),
    new_tokens_not_causal=("the new tokens see each other in both directions", lambda x: masked(
        x, lambda p, i, n, W: (0 <= i) & (p - W < i))),
    call_written_before_read=("all new tokens are in the ring before the first query reads it", lambda x: masked(
        x, lambda p, i, n, W: (0 <= i) & (n + x["q"].shape[2] - W <= i) & (i <= p))),
    present_read_by_all=("every new token reads the ring as it is after the call, later tokens included", lambda x: (
        masked(x, lambda p, i, n, W: (0 <= i) & (n + x["q"].shape[2] - W <= i)))),
    mask_cut_at_start=("the mask of the whole sequence is cut to its first columns, not its last", lambda x: masked(
        x, lambda p, i, n, W: (p - W < i - n + W) & (i - n + W <= p))),
    read_before_write=("each new token reads the ring before its own key is in it", lambda x: masked(
        x, lambda p, i, n, W: (0 <= i) & (p - W <= i) & (i < p))),
    past_ignored=("the new tokens see only each other", lambda x: masked(
        x, lambda p, i, n, W: (n <= i) & (p - W < i) & (i <= p))),
    garbage_read=("slots that no token has reached are read", lambda x: masked(
        x, lambda p, i, n, W: (p - W < i) & (i <= p))),
    mask_of_longest_row=("slots are right, but every row may see as far as the longest", lambda x: masked(
        x, lambda p, i, n, W: (p - W < i) & (i <= p) & ((0 <= i) | (i + W <= p - n + n.max())))),
    slots_taken_for_positions=("slot j is taken for the j-th oldest token where the window is applied", lambda x:
                               kit.with_o(dense(**x), gqa.dense(**in_slot_order(x))[0])),
    slot_clamped=("once the ring is full the last slot takes every token", lambda x: placed(
        x, lambda p, t, W: np.minimum(p, W - 1))),
    last_slot_unused=("the ring is full one token early: positions go round in W - 1 slots", lambda x: placed(
        x, lambda p, t, W: p % max(1, W - 1), unused=int(x["ring_key"].shape[2] > 1))),
    slot_one_late=("position p goes to slot (p + 1) mod W", lambda x: placed(x, lambda p, t, W: (p + 1) % W)),
    slot_from_0=("token t of a call goes to slot t mod W", lambda x: placed(x, lambda p, t, W: 0 * p + t % W)),
    token_over_token=("every token of a call goes to the slot of the first", lambda x: placed(
        x, lambda p, t, W: (p - t) % W)),
    length_of_longest_row=("the longest past of the batch is taken for every row", lambda x: dense(
        **kit.one_length(x, max(x["past_length"])))),
    length_of_row_0=("the past_length of batch entry 0 is taken for every row", lambda x: dense(
        **kit.one_length(x, x["past_length"][0]))),
    present_in_order=("the ring comes back in order of position, the oldest token in slot 0", lambda x: with_rings(
        x, lambda y: turn(y, turns(x)))),
    present_not_written=("the rings are returned as they came", lambda x: (
        dense(**x)[0], x["ring_key"], x["ring_value"])),
    unused_slots_cleared=("slots without a token are set to 0", lambda x: with_rings(x, lambda y: y * written(x))),
    cached_keys_scaled=("keys are scaled on their way into the ring, and the scores again", lambda x: dense(
        **x | {"k": x["scale"] * x["k"]})),
    heads_tiled=("query head h reads kv head h mod Hkv", lambda x: kit.with_o(
        dense(**x), gqa.dense(**gqa.mha(line(**x), lambda h, Hq, Hkv: h % Hkv))[0])),
    scale_missing=("the scores are not scaled", lambda x: dense(**x | {"scale": 1.0})),
    scale_ignored=("1/sqrt(dk) whatever scale was asked for", lambda x: dense(
        **x | {"scale": x["q"].shape[3] ** -0.5})),
    garbage_nan_poison=("0 * NaN: the value of a slot never written is read", lambda x: kit.with_o(
        dense(**x), gqa.weights(line(**x)) @ gqa.mha(line(**x))["v"])),
    strides_ignored=("strided views are read as if they were contiguous", lambda x: dense(
        **x | kit.changed(x, ARRAYS, kit.memory_order))),
)


def line_gradients(x, reduce=sum_groups):
    """Gradients of the line of keys and values, those through the present rings left out; reduce as in gqa.reduced."""
    y = line(**{name: x[name] for name in INPUTS}) | dict(do=x["do"], dlse=np.zeros_like(x["do"][..., 0]))
    return gqa.reduced(y, reduce).values()


def shared(x, dkey, dvalue):
    """The gradients of new and cached keys and values for wrong dkey, dvalue through attention."""
    return shares(dkey, dvalue, x["dpresent_key"], x["dpresent_value"], x["past_length"])


VJP_BUGS = dict(
    group_gradient_last_head=("the last head of a group overwrites the gradients of the others", lambda x: shared(
        x, *line_gradients(x, gqa.last_of_group))),
    group_gradient_mean=("gradients are means over the group instead of sums", lambda x: shared(
        x, *line_gradients(x, gqa.pool_heads))),
    present_cotangent_lost=("the gradient that comes through the rings after the call is lost", lambda x: vjp(
        **x | {name: 0 * x[name] for name in ("dpresent_key", "dpresent_value")})),
    past_detached=("cached keys get no gradient from the new queries", lambda x: dict(
        dring_key=shared(x, *(0 * d for d in line_gradients(x)))["dring_key"])),
    overwritten_slot_keeps_gradient=("a slot that was overwritten passes gradient to what stood there", lambda x: dict(
        dring_key=vjp(**x | {"dpresent_key": 0 * x["dpresent_key"]})["dring_key"] + x["dpresent_key"])),
    new_tokens_detached=("new keys and values go into the ring without their history and get no gradient",
                         lambda x: {name: 0 * vjp(**x)[name] for name in ("dk", "dv")}),
    ring_gradient_in_order=("the gradient of the ring comes back in order of position", lambda x: dict(
        dring_key=turn(vjp(**x)["dring_key"], x["past_length"]))),
    dq_scale_missing=("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=3, Hq=6, Hkv=2, T=5, W=8, dk=4, dv=7)
NEUTRAL = dict(past_length=np.array([13, 5, 2]), scale=lambda n: n.dk ** -0.5)


def without_ring(x, mask):
    """o of the new tokens when there are no others."""
    return gqa.dense(x["q"], x["k"], x["v"], mask, scale=x["scale"])[0]


CASES = dict(
    basic=dict(
        why="five tokens at once: a ring that has turned, one filled to the edge and over, one that is not full",
        sizes=SIZES, catches=(
            "window_plus_one", "window_minus_one", "window_dropped", "new_tokens_not_causal", "read_before_write",
            "call_written_before_read", "present_read_by_all", "mask_cut_at_start", "past_ignored", "garbage_read",
            "mask_of_longest_row", "slots_taken_for_positions", "slot_clamped", "last_slot_unused", "slot_one_late",
            "slot_from_0", "token_over_token", "length_of_longest_row", "length_of_row_0",
            "present_in_order", "present_not_written", "unused_slots_cleared", "cached_keys_scaled", "heads_tiled",
            "scale_missing", "group_gradient_last_head", "group_gradient_mean", "present_cotangent_lost",
            "past_detached", "overwritten_slot_keeps_gradient", "new_tokens_detached",
            "ring_gradient_in_order", "dq_scale_missing")),
    at_the_edge=dict(
        why="one token at position W - 1, W and W + 1", sizes=SIZES | dict(T=1), light=True,
        past_length=np.array([7, 8, 9]),
        catches=("slot_clamped", "window_plus_one", "read_before_write", "length_of_row_0")),
    before_the_edge=dict(
        why="one token before the ring is full: the window does not bite yet", sizes=SIZES | dict(T=1), light=True,
        past_length=np.array([6, 0, 3]), catches=("garbage_read", "slot_one_late", "length_of_longest_row")),
    new_ring=dict(
        why="nothing seen yet and fewer tokens than slots: causal attention", sizes=SIZES, light=True,
        past_length=np.array([0, 0, 0]), shows=lambda x, y: np.allclose(y["o"], without_ring(x, causal(5, 5)))),
    long_prompt=dict(
        why="a first call longer than the window: sliding-window attention", sizes=SIZES | dict(W=3), light=True,
        past_length=np.array([0, 0, 0]),
        shows=lambda x, y: np.allclose(y["o"], without_ring(x, window(5, 5, left=2, right=0)))),
    long_call=dict(
        why="more new tokens than slots, after others: the ring turns more than once", sizes=SIZES | dict(W=3),
        past_length=np.array([4, 2, 3]), catches=("call_written_before_read", "present_in_order", "window_plus_one")),
    full_turn=dict(
        why="T = W: the present is the new tokens, turned", sizes=SIZES | dict(T=8), light=True,
        past_length=np.array([8, 3, 0]),
        shows=lambda x, y: (y["present_key"] == turn(x["k"], -x["past_length"])).all()),
    window_1=dict(
        why="W = 1: a token sees itself alone, o is v", sizes=SIZES | dict(W=1), light=True,
        shows=lambda x, y: (y["o"] == np.repeat(x["v"], 3, axis=1)).all()),
    window_2=dict(
        why="W = 2: the token before and the token itself", sizes=SIZES | dict(W=2), light=True,
        past_length=np.array([1, 0, 4]), catches=("window_plus_one", "window_minus_one", "slot_clamped")),
    nan_in_unwritten_slots=dict(
        why="NaN in every slot that no token has reached", sizes=SIZES, past_length=np.array([2, 0, 6]),
        change=lambda x: kit.nan_in_new_slots(x, ARRAYS[3:]), catches=("garbage_nan_poison", "garbage_read")),
    mha=dict(
        why="Hkv = Hq: a ring for every head", sizes=SIZES | dict(Hkv=6, T=2), light=True,
        catches=("window_plus_one", "slot_one_late")),
    mqa=dict(
        why="Hkv = 1: one ring for all heads, gradients summed over all of them", sizes=SIZES | dict(Hkv=1, T=2),
        catches=("group_gradient_last_head",)),
    one_token=dict(
        why="one token in one slot: o is v", sizes=dict(B=1, Hq=1, Hkv=1, T=1, W=1, dk=1, dv=1),
        past_length=np.array([0]), shows=kit.returns_v),
    narrow_values=dict(
        why="dv may be smaller than dk", sizes=SIZES | dict(dk=16), light=True, shows=kit.narrow_values),
    scale_given=dict(
        why="a scale that is not 1/sqrt(dk) must be honoured, and a width that no 4 divides", sizes=SIZES | dict(dk=6),
        scale=0.75, catches=("scale_ignored", "cached_keys_scaled")),
    large_scores=dict(
        why="q k^T is over 65504 before it is scaled, and the newest key takes all the weight", sizes=SIZES, scale=0.5,
        light=True, change=lambda x: kit.ramp(x, 160, 160, 1),
        shows=lambda x, y: np.allclose(y["o"], np.repeat(x["v"], 3, axis=1))),
    strided=dict(
        why="rings and new tokens are views of (B, T, H, d) memory", sizes=SIZES,
        change=lambda x: kit.strided(x, ARRAYS), catches=("strides_ignored",)),
)
