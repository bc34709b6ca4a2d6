"""What the mistakes and cases of several variants share.

x are the inputs of a case by name, y = (o, lse) right outputs, n the sizes of a case. No form and no vjp is built on
these: a formula stays one independent text in one file.
"""
import numpy as np

from .core import segment_softmax, segment_sum, softmax
from .masks import causal
from .names import draw

LN2 = float(np.log(2))


# Masks of cases

def lengths_of(n):
    """(Tq, Tk); (T, T) where one sequence attends to itself."""
    return (n.T, n.T) if hasattr(n, "T") else (n.Tq, n.Tk)


def no_mask(n):
    """(1, 1, Tq, Tk) every pair."""
    return np.ones((1, 1, *lengths_of(n)), bool)


def causal_of(n, anchor="bottom-right"):
    """(1, 1, Tq, Tk) the causal mask."""
    return causal(*lengths_of(n), anchor)[None, None]


def but_row_1(n):
    """(1, 1, Tq, Tk) every pair but those of query 1."""
    return no_mask(n) & (np.arange(lengths_of(n)[0])[:, None] != 1)


# Inputs of cases

def changed(x, names, change):
    """Those of the named inputs that x has, changed."""
    return {name: change(x[name]) for name in names if name in x}


def strided(x, names="qkv", axes=(1, 2)):
    """The same numbers as views of memory in which two axes are exchanged: (B, T, H, d) for q, k and v."""
    return changed(x, names, lambda a: np.ascontiguousarray(a.swapaxes(*axes)).swapaxes(*axes))


def nan_where(hidden, x, names="kv"):
    """The named inputs with NaN where hidden, which broadcasts to them, is True."""
    return changed(x, names, lambda a: np.where(hidden, np.nan, a))


def nan_in_new_slots(x, names):
    """The named caches with NaN in every slot, from past_length on, that holds no token before the call."""
    slots = np.arange(x[names[0]].shape[2])[:, None]
    return nan_where(slots >= x["past_length"][:, None, None, None], x, names)


def padded_tokens(x):
    """The last two tokens of batch entry 0 without a key, the last three of entry 1 without strength beta."""
    k, beta = x["k"].copy(), x["beta"].copy()
    k[0, :, -2:], beta[1, :, -3:] = 0, 0
    return dict(k=k, beta=beta)


def one_length(x, n):
    """The inputs with the same past_length n for every row."""
    return x | {"past_length": np.full_like(x["past_length"], n)}


def unit_keys(n):
    """(B, H, T, dk) keys of length 1 with few bits, dk >= 5: 3, 2, 1, 1 and 1 quarters in turning places and signs."""
    place = (np.arange(n.B * n.H * n.T)[:, None] + np.arange(n.dk)) % n.dk
    quarters = np.array([3, 2, 1, 1, 1] + [0] * (n.dk - 5))[place].reshape(n.B, n.H, n.T, n.dk) / 4
    return np.where(draw("k", quarters.shape) < 0, 0 - quarters, quarters)


def ramp(x, q, k, step):
    """Queries that are q and keys that are k + step j in every channel: scores rise or fall along the keys."""
    return dict(q=np.full_like(x["q"], q), k=np.full_like(x["k"], k) + step * np.arange(x["k"].shape[2])[:, None])


def long_and_rising(x):
    """Keys that move step by step against the queries drawn: the running maximum of a row rises again and again."""
    steps = np.arange(x["k"].shape[2])[:, None] // 32 / 2
    return dict(k=x["k"] - steps, v=draw("k", x["v"].shape))


# Properties of cases

def maximum_moves(x, y):
    """The running maximum of every row of scores rises in each of the last five runs of 32 keys."""
    s = x["q"][:, :1] @ x["k"][:, :1].swapaxes(-1, -2)
    tiles = np.stack([s[..., j:j + 32].max(-1) for j in range(0, s.shape[-1] - 31, 32)], -1)
    return (np.diff(np.maximum.accumulate(tiles, -1), axis=-1)[..., -5:] > 0).all()


def returns_v(x, y):
    """o is v."""
    return (y["o"] == x["v"]).all()


def sees_nothing(x, y):
    """Every row is as one without keys: o = 0, lse = -inf."""
    return (y["o"] == 0).all() and (y["lse"] == -np.inf).all()


def narrow_values(x, y):
    """dv is smaller than dk."""
    return y["o"].shape[3] < x["k"].shape[3]


def of_tokens(x, names, tokens):
    """The inputs of a recurrence with the named arrays (B, H, T, ...) cut to some of their tokens."""
    return x | {name: x[name][:, :, tokens] for name in names}


def since(recurrent, names, x, t):
    """o and the final state of a run that begins at token t with a state of 0."""
    return recurrent(**of_tokens(x, names, np.s_[t:]) | {"initial_state": 0 * x["initial_state"]})


def restarted(recurrent, names, x, y, t):
    """From token t on o is that of a run which begins there with a state of 0."""
    return np.allclose(y["o"][:, :, t:], since(recurrent, names, x, t)[0], 1e-12)


def stops_at_padding(recurrent, names, x, y):
    """The final state of batch entry 1 is that after its first three tokens."""
    first = {name: x[name][1:] for name in (*names, "initial_state")}
    return np.allclose(y["final_state"][1:], recurrent(**of_tokens(x | first, names, np.s_[:3]))[1], 1e-12)


# Whole cases, but for sizes and masks

LONG = dict(why="scores that rise over more keys than a tile has, in no multiple of a tile", light=True, scale=0.5,
            change=long_and_rising, shows=maximum_moves)
EQUAL_WIDTHS = dict(why="dv = dk, as most kernels ask", light=True,
                    shows=lambda x, y: x["v"].shape[3] == x["k"].shape[3])
HIDDEN_LARGEST = dict(why="the first key that a query does not see has a score 256 higher, the next one 512",
                      light=True, scale=0.5, change=lambda x: ramp(x, 32, 0, 4),
                      catches=("hidden_key_in_max", "hidden_key_overflows"))


# What mistakes read

def lengths(x):
    """(Tq, Tk)."""
    return x["q"].shape[2], x["k"].shape[2]


def plain(a):
    """a with 0 for NaN, so that a mistake which reads hidden keys is shown apart from what NaN there would do."""
    return np.where(np.isnan(a), 0, a)


def mean_value(v):
    """The mean over all keys (..., 1, dv), hidden ones included."""
    return plain(v).sum(-2, keepdims=True) / max(1, v.shape[-2])


def rounded(a, bits):
    """A float array with each number rounded to so many significant bits: 8 in bfloat16, 11 in float16."""
    mantissa, exponent = np.frexp(np.asarray(a, np.float64))
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits).astype(a.dtype)


def T(a):
    """The last two axes exchanged."""
    return a.swapaxes(-1, -2)


def l2_normalised(a):
    """a / |a| along the last axis, with 1e-6 under the root, as most kernels have it."""
    return a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6)


def memory_order(a):
    """The numbers as they lie in memory, read as if the array were contiguous."""
    return a.ravel(order="K").reshape(a.shape)


def transposed_if_square(a):
    """a with its last two axes exchanged where that fits, else a."""
    return a.swapaxes(-1, -2) if a.shape[-1] == a.shape[-2] else a


def hidden_keys(mask):
    """(..., Tk, 1) True for a key that no query may attend to."""
    return ~mask.any(-2)[..., None]


def empty_rows(mask):
    """(..., Tq, 1) True for a query that may attend to nothing."""
    return ~mask.any(-1, keepdims=True)


def causal_part(x):
    """The causal mask (bottom right) if no query sees a key after its position, else no mask."""
    keep = causal(*lengths(x))
    return np.array(True) if (x["mask"] & ~keep).any() else keep


def from_top_left(x):
    """The mask, or the causal mask of the other anchor where it is causal."""
    return x["mask"] if causal_part(x).ndim == 0 else causal(*lengths(x), "top-left")


def of_another_head(mask, B, H):
    """Head h of batch entry b gets the mask of batch entry (h B + b) // H: heads folded first, masks batch first."""
    b, h = np.ogrid[:B, :H]
    return np.broadcast_to(mask, (B, H) + mask.shape[2:])[(h * B + b) // H, h]


# Mistakes of recurrences, whose tokens are x[name] for some names, with a state from initial_state to final_state

def chunked(x, names, one, carry=lambda part, new: new):
    """o and the state of one(part) chunk by chunk, the next of which starts from carry(part, new)."""
    o, s = [], x["initial_state"]
    for start in range(0, max(1, x[names[0]].shape[2]), x["chunk_size"]):
        part = x | {name: x[name][:, :, start:start + x["chunk_size"]] for name in names} | {"initial_state": s}
        y, new = one(part)
        o.append(y)
        s = carry(part, new)
    return np.concatenate(o, axis=2), s


def time_first(x, names, form):
    """The form on arrays (B, H, T, ...) whose bytes are read and written as (B, T, H, ...)."""
    def as_read(a):
        B, H, T = a.shape[:3]
        return a.reshape(B, T, H, *a.shape[3:]).swapaxes(1, 2)
    o, s = form(**x | changed(x, names, as_read))
    return o.swapaxes(1, 2).reshape(o.shape), s


def states_stored_transposed(x, form):
    """The form on states that lie in memory as (..., dv, dk) and are read and written in the shape (..., dk, dv)."""
    def stored(s):
        return T(s).reshape(s.shape)
    o, s = form(**x | {"initial_state": stored(x["initial_state"])})
    return o, stored(s)


def transposed_state(x, form):
    """The form on states (..., dk, dv) whose bytes are read and written as (..., dv, dk)."""
    s = x["initial_state"]
    o, new = form(**x | {"initial_state": s.reshape(*s.shape[:-2], *s.shape[:-3:-1]).swapaxes(-1, -2)})
    return o, new.swapaxes(-1, -2).reshape(new.shape)


# What mistakes give

def with_o(y, o):
    """A wrong o beside the other outputs, right."""
    return o, *y[1:]


def at_empty_rows(y, o=0, lse=-np.inf):
    """Right outputs, but for other numbers in the rows without keys and sink: lse = -inf there."""
    empty = y[1] == -np.inf
    return np.where(empty[..., None], o, y[0]), np.where(empty, lse, y[1])


def nan_at_empty_rows(x, y):
    """o alone, NaN in the rows that are 0/0; with Tk = 0 nothing is divided and o stays 0."""
    return at_empty_rows(y, np.nan if x["k"].shape[2] else 0)[:1]


def lse_in_base_2(y):
    """Right outputs, but for lse, which is a base-2 logarithm."""
    return y[0], y[1] / LN2


def width_of_keys(x, y):
    """Right outputs, but for the channels of o from dk on, which stay 0."""
    return with_o(y, y[0] * (np.arange(x["v"].shape[3]) < x["k"].shape[3]))


def shifted_by_hidden(s, mask, sink=-np.inf):
    """The weights for logits s when the maximum that is subtracted runs over hidden keys too."""
    s = plain(s)
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    return _normalised(np.where(mask, np.exp(s - np.where(m == -np.inf, 0, m)), 0), np.exp(sink - m))


def hidden_times_zero(s, mask, sink=-np.inf):
    """The weights for logits s when exp of a hidden one is multiplied by 0: inf 0 is NaN."""
    s = plain(s)
    m = np.maximum(np.where(mask, s, -np.inf).max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)
    return _normalised(np.exp(s - m) * mask, np.exp(sink - m))


def _normalised(e, rest):
    z = e.sum(-1, keepdims=True) + rest
    return e / np.where(z == 0, 1, z)


def sequential_softmax(s, v, sink):
    """o for logits s, -inf where masked, with the row sum added up one key after the other in the type of s."""
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)
    e = np.exp(s - m)
    z = np.add.accumulate(e, axis=-1).max(-1, keepdims=True, initial=0) + np.exp(sink - m)
    return e @ plain(v) / np.where(z == 0, 1, z)


def without_row_term(p, do, k, v, scale):
    """dq for the weights p when dS = P dP lacks its row term."""
    return scale * (p * (do @ plain(v).swapaxes(-1, -2))) @ plain(k)


# Attention over edges source -> target, (E,) each, of a graph whose nodes are on axis 2 of q or axis 1 of x

def edges(*pairs):
    """source and target of these pairs."""
    source, target = np.array(pairs, int).reshape(-1, 2).T
    return dict(source=source, target=target)


EDGES = edges((3, 1), (0, 2), (1, 4), (4, 1), (2, 0), (0, 3), (4, 2), (2, 2), (1, 0))    # in no order; 2 sees itself
RING = edges((1, 0), (2, 1), (3, 2), (4, 3), (0, 4))
LEFT_OUT = edges((0, 1), (4, 1), (1, 3), (0, 0), (3, 3), (4, 3))            # nothing ends in 2 and 4, nothing leaves 2
PARALLEL = edges((2, 1), (0, 1), (2, 1), (3, 4), (1, 0), (3, 4), (2, 1), (4, 2), (0, 3), (1, 0))


def on(edges, sizes, **recipe):
    """A case on these edges."""
    return dict(edges, sizes=sizes | dict(E=len(edges["source"])), **recipe)


def nodes_of(x):
    """The number N of nodes."""
    return x["q" if "q" in x else "x"].shape[-2]


def on_no_edge(x):
    """(N, 1) True for a node at which no edge starts or ends."""
    return ~np.isin(np.arange(nodes_of(x)), [x["source"], x["target"]])[:, None]


def edges_at(x, places):
    """The edges at these places of the list, each with its bias."""
    bias = {"bias": x["bias"][..., places]} if "bias" in x and x["bias"].shape[-1] > 1 else {}
    return dict(source=x["source"][places], target=x["target"][places]) | bias


def edges_added(x, pairs):
    """The edges and those of these pairs that are not among them, with a bias of 0."""
    known = set(zip(x["source"].tolist(), x["target"].tolist()))
    new = np.array([pair for pair in pairs if pair not in known], int).reshape(-1, 2)
    edges = dict(source=np.append(x["source"], new[:, 0]), target=np.append(x["target"], new[:, 1]))
    if "bias" not in x:
        return edges
    old = np.broadcast_to(x["bias"], (*x["bias"].shape[:2], len(x["source"])))
    return edges | dict(bias=np.concatenate([old, np.zeros_like(old, shape=(*old.shape[:2], len(new)))], -1))


def interleaved(w):
    """W of the heads if they owned every H-th column of a (D, H dv) matrix that holds them one after the other."""
    H, D, dv = w.shape
    return np.moveaxis(w.swapaxes(0, 1).reshape(D, dv, H), -1, 0)


def last_of(segment):
    """The place of the last entry of every segment."""
    return np.array([np.flatnonzero(segment == i)[-1] for i in np.unique(segment)], int)


def normalised(e, target, N):
    """e (B, H, E) divided by its sum over the edges that end in one node; 0/0 is NaN."""
    return e / segment_sum(e, target, N)[:, :, target]


EDGE_CHANGES = dict(                                                        # other edges, from the inputs x of a case
    direction_reversed=("an edge is read from target to source: values flow backwards",
                        lambda x: dict(source=x["target"], target=x["source"])),
    self_loops_added=("every node sees itself, whether or not there is such an edge",
                      lambda x: edges_added(x, [(i, i) for i in range(nodes_of(x))])),
    self_loops_removed=("an edge from a node to itself is dropped",
                        lambda x: edges_at(x, np.flatnonzero(x["source"] != x["target"]))),
    parallel_edges_merged=("parallel edges count as one, the first", lambda x: edges_at(x, np.sort(
        np.unique(x["source"] + nodes_of(x) * x["target"], return_index=True)[1]))),
    edges_assumed_sorted=("the edges of a node are counted off as if the list were sorted by target",
                          lambda x: dict(target=np.sort(x["target"]))),
    last_edge_lost=("the loop over the edges of a node ends one early",
                    lambda x: edges_at(x, np.delete(np.arange(len(x["source"])), last_of(x["target"])))),
    every_node_seen=("the graph is ignored: the softmax is over all nodes", lambda x: edges_added(
        x, [(j, i) for i in range(nodes_of(x)) for j in range(nodes_of(x))])),
)
EDGE_WEIGHTS = dict(                                                        # other weights, from logits a (B, H, E)
    softmax_over_outgoing=("the softmax is over the edges that leave a node",
                           lambda a, source, target, N: segment_softmax(a, source, N)[0]),
    softmax_over_all_edges=("the softmax is over all edges of the graph at once",
                            lambda a, source, target, N: softmax(a)[0]),
    maximum_not_subtracted=("exp of the logits as they are overflows",
                            lambda a, source, target, N: normalised(np.exp(a), target, N)),
    global_maximum=("one maximum is subtracted for all nodes: a node far below it is 0/0", lambda a, source, target, N:
                    normalised(np.exp(a - a.max(-1, keepdims=True, initial=-np.inf)), target, N)),
    scatter_overwrites=("y[target] += x keeps the last of the edges that end in one node",
                        lambda a, source, target, N: np.isin(np.arange(len(target)), last_of(target)) + 0 * a),
)


def receives(x):
    """(N, 1) True for a node in which an edge ends."""
    return np.isin(np.arange(nodes_of(x)), x["target"])[:, None]


def over_edges(x, logits, v, weights=lambda a, source, target, N: segment_softmax(a, target, N)[0]):
    """o for logits (B, H, E) and values (B, H, N, dv), by a softmax at every target or by other weights."""
    source, target, N = x["source"], x["target"], v.shape[2]
    return segment_sum(weights(logits, source, target, N)[..., None] * v[:, :, source], target, N)


def edge_mistakes(dense, parts):
    """Mistakes of any attention over edges; parts(x) gives the right logits (B, H, E) and values (B, H, N, dv)."""
    def o(x, *weights):
        return over_edges(x, *parts(x), *weights)
    changes = {slug: (text, lambda x, change=change: dense(**x | change(x)))
               for slug, (text, change) in EDGE_CHANGES.items()}
    weights = {slug: (text, lambda x, weights=weights: (o(x, weights),))
               for slug, (text, weights) in EDGE_WEIGHTS.items()}
    return changes | weights | dict(
        own_value_sent=("a node receives its own value in place of the source's",
                        lambda x: (np.where(receives(x), parts(x)[1], 0),)),
        empty_row_nan=("a node in which no edge ends is 0/0", lambda x: (np.where(receives(x), o(x), np.nan),)),
        empty_row_uniform=("a node in which no edge ends gets the mean of all values",
                           lambda x: (np.where(receives(x), o(x), mean_value(parts(x)[1])),)),
        masked_nan_poison=("0 * NaN: a node that no edge leaves is read by all, as in a dense product",
                           lambda x: (o(x) + (0 * parts(x)[1]).sum(-2, keepdims=True),)))


# Attention whose scores get a bias of positions

def scores(x):
    """scale q k^T (B, H, Tq, Tk), hidden keys included."""
    return x["scale"] * x["q"] @ plain(x["k"]).swapaxes(-1, -2)


def attend(x, logits):
    """o and lse for logits (B, H, Tq, Tk)."""
    weights, lse = softmax(logits, x["mask"])
    return weights @ plain(x["v"]), lse


def score_gradient(x, logits):
    """The gradient of the logits (B, H, Tq, Tk)."""
    p, _ = softmax(logits, x["mask"])
    dp = x["do"] @ plain(x["v"]).swapaxes(-1, -2)
    return p * (dp - (p * dp).sum(-1, keepdims=True) + x["dlse"][..., None])


def overwritten(da, index, rows):
    """(H, rows), the gradient of a table by d[index] += da, as NumPy does it: of pairs with one row the last stays."""
    d = np.zeros_like(da, shape=(da.shape[1], rows))
    d[:, index] += da.sum(0)
    return d


def over_queries(x, logits):
    """o alone, for weights that sum to one over the queries."""
    weights, _ = softmax(logits.swapaxes(-1, -2), x["mask"].swapaxes(-1, -2))
    return (weights.swapaxes(-1, -2) @ plain(x["v"]),)


def bias_mistakes(dense, bias):
    """Mistakes of any attention with a bias of positions; bias(x) gives the right one, (H, Tq, Tk)."""
    def times(x, factor):
        return attend(x, scores(x) + factor * bias(x))
    return dict(
        bias_ignored=("the bias is never added", lambda x: attend(x, scores(x))),
        bias_added_twice=("the bias is added to the mask and to the scores", lambda x: times(x, 2)),
        bias_sign=("the bias is subtracted", lambda x: times(x, -1)),
        bias_before_scale=("the bias is scaled together with the scores", lambda x: times(x, x["scale"])),
        exp2_bias_not_rescaled=("exp2 with log2(e) in the scores but not in the bias", lambda x: times(x, LN2)),
        bias_of_head_0=("the bias of head 0 serves every head", lambda x: attend(x, scores(x) + bias(x)[:1])),
        scale_missing=("the scores are not scaled", lambda x: dense(**x | {"scale": 1.0})),
        softmax_over_queries=("the weights sum to one over the queries instead of the keys",
                              lambda x: over_queries(x, scores(x) + bias(x))),
        mask_dropped=("the mask is ignored", lambda x: dense(**x | {"mask": np.array(True)})),
        empty_row_nan=("a row without keys is 0/0", lambda x: nan_at_empty_rows(x, dense(**x))),
        masked_nan_poison=("0 * NaN: a masked value is read",
                           lambda x: (softmax(scores(x) + bias(x), x["mask"])[0] @ x["v"],)),
        lse_without_bias=("lse is of the scores before the bias",
                          lambda x: (dense(**x)[0], attend(x, scores(x))[1])),
        lse_base_2=("lse is a base-2 logarithm", lambda x: lse_in_base_2(dense(**x))),
    )


def bias_gradient_mistakes(vjp, bias, name):
    """Mistakes of the backward of such attention; name is that of the gradient of what the bias is made of."""
    def of_the_bias(x, change, **changes):
        found = vjp(**x | changes)
        return {name: change(found[name])} if name in found else {}

    def first(d):
        return np.concatenate([d[:1], 0 * d[1:]])
    return {
        name + "_lost": ("the bias is a constant to the backward", lambda x: of_the_bias(x, lambda d: 0 * d)),
        name + "_scaled": ("the gradient of the bias is multiplied by scale",
                           lambda x: of_the_bias(x, lambda d: x["scale"] * d)),
        name + "_of_batch_0": ("the gradient of the bias is that of batch entry 0, not the sum",
                               lambda x: of_the_bias(x, lambda d: d, do=first(x["do"]), dlse=first(x["dlse"]))),
        "jacobian_term_missing": ("dS = P dP without the row term", lambda x: dict(dq=without_row_term(
            softmax(scores(x) + bias(x), x["mask"])[0], x["do"], x["k"], x["v"], x["scale"]))),
        "dq_scale_missing": ("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
        "dlse_ignored": ("the gradient that comes through lse is lost", lambda x: vjp(**x | {"dlse": 0 * x["dlse"]})),
    }
