"""Graph attention (GAT).                         Velickovic et al. 2018, arXiv:1710.10903, section 2.1, eq. 1 to 4

    h_i = x_i W
    a_e = LeakyReLU(a_target . h_i + a_source . h_j)          for every edge e from j = source_e to i = target_e
    p_e = exp(a_e) / sum_{f: target_f = i} exp(a_f)           o_i = sum_{e: target_e = i} p_e h_j

The paper's vector a is [a_target || a_source]: its first half meets the node that receives. LeakyReLU has slope 0.2.
Each head has a W and an a; the paper concatenates the heads (eq. 5, merge_heads(o)), in the last layer it averages them
(eq. 6, o.mean(1)), and applies its nonlinearity after that. The list of edges is taken as it is: parallel edges are
separate terms, self loops are those it has. Where code in the wild differs: PyTorch Geometric drops the self loops of
the list and adds one to every node; the released code fills in -1e9, so that a node without edges gets a mean (here 0).
"""
import numpy as np

from .. import kit
from ..core import leaky_relu, on_edges, per_head, segment_softmax, segment_sum, softmax
from ..shapes import cotangents, sizes

INPUTS = dict(x="B N D", w="H D dv", a_source="H dv", a_target="H dv", source="int E >=0 <N", target="int E >=0 <N",
              slope="")
OUTPUTS = dict(o="B H N dv")
STEPS = dict(projected="B H N dv", logits="B H E", weights="B H E")
CONVENTIONS = dict(edges="from source to target, in any order, parallel ones separate, no self loop added",
                   empty_row="a node in which no edge ends: o = 0", layout="B H N d", projections="(in, out)",
                   masked_values="a node on no edge is never read")


def half(h, a):
    """a . h_i of every node (B, H, N), with a (H, dv) of each head."""
    return (h @ a[..., None])[..., 0]


def dense(x, w, a_source, a_target, source, target, *, slope=0.2):
    """o (B, H, N, dv): the softmax of each node is over all edges, those that end elsewhere masked.

    source and target (E,) are integers below N. Raises ValueError for a shape or a number that does not fit.
    """
    n = sizes(INPUTS, locals())
    h = x[:, None] @ w
    s = half(h, a_target)[..., None] + half(h, a_source)[:, :, None, source]                # (B, H, N, E)
    weights, _ = softmax(leaky_relu(s, slope), target == np.arange(n["N"])[:, None])
    return weights @ h[:, :, source]


def edge_scores(h, a_source, a_target, source, target):
    """a_target . h_i + a_source . h_j of every edge (B, H, E)."""
    return half(h, a_target)[:, :, target] + half(h, a_source)[:, :, source]


def segment(x, w, a_source, a_target, source, target, *, slope=0.2):
    """As dense, in O(N + E): two numbers for every node, then a softmax over the edges that end in one node."""
    n = sizes(INPUTS, locals())
    h = x[:, None] @ w
    a = leaky_relu(edge_scores(h, a_source, a_target, source, target), slope)
    weights, _ = segment_softmax(a, target, n["N"])
    return segment_sum(weights[..., None] * h[:, :, source], target, n["N"])


def steps(x, w, a_source, a_target, source, target, *, slope=0.2):
    """h of every node, NaN where no edge is, and what is exponentiated and the weight, for every edge."""
    h = x[:, None] @ w
    a = leaky_relu(edge_scores(h, a_source, a_target, source, target), slope)
    on_edge = np.isin(np.arange(x.shape[1]), [source, target])[:, None]
    return np.where(on_edge, h, np.nan), a, segment_softmax(a, target, x.shape[1])[0]


@per_head(INPUTS, OUTPUTS)
def loop(x, w, a_source, a_target, source, target, slope):
    """h and its two products with a, once for every node; then three passes over the edges."""
    (N, D), dv, E = x.shape, w.shape[1], len(source)
    h, o = np.zeros((N, dv), x.dtype), np.zeros((N, dv), x.dtype)
    sends, receives, z = np.zeros(N, x.dtype), np.zeros(N, x.dtype), np.zeros(N, x.dtype)
    m, a = np.full(N, -np.inf, x.dtype), np.zeros(E, x.dtype)
    for i in range(N):
        for c in range(dv):
            for d in range(D):
                h[i, c] += x[i, d] * w[d, c]
            sends[i] += a_source[c] * h[i, c]
            receives[i] += a_target[c] * h[i, c]
    for e in range(E):
        i = target[e]
        a[e] = receives[i] + sends[source[e]]
        if a[e].real <= 0:
            a[e] *= slope
        if a[e].real > m[i].real:
            m[i] = a[e]
    for e in range(E):
        z[target[e]] += np.exp(a[e] - m[target[e]])
    for e in range(E):
        i, j = target[e], source[e]
        p = np.exp(a[e] - m[i]) / z[i]
        for c in range(dv):
            o[i, c] += p * h[j, c]
    return o


def vjp(do, x, w, a_source, a_target, source, target, *, slope=0.2):
    """Gradients of x, w, a_source and a_target for the cotangent do (B, H, N, dv)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    N, x = x.shape[1], on_edges(x, source, target)
    h = x[:, None] @ w
    s = edge_scores(h, a_source, a_target, source, target)
    p, _ = segment_softmax(leaky_relu(s, slope), target, N)
    dp = (do[:, :, target] * h[:, :, source]).sum(-1)
    da = p * (dp - segment_sum(p * dp, target, N)[:, :, target])
    ds = np.where(s.real > 0, da, slope * da)                               # LeakyReLU'
    sends, receives = segment_sum(ds, source, N)[..., None], segment_sum(ds, target, N)[..., None]
    dh = (segment_sum(p[..., None] * do[:, :, target], source, N)
          + sends * a_source[:, None] + receives * a_target[:, None])
    return dict(dx=(dh @ w.swapaxes(-1, -2)).sum(1), dw=(x[:, None].swapaxes(-1, -2) @ dh).sum(0),
                da_source=(sends * h).sum((0, 2)), da_target=(receives * h).sum((0, 2)))


FORMS = dense, segment, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def projected(x):
    """h (B, H, N, dv)."""
    return x["x"][:, None] @ x["w"]


def scores(x, h=None):
    """The right a_target . h_i + a_source . h_j (B, H, E), or those of another h."""
    h = projected(x) if h is None else h
    return edge_scores(h, x["a_source"], x["a_target"], x["source"], x["target"])


def parts(x):
    """The right logits (B, H, E), and the values of the nodes."""
    return leaky_relu(scores(x), x["slope"]), projected(x)


def finish(x, a):
    """The rest of the formula after logits a (B, H, E)."""
    return (kit.over_edges(x, a, projected(x)),)


def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


BUGS = dict(
    halves_swapped=("the first half of a meets the node that sends", lambda x: but(
        x, a_source=x["a_target"], a_target=x["a_source"])),
    one_vector=("one half of a serves both ends", lambda x: but(x, a_target=x["a_source"])),
    target_dropped=("a_target . h_i is left out, or passes LeakyReLU on its own: the softmax does not see it then",
                    lambda x: but(x, a_target=0 * x["a_target"])),
    leaky_missing=("no LeakyReLU before the softmax, or one after it, which sees no negative number",
                   lambda x: finish(x, scores(x))),
    leaky_before_a=("LeakyReLU of h before the products with a, in the order of GATv2", lambda x: finish(
        x, scores(x, leaky_relu(projected(x), x["slope"])))),
    slope_ignored=("slope 0.2, whatever slope says", lambda x: but(x, slope=0.2)),
    slope_of_libraries=("slope 0.01, which libraries have by default", lambda x: but(x, slope=0.01)),
    relu=("ReLU in place of LeakyReLU", lambda x: but(x, slope=0.0)),
    scaled=("the scores are divided by sqrt(dv)", lambda x: finish(
        x, parts(x)[0] * float(x["w"].shape[2] ** -0.5))),
    heads_interleaved=("head h owns every H-th column of the stored W", lambda x: but(x, w=kit.interleaved(x["w"]))),
    vectors_of_head_0=("the attention vector of head 0 serves every head", lambda x: but(x, **kit.changed(
        x, ("a_source", "a_target"), lambda a: a[:1] + 0 * a))),
    strides_ignored=("a strided view is read as if it were contiguous", lambda x: but(
        x, x=kit.memory_order(x["x"]))),
) | kit.edge_mistakes(dense, parts)


def weights(x):
    """The right weights (B, H, E)."""
    return segment_softmax(parts(x)[0], x["target"], x["x"].shape[1])[0]


def with_slope_of_derivative(x, slope):
    """da_source and da_target if the derivative of LeakyReLU below 0 were slope."""
    on_edge = x | {"x": on_edges(x["x"], x["source"], x["target"])}
    h, p, N = projected(on_edge), weights(x), x["x"].shape[1]
    dp = (x["do"][:, :, x["target"]] * h[:, :, x["source"]]).sum(-1)
    da = p * (dp - segment_sum(p * dp, x["target"], N)[:, :, x["target"]])
    ds = np.where(scores(x).real > 0, da, slope * da)
    return {"da_" + end: (segment_sum(ds, x[end], N)[..., None] * h).sum((0, 2)) for end in ("source", "target")}


def dh_of_values(x):
    """The part of dh (B, H, N, dv) that comes through the values."""
    return segment_sum(weights(x)[..., None] * x["do"][:, :, x["target"]], x["source"], x["x"].shape[1])


VJP_BUGS = dict(
    leaky_derivative_missing=("the derivative of LeakyReLU is taken to be 1", lambda x: with_slope_of_derivative(x, 1)),
    relu_derivative=("the derivative of LeakyReLU is taken to be 0 below 0", lambda x: with_slope_of_derivative(x, 0)),
    da_swapped=("the gradients of the two halves of a are exchanged", lambda x: dict(
        da_source=vjp(**x)["da_target"], da_target=vjp(**x)["da_source"])),
    scores_detached=("W and x get no gradient through the scores", lambda x: dict(
        dx=(dh_of_values(x) @ x["w"].swapaxes(-1, -2)).sum(1),
        dw=(on_edges(x["x"], x["source"], x["target"])[:, None].swapaxes(-1, -2) @ dh_of_values(x)).sum(0))),
    dw_of_batch_0=("dw is not summed over the batch", lambda x: dict(
        dw=vjp(**x | {"x": x["x"][:1], "do": x["do"][:1]})["dw"])),
    unread_gradient_nan=("0 * NaN in the backward: dW reads nodes that are on no edge", lambda x: dict(
        dw=vjp(**x)["dw"] + (0 * x["x"]).sum())),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, N=5, D=6, dv=4)
NEUTRAL = dict(slope=0.25)


CASES = dict(
    basic=kit.on(
        kit.EDGES, SIZES, why="every size differs and none is 1; edges in no order, of no symmetry",
        catches=("halves_swapped", "one_vector", "target_dropped", "leaky_missing", "leaky_before_a",
                 "slope_ignored", "slope_of_libraries", "relu", "scaled", "heads_interleaved",
                 "vectors_of_head_0", "direction_reversed", "self_loops_added", "self_loops_removed",
                 "edges_assumed_sorted", "last_edge_lost", "every_node_seen", "softmax_over_outgoing",
                 "softmax_over_all_edges", "scatter_overwrites", "own_value_sent", "leaky_derivative_missing",
                 "relu_derivative", "da_swapped", "scores_detached", "dw_of_batch_0")),
    one_node=kit.on(
        kit.edges((0, 0)), dict(B=1, H=1, N=1, D=1, dv=1), why="a single node that sees itself: o is x W", light=True,
        shows=lambda x, y: (y["o"] == projected(x)).all()),
    no_edge=kit.on(
        kit.edges(), SIZES, why="no edge at all is legal: o = 0", light=True, shows=lambda x, y: (y["o"] == 0).all(),
        catches=("self_loops_added", "every_node_seen")),
    one_neighbour=kit.on(
        kit.RING, SIZES, why="with one edge into every node o is x W of its source", light=True,
        shows=lambda x, y: (y["o"] == projected(x)[:, :, x["source"]]).all(), catches=("direction_reversed",)),
    complete=kit.on(
        kit.edges(*np.ndindex(5, 5)), SIZES, why="every node sees every node, itself included", light=True,
        catches=("self_loops_removed", "edges_assumed_sorted")),
    left_out=kit.on(
        kit.LEFT_OUT, SIZES, why="a node that no edge enters or leaves, and one that only sends",
        catches=("empty_row_nan", "empty_row_uniform")),
    unread_nan=kit.on(
        kit.LEFT_OUT, SIZES, why="NaN in a node that is on no edge",
        change=lambda x: kit.nan_where(kit.on_no_edge(x), x, "x"),
        catches=("masked_nan_poison", "unread_gradient_nan")),
    parallel=kit.on(
        kit.PARALLEL, SIZES, why="parallel edges, not side by side, are separate terms",
        catches=("parallel_edges_merged",)),
    slope_given=kit.on(
        kit.EDGES, SIZES, why="a slope of 1/2: another shape of the scores", slope=0.5, light=True,
        catches=("slope_ignored", "slope_of_libraries", "relu")),
    equal_widths=kit.on(
        kit.EDGES, SIZES | dict(D=4), why="D = dv, so that a projection could be left out", light=True,
        shows=lambda x, y: x["x"].shape[-1] == y["o"].shape[-1], catches=("leaky_missing",)),
    far_apart=kit.on(
        kit.EDGES, SIZES, why="logits equal within a node and hundreds apart between nodes: exp overflows or is 0",
        light=True, change=lambda x: dict(a_source=0 * x["a_source"], a_target=256 * x["a_target"]),
        catches=("maximum_not_subtracted", "global_maximum")),
    strided=kit.on(
        kit.EDGES, SIZES, why="x is a view of memory with the nodes last", light=True,
        change=lambda x: kit.strided(x, "x"), catches=("strides_ignored",)),
)
