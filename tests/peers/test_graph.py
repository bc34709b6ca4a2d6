"""torch, and PyTorch Geometric where it is installed, against the golden data of attention over graphs."""
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exact import agrees, without_dlse, without_nan
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_cases import floating, tensors, with_gradients

from attention_ref import diagnose, graph, load_cases


def clean(variant):
    """The golden cases without NaN: no peer leaves a number unread."""
    return [pytest.param(case, id=case.name) for case in without_nan(load_cases(variant))]


def attention(q, k, v, bias, scale):
    """scaled_dot_product_attention with an additive mask."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, bias, scale=scale)


# torch: dense attention with a matrix of biases

@pytest.mark.parametrize("case", clean("graph"))
def test_sdpa_with_the_logarithm_of_what_parallel_edges_add_up_to(case):
    x, n = tensors(case, floating(case)), case.sizes
    pair = torch.from_numpy(case.inputs["target"] * n["N"] + case.inputs["source"])
    weight = torch.exp(x["bias"]).expand(n["B"], n["H"], n["E"])
    mass = torch.zeros(n["B"], n["H"], n["N"] ** 2, dtype=torch.float64).index_add(-1, pair, weight)
    bias = torch.log(mass).unflatten(-1, (n["N"], n["N"]))
    o = attention(x["q"], x["k"], x["v"], bias, case.inputs["scale"])
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x))


@pytest.mark.parametrize("case", clean("graphormer"))
def test_sdpa_with_the_biases_of_graphormer(case):
    x, y = tensors(case, floating(case)), case.inputs
    distance, path = torch.from_numpy(y["distance"] % case.sizes["S"]), torch.from_numpy(y["path"])
    b = functional.embedding(distance, x["spatial_bias"].T)                 # (B?, N, N, H)
    padded = torch.cat([x["edge_features"], torch.zeros(1, case.sizes["F"], dtype=torch.float64)])
    f = functional.embedding(torch.where(path < 0, case.sizes["E"], path), padded)
    c = torch.einsum("bijnf,hnf->bijh", f, x["edge_weight"]) / (path >= 0).sum(-1, keepdim=True).clamp(min=1)
    o = attention(x["q"], x["k"], x["v"], (b + c).movedim(-1, 1), y["scale"])
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x))


# PyTorch Geometric

def layer(name, case, **options):
    """A layer of theirs for the widths of a case, in float64, without what the formula has not."""
    nn = pytest.importorskip("torch_geometric").nn
    n, slope = case.sizes, case.inputs["slope"]
    options = dict(negative_slope=slope, add_self_loops=False, bias=False) | options
    return getattr(nn, name)(n["D"], n["dv"], heads=n["H"], **options).double()


def stored(w):
    """W (H, D, dv) as they store it, (H dv, D)."""
    return w.transpose(-1, -2).flatten(0, 1)


def run(module, weights, x, case):
    """o (B, H, N, dv) of a layer with these weights; the edges go as (source, target)."""
    edges = torch.from_numpy(np.stack([case.inputs["source"], case.inputs["target"]]))
    call = partial(torch.func.functional_call, module, weights)
    return torch.stack([call((nodes, edges)) for nodes in x]).unflatten(-1, (case.sizes["H"], -1)).transpose(1, 2)


def gat(case, **options):
    x = tensors(case, floating(case))
    weights = {"lin.weight": stored(x["w"]), "att_src": x["a_source"][None], "att_dst": x["a_target"][None]}
    return dict(o=run(layer("GATConv", case, **options), weights, x["x"], case)), x


def gatv2(case, **options):
    x = tensors(case, floating(case))
    weights = {"lin_l.weight": stored(x["w_source"]), "lin_r.weight": stored(x["w_target"]), "att": x["a"][None]}
    return dict(o=run(layer("GATv2Conv", case, **options), weights, x["x"], case)), x


@pytest.mark.parametrize("case", clean("gat"))
def test_gat_conv(case):
    assert agrees(case, with_gradients(case, *gat(case)))


@pytest.mark.parametrize("case", clean("gatv2"))
def test_gatv2_conv(case):
    assert agrees(case, with_gradients(case, *gatv2(case)))


@pytest.mark.parametrize("variant, theirs", [("gat", gat), ("gatv2", gatv2)])
def test_by_default_they_add_self_loops(variant, theirs):
    case = load_cases(variant, "parallel")[0]
    o, _ = theirs(case, add_self_loops=True)
    assert diagnose(case, o.detach().numpy()).mistake == "self_loops_added"


@pytest.mark.parametrize("case", [param for param in clean("graph") if param.id in ("basic", "left_out", "parallel")])
def test_transformer_conv(case):
    """Its projections pick the queries, keys and values, which stand side by side, apart; its scale is 1/sqrt(d)."""
    nn = pytest.importorskip("torch_geometric").nn
    y, (B, H, N, d) = case.inputs, case.inputs["q"].shape
    parts = dict(lin_query=y["q"], lin_key=y["k"], lin_value=y["v"][..., :d])
    nodes = np.concatenate([a.swapaxes(1, 2).reshape(B, N, H * d) for a in parts.values()], -1)
    picks = np.split(np.eye(3 * H * d), 3)
    module = nn.TransformerConv(3 * H * d, d, heads=H, bias=False, root_weight=False).double()
    weights = {f"{name}.weight": torch.from_numpy(pick) for name, pick in zip(parts, picks)}
    o = run(module, weights, torch.from_numpy(nodes), case).numpy()
    expected, _ = graph.segment(y["q"], y["k"], y["v"][..., :d], y["source"], y["target"], scale=d ** -0.5)
    np.testing.assert_allclose(o, expected, rtol=1e-13, atol=1e-14)
