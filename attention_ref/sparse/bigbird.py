"""Blocks: window, random and global (BigBird).    Zaheer et al. 2020, arXiv:2007.14062, section 2, eq. AT, appendix D

    A_rc    = 1 if |r - c| <= 1 or c in R(h, r) or r in G or c in G, else 0      block row r, block column c, head h
    N(i)    = { j : i < g or j < g or A_rc = 1 }             r, c = (i - g) // b, (j - g) // b    i and j no padding
    s_ij    = scale q_i . k_j            z_i = sum_{j in N(i)} exp(s_ij)                   lse_i = log z_i
    o_i     = sum_{j in N(i)} exp(s_ij) v_j / z_i

R are the random blocks, G the global ones, b the block size, g the number of extra tokens in front. BigBird-ITC has the
first and the last block in G and g = 0, BigBird-ETC no block in G and g > 0. A is a set: a block that is listed twice
counts once. Where code in the wild differs: gathered lists count it twice; transformers takes block 0 for every random
block outside of training, so that block 0 counts r times more; the paper leaves out the scale, which all code has.
"""
import numpy as np

from .. import kit, masks
from ..core import per_head, softmax, take, unread
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H T dk", k="B H T dk", v="B H T dv", random_blocks="int H M r >=-1 <M", global_blocks="bool M",
              keep="bool B T", block_size="int >=1", global_tokens="int >=0 <=T", scale="")
OUTPUTS = dict(o="B H T dv", lse="B H T")
STEPS = dict(scores="B H T T")
CONVENTIONS = dict(random_blocks="a set of key blocks for each block row; -1 is none, and global rows are not read",
                   blocks="counted from token global_tokens on; the last may be shorter",
                   window="a block and its neighbours, which do not wrap around", keep="True = the token is there",
                   empty_row="a padded query: o = 0, lse = -inf, gradients 0", lse="natural log", layout="B H T d",
                   masked_values="padding is never read")


def mix(n):
    """uint64 -> uint64, the last steps of SplitMix64 (Steele et al. 2014, OOPSLA, figure 16): the same everywhere."""
    n = (n ^ n >> 30) * 0xBF58476D1CE4E5B9
    n = (n ^ n >> 27) * 0x94D049BB133111EB
    return n ^ n >> 31


def draw_random_blocks(heads, global_blocks, r, seed):
    """int (heads, M, r), a function of its arguments: for every row the r free blocks with the smallest random numbers.

    Free are the blocks that the row does not see anyway; -1 stands where there are fewer. global_blocks is bool (M,),
    the seed an integer from 0 to 2^64 - 1.
    """
    M = len(global_blocks)
    free = ~adjacency(np.full((heads, M, 0), -1), global_blocks)
    n = np.arange(free.size, dtype=np.uint64).reshape(free.shape)
    rank = np.where(free, mix(mix(np.full(1, seed, np.uint64)) + n * 0x9E3779B97F4A7C15) >> 1, 2 ** 63)
    found, order = np.full((heads, M, r), -1), np.argsort(rank, -1, "stable")[..., :r]
    found[..., :M] = np.where(np.take_along_axis(free, order, -1), order, -1)
    return found


def adjacency(random_blocks, global_blocks):
    """A, (H, M, M): True where a block row sees a block."""
    row, column = masks.grid(*2 * global_blocks.shape)
    is_random = (random_blocks[..., None] == column).any(2)
    return (np.abs(row - column) <= 1) | is_random | global_blocks[row] | global_blocks[column]


def fits(M, T, block_size):
    """Raise ValueError unless M blocks are what T tokens fill."""
    if M != -(-T // block_size):
        raise ValueError(f"random_blocks: expected M = {-(-T // block_size)} blocks of {block_size} tokens, got {M}")


def visible(pattern, keep, block_size, global_tokens):
    """(B, H, T, T) True where key j is in N(i), by a pattern (H, M, M) of blocks. ValueError if M does not fit T."""
    T = keep.shape[1] - global_tokens
    fits(len(pattern[0]), T, block_size)
    mask = np.ones((len(pattern), *2 * keep.shape[1:]), bool)
    mask[:, global_tokens:, global_tokens:] = masks.blocks(pattern, block_size, T, T)
    return mask & keep[:, None, :, None] & keep[:, None, None]


def dense(q, k, v, random_blocks, global_blocks, keep, *, block_size, global_tokens=0, scale):
    """o (B, H, T, dv) and lse (B, H, T), by the equations above. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    mask = visible(adjacency(random_blocks, global_blocks), keep, block_size, global_tokens)
    k, v = unread(k, mask), unread(v, mask)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    return weights @ v, lse


def steps(q, k, random_blocks, global_blocks, keep, *, block_size, global_tokens=0, scale):
    """scores (B, H, T, T), NaN for a pair that does not meet."""
    mask = visible(adjacency(random_blocks, global_blocks), keep, block_size, global_tokens)
    return np.where(mask, scale * q @ unread(k, mask).swapaxes(-1, -2), np.nan)


def key_blocks(rows, random_blocks, global_blocks):
    """(H, rows, n) the blocks that these rows of middle blocks see, each once, and -1 for those that are left over."""
    (H, M, _), shared = random_blocks.shape, np.flatnonzero(global_blocks)
    near = rows[:, None] + np.arange(-1, 2)
    found = np.concatenate([np.where(near < M, near, -1), np.broadcast_to(shared, (len(rows), len(shared)))], -1)
    found = np.concatenate([np.broadcast_to(found, (H, *found.shape)), random_blocks[:, rows]], -1)
    found.sort(-1)
    return np.where(np.diff(found, prepend=-1) == 0, -1, found)


def tokens_of(blocks, T, block_size, global_tokens):
    """Positions (..., n b) of the tokens in blocks (..., n), -1 for those that are not there."""
    j = blocks.repeat(block_size, -1) * block_size + np.tile(np.arange(block_size), blocks.shape[-1]) + global_tokens
    return np.where((blocks.repeat(block_size, -1) >= 0) & (j < T), j, -1)


def blocks(q, k, v, random_blocks, global_blocks, keep, *, block_size, global_tokens=0, scale):
    """As dense, in O(T (g + b (3 + r + |G|))): the middle rows with the keys that they list, then the full rows."""
    sizes(INPUTS, locals())
    B, H, T, _ = q.shape
    fits(len(global_blocks), T - global_tokens, block_size)
    there, middle = keep[:, None, :, None], np.flatnonzero(~global_blocks)
    k, v = np.where(there, k, 0), np.where(there, v, 0)
    listed = tokens_of(key_blocks(middle, random_blocks, global_blocks), T, block_size, global_tokens)
    extra = np.broadcast_to(np.arange(global_tokens), (*listed.shape[:2], global_tokens))
    keys, rows = np.concatenate([extra, listed], -1), tokens_of(middle[:, None], T, block_size, global_tokens)
    o, lse = np.zeros_like(v, shape=(B, H, T + 1, v.shape[3])), np.zeros_like(q, shape=(B, H, T + 1))    # -1 is place T
    s = scale * take(q, rows[None, None]) @ take(k, keys[None]).swapaxes(-1, -2)
    p, lse[:, :, rows] = softmax(s, take(there, keys[None]).swapaxes(-1, -2))
    o[:, :, rows] = p @ take(v, keys[None])
    full = tokens_of(np.flatnonzero(global_blocks), T, block_size, global_tokens)
    full = np.concatenate([np.arange(global_tokens), full[full >= 0]])
    p, lse[:, :, full] = softmax(scale * q[:, :, full] @ k.swapaxes(-1, -2), keep[:, None, None])
    o[:, :, full] = p @ v
    return np.where(there, o[:, :, :T], 0), np.where(there[..., 0], lse[:, :, :T], -np.inf)


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, random_blocks, global_blocks, keep, block_size, global_tokens, scale):
    """One block row at a time: a list of the keys it sees, each once, then its queries. Block 0 is the extra tokens."""
    (T, dk), dv, (M, r) = q.shape, v.shape[1], random_blocks.shape
    o, z, a = np.zeros((T, dv), q.dtype), np.zeros(T, q.dtype), np.zeros(T, q.dtype)
    lse, keys, sees = np.full(T, -np.inf, q.dtype), np.zeros(T, np.int64), np.ones(M + 1, np.bool_)
    start = np.zeros(M + 2, np.int64)
    for e in range(M + 1):
        start[e + 1] = min(T, global_tokens + e * block_size)
    if M != -(-(T - global_tokens) // block_size):
        raise ValueError("random_blocks: expected as many blocks as the tokens fill")
    for row in range(M + 1):
        full, n = row == 0 or global_blocks[row - 1], 0
        for e in range(1, M + 1):
            sees[e] = full or global_blocks[e - 1] or abs(e - row) <= 1
        for e in range(r):
            if not full and random_blocks[row - 1, e] >= 0:
                sees[random_blocks[row - 1, e] + 1] = True
        for e in range(M + 1):
            if sees[e]:
                for j in range(start[e], start[e + 1]):
                    if keep[j]:
                        keys[n] = j
                        n += 1
        for i in range(start[row], start[row + 1]):
            if keep[i]:
                m = lse[i]
                for e in range(n):
                    a[e] = 0
                    for c in range(dk):
                        a[e] += scale * q[i, c] * k[keys[e], c]
                    if a[e].real > m.real:
                        m = a[e]
                for e in range(n):
                    p = np.exp(a[e] - m)
                    z[i] += p
                    for c in range(dv):
                        o[i, c] += p * v[keys[e], c]
                o[i] /= z[i]
                lse[i] = m + np.log(z[i])
    return o, lse


def vjp(do, dlse, q, k, v, random_blocks, global_blocks, keep, *, block_size, global_tokens=0, scale):
    """Gradients of q, k and v for cotangents do (B, H, T, dv) and dlse (B, H, T)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    mask = visible(adjacency(random_blocks, global_blocks), keep, block_size, global_tokens)
    q, k, v = (np.where(keep[:, None, :, None], x, 0) for x in (q, k, v))
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    return dict(dq=scale * ds @ k, dk=scale * ds.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do)


FORMS = dense, blocks, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def pattern_of(x, **changes):
    """The pattern A of a case, or of changed arguments."""
    return adjacency(*((x | changes)[name] for name in ("random_blocks", "global_blocks")))


def mask_of(x, pattern=None):
    """The mask of a case, or of another pattern."""
    return visible(pattern_of(x) if pattern is None else pattern, x["keep"], x["block_size"], x["global_tokens"])


def under(x, mask, bias=0):
    """Attention under a wrong mask, with a bias; NaN in padding counts as 0."""
    q, k, v = (kit.plain(x[name]) for name in "qkv")
    weights, lse = softmax(x["scale"] * q @ k.swapaxes(-1, -2) + bias, mask)
    return weights @ v, lse


def by(x, pattern):
    """The outputs of a wrong pattern."""
    return under(x, mask_of(x, pattern))


def both(flags):
    """bool (M, M) True in the rows and the columns of the flagged blocks."""
    return flags[:, None] | flags


def near(x):
    """bool (M, M) the window alone."""
    M = len(x["global_blocks"])
    return masks.window(M, M, 1, 1)


def times_listed(x, random_blocks):
    """int (H, M, M) how often the random blocks of a row name every block; nobody reads those of a global row."""
    listed = (random_blocks[..., None] == np.arange(random_blocks.shape[1])).sum(2)
    return np.where(x["global_blocks"][:, None], 0, listed)


def far(x):
    """(H, M, M) the random and the global part of the pattern."""
    return (times_listed(x, x["random_blocks"]) > 0) | both(x["global_blocks"])


def counted(x, times):
    """The outputs when a block row meets a block as many times as `times` (H, M, M) says: log of that is added."""
    g, b, mask = x["global_tokens"], x["block_size"], mask_of(x, times > 0)
    T, bias = mask.shape[-1] - g, np.zeros(mask.shape[1:], x["q"].dtype)
    bias[:, g:, g:] = np.log(np.maximum(times, 1)).repeat(b, 1).repeat(b, 2)[:, :T, :T]
    return under(x, mask, bias)


def lists(x, random_blocks):
    """The outputs when what the lists of random blocks name is counted beside the window and the global blocks."""
    return counted(x, times_listed(x, random_blocks) + (near(x) | both(x["global_blocks"])))


def unpadded(x, pattern=None):
    """The mask of a case, or of another pattern, if no token were padding."""
    keep = np.ones_like(x["keep"])
    return visible(pattern_of(x) if pattern is None else pattern, keep, x["block_size"], x["global_tokens"])


def extra(x):
    """bool (T,) the tokens in front of the blocks."""
    return np.arange(x["keep"].shape[1]) < x["global_tokens"]


def counted_from_token_0(x):
    """The extra tokens fill the first blocks, and the last block takes what is left over."""
    block = np.minimum(np.arange(x["keep"].shape[1]) // x["block_size"], len(x["global_blocks"]) - 1)
    there = x["keep"][:, None, :, None] & x["keep"][:, None, None]
    return under(x, there & (pattern_of(x)[:, block[:, None], block] | both(extra(x))))


def tail_lost(x):
    """The tokens after the last whole block are keys of nobody."""
    T = x["keep"].shape[1]
    return under(x, mask_of(x) & (np.arange(T) < T - (T - x["global_tokens"]) % x["block_size"]))


def at_padding(x, o, lse=-np.inf):
    """Right outputs but for those of padded queries."""
    y, pad = dense(**x), ~x["keep"][:, None]
    return np.where(pad[..., None], o, y[0]), np.where(pad, lse, y[1])


def weights(x):
    """The right weights (B, H, T, T)."""
    return softmax(x["scale"] * kit.plain(x["q"]) @ kit.plain(x["k"]).swapaxes(-1, -2), mask_of(x))[0]


BUGS = dict(
    random_counted_again=("a random block that is in the window, global or listed twice counts again",
                          lambda x: lists(x, x["random_blocks"])),
    global_counted_again=("a global block that is in the window counts twice",
                          lambda x: counted(x, (near(x) & ~x["global_blocks"][:, None]) + 1 * far(x))),
    random_all_block_0=("every random block is block 0 and counts each time, as in evaluation mode",
                        lambda x: lists(x, 0 * x["random_blocks"])),
    random_missing=("the random blocks are left out", lambda x: by(x, near(x) | both(x["global_blocks"])[None])),
    random_of_head_0=("the random blocks of head 0 serve every head", lambda x: but(
        x, random_blocks=np.broadcast_to(x["random_blocks"][:1], x["random_blocks"].shape))),
    random_one_row_off=("every row reads the random blocks of the row before",
                        lambda x: but(x, random_blocks=np.roll(x["random_blocks"], 1, 1))),
    none_is_last_block=("-1 in the random blocks is read as the last block", lambda x: but(
        x, random_blocks=x["random_blocks"] % x["random_blocks"].shape[1])),
    global_rows_missing=("a global block looks at its window and the global blocks only", lambda x: by(
        x, np.where(x["global_blocks"][:, None], near(x) | x["global_blocks"], pattern_of(x)))),
    global_columns_missing=("the global blocks see all, but are not seen", lambda x: by(
        x, near(x) | (times_listed(x, x["random_blocks"]) > 0) | x["global_blocks"][:, None])),
    last_block_not_global=("of the global blocks only the first is one", lambda x: but(
        x, global_blocks=x["global_blocks"] & (x["global_blocks"].cumsum() == 1))),
    extra_rows_missing=("the extra tokens see each other only",
                        lambda x: under(x, mask_of(x) & (~extra(x)[:, None] | extra(x)))),
    extra_columns_missing=("the extra tokens see all, but are not seen",
                           lambda x: under(x, mask_of(x) & (extra(x)[:, None] | ~extra(x)))),
    window_one_sided=("the block on the right is not in the window", lambda x: by(x, near(x) & np.tri(
        len(x["global_blocks"]), dtype=bool) | far(x))),
    window_wraps=("the first and the last block are neighbours",
                  lambda x: by(x, pattern_of(x) | (near(x).sum(0) < 3) & (near(x).sum(0) < 3)[:, None])),
    blocks_from_token_0=("blocks are counted from token 0 on, extra tokens or not", counted_from_token_0),
    tail_lost=("the tokens after the last whole block are not seen", tail_lost),
    padding_seen=("padded keys take part in the softmax",
                  lambda x: under(x, unpadded(x) & x["keep"][:, None, :, None])),
    random_padding_seen=("padded keys of random blocks take part in the softmax", lambda x: under(
        x, mask_of(x) | unpadded(x) & ~unpadded(x, near(x) | both(x["global_blocks"])[None])
        & x["keep"][:, None, :, None])),
    padded_query_computed=("a padded query is computed like others",
                           lambda x: at_padding(x, *under(x, unpadded(x) & x["keep"][:, None, None]))),
    padded_query_uniform=("a padded query gives the mean of all values",
                          lambda x: at_padding(x, kit.mean_value(x["v"]))[:1]),
    penalty=("-10000 is added to hidden keys: a padded query, which has no other, sees every token", lambda x: under(
        x, True, np.where(mask_of(x), 0, -10000).astype(x["q"].dtype))),
    empty_row_lse_zero=("lse of a padded query is 0", lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    masked_nan_poison=("0 * NaN: a padded value is read", lambda x: (weights(x) @ x["v"],)),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    scale_by_block_size=("1/sqrt(b), the block size, instead of the scale",
                         lambda x: but(x, scale=x["block_size"] ** -0.5)),
)


def of_last_row(x):
    """dk and dv if every block row that reads a key overwrites what the rows before it sent there."""
    mask = mask_of(x)
    row = (np.arange(mask.shape[-1])[:, None] - x["global_tokens"]) // x["block_size"]
    last = row == np.where(mask, row, -x["global_tokens"]).max(-2, keepdims=True)
    p, do, v = weights(x), x["do"], kit.plain(x["v"])
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + x["dlse"][..., None])
    return dict(dk=x["scale"] * (ds * last).swapaxes(-1, -2) @ kit.plain(x["q"]), dv=(p * last).swapaxes(-1, -2) @ do)


VJP_BUGS = dict(
    gathered_gradient_overwritten=("dk and dv keep what the last block row sent instead of the sum", of_last_row),
    dq_scale_missing=("dQ is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
    padded_query_gradient_nan=("0 * NaN in the backward of a padded query", lambda x: dict(
        dq=np.where(x["keep"][:, None, :, None], vjp(**x)["dq"], np.nan))),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=13, dk=4, dv=5, M=7, r=1)


def first_and_last(n):
    """bool (M,) the global blocks of BigBird-ITC."""
    return np.isin(np.arange(n.M), (0, n.M - 1))


NEUTRAL = dict(keep=lambda n: np.ones((n.B, n.T), bool), global_tokens=0, scale=lambda n: n.dk ** -0.5)
ITC = dict(sizes=SIZES, global_blocks=first_and_last, block_size=2,
           random_blocks=lambda n: draw_random_blocks(n.H, first_and_last(n), n.r, seed=7))
KEPT = np.array([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1]], bool)
NO_BLOCK = np.zeros(6, bool)
ETC = dict(sizes=SIZES | dict(M=6), global_blocks=NO_BLOCK, block_size=2, global_tokens=2,
           random_blocks=draw_random_blocks(3, NO_BLOCK, 1, seed=3))
AGAIN = np.array([[0, 0, 0], [0, 3, 3], [4, 1, 6], [3, 1, 1], [2, 6, 4], [1, 2, 6], [0, 0, 0]])


CASES = dict(
    basic=dict(
        ITC, why="every size differs and none is 1; the last block, which is global, has one token",
        sizes=dict(B=2, H=4, T=17, dk=5, dv=6, M=9, r=3), scale=0.75,
        catches=("random_all_block_0", "random_missing", "random_of_head_0", "random_one_row_off",
                 "global_counted_again", "global_rows_missing", "global_columns_missing", "last_block_not_global",
                 "window_one_sided", "tail_lost", "lse_base_2", "scale_missing", "scale_by_block_size",
                 "gathered_gradient_overwritten", "dq_scale_missing", "dlse_sign")),
    padding=dict(
        ITC, why="padding at the end and in the middle, in global, random and neighbouring blocks", light=True,
        keep=KEPT, catches=("padding_seen", "random_padding_seen", "padded_query_computed", "padded_query_uniform",
                            "penalty", "empty_row_lse_zero")),
    extra_tokens=dict(
        ETC, why="two extra tokens in front and no global block, as in BigBird-ETC",
        catches=("extra_rows_missing", "extra_columns_missing", "blocks_from_token_0", "window_wraps",
                 "random_all_block_0")),
    extra_tokens_and_global_block=dict(
        ITC, why="a global block in the middle, three extra tokens, one of them padding", light=True,
        keep=KEPT[:, ::-1], sizes=SIZES | dict(M=5), global_blocks=np.arange(5) == 2,
        global_tokens=3, catches=("padding_seen", "extra_columns_missing", "global_columns_missing",
                                  "blocks_from_token_0")),
    listed_again=dict(
        ITC, why="random blocks that are in the window, global, or listed twice count once", light=True,
        sizes=SIZES | dict(r=3), random_blocks=np.stack([AGAIN, np.roll(AGAIN, 1, 1), AGAIN[::-1]]),
        catches=("random_counted_again",)),
    none_listed=dict(
        ETC, why="-1 stands for no block", light=True, catches=("none_is_last_block",),
        random_blocks=np.where(np.arange(6)[:, None] % 2, ETC["random_blocks"], -1)),
    no_random=dict(
        ITC, why="without random blocks every head sees the same", sizes=SIZES | dict(r=0), light=True,
        shows=lambda x, y: (pattern_of(x) == near(x) | both(x["global_blocks"])).all(),
        catches=("window_one_sided", "global_columns_missing")),
    few_blocks=dict(
        ITC, why="three blocks see each other, whatever is drawn", sizes=SIZES | dict(M=3), block_size=5, light=True,
        shows=lambda x, y: pattern_of(x).all(), catches=("global_counted_again",)),
    one_block=dict(
        ITC, why="a block that is wider than the sequence", sizes=SIZES | dict(T=5, M=1), block_size=7, light=True,
        shows=lambda x, y: mask_of(x).all(), catches=("scale_by_block_size",)),
    block_of_one=dict(
        ITC, why="blocks of one token", sizes=SIZES | dict(T=9, M=9, r=2), block_size=1, light=True,
        catches=("random_missing", "last_block_not_global", "scale_by_block_size")),
    whole_blocks=dict(
        ITC, why="the last block is whole", sizes=SIZES | dict(T=12, M=6), light=True,
        catches=("last_block_not_global",)),
    short_tail=dict(
        ITC, why="the last block lacks one of its tokens", sizes=SIZES | dict(T=11, M=4), block_size=3, light=True,
        shows=lambda x, y: x["keep"].shape[1] % 3 == 2, catches=("tail_lost",)),
    never_read=dict(
        ITC, why="NaN in padding", keep=KEPT, catches=("masked_nan_poison", "padded_query_gradient_nan"),
        change=lambda x: kit.nan_where(~x["keep"][:, None, :, None], x, "qkv")),
    hardly_any_token=dict(
        ITC, why="an entry without any token, and one with a single token: o is v there", light=True,
        keep=np.arange(13) < np.array([[0], [1]]),
        shows=lambda x, y: (y["o"][0] == 0).all() and (y["lse"][0] == -np.inf).all()
        and (y["o"][1, :, 0] == x["v"][1, :, 0]).all()),
    long=dict(
        ITC, why="a quarter of the keys is hidden from every middle row", sizes=SIZES | dict(B=1, H=1, T=29, M=10),
        block_size=3, light=True, catches=("random_missing",),
        shows=lambda x, y: (mask_of(x)[:, :, 3:-2].mean(-1) < 0.75).all()),
    one_token=dict(
        ITC, why="a single token sees itself: o is v", sizes=dict(B=1, H=1, T=1, dk=1, dv=1, M=1, r=1), light=True,
        shows=kit.returns_v),
)
