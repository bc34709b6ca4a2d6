"""Attention over graphs: what the variants become, what they cost, and the functions that make their inputs."""
import numpy as np
import pytest

from attention_ref import gat, gatv2, graph, graphormer, load_cases, masks, sdpa
from attention_ref.conformance import numbers
from attention_ref.core import segment_softmax, segment_sum, softmax
from attention_ref.names import draw, tab

N, E = 6, 14
EDGES = np.random.default_rng(1).permutation(N * N)[:E]                     # distinct, in no order
SOURCE, TARGET = EDGES % N, EDGES // N
PAIRS = np.stack([SOURCE, TARGET], 1)
ALL = tuple(np.indices((N, N)).reshape(2, -1))
FORMS = dict(graph=graph, gat=gat, gatv2=gatv2)
CASES = {f"{name}-{case.name}": case for name in FORMS for case in load_cases(name)}


def assert_close(got, expected, atol=1e-13):
    """The same numbers within rounding, for outputs or tuples of them."""
    got, expected = (y if isinstance(y, tuple) else (y,) for y in (got, expected))
    for y, z in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=atol)


def qkv(N=N, dk=4, dv=7):
    return draw("q", (2, 3, N, dk)), draw("k", (2, 3, N, dk)), draw("v", (2, 3, N, dv))


def layer(variant, N=N, D=6, dv=4):
    """The inputs of gat or gatv2, but for edges and slope."""
    shapes = dict(gat=dict(x=(2, N, D), w=(3, D, dv), a_source=(3, dv), a_target=(3, dv)),
                  gatv2=dict(x=(2, N, D), w_source=(3, D, dv), w_target=(3, D, dv), a=(3, dv)))[variant]
    return {name: draw(name, shape) for name, shape in shapes.items()}


# Segments

def test_segments_are_rows_of_a_masked_softmax():
    s, mask = draw("bias", (2, 3, E)), TARGET == np.arange(N)[:, None]
    weights, lse = segment_softmax(s, TARGET, N)
    expected, expected_lse = softmax(np.broadcast_to(s[:, :, None], (2, 3, N, E)), mask)
    assert_close((weights, lse), (expected.sum(-2), expected_lse))
    assert_close(segment_sum(s, TARGET, N), (np.where(mask, s[:, :, None], 0)).sum(-1))


# What they become

@pytest.mark.parametrize("form", graph.FORMS)
def test_graph_with_distinct_edges_is_sdpa_with_their_mask(form):
    q, k, v = qkv()
    assert_close(form(q, k, v, SOURCE, TARGET, 0.0, scale=0.5),
                 sdpa.dense(q, k, v, masks.graph(PAIRS, N), scale=0.5))


@pytest.mark.parametrize("form", graph.FORMS)
def test_graph_with_all_edges_is_sdpa(form):
    q, k, v = qkv()
    bias = draw("bias", (2, 3, N * N))
    table = bias.reshape(2, 3, N, N).swapaxes(-1, -2)                       # edges are numbered by source, then target
    assert_close(form(q, k, v, *ALL, bias, scale=0.5), sdpa.dense(q, k, v, bias=table, scale=0.5))


def test_parallel_edges_are_a_bias_of_the_log_of_their_number():
    q, k, v = qkv()
    source, target = np.append(SOURCE, SOURCE[:5]), np.append(TARGET, TARGET[:5])
    log = np.where(np.arange(E) < 5, np.log(2), 0)[None, None]
    twice = graph.segment(q, k, v, source, target, scale=0.5)
    assert_close(twice, graph.segment(q, k, v, SOURCE, TARGET, log, scale=0.5))
    assert np.abs(twice[0] - graph.segment(q, k, v, SOURCE, TARGET, scale=0.5)[0]).max() > 0.1


@pytest.mark.parametrize("form", gat.FORMS + gatv2.FORMS)
def test_with_one_neighbour_gat_returns_its_projection(form):
    variant = form.__module__.rsplit(".", 1)[1]
    x = layer(variant)
    source, target = np.array([4, 2, 0]), np.array([1, 5, 3])
    h = x["x"][:, None] @ x["w" if variant == "gat" else "w_source"]
    o = form(**x, source=source, target=target, slope=0.25)
    assert np.allclose(o[:, :, target], h[:, :, source], rtol=1e-15, atol=1e-15)
    assert not o[:, :, [0, 2, 4]].any()


def test_without_leaky_relu_both_are_the_same_and_the_receiving_node_does_not_matter():
    x = layer("gat")
    edges = dict(source=SOURCE, target=TARGET, slope=1.0)
    o = gat.dense(**x, **edges)
    assert_close(o, gat.dense(**x | dict(a_target=0 * x["a_target"]), **edges))
    both = dict(x=x["x"], w_source=x["w"], w_target=x["w"], a=x["a_source"])
    assert_close(o, gatv2.dense(**both, **edges))
    assert np.abs(o - gat.dense(**x, **edges | dict(slope=0.2))).max() > 0.01


def test_gat_with_equal_halves_differs_from_gatv2():
    """The order of LeakyReLU and of the product with a is all that tells them apart."""
    x, edges = layer("gat"), dict(source=SOURCE, target=TARGET)
    both = dict(x=x["x"], w_source=x["w"], w_target=x["w"], a=x["a_source"])
    assert np.abs(gatv2.dense(**both, **edges) - gat.dense(**x | dict(a_target=x["a_source"]), **edges)).max() > 0.01


def test_gat_is_graph_with_its_logits_as_biases():
    x = layer("gat")
    _, logits, _ = gat.steps(**x, source=SOURCE, target=TARGET)
    h = x["x"][:, None] @ x["w"]
    o, _ = graph.segment(0 * h, h, h, SOURCE, TARGET, logits, scale=1.0)
    assert_close(gat.dense(**x, source=SOURCE, target=TARGET), o)


def graphormer_inputs(F=5):
    distance, path = graphormer.shortest_paths(SOURCE, TARGET, N)
    S, L = distance.max() + 2, path.shape[-1]
    shapes = dict(spatial_bias=(3, S), edge_features=(E, F), edge_weight=(3, L, F))
    return dict(zip("qkv", qkv())) | {name: draw(name, shape) for name, shape in shapes.items()} | dict(
        distance=distance, path=path, scale=0.5)


@pytest.mark.parametrize("form", graphormer.FORMS)
def test_graphormer_is_sdpa_with_its_bias_and_without_one_where_its_tables_are_zero(form):
    x = graphormer_inputs()
    q, k, v = (x[name] for name in "qkv")
    bias = graphormer.spatial(x["spatial_bias"], x["distance"]) + graphormer.steps(
        **{name: x[name] for name in x if name != "v"})[1]
    assert_close(form(**x), sdpa.dense(q, k, v, bias=bias, scale=0.5))
    zeros = dict(spatial_bias=0 * x["spatial_bias"], edge_weight=0 * x["edge_weight"])
    assert_close(form(**x | zeros), sdpa.dense(q, k, v, scale=0.5))


def test_graphormer_of_neighbours_alone_is_graph():
    """With -inf for every distance but 1, and no encoding of edges."""
    x = graphormer_inputs()
    q, k, v = (x[name] for name in "qkv")
    others = np.where(np.arange(x["spatial_bias"].shape[1]) == 1, 0.0, -np.inf) + 0 * x["spatial_bias"]
    loose = SOURCE != TARGET
    o = graphormer.dense(**x | dict(spatial_bias=others, edge_weight=0 * x["edge_weight"]))
    assert_close(o, graph.segment(q, k, v, TARGET[loose], SOURCE[loose], scale=0.5))      # i sees where its edges lead


# The order of nodes and edges

@pytest.mark.parametrize("variant, form", [(name, form) for name, module in FORMS.items() for form in module.FORMS])
def test_the_order_of_edges_changes_nothing(variant, form):
    for case in load_cases(variant):
        x, order = case.inputs, np.random.default_rng(2).permutation(len(case.inputs["source"]))
        if np.isnan(x.get("x", x.get("q"))).any() or case.name in ("far_apart", "large_scores"):
            continue
        moved = {name: x[name][order] for name in ("source", "target")}
        if x.get("bias", np.zeros(1)).shape[-1] > 1:
            moved["bias"] = x["bias"][..., order]
        assert_close(form(**x | moved), form(**x))


@pytest.mark.parametrize("variant, form", [(name, form) for name, module in FORMS.items() for form in module.FORMS])
def test_the_order_of_nodes_does_not_matter(variant, form):
    x = load_cases(variant, "basic")[0].inputs
    place = np.array([3, 0, 4, 1, 2])                                       # node n moves to place[n]
    back = np.argsort(place)
    nodes = {name: x[name][..., back, :] for name in ("q", "k", "v", "x") if name in x}
    edges = {name: place[x[name]] for name in ("source", "target")}
    got, expected = form(**x | nodes | edges), form(**x)
    for y, z in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, expected))):
        assert_close(y[:, :, place], z)


# Work

def flops(form, edges, nodes=40, **x):
    random = np.random.default_rng(0)
    return numbers.count(form, **x, source=random.integers(0, nodes, edges), target=random.integers(0, nodes, edges))


@pytest.mark.parametrize("variant, per_edge, per_node", [             # score, softmax, sum of values; and lse
    ("graph", (3 * 4 + 1) + 3 + 2 * 7, 1), ("gat", 2 + 3 + 2 * 4, 2 * 6 * 4 + 4 * 4 + 1),
    ("gatv2", 4 * 4 + 3 + 2 * 4, 4 * 6 * 4 + 1)])
def test_segments_cost_what_their_edges_cost(variant, per_edge, per_node):
    """The work is a number per edge plus a number per node; the definition pays for every pair of them."""
    plain = dict(zip("qkv", qkv(40))) | dict(scale=0.5, bias=np.zeros((1, 1, 1)))
    x = plain if variant == "graph" else layer(variant, 40)
    for edges in (200, 1200):
        work = dict(flops=6 * (per_edge * edges + per_node * 40), exp=6 * (edges + 40))
        assert flops(FORMS[variant].segment, edges, **x) == work
        assert flops(FORMS[variant].dense, edges, **x)["exp"] > 6 * 40 * edges
        assert flops(FORMS[variant].dense, edges, **x)["flops"] > 6 * 40 * edges * 8


def test_graphormer_multiplies_edges_once():
    x = graphormer_inputs(F=50)
    (H, L, F), pairs = x["edge_weight"].shape, N * N
    dense, gathered = (numbers.count(form, **x)["flops"] for form in (graphormer.dense, graphormer.gathered))
    assert dense - gathered == H * L * F * 2 * (pairs - E)


# What makes their inputs

def test_shortest_paths_by_hand():
    """0 -> 1 -> 2 -> 3, a short cut 0 -> 2, a second edge 0 -> 1, a loop, and 4 alone."""
    source, target = np.array([0, 1, 2, 0, 0, 1]), np.array([1, 2, 3, 2, 1, 1])
    distance, path = graphormer.shortest_paths(source, target, 5)
    assert distance.tolist() == [[0, 1, 1, 2, -1], [-1, 0, 1, 2, -1], [-1, -1, 0, 1, -1], [-1, -1, -1, 0, -1],
                                 [-1, -1, -1, -1, 0]]
    assert path[0].tolist() == [[-1, -1], [0, -1], [3, -1], [3, 2], [-1, -1]]
    assert path[1, 3].tolist() == [1, 2] and (path[4] == -1).all()


@pytest.mark.parametrize("seed", range(5))
def test_paths_lead_where_they_should_and_none_is_shorter(seed):
    source, target = np.random.default_rng(seed).integers(0, 9, (2, 14))
    distance, path = graphormer.shortest_paths(source, target, 9)
    reached = np.eye(9, dtype=int)
    for length in range(9):                                                 # reached[i, j]: walks of this many edges
        new = (reached > 0) & ((distance == -1) | (distance > length))
        assert not new.any() and (reached[distance == length] > 0).all()
        reached = np.minimum(1, reached @ (np.array(masks.graph(np.stack([target, source], 1), 9), int)))
    for i, j in zip(*np.nonzero(distance > 0)):
        edges = path[i, j][path[i, j] >= 0]
        assert len(edges) == distance[i, j] and (path[i, j][len(edges):] == -1).all()
        assert [i, *target[edges]] == [*source[edges], j]


def test_paths_of_no_edge_and_of_bad_edges():
    distance, path = graphormer.shortest_paths(*np.zeros((2, 0), int), 3)
    assert distance.tolist() == [[0, -1, -1], [-1, 0, -1], [-1, -1, 0]] and path.shape == (3, 3, 0)
    with pytest.raises(ValueError, match="target: expected numbers < N = 3, got 3"):
        graphormer.shortest_paths(np.array([0]), np.array([3]), 3)


def test_centrality_adds_one_row_for_each_degree():
    x, z_in, z_out = tab((2, 4, 3), 3, 1), tab((4, 3), 5, 2), tab((4, 3), 7, 4)
    source, target = np.array([0, 0, 0, 2]), np.array([1, 2, 1, 2])
    y = graphormer.centrality(x, source, target, z_in, z_out)
    assert np.array_equal(y - x, np.broadcast_to(z_in[[0, 2, 2, 0]] + z_out[[3, 0, 1, 0]], x.shape))
    with pytest.raises(ValueError, match="source: expected numbers < N = 4, got 4"):
        graphormer.centrality(x, source + 2, target, z_in, z_out)


def test_a_node_of_its_own_distance_is_a_virtual_node():
    """The released code gives pairs of node 0 one number; here they have a distance that no other pair has."""
    x = graphormer_inputs()
    own, S = np.zeros((N, N), bool), x["spatial_bias"].shape[1]
    own[0], own[:, 0] = True, True
    table = np.insert(x["spatial_bias"], S - 1, 0.5, axis=1)
    distance = np.where(own, S - 1, x["distance"])
    path = np.where(own[..., None], -1, x["path"])
    bias = np.where(own, 0.5, graphormer.spatial(x["spatial_bias"], x["distance"])
                    + graphormer.edge_encoding(x["edge_features"], x["edge_weight"], x["path"]))
    assert_close(graphormer.dense(**x | dict(spatial_bias=table, distance=distance, path=path)),
                 sdpa.dense(x["q"], x["k"], x["v"], bias=bias, scale=0.5))
