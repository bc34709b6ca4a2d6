"""Attention within hash buckets (Reformer).      Kitaev et al. 2020, arXiv:2001.04451, section 2, appendix A, eq. 11-16

    k_j    = q_j / |q_j|                                                       one vector is query and key
    P_i^r  = { j : h_j^r = h_i^r, mask_ij }                                    same bucket in round r
    P~_i^r = { j : c_i^r - 1 <= c_j^r <= c_i^r }      c_i^r = s_i^r // m       same chunk, or the one before
    a_ij   = scale q_i . k_j - (self_penalty if j = i else log N_ij)           N_ij = | { r : j in P_i^r } |
    z_i^r  = log sum_j exp(a_ij)       o_i^r = sum_j exp(a_ij - z_i^r) v_j     over j in both P_i^r and P~_i^r
    lse_i  = log sum_r exp(z_i^r)      o_i   = sum_r exp(z_i^r - lse_i) o_i^r

s_i^r is the place of i when the round is sorted by bucket, stably, m the chunk length. If P_i^r lies in P~_i^r, as it
does under a causal mask where no bucket has more than m tokens, o_i is attention over all keys that share a bucket with
i in any round, each counted once. The paper has scale = 1 and self_penalty = 1e5, which float16 cannot hold. Where code
in the wild differs: Trax and transformers see both chunks whatever the bucket, the first chunk looks back at the last,
and N is 1; reformer-pytorch has scale = 1/sqrt(dk); the penalty replaces the score, and is 1e3 or 5e4.
"""
import numpy as np

from .. import kit
from ..core import per_head, softmax, take
from ..masks import causal, window
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(qk="B H T dk", v="B H T dv", buckets="int B H L T >=0", mask="bool T? T?", keep="bool B T",
              chunk_length="int >=1", self_penalty="", scale="")
OUTPUTS = dict(o="B H T dv", lse="B H T")
STEPS = dict(place="B H L T", round_lse="B H L T", weights="B H T T")
CONVENTIONS = dict(sort="stable; padding stands behind all buckets", chunks="of sorted tokens, in each round anew",
                   mask="True = may attend", keep="True = the token is there", keys="0 for a vector of length 0",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, over all rounds", layout="B H T d",
                   masked_values="padding is never read")


def hash_buckets(qk, rotations):
    """int (B, H, L, T), h(x) = argmax [x R; -x R], ties to the first; rotations R (H or 1, L, dk, half the buckets)."""
    x = qk[:, :, None] @ rotations
    return np.concatenate([x, -x], -1).argmax(-1)


def places(buckets, keep):
    """s, (B, H, L, T): the place of every token in its round, sorted."""
    key = np.where(keep[:, None, None], buckets, buckets.max(initial=0) + 1)
    return key.argsort(-1, "stable").argsort(-1)


def meetings(buckets, mask, keep, chunk_length):
    """(B, H, L, T, T) True where j is in P_i^r, and where it is in P~_i^r as well."""
    there = keep[:, None, None, :, None] & keep[:, None, None, None]
    same = there & mask & (buckets[..., None] == buckets[..., None, :])
    chunk = places(buckets, keep) // chunk_length
    back = chunk[..., None] - chunk[..., None, :]
    return same, same & (0 <= back) & (back <= 1)


def length(x):
    """|x|, and 1 where x is 0, (..., 1)."""
    norm = np.sqrt((x * x).sum(-1, keepdims=True))
    return np.where(norm == 0, 1, norm)


def log_of(N, s):
    """log max(1, N) of integers N in the number system of s, which has their shape."""
    return np.log(np.maximum(N, 1).astype(s.dtype) + 0 * s)


def rounds(qk, same, seen, self_penalty, scale):
    """exp(a - z), (B, H, L, T, T), and z, (B, H, L, T), of every round."""
    s = scale * qk @ (qk / length(qk)).swapaxes(-1, -2)
    a = s - np.where(np.eye(s.shape[-1], dtype=bool), self_penalty, log_of(same.sum(2), s))
    return softmax(a[:, :, None], seen)


def over_rounds(o, z):
    """o (B, H, T, dv) and lse (B, H, T) from those of every round, (B, H, L, T, dv) and (B, H, L, T)."""
    w, lse = softmax(z.swapaxes(2, 3))
    return (w.swapaxes(2, 3)[..., None] * o).sum(2), lse


def dense(qk, v, buckets, mask, keep, *, chunk_length, self_penalty=1e5, scale):
    """o (B, H, T, dv) and lse (B, H, T), by the equations above. Raises ValueError for a shape that does not fit."""
    sizes(INPUTS, locals())
    same, seen = meetings(buckets, mask, keep, chunk_length)
    qk, v = (np.where(keep[:, None, :, None], x, 0) for x in (qk, v))
    p, z = rounds(qk, same, seen, self_penalty, scale)
    return over_rounds(p @ v[:, :, None], z)


def steps(qk, buckets, mask, keep, *, chunk_length, self_penalty=1e5, scale):
    """place and round_lse, (B, H, L, T), and the weights of all rounds together, (B, H, T, T)."""
    same, seen = meetings(buckets, mask, keep, chunk_length)
    p, z = rounds(np.where(keep[:, None, :, None], qk, 0), same, seen, self_penalty, scale)
    return places(buckets, keep).astype(qk.dtype), z, over_rounds(p, z)[0]


def chunked(qk, v, buckets, mask, keep, *, chunk_length, self_penalty=1e5, scale):
    """As dense, in O(L T m): sort a round and cut it, let each chunk meet itself and the one before, undo the sort."""
    sizes(INPUTS, locals())
    (B, H, L, T), m = buckets.shape, chunk_length
    place, mask = places(buckets, keep), np.broadcast_to(mask, (T, T))
    qk, v = (np.where(keep[:, None, :, None], x, 0) for x in (qk, v))
    order = np.concatenate([place.argsort(-1), np.full((B, H, L, -T % m), -1)], -1).reshape(B, H, L, -1, m)
    before = np.concatenate([np.full((B, H, L, 1, m), -1), order[:, :, :, :-1]], 3)
    keys = np.concatenate([before, order], -1)                              # (B, H, L, chunks, 2 m)
    i, j = order[..., None], keys[..., None, :]
    b, h, r = (n[..., None, None, None] for n in np.ogrid[:B, :H, :L])
    met = (i >= 0) & (j >= 0) & keep[b, i] & keep[b, j] & mask[i, j] & (buckets[b, h, r, i] == buckets[b, h, r, j])
    N = (buckets[b, h, :, i] == buckets[b, h, :, j]).sum(-1)
    s = scale * take(qk, order) @ take(qk / length(qk), keys).swapaxes(-1, -2)
    p, z = softmax(s - np.where(i == j, self_penalty, log_of(N, s)), met)
    o = (p @ take(v, keys)).reshape(B, H, L, -1, v.shape[3])
    return over_rounds(np.take_along_axis(o, place[..., None], 3), np.take_along_axis(z.reshape(B, H, L, -1), place, 3))


@per_head(INPUTS, OUTPUTS)
def loop(qk, v, buckets, mask, keep, chunk_length, self_penalty, scale):
    """Round by round, in sorted order: a token adds exp(a) / N of its keys to one running softmax over all rounds."""
    (T, dk), (L, _), dv, last = qk.shape, buckets.shape, v.shape[1], 0
    o, z, norm = np.zeros((T, dv), v.dtype), np.zeros(T, v.dtype), np.zeros(T, v.dtype)
    lse, a, N = np.full(T, -np.inf, v.dtype), np.zeros(T, v.dtype), np.zeros(T, v.dtype)
    order = np.zeros(T, np.int64)
    for i in range(T):
        for r in range(L):
            last = max(last, buckets[r, i])
        for c in range(dk):
            norm[i] += qk[i, c] * qk[i, c]
        norm[i] = np.sqrt(norm[i]) if norm[i].real > 0 else norm[i] + 1
    for r in range(L):
        n = 0
        for b in range(last + 1):
            for i in range(T):
                if keep[i] and buckets[r, i] == b:
                    order[n] = i
                    n += 1
        for s in range(n):
            i, chunk = order[s], s // chunk_length
            for e in range(max(0, (chunk - 1) * chunk_length), min(n, (chunk + 1) * chunk_length)):
                j = order[e]
                if buckets[r, j] == buckets[r, i] and mask[i, j]:
                    a[j], N[j] = -self_penalty if i == j else 0, 0
                    for c in range(dk):
                        a[j] += scale * qk[i, c] * qk[j, c] / norm[j]
                    for t in range(L):
                        N[j] += buckets[t, i] == buckets[t, j]
                    N[j] = 1 if i == j else N[j]
                    m = a[j] if a[j].real > lse[i].real else lse[i]
                    p, old = np.exp(a[j] - m) / N[j], np.exp(lse[i] - m)
                    lse[i], z[i] = m, z[i] * old + p
                    for c in range(dv):
                        o[i, c] = o[i, c] * old + p * v[j, c]
    for i in range(T):
        if z[i].real > 0:
            o[i] /= z[i]
            lse[i] += np.log(z[i])
    return o, lse


def backward(da, qk, scale):
    """The gradient of qk for that of the logits a, (B, H, T, T), through queries and through keys of length 1."""
    norm = length(qk)
    k, dk = qk / norm, scale * da.swapaxes(-1, -2) @ qk
    return scale * da @ k + (dk - (dk * k).sum(-1, keepdims=True) * k) / norm


def vjp(do, dlse, qk, v, buckets, mask, keep, *, chunk_length, self_penalty=1e5, scale):
    """Gradients of qk and v for cotangents do (B, H, T, dv) and dlse (B, H, T), as of one softmax over all rounds."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    same, seen = meetings(buckets, mask, keep, chunk_length)
    qk, v = (np.where(keep[:, None, :, None], x, 0) for x in (qk, v))
    weights, _ = over_rounds(*rounds(qk, same, seen, self_penalty, scale))
    dp = do @ v.swapaxes(-1, -2)
    da = weights * (dp - (weights * dp).sum(-1, keepdims=True) + dlse[..., None])
    return dict(dqk=backward(da, qk, scale), dv=weights.swapaxes(-1, -2) @ do)


FORMS = dense, chunked, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def sets(x, **changes):
    """P and what of it is in P~, (B, H, L, T, T), of a case or of changed arguments."""
    return meetings(*((x | changes)[name] for name in ("buckets", "mask", "keep", "chunk_length")))


def chunks_back(x, place=None):
    """(B, H, L, T, T) how many chunks the key stands before the query."""
    chunk = (places(x["buckets"], x["keep"]) if place is None else place) // x["chunk_length"]
    return chunk[..., None] - chunk[..., None, :]


def next_door(x, place=None):
    """(B, H, L, T, T) True for a pair of which the key is in the chunk of the query or in the one before."""
    return (chunks_back(x, place) >= 0) & (chunks_back(x, place) <= 1)


def there(x):
    """(B, 1, 1, T, T) the pairs that are allowed, whatever the bucket."""
    return (x["keep"][:, None, :, None] & x["keep"][:, None, None] & x["mask"])[:, :, None]


def own(x):
    """bool (T, T) a token and itself."""
    return np.eye(x["qk"].shape[2], dtype=bool)


def scores(x, k=None):
    """scale q k^T, (B, H, 1, T, T), NaN in padding read as 0."""
    q = kit.plain(x["qk"])
    return (x["scale"] * q @ (q / length(q) if k is None else k).swapaxes(-1, -2))[:, :, None]


def log_n(x, same):
    """log N, (B, H, 1, T, T)."""
    return log_of(same.sum(2, keepdims=True), scores(x))


def logits(x, k=None):
    """The right logits a, or those of other keys, (B, H, 1, T, T)."""
    return scores(x, k) - np.where(own(x), x["self_penalty"], log_n(x, sets(x)[0]))


def each_round(x, a=None, seen=None):
    """o and z of every round for other logits, or for another set of pairs."""
    p, z = softmax(logits(x) if a is None else a, sets(x)[1] if seen is None else seen)
    return p @ kit.plain(x["v"])[:, :, None], z


def finish(x, a=None, seen=None):
    """The rest of the formula for other logits, or for another set of pairs."""
    return over_rounds(*each_round(x, a, seen))


def by_place(x, place):
    """The outputs if the tokens of every round stood at other places."""
    return finish(x, seen=sets(x)[0] & next_door(x, place))


def released_code(x):
    """As Trax and transformers: whole chunks, the first of a round behind the last of the round before, no log N.

    A key that stands in both of these counts twice.
    """
    chunk = places(x["buckets"], x["keep"]) // x["chunk_length"]
    before = np.roll(chunk, 1, 2)[..., None, :]
    wrap = (chunk[..., None] == 0) & (before == before.max(-1, keepdims=True))
    a = scores(x) - np.where(own(x), x["self_penalty"], 0)
    return finish(x, np.where(next_door(x) & wrap, a + kit.LN2, a), there(x) & (next_door(x) | wrap))


def at_places(x):
    """The mask (B, H, L, T, T) read at the place of the query and the place of the key."""
    T, s = x["keep"].shape[1], places(x["buckets"], x["keep"])
    return np.broadcast_to(x["mask"], (T, T))[s[..., None], s[..., None, :]]


def first_chunk_wraps(x):
    """In every round the first chunk looks back at the last, where these are not neighbours."""
    back = chunks_back(x)
    return finish(x, seen=sets(x)[0] & (next_door(x) | (back == back.min((-1, -2), keepdims=True)) & (back < -1)))


def sort_not_undone(x):
    """Every round leaves its outputs in sorted order."""
    order, (o, z) = places(x["buckets"], x["keep"]).argsort(-1), each_round(x)
    return over_rounds(np.take_along_axis(o, order[..., None], 3), np.take_along_axis(z, order, 3))


def rounds_sorted_together(x):
    """The tokens of all rounds in one row, sorted by bucket: equal numbers of different rounds are one bucket."""
    B, H, L, T = x["buckets"].shape
    t = np.arange(L * T) % T                                                # the token of every item
    seen = sets(x | dict(buckets=x["buckets"].reshape(B, H, 1, L * T), keep=x["keep"][:, t], mask=np.array(True)))[1]
    p, z = softmax(logits(x)[:, :, :, t][..., t], seen & there(x)[..., t, :][..., t])
    o = p @ kit.plain(x["v"])[:, :, None, t]
    return over_rounds(o.reshape(B, H, L, T, -1), z.reshape(B, H, L, T))


def rounds_averaged(x):
    o, z = each_round(x)
    return o.mean(2), over_rounds(o, z)[1]


def round_lse_without_max(x):
    """z lacks the maximum of its round."""
    o, z = each_round(x)
    m = np.where(sets(x)[1], logits(x), -np.inf).max(-1)
    return over_rounds(o, z - np.where(m == -np.inf, 0, m))


def weights(x):
    """The right weights of every round in the whole, (B, H, L, T, T)."""
    p, z = softmax(logits(x), sets(x)[1])
    return softmax(z.swapaxes(2, 3))[0].swapaxes(2, 3)[..., None] * p


BUGS = dict(
    keys_not_normalised=("keys are the queries, at their full length",
                         lambda x: finish(x, logits(x, kit.plain(x["qk"])))),
    queries_normalised=("queries have length 1 like the keys", lambda x: but(x, qk=x["qk"] / length(x["qk"]))),
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    scale_of_dot_products=("1/sqrt(dk) on top of the scale, though keys have length 1",
                           lambda x: but(x, scale=x["scale"] * x["qk"].shape[3] ** -0.5)),
    log_n_missing=("a key that shares several buckets counts in each of them",
                   lambda x: finish(x, scores(x) - np.where(own(x), x["self_penalty"], 0))),
    n_of_meetings=("N counts only the rounds in which the chunks meet", lambda x: finish(
        x, scores(x) - np.where(own(x), x["self_penalty"], log_n(x, sets(x)[1])))),
    self_not_penalised=("a token is a key of itself like others", lambda x: but(x, self_penalty=0.0)),
    self_excluded=("a token is no key of itself, even if it has no other",
                   lambda x: finish(x, seen=sets(x)[1] & ~own(x))),
    self_penalty_replaces_score=("the penalty stands in place of the score with itself", lambda x: finish(
        x, np.where(own(x), -x["self_penalty"], logits(x)))),
    chunk_taken_for_bucket=("all keys of both chunks are seen, whatever their bucket",
                            lambda x: finish(x, seen=there(x) & next_door(x))),
    released_code=("all keys of both chunks whatever their bucket, a first chunk looks back at the last one, N is 1",
                   released_code),
    look_back_missing=("a chunk sees only itself", lambda x: finish(x, seen=sets(x)[1] & (chunks_back(x) == 0))),
    first_chunk_wraps=("the first chunk sees the last", first_chunk_wraps),
    mask_dropped=("the mask is ignored", lambda x: but(x, mask=np.array(True))),
    mask_at_sorted_places=("the mask is read at the places of the sorted tokens", lambda x: finish(
        x, seen=sets(x, mask=np.array(True))[1] & at_places(x))),
    sort_not_undone=("the outputs of a round stay in sorted order", sort_not_undone),
    sort_unstable=("tokens of one bucket stand in reversed order: chunks end elsewhere", lambda x: by_place(
        x, places(x["buckets"][..., ::-1], x["keep"][:, ::-1])[..., ::-1])),
    rounds_sorted_together=("all rounds are sorted at once, and equal buckets of different rounds meet",
                            rounds_sorted_together),
    rounds_averaged=("o is the mean over the rounds", rounds_averaged),
    round_lse_without_max=("the lse of a round, its weight, lacks the maximum", round_lse_without_max),
    hash_of_round_0=("all rounds use the buckets of the first", lambda x: but(
        x, buckets=np.broadcast_to(x["buckets"][:, :, :1], x["buckets"].shape))),
    padding_hashed=("padding stands in the buckets, and chunks end elsewhere", lambda x: by_place(
        x, places(x["buckets"], np.ones_like(x["keep"])))),
    padding_seen=("padded keys take part in the softmax", lambda x: finish(x, seen=sets(
        x, keep=np.ones_like(x["keep"]))[1] & x["keep"][:, None, None, :, None])),
    empty_row_lse_zero=("lse of a row without keys is 0", lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    masked_nan_poison=("0 * NaN: a padded value is read", lambda x: (weights(x).sum(2) @ x["v"],)),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
)


def logit_gradient(x):
    """The gradient of the logits (B, H, T, T)."""
    w, dp = weights(x).sum(2), x["do"] @ kit.plain(x["v"]).swapaxes(-1, -2)
    return w * (dp - (w * dp).sum(-1, keepdims=True) + x["dlse"][..., None])


def parts(x):
    """What comes to qk through the queries, and through the keys if their lengths were constants."""
    q, ds = kit.plain(x["qk"]), x["scale"] * logit_gradient(x)
    return ds @ (q / length(q)), ds.swapaxes(-1, -2) @ q / length(q)


def rounds_taken_as_constant(x):
    """A round sends the gradient of its own softmax, weighed, and none through its weight."""
    w, dp = weights(x), (x["do"] @ kit.plain(x["v"]).swapaxes(-1, -2))[:, :, None]
    total = w.sum(-1, keepdims=True)
    da = w * (dp - (w * dp).sum(-1, keepdims=True) / np.where(total == 0, 1, total))
    return dict(dqk=backward(da.sum(2), kit.plain(x["qk"]), x["scale"]))


def unsorted_by_round_0(x):
    """The gradient of every round is brought back by the order of the first."""
    s = places(x["buckets"], x["keep"])
    back = np.take_along_axis(s.argsort(-1), np.broadcast_to(s[:, :, :1], s.shape), -1)
    dv = weights(x).swapaxes(-1, -2) @ x["do"][:, :, None]
    return dict(dv=np.take_along_axis(dv, back[..., None], 3).sum(2))


VJP_BUGS = dict(
    unsorted_by_round_0=("the sort of every round is undone by the order of the first in dv", unsorted_by_round_0),
    rounds_taken_as_constant=("the weights of the rounds get no gradient", rounds_taken_as_constant),
    keys_taken_as_constant=("dqk lacks what comes through the keys", lambda x: dict(dqk=parts(x)[0])),
    key_length_taken_as_constant=("dqk lacks the derivative of the length that keys are divided by",
                                  lambda x: dict(dqk=sum(parts(x)))),
    own_score_without_gradient=("the score with itself gets no gradient, as if it were replaced", lambda x: dict(
        dqk=backward(np.where(own(x), 0, logit_gradient(x)), kit.plain(x["qk"]), x["scale"]))),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=13, dk=4, dv=5, L=2)


def hashed(n, half=3):
    """Buckets of the queries drawn, 2 half in number."""
    return hash_buckets(draw("qk", (n.B, n.H, n.T, n.dk)), draw("k", (n.H, n.L, n.dk, half)))


NEUTRAL = dict(mask=np.ones((1, 1), bool), keep=lambda n: np.ones((n.B, n.T), bool))
GIVEN = dict(sizes=SIZES, buckets=hashed, chunk_length=3, self_penalty=1000.0, scale=0.75)
KEPT = np.array([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1]], bool)
CAUSAL = causal(13, 13)


CASES = dict(
    basic=dict(
        GIVEN, why="every size differs and none is 1; a penalty that leaves a token some weight on itself",
        sizes=dict(B=2, H=4, T=13, dk=5, dv=6, L=3), self_penalty=1.5,
        catches=("keys_not_normalised", "queries_normalised", "scale_missing", "scale_of_dot_products", "log_n_missing",
                 "self_not_penalised", "self_excluded", "self_penalty_replaces_score", "chunk_taken_for_bucket",
                 "released_code", "look_back_missing", "sort_not_undone", "rounds_sorted_together", "rounds_averaged",
                 "round_lse_without_max", "hash_of_round_0", "lse_base_2", "unsorted_by_round_0",
                 "rounds_taken_as_constant", "keys_taken_as_constant", "key_length_taken_as_constant",
                 "own_score_without_gradient", "dlse_sign")),
    last_resort=dict(
        GIVEN, why="with a large penalty a token sees itself only where it has no other key",
        buckets=lambda n: hashed(n, 6), catches=("self_excluded",)),
    causal_window=dict(
        GIVEN, why="a window that looks back five tokens, wherever these stand when sorted", light=True,
        mask=window(13, 13, 5, 0), catches=("mask_dropped", "mask_at_sorted_places")),
    buckets_fit=dict(
        GIVEN, why="under a causal mask chunks change nothing where no bucket is longer", light=True, mask=CAUSAL,
        chunk_length=8, shows=lambda x, y: (sets(x)[0] == sets(x)[1]).all() and abs(chunks_back(x)).any()),
    buckets_overflow=dict(
        GIVEN, why="buckets that are longer than two chunks: what shares a bucket need not meet", light=True,
        chunk_length=2, buckets=lambda n: hashed(n, 1) * np.array([1, 0, 1])[:, None, None],
        catches=("n_of_meetings", "sort_unstable", "first_chunk_wraps")),
    one_chunk=dict(
        GIVEN, why="with a chunk that holds all, buckets alone decide", light=True, chunk_length=13,
        shows=lambda x, y: (sets(x)[0] == sets(x)[1]).all()),
    one_bucket=dict(
        GIVEN, why="one bucket and one chunk: every token sees every other", light=True, chunk_length=20,
        buckets=lambda n: np.zeros((n.B, n.H, n.L, n.T), int), shows=lambda x, y: sets(x)[1].all(),
        catches=("log_n_missing",)),
    one_round=dict(
        GIVEN, why="one round: N is 1", light=True, sizes=SIZES | dict(L=1), self_penalty=0.5,
        catches=("self_not_penalised",)),
    chunk_of_one=dict(
        GIVEN, why="chunks of one token: it sees the one before, if that is in its bucket", light=True, chunk_length=1,
        buckets=lambda n: hashed(n, 1), shows=lambda x, y: sets(x)[1].sum(-1).max() == 2),
    whole_chunks=dict(
        GIVEN, why="tokens that fill their chunks", light=True, sizes=SIZES | dict(T=12), self_penalty=2.0,
        catches=("look_back_missing",)),
    padding=dict(
        GIVEN, why="padding at the end and in the middle, under a causal mask", light=True, keep=KEPT, mask=CAUSAL,
        self_penalty=2.0, catches=("padding_seen", "padding_hashed", "empty_row_lse_zero")),
    never_read=dict(
        GIVEN, why="NaN in padding", keep=KEPT, self_penalty=2.0, catches=("masked_nan_poison",),
        change=lambda x: kit.nan_where(~x["keep"][:, None, :, None], x, ("qk", "v"))),
    hardly_any_token=dict(
        GIVEN, why="an entry without any token, and one with a single token: o is v there", light=True,
        keep=np.arange(13) < np.array([[0], [1]]),
        shows=lambda x, y: (y["o"][0] == 0).all() and (y["lse"][0] == -np.inf).all()
        and (y["o"][1, :, 0] == x["v"][1, :, 0]).all()),
    length_0=dict(
        GIVEN, why="a vector of length 0 is a key of length 0: all its scores are 0", light=True, self_penalty=2.0,
        change=lambda x: dict(qk=x["qk"] * (np.arange(13)[:, None] != 4)),
        shows=lambda x, y: (x["qk"][:, :, 4] == 0).all() and np.isfinite(y["o"]).all()),
    long=dict(
        GIVEN, why="more tokens than a few chunks, in no multiple of one", light=True, chunk_length=4,
        sizes=SIZES | dict(B=1, H=1, T=29, L=3), catches=("n_of_meetings", "sort_not_undone")),
    one_token=dict(
        GIVEN, why="a single token sees itself: o is v", sizes=dict(B=1, H=1, T=1, dk=1, dv=1, L=1), light=True,
        shows=kit.returns_v),
)
