"""Graph attention with dynamic ranking (GATv2).    Brody et al. 2021, arXiv:2105.14491, section 3.2, eq. 7 (GAT: eq. 6)

    t_i = x_i W_target          h_j = x_j W_source
    a_e = a . LeakyReLU(t_i + h_j)                            for every edge e from j = source_e to i = target_e
    p_e = exp(a_e) / sum_{f: target_f = i} exp(a_f)           o_i = sum_{e: target_e = i} p_e h_j

In GAT the product with a comes before LeakyReLU: every node then ranks its neighbours alike, which the paper calls
static attention. Here it comes after, and each node has an order of its own. W_target and W_source are the two halves
of the paper's W; they are equal where a library says share_weights. LeakyReLU has slope 0.2. Heads are concatenated,
merge_heads(o), or averaged, o.mean(1), by the caller. Edges, self loops and what differs in the wild: see gat.
"""
import numpy as np

from .. import kit
from ..core import leaky_relu, on_edges, per_head, segment_softmax, segment_sum, softmax
from ..shapes import cotangents, sizes

INPUTS = dict(x="B N D", w_source="H D dv", w_target="H D dv", a="H dv", source="int E >=0 <N",
              target="int E >=0 <N", slope="")
OUTPUTS = dict(o="B H N dv")
STEPS = dict(logits="B H E", weights="B H E")
CONVENTIONS = dict(edges="from source to target, in any order, parallel ones separate, no self loop added",
                   values="those of W_source", empty_row="a node in which no edge ends: o = 0", layout="B H N d",
                   projections="(in, out)", masked_values="a node on no edge is never read")


def dense(x, w_source, w_target, a, source, target, *, slope=0.2):
    """o (B, H, N, dv): the softmax of each node is over all edges, those that end elsewhere masked.

    source and target (E,) are integers below N. Raises ValueError for a shape or number that does not fit.
    """
    n = sizes(INPUTS, locals())
    t, h = x[:, None] @ w_target, x[:, None] @ w_source
    s = leaky_relu(t[:, :, :, None] + h[:, :, None, source], slope)                         # (B, H, N, E, dv)
    weights, _ = softmax((s * a[:, None, None]).sum(-1), target == np.arange(n["N"])[:, None])
    return weights @ h[:, :, source]


def edge_sums(x, w_source, w_target, source, target):
    """t_i + h_j and h_j of every edge, each (B, H, E, dv)."""
    t, h = x[:, None] @ w_target, x[:, None] @ w_source
    return t[:, :, target] + h[:, :, source], h[:, :, source]


def segment(x, w_source, w_target, a, source, target, *, slope=0.2):
    """As dense, in O(N + E): every edge once, and a softmax over the edges that end in one node."""
    n = sizes(INPUTS, locals())
    u, h = edge_sums(x, w_source, w_target, source, target)
    weights, _ = segment_softmax((leaky_relu(u, slope) @ a[..., None])[..., 0], target, n["N"])
    return segment_sum(weights[..., None] * h, target, n["N"])


def steps(x, w_source, w_target, a, source, target, *, slope=0.2):
    """What is exponentiated and the weight, for every edge (B, H, E)."""
    u, _ = edge_sums(x, w_source, w_target, source, target)
    logits = (leaky_relu(u, slope) @ a[..., None])[..., 0]
    return logits, segment_softmax(logits, target, x.shape[1])[0]


@per_head(INPUTS, OUTPUTS)
def loop(x, w_source, w_target, a, source, target, slope):
    """Both projections of every node; then three passes over the edges."""
    (N, D), dv, E = x.shape, a.shape[0], len(source)
    t, h, o = np.zeros((N, dv), x.dtype), np.zeros((N, dv), x.dtype), np.zeros((N, dv), x.dtype)
    m, z, logits = np.full(N, -np.inf, x.dtype), np.zeros(N, x.dtype), np.zeros(E, x.dtype)
    for i in range(N):
        for c in range(dv):
            for d in range(D):
                t[i, c] += x[i, d] * w_target[d, c]
                h[i, c] += x[i, d] * w_source[d, c]
    for e in range(E):
        i, j = target[e], source[e]
        for c in range(dv):
            u = t[i, c] + h[j, c]
            logits[e] += a[c] * (u if u.real > 0 else slope * u)
        if logits[e].real > m[i].real:
            m[i] = logits[e]
    for e in range(E):
        z[target[e]] += np.exp(logits[e] - m[target[e]])
    for e in range(E):
        i, j = target[e], source[e]
        p = np.exp(logits[e] - m[i]) / z[i]
        for c in range(dv):
            o[i, c] += p * h[j, c]
    return o


def vjp(do, x, w_source, w_target, a, source, target, *, slope=0.2):
    """Gradients of x, w_source, w_target and a for the cotangent do (B, H, N, dv)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    N, x = x.shape[1], on_edges(x, source, target)
    u, h = edge_sums(x, w_source, w_target, source, target)
    s = leaky_relu(u, slope)
    p, _ = segment_softmax((s @ a[..., None])[..., 0], target, N)
    dp = (do[:, :, target] * h).sum(-1)
    ds = (p * (dp - segment_sum(p * dp, target, N)[:, :, target]))[..., None]
    du = np.where(u.real > 0, ds, slope * ds) * a[:, None]                  # LeakyReLU'
    dt = segment_sum(du, target, N)
    dh = segment_sum(du + p[..., None] * do[:, :, target], source, N)
    xt = x[:, None].swapaxes(-1, -2)
    return dict(dx=(dt @ w_target.swapaxes(-1, -2) + dh @ w_source.swapaxes(-1, -2)).sum(1),
                dw_source=(xt @ dh).sum(0), dw_target=(xt @ dt).sum(0), da=(ds * s).sum((0, 2)))


FORMS = dense, segment, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def values(x):
    """h (B, H, N, dv)."""
    return x["x"][:, None] @ x["w_source"]


def sums(x):
    """The right t_i + h_j (B, H, E, dv)."""
    return edge_sums(x["x"], x["w_source"], x["w_target"], x["source"], x["target"])[0]


def meets_a(x, s):
    """a . s of every edge (B, H, E)."""
    return (s @ x["a"][..., None])[..., 0]


def parts(x):
    """The right logits (B, H, E), and the values of the nodes."""
    return meets_a(x, leaky_relu(sums(x), x["slope"])), values(x)


def finish(x, logits, v=None):
    """The rest of the formula after logits (B, H, E), with other values (B, H, N, dv) if given."""
    return (kit.over_edges(x, logits, values(x) if v is None else v),)


def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


BUGS = dict(
    gat_scores=("LeakyReLU after the product with a, as in GAT", lambda x: finish(
        x, leaky_relu(meets_a(x, sums(x)), x["slope"]))),
    leaky_of_each_end=("LeakyReLU of t_i and of h_j, then their sum: t_i then moves no weight", lambda x: finish(
        x, meets_a(x, leaky_relu(values(x)[:, :, x["source"]], x["slope"])))),
    leaky_missing=("no LeakyReLU: t_i then moves no weight", lambda x: finish(x, meets_a(x, sums(x)))),
    leaky_twice=("LeakyReLU before the product with a and after it", lambda x: finish(
        x, leaky_relu(parts(x)[0], x["slope"]))),
    projections_swapped=("W_source meets the node that receives, W_target the one that sends", lambda x: but(
        x, w_source=x["w_target"], w_target=x["w_source"])),
    scores_swapped=("the scores take W_source for the node that receives, the values are right", lambda x: finish(
        x, parts(x | dict(w_source=x["w_target"], w_target=x["w_source"]))[0])),
    one_projection=("one W for both ends, whatever the other is", lambda x: but(x, w_target=x["w_source"])),
    values_of_target_weights=("the values are x_j W_target", lambda x: finish(
        x, parts(x)[0], x["x"][:, None] @ x["w_target"])),
    values_activated=("the values are LeakyReLU(h_j)", lambda x: finish(
        x, parts(x)[0], leaky_relu(values(x), x["slope"]))),
    slope_ignored=("slope 0.2, whatever slope says", lambda x: but(x, slope=0.2)),
    slope_of_libraries=("slope 0.01, which libraries have by default", lambda x: but(x, slope=0.01)),
    relu=("ReLU in place of LeakyReLU", lambda x: but(x, slope=0.0)),
    heads_interleaved=("head h owns every H-th column of the stored W", lambda x: but(
        x, **kit.changed(x, ("w_source", "w_target"), kit.interleaved))),
    vector_of_head_0=("the attention vector of head 0 serves every head", lambda x: but(
        x, a=x["a"][:1] + 0 * x["a"])),
) | kit.edge_mistakes(dense, parts)


def nodes(x):
    """x (B, 1, N, D), zeros where no edge is."""
    return on_edges(x["x"], x["source"], x["target"])[:, None]


def logits_gradient(x):
    """d loss / d logits (B, H, E, 1), and the weights (B, H, E, 1)."""
    p, _ = segment_softmax(parts(x)[0], x["target"], x["x"].shape[1])
    dp = (x["do"][:, :, x["target"]] * values(x)[:, :, x["source"]]).sum(-1)
    row = segment_sum(p * dp, x["target"], x["x"].shape[1])
    return (p * (dp - row[:, :, x["target"]]))[..., None], p[..., None]


def dw_target_with(x, derivative):
    """dw_target with another derivative of LeakyReLU: a function of t_i + h_j."""
    du = logits_gradient(x)[0] * derivative(sums(x)) * x["a"][:, None]
    return (nodes(x).swapaxes(-1, -2) @ segment_sum(du, x["target"], x["x"].shape[1])).sum(0)


def dw_of_values(x):
    """The part of dw_source that comes through the values."""
    dh = segment_sum(logits_gradient(x)[1] * x["do"][:, :, x["target"]], x["source"], x["x"].shape[1])
    return (nodes(x).swapaxes(-1, -2) @ dh).sum(0)


VJP_BUGS = dict(
    leaky_derivative_missing=("the derivative of LeakyReLU is taken to be 1", lambda x: dict(
        dw_target=dw_target_with(x, np.ones_like))),
    relu_derivative=("the derivative of LeakyReLU is taken to be 0 below 0", lambda x: dict(
        dw_target=dw_target_with(x, lambda u: np.where(u.real > 0, np.ones_like(u), 0)))),
    da_before_leaky=("da is that of a . (t_i + h_j)", lambda x: dict(
        da=(logits_gradient(x)[0] * sums(x)).sum((0, 2)))),
    scores_detached=("W_source gets no gradient through the scores", lambda x: dict(dw_source=dw_of_values(x))),
    values_detached=("W_source gets no gradient through the values", lambda x: dict(
        dw_source=vjp(**x)["dw_source"] - dw_of_values(x))),
    dw_of_batch_0=("gradients of W are not summed over the batch", lambda x: {name: g for name, g in vjp(
        **x | {"x": x["x"][:1], "do": x["do"][:1]}).items() if name.startswith("dw")}),
    unread_gradient_nan=("0 * NaN in the backward: dW reads nodes that are on no edge", lambda x: dict(
        dw_source=vjp(**x)["dw_source"] + (0 * x["x"]).sum())),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, N=5, D=6, dv=4)
NEUTRAL = dict(slope=0.25)


def favourites(x):
    """The source that each node weighs most (B, H, N), where all see all."""
    logits, _ = parts(x)
    return logits.reshape(*logits.shape[:2], 5, 5).argmax(2)


def in_one_channel(x):
    """Scores of one channel alone, which no source moves: equal within a node and hundreds apart between nodes."""
    first = np.arange(x["a"].shape[1]) == 0
    return dict(a=np.where(first, 1, 0 * x["a"]), w_source=np.where(first, 0, x["w_source"]),
                w_target=np.where(first, 256 * x["w_target"], x["w_target"]))


CASES = dict(
    basic=kit.on(
        kit.EDGES, SIZES, why="every size differs and none is 1; edges in no order, of no symmetry",
        catches=("gat_scores", "leaky_of_each_end", "leaky_missing", "leaky_twice", "projections_swapped",
                 "scores_swapped", "one_projection", "values_of_target_weights", "values_activated", "slope_ignored",
                 "slope_of_libraries", "relu", "heads_interleaved", "vector_of_head_0", "direction_reversed",
                 "self_loops_added", "self_loops_removed", "edges_assumed_sorted", "last_edge_lost", "every_node_seen",
                 "softmax_over_outgoing", "softmax_over_all_edges", "scatter_overwrites", "own_value_sent",
                 "leaky_derivative_missing", "relu_derivative", "da_before_leaky", "scores_detached",
                 "values_detached", "dw_of_batch_0")),
    one_node=kit.on(
        kit.edges((0, 0)), dict(B=1, H=1, N=1, D=1, dv=1), why="a single node that sees itself: o is x W_source",
        light=True, shows=lambda x, y: (y["o"] == values(x)).all()),
    no_edge=kit.on(
        kit.edges(), SIZES, why="no edge at all is legal: o = 0", light=True, shows=lambda x, y: (y["o"] == 0).all(),
        catches=("self_loops_added", "every_node_seen")),
    one_neighbour=kit.on(
        kit.RING, SIZES, why="with one edge into every node o is x W_source of its source", light=True,
        shows=lambda x, y: (y["o"] == values(x)[:, :, x["source"]]).all(), catches=("direction_reversed",)),
    own_order=kit.on(
        kit.edges(*np.ndindex(5, 5)), SIZES, why="all nodes see all, and not all of them prefer the same: not static",
        light=True, shows=lambda x, y: np.ptp(favourites(x), -1).any(), catches=("leaky_missing", "leaky_of_each_end")),
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
    shared_weights=kit.on(
        kit.EDGES, SIZES, why="W_target = W_source, as share_weights has it", light=True,
        change=lambda x: dict(w_target=x["w_source"]), catches=("gat_scores",)),
    slope_given=kit.on(
        kit.EDGES, SIZES, why="a slope of 1/2: another shape of the scores", slope=0.5, light=True,
        catches=("slope_ignored", "slope_of_libraries", "relu")),
    equal_widths=kit.on(
        kit.EDGES, SIZES | dict(D=4), why="D = dv, so that a projection could be left out or transposed", light=True,
        shows=lambda x, y: x["x"].shape[-1] == y["o"].shape[-1], catches=("gat_scores",)),
    far_apart=kit.on(
        kit.EDGES, SIZES, why="logits equal within a node and hundreds apart between nodes: exp overflows or is 0",
        light=True, change=in_one_channel, catches=("maximum_not_subtracted", "global_maximum")),
)
