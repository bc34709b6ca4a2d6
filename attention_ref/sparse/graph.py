"""Dot-product attention over the edges of a graph.    Shi et al. 2020, arXiv:2009.03509, graph transformer layer

    s_e = scale q_i . k_j + bias_e          for every edge e from j = source_e to i = target_e
    z_i = sum_{e: target_e = i} exp(s_e)    lse_i = log z_i
    p_e = exp(s_e) / z_i                    o_i   = sum_{e: target_e = i} p_e v_j

Node i sees the nodes that point at it: sdpa with masks.graph, but edges have a bias each, and parallel edges are
separate terms. Edges come in any order, one list for the whole batch; several graphs are one graph in parts. The paper
has scale = 1/sqrt(dk), and adds a vector e of each edge to k_j, which is a bias of scale q_i . e, and to v_j. Where
code in the wild differs: self loops are added or removed without being asked for (here the list is taken as it is); a
node in which no edge ends gives NaN or the mean of V (here 0, lse -inf); a matrix in place of the list merges parallel
edges.
"""
import numpy as np

from .. import kit
from ..core import per_head, segment_softmax, segment_sum, softmax, sum_to
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H N dk", k="B H N dk", v="B H N dv", source="int E >=0 <N", target="int E >=0 <N",
              bias="B? H? E?", scale="")
OUTPUTS = dict(o="B H N dv", lse="B H N")
STEPS = dict(scores="B H E", biased="B H E", weights="B H E")
CONVENTIONS = dict(edges="from source (key) to target (query), in any order, parallel ones separate, no loop added",
                   empty_row="a node in which no edge ends: o = 0, lse = -inf, gradients 0",
                   lse="natural log, of biased scores", layout="B H N d",
                   masked_values="a node that no edge leaves is never read as a key")


def dense(q, k, v, source, target, bias=0.0, *, scale):
    """o (B, H, N, dv) and lse (B, H, N): the softmax of each node is over all edges, those that end elsewhere masked.

    source and target (E,) are integers below N. Raises ValueError for a shape or a number that does not fit.
    """
    n = sizes(INPUTS, locals())
    ends_here = target == np.arange(n["N"])[:, None]                        # (N, E)
    s = (scale * q @ k.swapaxes(-1, -2))[:, :, target, source] + bias       # (B, H, E)
    weights, lse = softmax(s[:, :, None], ends_here)
    return weights @ v[:, :, source], lse


def edge_scores(q, k, source, target, scale):
    """scale q_i . k_j of every edge (B, H, E)."""
    return (scale * q[:, :, target] * k[:, :, source]).sum(-1)


def segment(q, k, v, source, target, bias=0.0, *, scale):
    """As dense, in O(N + E): every edge once, and a softmax over the edges that end in one node."""
    n = sizes(INPUTS, locals())
    s = edge_scores(q, k, source, target, scale) + bias
    weights, lse = segment_softmax(s, target, n["N"])
    return segment_sum(weights[..., None] * v[:, :, source], target, n["N"]), lse


def steps(q, k, source, target, bias=0.0, *, scale):
    """The intermediates of every edge, each (B, H, E)."""
    scores = edge_scores(q, k, source, target, scale)
    return scores, scores + bias, segment_softmax(scores + bias, target, q.shape[2])[0]


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, source, target, bias, scale):
    """Two passes over the edges, in any order: scores and the maximum of each node, then its two sums. O(N + E)."""
    (N, dk), dv, E = q.shape, v.shape[1], len(source)
    o, z, m, s = np.zeros((N, dv), q.dtype), np.zeros(N, q.dtype), np.full(N, -np.inf, q.dtype), np.zeros(E, q.dtype)
    for e in range(E):
        i, j = target[e], source[e]
        for c in range(dk):
            s[e] += scale * q[i, c] * k[j, c]
        s[e] += bias[e]
        if s[e].real > m[i].real:
            m[i] = s[e]
    for e in range(E):
        i, j = target[e], source[e]
        if s[e].real > -np.inf:
            p = np.exp(s[e] - m[i])
            z[i] += p
            for c in range(dv):
                o[i, c] += p * v[j, c]
    for i in range(N):
        if z[i].real > 0:
            for c in range(dv):
                o[i, c] /= z[i]
            m[i] += np.log(z[i])
    return o, m


def vjp(do, dlse, q, k, v, source, target, bias=0.0, *, scale):
    """Gradients of q, k, v and bias (its own shape) for cotangents do (B, H, N, dv) and dlse (B, H, N), in O(N + E)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    N = q.shape[2]
    p, _ = segment_softmax(edge_scores(q, k, source, target, scale) + bias, target, N)
    dp = (do[:, :, target] * v[:, :, source]).sum(-1)
    row = segment_sum(p * dp, target, N) - dlse                             # = do . o - dlse
    ds = p * (dp - row[:, :, target])
    return dict(dq=scale * segment_sum(ds[..., None] * k[:, :, source], target, N),
                dk=scale * segment_sum(ds[..., None] * q[:, :, target], source, N),
                dv=segment_sum(p[..., None] * do[:, :, target], source, N), dbias=sum_to(ds, np.shape(bias)))


FORMS = dense, segment, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def parts(x):
    """The right logits (B, H, E), and the values of the nodes."""
    return edge_scores(x["q"], x["k"], x["source"], x["target"], x["scale"]) + x["bias"], x["v"]


def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def with_lse(x, lse):
    """The right o beside another lse."""
    return dense(**x)[0], lse


def node_max(x):
    """The largest logit of every node (B, H, N), 0 for one without edges."""
    a = np.where(x["target"] == np.arange(x["q"].shape[2])[:, None], parts(x)[0][..., None, :], -np.inf)
    m = a.max(-1, initial=-np.inf)
    return np.where(m == -np.inf, 0, m)


BUGS = dict(
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    scale_ignored=("1/sqrt(dk), whatever scale says", lambda x: but(x, scale=x["q"].shape[3] ** -0.5)),
    source_asks=("the query is that of the source, the key that of the target", lambda x: but(x, q=x["k"], k=x["q"])),
    bias_ignored=("the bias is not added", lambda x: but(x, bias=np.zeros_like(x["bias"]))),
    bias_before_scale=("the bias is scaled with the scores", lambda x: but(x, bias=x["scale"] * x["bias"])),
    bias_twice=("the bias is added twice", lambda x: but(x, bias=2 * x["bias"])),
    bias_of_head_0=("the bias of head 0 serves every head", lambda x: but(x, bias=x["bias"][:, :1])),
    bias_sorted_apart=("the edges are sorted by target, the biases stay where they were", lambda x: but(
        x, **{name: x[name][np.argsort(x["target"], kind="stable")] for name in ("source", "target")})),
    empty_row_lse_zero=("lse of a node without edges is 0", lambda x: kit.at_empty_rows(dense(**x), lse=0)),
    lse_without_bias=("lse is of the scores before the bias",
                      lambda x: with_lse(x, but(x, bias=np.zeros_like(x["bias"]))[1])),
    lse_without_max=("the maximum of a node is not added back to lse",
                     lambda x: with_lse(x, dense(**x)[1] - node_max(x))),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
    strides_ignored=("a strided view is read as if it were contiguous",
                     lambda x: but(x, **kit.changed(x, "qkv", kit.memory_order))),
) | kit.edge_mistakes(dense, parts)


def weights(x):
    """The right weights (B, H, E)."""
    return segment_softmax(parts(x)[0], x["target"], x["q"].shape[2])[0]


def kept_of_last(x, weighted, segment):
    """The sums over segments of which only the last entry is kept."""
    kept = np.isin(np.arange(len(segment)), kit.last_of(segment))
    return segment_sum(np.where(kept[:, None], weighted, 0), segment, x["q"].shape[2])


def without_row_term(x):
    """dq when ds = p dp lacks its row term."""
    dp = (x["do"][:, :, x["target"]] * x["v"][:, :, x["source"]]).sum(-1)
    ds = (weights(x) * dp)[..., None]
    return x["scale"] * segment_sum(ds * x["k"][:, :, x["source"]], x["target"], x["q"].shape[2])


def first_slice(x):
    full = vjp(**x | {"bias": x["bias"] + 0 * parts(x)[0]})["dbias"]
    return full[tuple(slice(0, 1) if n == 1 else slice(None) for n in x["bias"].shape)]


VJP_BUGS = dict(
    jacobian_term_missing=("ds = p dp without the row term", lambda x: dict(dq=without_row_term(x))),
    dq_scale_missing=("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    dk_scale_missing=("dk is not multiplied by scale", lambda x: dict(dk=vjp(**x)["dk"] / x["scale"])),
    dv_overwritten=("dv[source] += keeps the last of the edges that leave one node", lambda x: dict(
        dv=kept_of_last(x, weights(x)[..., None] * x["do"][:, :, x["target"]], x["source"]))),
    bias_gradient_not_reduced=("dbias is a slice, not the sum, over the axes along which bias was broadcast",
                               lambda x: dict(dbias=first_slice(x))),
    masked_row_gradient_nan=("0/0 in the backward of a node in which no edge ends", lambda x: dict(
        dq=np.where(kit.receives(x), vjp(**x)["dq"], np.nan))),
    dlse_ignored=("the gradient that comes through lse is lost", lambda x: vjp(**x | {"dlse": 0 * x["dlse"]})),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, N=5, dk=4, dv=7)
NEUTRAL = dict(bias=np.zeros((1, 1, 1)), scale=lambda n: n.dk ** -0.5)


def sdpa_of(x):
    """o where every node sees every node."""
    return softmax(x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2))[0] @ x["v"]


def nan_where_unread(x):
    """NaN in nodes that no edge leaves, or in which none ends."""
    nodes = np.arange(5)[:, None]
    return kit.nan_where(~np.isin(nodes, x["source"]), x) | kit.nan_where(~np.isin(nodes, x["target"]), x, "q")


CASES = dict(
    basic=kit.on(
        kit.EDGES, SIZES, why="every size differs and none is 1; edges in no order, of no symmetry",
        catches=("scale_missing", "source_asks", "direction_reversed", "self_loops_added", "self_loops_removed",
                 "edges_assumed_sorted", "last_edge_lost", "every_node_seen", "softmax_over_outgoing",
                 "softmax_over_all_edges", "scatter_overwrites", "own_value_sent", "lse_base_2", "lse_without_max",
                 "jacobian_term_missing", "dq_scale_missing", "dk_scale_missing", "dv_overwritten", "dlse_ignored",
                 "dlse_sign")),
    one_node=kit.on(
        kit.edges((0, 0)), dict(B=1, H=1, N=1, dk=1, dv=1), why="a single node that sees itself: o is v", light=True,
        shows=kit.returns_v),
    no_edge=kit.on(
        kit.edges(), SIZES, why="no edge at all is legal: o = 0, lse = -inf", light=True, shows=kit.sees_nothing,
        catches=("self_loops_added", "every_node_seen")),
    one_neighbour=kit.on(
        kit.RING, SIZES, why="with one edge into every node o is the value of its source", light=True,
        shows=lambda x, y: (y["o"] == x["v"][:, :, x["source"]]).all(), catches=("direction_reversed",)),
    complete=kit.on(
        kit.edges(*np.ndindex(5, 5)), SIZES, why="every node sees all, itself included: sdpa without a mask",
        light=True, shows=lambda x, y: np.allclose(y["o"], sdpa_of(x)), catches=("self_loops_removed",)),
    left_out=kit.on(
        kit.LEFT_OUT, SIZES, why="a node that no edge enters or leaves, and one that only sends",
        catches=("empty_row_nan", "empty_row_uniform", "empty_row_lse_zero", "masked_row_gradient_nan")),
    unread_nan=kit.on(
        kit.LEFT_OUT, SIZES, why="NaN in a key and value that no edge reads and in queries without edges",
        change=nan_where_unread, catches=("masked_nan_poison",)),
    parallel=kit.on(
        kit.PARALLEL, SIZES, why="parallel edges, not side by side, are separate terms", light=True,
        catches=("parallel_edges_merged",)),
    bias_full=kit.on(
        kit.PARALLEL, SIZES, why="a bias for every edge of every head and batch entry, parallel edges told apart by it",
        bias=lambda n: draw("bias", (n.B, n.H, n.E)),
        catches=("bias_ignored", "bias_before_scale", "bias_twice", "bias_of_head_0", "bias_sorted_apart",
                 "lse_without_bias", "parallel_edges_merged")),
    bias_shared=kit.on(
        kit.EDGES, SIZES, why="one bias per edge for all heads: its gradient is their sum",
        bias=lambda n: draw("bias", (1, 1, n.E)), catches=("bias_gradient_not_reduced",)),
    bias_minus_inf=kit.on(
        kit.EDGES, SIZES, why="a bias of -inf removes an edge, and a node of no other edges sees nothing",
        light=True, bias=lambda n: np.where(np.isin(np.arange(n.E), [1, 5]), -np.inf, draw("bias", (1, n.H, n.E))),
        shows=lambda x, y: (y["o"][:, :, 3] == 0).all() and (y["lse"][:, :, 3] == -np.inf).all()),
    scale_given=kit.on(
        kit.EDGES, SIZES | dict(dk=6), why="a scale that is not 1/sqrt(dk), and a width that no 4 divides",
        scale=0.25, light=True, catches=("scale_ignored",)),
    large_scores=kit.on(
        kit.EDGES, SIZES, why="scores of 50000 overflow exp in every type; one edge takes all the weight",
        scale=0.5, light=True, change=lambda x: kit.ramp(x, 160, 160, -1), catches=("maximum_not_subtracted",)),
    far_below=kit.on(
        kit.EDGES, SIZES, why="the scores of one node lie 256 below those of the others", light=True,
        bias=lambda n: np.where(kit.EDGES["target"] == 1, -256.0, 0.0)[None, None], catches=("global_maximum",)),
    strided=kit.on(
        kit.EDGES, SIZES, why="q, k and v are views of (B, N, H, d) memory", change=kit.strided, light=True,
        catches=("strides_ignored",)),
)
