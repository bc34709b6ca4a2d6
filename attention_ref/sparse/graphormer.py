"""Graphormer attention.                          Ying et al. 2021, arXiv:2106.05234, section 3.1, eq. 5 to 7

    s_ij = scale q_i . k_j + b[distance_ij] + c_ij           distance: edges on a shortest path from i to j (eq. 6)
    c_ij = 1/L_ij sum_{n < L_ij} f[path_ijn] . w_n           the mean over these edges, 0 without any (eq. 7)
    z_i  = sum_j exp(s_ij)      lse_i = log z_i      p_ij = exp(s_ij) / z_i      o_i = sum_j p_ij v_j

All nodes see all. Where no path leads from i to j the distance is -1, which is the last entry of b, as an index of
Python is; -inf there excludes the pair. `shortest_paths` makes distance and path; which of several shortest paths is
taken is a choice, so they are inputs. Centrality (eq. 5) is added to x before the first layer: `centrality`. Where code
in the wild differs: the released one adds 1 to the distance (0 is padding), gives the pairs of its virtual node an
entry of b of their own (as it can be done here), excludes pairs beyond a cut-off, and adds its mask twice.
"""
import numpy as np

from .. import kit
from ..core import per_head, segment_sum, softmax
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H N dk", k="B H N dk", v="B H N dv", spatial_bias="H S", edge_features="E F", edge_weight="H L F",
              distance="int B? N N >=-1 <S", path="int B? N N L >=-1 <E", scale="")
OUTPUTS = dict(o="B H N dv", lse="B H N")
STEPS = dict(scores="B H N N", edge_encoding="B? H N N", biased="B H N N", weights="B H N N")
CONVENTIONS = dict(distance="from query i to key j; -1 reads the last entry of spatial_bias", layout="B H N d",
                   edge_encoding="divided by the number of edges of the path, 0 for a path without edges",
                   empty_row="o = 0, lse = -inf, gradients 0", lse="natural log, of biased scores",
                   masked_values="the features of an edge on no path are never read")


def shortest_paths(source, target, N):
    """distance (N, N) and path (N, N, L) for edges source -> target, (E,) each: a breadth-first search from every node.

    path_ij holds the edges, numbers below E, from i to j: of several shortest paths the first that is found when edges
    are tried in the order of the list. L is the longest; -1 fills up shorter ones, and is the distance without a path.
    """
    sizes(dict(N="int =N", source="int E >=0 <N", target="int E >=0 <N"), locals())
    found = {}
    for i in range(N):
        found[i, i], reached = [], [i]
        for j in reached:                                                   # grows while it is read
            for e in np.flatnonzero(source == j):
                if (i, target[e]) not in found:
                    found[i, target[e]] = [*found[i, j], e]
                    reached.append(target[e])
    distance, path = np.full((N, N), -1), np.full((N, N, max(map(len, found.values()), default=0)), -1)
    for pair, chain in found.items():
        distance[pair], path[pair][:len(chain)] = len(chain), chain
    return distance, path


def centrality(x, source, target, z_in, z_out):
    """x_i + z_in[in-degree of i] + z_out[out-degree of i] (eq. 5), with x (B, N, D) and tables (degrees, D)."""
    n = sizes(dict(x="B N D", source="int E >=0 <N", target="int E >=0 <N", z_in="M D", z_out="M D"), locals())
    return x + z_in[np.bincount(target, minlength=n["N"])] + z_out[np.bincount(source, minlength=n["N"])]


def spatial(spatial_bias, distance):
    """b[distance_ij], (B?, H, N, N)."""
    return np.moveaxis(spatial_bias[:, distance], 0, -3)


def lengths(path, dtype):
    """L_ij, (..., N, N), but 1 for a path without edges."""
    return np.maximum(1, (path >= 0).sum(-1)).astype(dtype)


def mean_of(terms, path):
    """The mean (..., N, N) of the terms (..., N, N, L) that belong to an edge of the path, 0 without edges."""
    return np.where(path >= 0, terms, 0).sum(-1) / lengths(path, terms.dtype)


def edge_encoding(edge_features, edge_weight, path):
    """c_ij, (B?, H, N, N)."""
    f = edge_features[path][..., None, :, :, :, :]                          # (B?, 1, N, N, L, F)
    return mean_of((f * edge_weight[:, None, None]).sum(-1), path[..., None, :, :, :])


def dense(q, k, v, spatial_bias, edge_features, edge_weight, distance, path, *, scale):
    """o (B, H, N, dv) and lse (B, H, N), by the equations above.

    distance (B?, N, N) and path (B?, N, N, L) are as `shortest_paths` gives them: one graph, or one for each batch
    entry. Raises ValueError for a shape or a number that does not fit.
    """
    sizes(INPUTS, locals())
    bias = spatial(spatial_bias, distance) + edge_encoding(edge_features, edge_weight, path)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2) + bias)
    return weights @ v, lse


def gathered(q, k, v, spatial_bias, edge_features, edge_weight, distance, path, *, scale):
    """As dense, but every edge meets every w_n once: E L F products, not N N L F, and what they give is gathered."""
    n = sizes(INPUTS, locals())
    g = edge_weight @ edge_features.T                                       # (H, L, E)
    bias = spatial_bias[:, distance] + mean_of(g[:, np.arange(n["L"]), path], path)         # (H, B?, N, N)
    weights, lse = softmax(scale * q @ k.swapaxes(-1, -2) + np.moveaxis(bias, 0, -3))
    return weights @ v, lse


def steps(q, k, spatial_bias, edge_features, edge_weight, distance, path, *, scale):
    """Scores, c, biased scores and weights."""
    scores, c = scale * q @ k.swapaxes(-1, -2), edge_encoding(edge_features, edge_weight, path)
    biased = scores + (spatial(spatial_bias, distance) + c)
    return scores, c, biased, softmax(biased)[0]


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, spatial_bias, edge_features, edge_weight, distance, path, scale):
    """The products of edges and weights, then one query at a time: the path to every key, and two passes over them."""
    (N, dk), dv, (L, F), E = q.shape, v.shape[1], edge_weight.shape, len(edge_features)
    g, s, z = np.zeros((L, E), q.dtype), np.zeros(N, q.dtype), np.zeros(N, q.dtype)
    o, lse = np.zeros((N, dv), q.dtype), np.full(N, -np.inf, q.dtype)
    for n in range(L):
        for e in range(E):
            for f in range(F):
                g[n, e] += edge_features[e, f] * edge_weight[n, f]
    for i in range(N):
        for j in range(N):
            s[j], length = 0, 0
            for n in range(L):
                if path[i, j, n] >= 0:
                    s[j] += g[n, path[i, j, n]]
                    length += 1
            s[j] = s[j] / max(1, length) + spatial_bias[distance[i, j]]
            for c in range(dk):
                s[j] += scale * q[i, c] * k[j, c]
            if s[j].real > lse[i].real:
                lse[i] = s[j]                                               # the maximum until the sum is known
        if lse[i].real == -np.inf:
            continue
        for j in range(N):
            p = np.exp(s[j] - lse[i])
            z[i] += p
            for c in range(dv):
                o[i, c] += p * v[j, c]
        for c in range(dv):
            o[i, c] /= z[i]
        lse[i] += np.log(z[i])
    return o, lse


def table_gradient(dy, index, count):
    """The gradient of y (H, count) for the cotangent dy (B, H, ...) of y[:, index], index (B?, ...)."""
    index = np.broadcast_to(index, (dy.shape[0], *dy.shape[2:]))
    return segment_sum(dy.swapaxes(0, 1).reshape(1, dy.shape[1], index.size), index.ravel(), count)[0]


def encoding_vjp(dc, edge_features, edge_weight, path):
    """Gradients of f and w for the cotangent dc (B, H, N, N) of c."""
    E, L, path = len(edge_features), path.shape[-1], path[..., None, :, :, :]
    f = np.where(np.isin(np.arange(E), path)[:, None], edge_features, 0)
    terms = np.where(path >= 0, (dc / lengths(path, dc.dtype))[..., None], 0)               # (B, H, N, N, L)
    dg = table_gradient(terms, np.arange(L) * E + path[..., 0, :, :, :], L * E).reshape(-1, L, E)
    return (dg.swapaxes(-1, -2) @ edge_weight).sum(0), dg @ f


def vjp(do, dlse, q, k, v, spatial_bias, edge_features, edge_weight, distance, path, *, scale):
    """Gradients of q, k, v, the table, edges and weights for cotangents do (B, H, N, dv) and dlse (B, H, N)."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    bias = spatial(spatial_bias, distance) + edge_encoding(edge_features, edge_weight, path)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2) + bias)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - ((p * dp).sum(-1) - dlse)[..., None])
    df, dw = encoding_vjp(ds, edge_features, edge_weight, path)
    return dict(dq=scale * ds @ k, dk=scale * ds.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do,
                dspatial_bias=table_gradient(ds, distance, spatial_bias.shape[1]), dedge_features=df, dedge_weight=dw)


FORMS = dense, gathered, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def scores(x):
    """scale q k^T and nothing else."""
    return x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2)


def encoding(x):
    """The right c_ij."""
    return edge_encoding(x["edge_features"], x["edge_weight"], x["path"])


def bias(x):
    """The right b + c."""
    return spatial(x["spatial_bias"], x["distance"]) + encoding(x)


def finish(x, bias):
    """The rest of the formula with another bias."""
    weights, lse = softmax(scores(x) + bias)
    return weights @ x["v"], lse


def finish_unguarded(x, axis=-1):
    """o with a softmax as most code writes it, along an axis."""
    s = scores(x) + bias(x)
    e = np.exp(s - s.max(axis, keepdims=True))
    return (e / e.sum(axis, keepdims=True) @ x["v"],)


def times_length(x, divisor):
    """b + c with c divided by divisor(length) in place of the length of the path."""
    length = lengths(x["path"], float)[..., None, :, :]
    factor = (length / divisor(length)).astype(x["q"].dtype)
    return finish(x, spatial(x["spatial_bias"], x["distance"]) + encoding(x) * factor)


def padding_read(x):
    """b + c where the -1 of a short path reads the last edge, and the sum is divided by the length."""
    every = x["path"] % max(1, len(x["edge_features"]))
    c = x["path"].shape[-1] * edge_encoding(kit.plain(x["edge_features"]), x["edge_weight"], every)
    return finish(x, spatial(x["spatial_bias"], x["distance"]) + c / lengths(x["path"], c.dtype)[..., None, :, :])


def hops_reversed(path):
    """The same edges from the last to the first, the -1 still at the end."""
    length = (path >= 0).sum(-1, keepdims=True)
    n = np.arange(path.shape[-1])
    return np.take_along_axis(path, np.where(n < length, length - 1 - n, n), -1)


def no_path(x, other):
    """The right formula with distance other(largest) in place of -1."""
    d = x["distance"]
    return but(x, distance=np.where(d < 0, other(x["spatial_bias"].shape[1] - 2), d))


def with_last(table, value):
    """The table with another last entry: that of pairs without a path."""
    return np.where(np.arange(table.shape[1]) == table.shape[1] - 1, value, table)


BUGS = dict(
    scale_missing=("the scores are not scaled", lambda x: but(x, scale=1.0)),
    bias_before_scale=("b and c are scaled with the scores", lambda x: finish(x, x["scale"] * bias(x))),
    bias_twice=("b and c are added twice", lambda x: finish(x, 2 * bias(x))),
    softmax_over_queries=("the softmax runs over the queries of a key", lambda x: finish_unguarded(x, -2)),
    spatial_ignored=("b is left out", lambda x: but(x, spatial_bias=np.zeros_like(x["spatial_bias"]))),
    spatial_off_by_one=("b[distance + 1], from a table that has no entry for padding", lambda x: but(
        x, distance=np.where(x["distance"] < 0, -1, np.minimum(x["distance"] + 1, x["spatial_bias"].shape[1] - 1)))),
    spatial_of_head_0=("the b of head 0 serves every head", lambda x: but(
        x, spatial_bias=x["spatial_bias"][:1] + 0 * x["spatial_bias"])),
    no_path_as_0=("a distance of -1 is clipped to 0", lambda x: no_path(x, lambda largest: 0)),
    no_path_as_largest=("without a path the largest distance of the table is read", lambda x: no_path(
        x, lambda largest: largest)),
    no_path_without_bias=("a pair without a path gets no b, and is seen", lambda x: but(
        x, spatial_bias=with_last(x["spatial_bias"], 0))),
    no_path_excluded=("a pair without a path is masked, whatever b says", lambda x: finish(
        x, np.where((x["distance"] < 0)[..., None, :, :], -np.inf, bias(x)))),
    distance_transposed=("b of the distance from key to query", lambda x: but(
        x, distance=x["distance"].swapaxes(-1, -2))),
    path_transposed=("c of the path from key to query", lambda x: but(x, path=x["path"].swapaxes(-2, -3))),
    graph_of_batch_0=("the distances and paths of batch entry 0 serve every entry", lambda x: but(
        x, distance=x["distance"][:1], path=x["path"][:1])),
    edges_ignored=("c is left out", lambda x: finish(x, spatial(x["spatial_bias"], x["distance"]))),
    edges_summed=("c is the sum over the path, not the mean", lambda x: times_length(x, np.ones_like)),
    edges_over_longest=("c is divided by the longest path", lambda x: times_length(
        x, lambda length: max(1, x["path"].shape[-1]))),
    edges_over_nodes=("c is divided by the number of nodes on the path", lambda x: times_length(
        x, lambda length: length + 1)),
    edge_padding_read=("the -1 at the end of a path is read as an edge, the last", padding_read),
    hops_reversed=("w_0 meets the last edge of a path", lambda x: but(x, path=hops_reversed(x["path"]))),
    hop_0_for_all=("w_0 meets every edge of a path", lambda x: but(
        x, edge_weight=x["edge_weight"][:, :1] + 0 * x["edge_weight"])),
    hop_weights_of_head_0=("the w of head 0 serve every head", lambda x: but(
        x, edge_weight=x["edge_weight"][:1] + 0 * x["edge_weight"])),
    empty_row_nan=("a row of -inf is 0/0", finish_unguarded),
    lse_without_bias=("lse is of the scores alone", lambda x: (dense(**x)[0], softmax(scores(x))[1])),
    lse_base_2=("lse is a base-2 logarithm", lambda x: kit.lse_in_base_2(dense(**x))),
    strides_ignored=("a strided view is read as if it were contiguous", lambda x: but(
        x, **kit.changed(x, "qkv", kit.memory_order))),
)


def score_gradient(x):
    """The right ds (B, H, N, N)."""
    p, _ = softmax(scores(x) + bias(x))
    dp = x["do"] @ x["v"].swapaxes(-1, -2)
    return p * (dp - ((p * dp).sum(-1) - x["dlse"])[..., None])


def last_pair(x):
    """dspatial_bias that is overwritten from pair to pair, and from one batch entry to the next."""
    ds, table = score_gradient(x)[-1], np.zeros_like(x["spatial_bias"])
    table[:, x["distance"][-1]] = ds
    return table


def of_first(x, axis):
    """The gradients of what the batch and the heads share, for the first entry along an axis alone."""
    first = {name: np.where(np.arange(x[name].shape[axis]).reshape([-1] + (x[name].ndim - axis - 1) * [1]) == 0,
                            x[name], 0) for name in ("do", "dlse")}
    g = vjp(**x | first)
    return {name: g[name] for name in ("dspatial_bias", "dedge_features", "dedge_weight")}


VJP_BUGS = dict(
    jacobian_term_missing=("ds = p dp without the row term", lambda x: dict(dq=kit.without_row_term(
        softmax(scores(x) + bias(x))[0], x["do"], x["k"], x["v"], x["scale"]))),
    dq_scale_missing=("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
    table_overwritten=("the gradient of b keeps the last pair of each distance", lambda x: dict(
        dspatial_bias=last_pair(x))),
    table_of_batch_0=("gradients of b, f and w are not summed over the batch", lambda x: of_first(x, 0)),
    edges_of_head_0=("the gradient of f is not summed over the heads", lambda x: dict(
        dedge_features=of_first(x, 1)["dedge_features"])),
    mean_not_differentiated=("the gradient of c is not divided by the length of the path", lambda x: dict(zip(
        ("dedge_features", "dedge_weight"), encoding_vjp(
            score_gradient(x) * lengths(x["path"], x["q"].dtype)[..., None, :, :], x["edge_features"],
            x["edge_weight"], x["path"])))),
    dlse_ignored=("the gradient that comes through lse is lost", lambda x: vjp(**x | {"dlse": 0 * x["dlse"]})),
    dlse_sign=("the gradient through lse has the wrong sign", lambda x: vjp(**x | {"dlse": -x["dlse"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

NEUTRAL = dict(scale=lambda n: n.dk ** -0.5)
CHAIN = [(3, 4), (0, 1), (2, 2), (1, 2), (1, 0), (3, 1), (2, 3), (0, 1)]    # no path leaves 4; a loop; a parallel edge
STAR = [(1, 0), (2, 0), (0, 2), (3, 0), (0, 4), (4, 0), (0, 1), (2, 3)]     # node 0 is near to all


def padded(path, L):
    """path (N, N, L) filled up with -1 to L edges."""
    return np.concatenate([path, np.full((*path.shape[:2], L - path.shape[2]), -1)], -1)


def graphs(*lists, L=4, **sizes):
    """The sizes of a case, and the distances and paths of these lists of edges, one for each batch entry."""
    distance, path = zip(*(shortest_paths(*np.array(edges, int).reshape(-1, 2).T, N=5) for edges in lists))
    n = dict(B=2, H=3, N=5, dk=16, dv=9, S=L + 2, E=len(lists[0]), F=7, L=L) | sizes
    return dict(sizes=n, distance=np.stack(distance), path=np.stack([padded(p, L) for p in path]))


ONE_GRAPH, TWO_GRAPHS = graphs(CHAIN), graphs(CHAIN, STAR)


def table_with(last, first=None):
    """A drawn table with another last entry, and another first one if given."""
    def table(n):
        b = with_last(draw("spatial_bias", (n.H, n.S)), last)
        return b if first is None else np.where(np.arange(n.S) == 0, first, b)
    return table


CASES = dict(
    basic=dict(
        ONE_GRAPH, why="every size differs and none is 1; paths of 0 to 4 edges, and pairs without one",
        catches=("scale_missing", "bias_before_scale", "bias_twice", "softmax_over_queries",
                 "spatial_ignored", "spatial_off_by_one", "spatial_of_head_0", "no_path_as_0", "no_path_as_largest",
                 "no_path_without_bias", "no_path_excluded", "distance_transposed", "path_transposed",
                 "edges_ignored", "edges_summed", "edges_over_longest", "edges_over_nodes", "edge_padding_read",
                 "hops_reversed", "hop_0_for_all", "hop_weights_of_head_0", "lse_without_bias", "lse_base_2",
                 "jacobian_term_missing", "dq_scale_missing", "table_overwritten", "edges_of_head_0",
                 "mean_not_differentiated", "dlse_ignored", "dlse_sign")),
    two_graphs=dict(
        TWO_GRAPHS, why="another graph in each batch entry, of the same tables and edges",
        catches=("graph_of_batch_0", "table_of_batch_0", "table_overwritten")),
    one_node=dict(
        why="a single node: o is v", light=True, sizes=dict(B=1, H=1, N=1, dk=1, dv=1, S=2, E=1, F=1, L=1),
        distance=np.array([[[0]]]), path=np.array([[[[-1]]]]), shows=kit.returns_v),
    no_edge=dict(
        graphs([], L=0), why="no edge at all is legal: nodes see each other with the last entry of b", light=True,
        shows=lambda x, y: (x["distance"] == np.eye(5) - 1).all() and np.ptp(y["o"], 2).any(),
        catches=("no_path_excluded", "no_path_as_0")),
    no_path=dict(
        TWO_GRAPHS, why="a last entry of -inf excludes pairs without a path", light=True,
        spatial_bias=table_with(-np.inf), catches=("no_path_without_bias", "no_path_as_largest", "no_path_as_0")),
    empty_row=dict(
        ONE_GRAPH, why="a node without a path to another, and with -inf for itself: o = 0, lse = -inf",
        spatial_bias=table_with(-np.inf, first=-np.inf), catches=("empty_row_nan",)),
    unread_nan=dict(
        ONE_GRAPH, why="NaN in the features of edges on no shortest path: the loop and the second of two parallel ones",
        change=lambda x: dict(edge_features=np.where(
            np.isin(np.arange(8), x["path"])[:, None], x["edge_features"], np.nan)),
        shows=lambda x, y: np.isnan(x["edge_features"]).any() and np.isfinite(y["o"]).all()),
    plain=dict(
        ONE_GRAPH, why="tables of 0: sdpa without a mask", light=True,
        change=lambda x: kit.changed(x, ("spatial_bias", "edge_weight"), np.zeros_like),
        shows=lambda x, y: np.allclose(y["o"], softmax(scores(x))[0] @ x["v"]), catches=("scale_missing",)),
    longer_table=dict(
        graphs(STAR, L=6), why="a table and paths longer than this graph needs", light=True,
        catches=("edges_over_longest", "edge_padding_read")),
    scale_given=dict(
        graphs(CHAIN, dk=6), why="a scale that is not 1/sqrt(dk)", light=True, scale=0.75,
        catches=("bias_before_scale", "scale_missing")),
    large_scores=dict(
        ONE_GRAPH, why="q k^T is over 65504 before it is scaled, and one key takes all the weight", light=True,
        scale=1 / 8, change=lambda x: kit.ramp(x, 160, 160, -1),
        shows=lambda x, y: (x["q"] @ x["k"].swapaxes(-1, -2)).max() > 65504 and np.allclose(y["o"], x["v"][:, :, :1])),
    strided=dict(
        ONE_GRAPH, why="q, k and v are views of (B, N, H, d) memory", light=True, change=kit.strided,
        catches=("strides_ignored",)),
)
