"""Decoding with a static key-value cache: T new tokens are written into P slots, then read with those before them.

Shazeer 2019, arXiv:1911.02150, section 2.4 (incremental attention); the write is ONNX TensorScatter-24, linear

    present_bj = new_b(j - n_b)  where n_b <= j < n_b + T, else past_bj        n_b = past_length_b; keys, values alike
    o_bt       = sum_{j <= n_b + t} softmax_j(scale q_bt . present_key_bj) present_value_bj     grouped heads as in gqa

Slots from n_b + T on hold garbage, NaN perhaps: they are copied and never read. Causal attention over a whole sequence
equals any cutting of it into calls, each with the present of the one before as its past and n larger by its T.
Where code in the wild differs: a cache that grows (present = past and new side by side); the causal diagonal from the
top left, so that token t sees slots 0 to t (torch is_causal, ONNX without lengths); one length for the whole batch.
"""
import numpy as np

from .. import kit
from ..core import chunks, per_head, sum_groups
from ..masks import causal, grid
from ..shapes import cotangents, sizes
from . import gqa

INPUTS = dict(q="B Hq T dk", k="B Hkv T dk", v="B Hkv T dv", past_key="B Hkv P dk", past_value="B Hkv P dv",
              past_length="int B >=0", scale="", chunk_size="int >=1")
OUTPUTS = dict(o="B Hq T dv", present_key="B Hkv P dk", present_value="B Hkv P dv")
CONVENTIONS = dict(heads=gqa.CONVENTIONS["heads"], causal="new token t of row b sees slots 0 to past_length[b] + t",
                   cache="token t of row b goes to slot past_length[b] + t; the other slots are copied",
                   layout="B H T d", masked_values="slots from past_length[b] + T on are never read")


def dense(q, k, v, past_key, past_value, past_length, *, scale, chunk_size=64):
    """o (B, Hq, T, dv) and the caches after the call; ValueError where shapes do not fit or slots do not suffice."""
    check(sizes(INPUTS, locals()), past_length)
    x = whole(q, k, v, past_key, past_value, past_length, scale)
    return gqa.dense(**x)[0], x["k"], x["v"]


def whole(q, k, v, past_key, past_value, past_length, scale, **_):
    """The call as gqa sees it: keys and values are the caches after the write, under a mask."""
    return dict(q=q, k=write(past_key, k, past_length), v=write(past_value, v, past_length),
                mask=seen(past_length, q.shape[2], past_key.shape[2]), scale=scale)


def check(n, past_length):
    """Raises ValueError unless every row has slots for the T new tokens."""
    if np.any(past_length > n["P"] - n["T"]):
        raise ValueError(f"past_length: expected numbers <= P - T = {n['P'] - n['T']}, got {past_length}")


def write(past, new, past_length):
    """past (B, Hkv, P, d) with new (B, Hkv, T, d) in the slots past_length[b] to past_length[b] + T - 1 of row b."""
    present = past.copy()
    for b, n in enumerate(past_length):
        present[b, :, n:n + new.shape[2]] = new[b]
    return present


def read(present, past_length, T):
    """The T tokens that `write` put there, (B, Hkv, T, d)."""
    return np.stack([present[b, :, n:n + T] for b, n in enumerate(past_length)])


def seen(past_length, T, P):
    """(B, 1, T, P) True where slot j holds new token t of row b or one before it."""
    t, j = grid(T, P)
    return j <= past_length[:, None, None, None] + t


def decode(q, k, v, past_key, past_value, past_length, *, scale, chunk_size=64):
    """One token at a time: its key and value into the next slot of each row, then one query over the filled slots."""
    check(sizes(INPUTS, locals()), past_length)
    key, value, o = past_key.copy(), past_value.copy(), []
    rows, slots = np.arange(len(q)), np.arange(key.shape[2])
    for t in range(q.shape[2]):
        slot = past_length + t
        key[rows, :, slot], value[rows, :, slot] = k[:, :, t], v[:, :, t]
        filled = slots <= slot[:, None]
        o.append(gqa.grouped(q[:, :, t:t + 1], key, value, filled[:, None, None], scale=scale)[0])
    return np.concatenate(o, axis=2), key, value


def chunkwise(q, k, v, past_key, past_value, past_length, *, scale, chunk_size=64):
    """Chunked prefill: the tokens come in calls of chunk_size, the present of one call is the past of the next."""
    check(sizes(INPUTS, locals()), past_length)
    key, value, o = past_key, past_value, []
    for i, (qc, kc, vc) in enumerate(zip(*(chunks(x, chunk_size) for x in (q, k, v)))):
        y, key, value = dense(qc, kc, vc, key, value, past_length + i * chunk_size, scale=scale)
        o.append(y)
    return np.concatenate(o, axis=2), key, value


def loop(q, k, v, past_key, past_value, past_length, *, scale, chunk_size=64):
    """`one_head` for every query head, on lengths that were checked."""
    check(sizes(INPUTS, locals()), past_length)
    return one_head(q, k, v, past_key, past_value, past_length, scale, chunk_size)


@per_head(INPUTS, OUTPUTS)
def one_head(q, k, v, past_key, past_value, past_length, scale, chunk_size):
    """Query head h with the cache of kv head h // (Hq/Hkv): write slot n, then read slots 0 to n."""
    (T, dk), (P, dv) = q.shape, past_value.shape
    key, value = past_key.copy(), past_value.copy()
    o, s, z = np.zeros((T, dv), q.dtype), np.zeros(P, q.dtype), np.zeros(T, q.dtype)
    m = np.full(T, -np.inf, q.dtype)
    for t in range(T):
        n = past_length + t
        for c in range(dk):
            key[n, c] = k[t, c]
        for c in range(dv):
            value[n, c] = v[t, c]
        for j in range(n + 1):
            s[j] = 0
            for c in range(dk):
                s[j] += scale * q[t, c] * key[j, c]
            if s[j].real > m[t].real:
                m[t] = s[j]
        for j in range(n + 1):
            p = np.exp(s[j] - m[t])
            z[t] += p
            for c in range(dv):
                o[t, c] += p * value[j, c]
        o[t] /= z[t]
    return o, key, value


def vjp(do, dpresent_key, dpresent_value, q, k, v, past_key, past_value, past_length, *, scale,
        chunk_size=64):
    """Gradients of q, k, v and both caches for cotangents of o and of both caches after the call."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    x = whole(q, k, v, past_key, past_value, past_length, scale)
    d = gqa.vjp(do, np.zeros_like(do[..., 0]), **x)
    return dict(dq=d["dq"]) | shares(d["dk"] + dpresent_key, d["dv"] + dpresent_value, k, v, past_length)


def shares(dkey, dvalue, k, v, past_length):
    """The gradient of a written slot belongs to the new token, that of every other slot to the past."""
    return dict(dk=read(dkey, past_length, k.shape[2]), dpast_key=write(dkey, np.zeros_like(k), past_length),
                dv=read(dvalue, past_length, k.shape[2]), dpast_value=write(dvalue, np.zeros_like(v), past_length))


FORMS = dense, decode, chunkwise, loop


def cache_bytes(layers, tokens, kv_heads, head_dim, bytes_per_number):
    """Bytes of all keys and values: 80 layers, 128 numbers of 2 bytes: 2.5 MiB a token for 64 heads, 320 KiB for 8."""
    return 2 * layers * tokens * kv_heads * head_dim * bytes_per_number


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

ARRAYS = "q", "k", "v", "past_key", "past_value"


def masked(x, keep):
    """Right caches, and o under the mask keep(n, t, j, T, P): n tokens before the call, new token t, slot j."""
    y, (T, P) = whole(**x), (x["q"].shape[2], x["past_key"].shape[2])
    mask = np.broadcast_to(keep(x["past_length"][:, None, None, None], *grid(T, P), T, P), y["mask"].shape)
    return gqa.dense(**y | {"mask": mask})[0], y["k"], y["v"]


def placed(x, slot):
    """Right mask, and new token t of row b in slot(n, t), or nowhere where there is no such slot."""
    key, value = x["past_key"].copy(), x["past_value"].copy()
    for b, t in np.ndindex(x["q"].shape[0], x["q"].shape[2]):
        j = slot(x["past_length"][b], t)
        if j < key.shape[2]:
            key[b, :, j], value[b, :, j] = x["k"][b, :, t], x["v"][b, :, t]
    return gqa.dense(**whole(**x) | {"k": key, "v": value})[0], key, value


def appended(x):
    """o with the new tokens after slot P - 1 and a causal mask from the bottom right."""
    key, value = (np.concatenate(y, axis=2) for y in ((x["past_key"], x["k"]), (x["past_value"], x["v"])))
    return gqa.dense(x["q"], key, value, causal(x["q"].shape[2], key.shape[2]), scale=x["scale"])[0]


def chunk_over_chunk(x):
    """Calls of chunk_size that all start at the same slots."""
    o, present = [], (x["past_key"], x["past_value"])
    for q, k, v in zip(*(chunks(x[name], x["chunk_size"]) for name in "qkv")):
        y, *present = dense(q, k, v, *present, x["past_length"], scale=x["scale"])
        o.append(y)
    return np.concatenate(o, axis=2), *present


def cleared(x):
    """The caches after the call with 0 in slots without a token."""
    last = seen(x["past_length"], x["q"].shape[2], x["past_key"].shape[2])[:, :, -1, :, None]
    return tuple(np.where(last, y, 0) for y in dense(**x)[1:])


BUGS = dict(
    causal_top_left=("new token t sees slots 0 to t, as if nothing were cached", lambda x: masked(
        x, lambda n, t, j, T, P: j <= t)),
    causal_one_ahead=("a new token sees the slot after its own", lambda x: masked(
        x, lambda n, t, j, T, P: j <= n + t + 1)),
    causal_bottom_right=("the causal diagonal ends at the last slot, not at the last token", lambda x: masked(
        x, lambda n, t, j, T, P: j <= t + P - T)),
    garbage_read=("every slot is read, filled or not", lambda x: masked(x, lambda n, t, j, T, P: j >= 0)),
    new_tokens_not_causal=("the new tokens see each other in both directions", lambda x: masked(
        x, lambda n, t, j, T, P: j < n + T)),
    read_before_write=("each new token reads the cache before its own key is in it", lambda x: masked(
        x, lambda n, t, j, T, P: j < n + t)),
    new_tokens_unseen=("all new tokens read the cache as it was before the call", lambda x: masked(
        x, lambda n, t, j, T, P: j < n)),
    past_ignored=("the new tokens see only each other", lambda x: masked(
        x, lambda n, t, j, T, P: (n <= j) & (j <= n + t))),
    mask_of_longest_row=("slots are right, but every row may see as far as the longest", lambda x: masked(
        x, lambda n, t, j, T, P: j <= n.max() + t)),
    length_of_longest_row=("the longest past of the batch is taken for every row", lambda x: dense(
        **kit.one_length(x, max(x["past_length"])))),
    length_of_row_0=("the past_length of batch entry 0 is taken for every row", lambda x: dense(
        **kit.one_length(x, x["past_length"][0]))),
    slot_one_late=("new token t goes to slot past_length + t + 1", lambda x: placed(x, lambda n, t: n + t + 1)),
    offset_twice=("new token t goes to slot 2 past_length + t", lambda x: placed(x, lambda n, t: 2 * n + t)),
    slot_one_early=("the first new token overwrites the last cached one", lambda x: placed(
        x, lambda n, t: max(n - 1, 0) + t)),
    slots_from_0=("new token t goes to slot t, over the past", lambda x: placed(x, lambda n, t: t)),
    token_over_token=("every new token goes to slot past_length, over the one before it", lambda x: (
        masked(x, lambda n, t, j, T, P: (j < n) | (j == n + t))[0], *placed(x, lambda n, t: n)[1:])),
    last_token_alone=("of several new tokens the last alone is written, to slot past_length", lambda x: placed(
        x, lambda n, t: n)),
    chunk_over_chunk=("past_length does not grow from chunk to chunk", chunk_over_chunk),
    appended_after_capacity=("new tokens are appended after the last slot, garbage between", lambda x: (appended(x),)),
    present_not_written=("the caches are returned as they came", lambda x: (
        dense(**x)[0], x["past_key"], x["past_value"])),
    value_cache_stale=("keys are written, values are not", lambda x: (
        gqa.dense(**whole(**x) | {"v": x["past_value"]})[0], dense(**x)[1], x["past_value"])),
    unused_slots_cleared=("slots without a token are set to 0", lambda x: (dense(**x)[0], *cleared(x))),
    cached_keys_scaled=("keys are scaled on their way into the cache, and the scores again", lambda x: dense(
        **x | {"k": x["scale"] * x["k"]})),
    heads_tiled=("query head h reads kv head h mod Hkv", lambda x: kit.with_o(
        dense(**x), gqa.dense(**gqa.mha(whole(**x), lambda h, Hq, Hkv: h % Hkv))[0])),
    scale_missing=("the scores are not scaled", lambda x: dense(**x | {"scale": 1.0})),
    scale_ignored=("1/sqrt(dk) whatever scale was asked for", lambda x: dense(
        **x | {"scale": x["q"].shape[3] ** -0.5})),
    garbage_nan_poison=("0 * NaN: the value of an empty slot is read", lambda x: kit.with_o(
        dense(**x), gqa.weights(whole(**x)) @ gqa.mha(whole(**x))["v"])),
    strides_ignored=("strided views are read as if they were contiguous", lambda x: dense(
        **x | kit.changed(x, ARRAYS, kit.memory_order))),
)


def cache_gradients(x, reduce=sum_groups):
    """Gradients of the caches after the write, present cotangents left out; reduce as in gqa.reduced."""
    y = whole(**{name: x[name] for name in INPUTS}) | dict(do=x["do"], dlse=np.zeros_like(x["do"][..., 0]))
    return tuple(gqa.reduced(y, reduce).values())


def shared(x, dkey, dvalue):
    """The gradients of new and cached keys and values for wrong dkey, dvalue through attention."""
    return shares(dkey + x["dpresent_key"], dvalue + x["dpresent_value"], x["k"], x["v"], x["past_length"])


VJP_BUGS = dict(
    group_gradient_last_head=("the last head of a group overwrites the gradients of the others", lambda x: shared(
        x, *cache_gradients(x, gqa.last_of_group))),
    group_gradient_mean=("gradients are means over the group instead of sums", lambda x: shared(
        x, *cache_gradients(x, gqa.pool_heads))),
    present_cotangent_lost=("the gradient that comes through the caches after the call is lost", lambda x: vjp(
        **x | {name: 0 * x[name] for name in ("dpresent_key", "dpresent_value")})),
    past_detached=("cached keys get no gradient from the new queries", lambda x: dict(
        dpast_key=shared(x, *(0 * d for d in cache_gradients(x)))["dpast_key"])),
    overwritten_slot_keeps_gradient=("a slot that was overwritten passes gradient to what stood there", lambda x: dict(
        dpast_key=cache_gradients(x)[0] + x["dpresent_key"])),
    new_tokens_detached=("new keys and values are cached without their history and get no gradient",
                         lambda x: {name: 0 * vjp(**x)[name] for name in ("dk", "dv")}),
    gradient_of_first_slots=("the gradient of new key t is read from slot t", lambda x: dict(
        dk=(cache_gradients(x)[0] + x["dpresent_key"])[:, :, :x["k"].shape[2]])),
    dq_scale_missing=("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=3, Hq=6, Hkv=2, T=5, P=9, dk=4, dv=7)
NEUTRAL = dict(past_length=np.array([3, 1, 2]), scale=lambda n: n.dk ** -0.5, chunk_size=2)


def without_cache(x):
    """o of the new tokens when there are no others."""
    return gqa.dense(x["q"], x["k"], x["v"], causal(x["q"].shape[2], x["k"].shape[2]), scale=x["scale"])[0]


CASES = dict(
    basic=dict(
        why="rows of different length, five tokens at once in chunks of two, room to spare", sizes=SIZES,
        catches=("causal_top_left", "causal_one_ahead", "causal_bottom_right", "garbage_read",
                 "new_tokens_not_causal", "read_before_write", "new_tokens_unseen", "past_ignored",
                 "mask_of_longest_row", "length_of_longest_row", "length_of_row_0", "slot_one_late", "offset_twice",
                 "slot_one_early", "slots_from_0", "token_over_token", "last_token_alone", "chunk_over_chunk",
                 "appended_after_capacity", "present_not_written", "value_cache_stale", "unused_slots_cleared",
                 "cached_keys_scaled", "heads_tiled", "scale_missing", "group_gradient_last_head",
                 "group_gradient_mean", "present_cotangent_lost", "past_detached",
                 "overwritten_slot_keeps_gradient", "new_tokens_detached", "gradient_of_first_slots",
                 "dq_scale_missing")),
    first_and_last_slot=dict(
        why="a row with nothing cached beside a row that is filled to the last slot; the last chunk is one token",
        sizes=SIZES, light=True, past_length=np.array([0, 4, 3]), chunk_size=4,
        catches=("length_of_row_0", "slot_one_late", "past_ignored", "chunk_over_chunk")),
    one_new_token=dict(
        why="one query: from the top left it would see slot 0 alone", sizes=SIZES | dict(T=1), light=True,
        past_length=np.array([5, 8, 0]), catches=("causal_top_left", "read_before_write", "garbage_read")),
    empty_cache=dict(
        why="prefill in one chunk: with nothing cached the call is causal attention", sizes=SIZES, light=True,
        chunk_size=5, past_length=np.array([0, 0, 0]), shows=lambda x, y: np.allclose(y["o"], without_cache(x))),
    whole_sequence=dict(
        why="P = T, and a chunk that is longer: the present is the new keys and values themselves",
        sizes=SIZES | dict(P=5), light=True, past_length=np.array([0, 0, 0]), chunk_size=6,
        shows=lambda x, y: (y["present_key"] == x["k"]).all() and (y["present_value"] == x["v"]).all()),
    nan_in_empty_slots=dict(
        why="NaN in every slot that holds no token before the call", sizes=SIZES, past_length=np.array([1, 0, 3]),
        change=lambda x: kit.nan_in_new_slots(x, ARRAYS[3:]),
        catches=("garbage_nan_poison", "garbage_read", "value_cache_stale")),
    mha=dict(
        why="Hkv = Hq: a cache for every head; chunks of one token", sizes=SIZES | dict(Hkv=6, T=2), light=True,
        chunk_size=1, catches=("causal_top_left", "slot_one_early", "token_over_token")),
    mqa=dict(
        why="Hkv = 1: one cache for all heads, gradients summed over all of them", sizes=SIZES | dict(Hkv=1, T=2),
        catches=("group_gradient_last_head",)),
    one_token=dict(
        why="one token in one slot: o is v", sizes=dict(B=1, Hq=1, Hkv=1, T=1, P=1, dk=1, dv=1),
        past_length=np.array([0]), shows=kit.returns_v),
    narrow_values=dict(
        why="dv may be smaller than dk", sizes=SIZES | dict(T=4, dk=16), light=True, shows=kit.narrow_values),
    scale_given=dict(
        why="a scale that is not 1/sqrt(dk) must be honoured, and a width that no 4 divides", sizes=SIZES | dict(dk=6),
        scale=0.75, chunk_size=3,
        catches=("scale_ignored", "cached_keys_scaled")),
    large_scores=dict(
        why="q k^T is over 65504 before it is scaled, and the newest key takes all the weight", sizes=SIZES, scale=0.5,
        light=True, change=lambda x: kit.ramp(x, 160, 160, 1),
        shows=lambda x, y: np.allclose(y["o"], np.repeat(x["v"], 3, axis=1))),
    strided=dict(
        why="caches and new tokens are views of (B, T, H, d) memory", sizes=SIZES,
        change=lambda x: kit.strided(x, ARRAYS), catches=("strides_ignored",)),
)
