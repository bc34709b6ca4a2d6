"""Rotary position embedding: every node case of ONNX, and the golden cases through ONNX, Llama, GPT-NeoX and GPT-J."""
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx.backend.test.case.node.rotaryembedding  # its import fills the list of cases
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_nodes import unpack

from attention_ref import check, diagnose, load_cases, rope
from attention_ref.conformance.numbers import conditioning
from attention_ref.conformance.verify import compare
from attention_ref.core import merge_heads, split_heads

INPUTS = "input", "cos_cache", "sin_cache", "position_ids"
ATTRIBUTES = {"interleaved", "rotary_embedding_dim", "num_heads"}
ALL = {case.name: case for case in onnx.backend.test.case.node._NodeTestCases if "_rotary_embedding" in case.name}
CASES = {name: case for name, case in ALL.items() if case.model.graph.node[0].op_type == "RotaryEmbedding"}
GOLDEN = {case.name: case for case in load_cases("rope")}


def arguments(x, a):
    """What `rotate` takes: heads split off, and the rows of the tables picked, (B, 1, T, rotary/2)."""
    assert set(a) <= ATTRIBUTES and set(x) <= set(INPUTS)
    cos, sin = (x[name].astype(float) for name in ("cos_cache", "sin_cache"))
    if "position_ids" in x:
        cos, sin = cos[x["position_ids"]], sin[x["position_ids"]]
    given = x["input"].astype(float)
    given = given if given.ndim == 4 else split_heads(given, a["num_heads"])
    return dict(x=given, cos=cos[:, None], sin=sin[:, None],
                layout="interleaved" if a.get("interleaved") else "half")


def rotated(**given):
    return dict(y=rope.rotate(**given))


def distance(x, a, y, **changes):
    """How far the output of a node case is from `rotate`, in budgets of its type."""
    given = arguments(x, a) | changes
    y = y if y.ndim == 4 else split_heads(y, a["num_heads"])
    K = conditioning([rotated], given, runs=16)
    return compare("y", y, rotated(**given)["y"], K["y"], str(y.dtype)).score


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    x, a, (y,) = unpack(CASES[name], INPUTS)
    assert distance(x, a, y) <= 1
    given = arguments(x, a)
    assert distance(x, a, y, layout=rope.other(given["layout"])) > 1, "the case tells the layouts apart"
    assert distance(x, a, y, sin=-given["sin"]) > 1


def test_no_case_is_dropped():
    """Beside each case stands the same one with the operator expanded into others: the same numbers, nothing new."""
    assert len(CASES) >= 8 and set(ALL) - set(CASES) == {f"{name}_expanded" for name in CASES}
    for name in CASES:
        for a, b in zip(CASES[name].data_sets[0], ALL[f"{name}_expanded"].data_sets[0], strict=True):
            assert all(x is y for x, y in zip(a, b, strict=True))


# The golden cases

def table(case):
    """cos and sin for every position of a golden case (B, T, rotary/2), float64."""
    x, angle = case.inputs, rope.angles_of(case.inputs)[:, 0]
    assert angle.shape == (*np.array(x["x"].shape)[[0, 2]], x["rotary"] // 2)
    return np.cos(angle), np.sin(angle)


def through_onnx(case, dtype, merged=False, **attributes):
    """A golden case through the reference implementation of onnx, heads merged or not."""
    x, (cos, sin) = case.in_dtype(dtype), table(case)
    H = x["x"].shape[1]
    inputs = dict(input=merge_heads(x["x"]) if merged else x["x"], cos_cache=cos.astype(dtype),
                  sin_cache=sin.astype(dtype))
    attributes = dict(interleaved=int(x["layout"] == "interleaved"), rotary_embedding_dim=x["rotary"],
                      num_heads=H) | attributes
    node = helper.make_node("RotaryEmbedding", list(inputs), ["output"], **attributes)
    types = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(y.dtype), y.shape)
             for name, y in inputs.items()]
    graph = helper.make_graph([node], "rope", types, [helper.make_tensor_value_info("output", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    y, = ReferenceEvaluator(model).run(None, inputs)
    return split_heads(y, H) if merged else y


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("case", GOLDEN.values(), ids=lambda case: case.name)
def test_golden_through_onnx(case, dtype, merged):
    assert check(case, through_onnx(case, dtype, merged), dtype).passed


def test_the_attribute_interleaved_is_the_layout():
    y = through_onnx(GOLDEN["basic"], "float64", interleaved=1)
    assert diagnose(GOLDEN["basic"], y).mistake == "layout_swapped"


# Code of models. Their tables are float32 whatever the type of x, so they get the budget of float32.

def modeling(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return torch, pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def config(dk, rotary, base):
    """What a rotary embedding of transformers reads of the configuration of a model."""
    parameters = dict(rope_type="default", rope_theta=float(base), partial_rotary_factor=rotary / dk)
    return SimpleNamespace(max_position_embeddings=64, hidden_size=dk, num_attention_heads=1, head_dim=dk,
                           rope_parameters=parameters, standardize_rope_params=lambda: None)


def by_llama(case, name="llama"):
    """A golden case through the rotary embedding of Llama or GPT-NeoX, which compute their own tables."""
    torch, module = modeling(name)
    x = case.in_dtype("float32")
    dk, rotary = x["x"].shape[-1], x["rotary"]
    rotary_class = dict(llama="LlamaRotaryEmbedding", gpt_neox="GPTNeoXRotaryEmbedding")[name]
    vectors = torch.from_numpy(x["x"])
    positions = torch.from_numpy(np.broadcast_to(x["positions"], (len(vectors), vectors.shape[2])).copy())
    cos, sin = getattr(module, rotary_class)(config(dk, rotary, x["base"]))(vectors, positions)
    turned, also = module.apply_rotary_pos_emb(vectors, vectors, cos, sin)
    assert turned.equal(also)
    return turned.numpy()


HALF = [case for case in GOLDEN.values() if case.inputs["layout"] == "half"]
LLAMA = [case for case in HALF if case.inputs["rotary"] == case.sizes["dk"]]
INTERLEAVED = [case for case in GOLDEN.values() if case.inputs["layout"] == "interleaved"]


@pytest.mark.parametrize("case", LLAMA, ids=lambda case: case.name)
def test_llama(case):
    assert check(case, by_llama(case), "float32").passed


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_gpt_neox(case):
    """Also with fewer channels than dk."""
    assert check(case, by_llama(case, "gpt_neox"), "float32").passed


@pytest.mark.parametrize("case", INTERLEAVED, ids=lambda case: case.name)
def test_gptj(case):
    """GPT-J keeps x as (B, T, H, d), and is given the table."""
    torch, module = modeling("gptj")
    x, (cos, sin), r = case.inputs["x"], map(torch.from_numpy, table(case)), case.inputs["rotary"]
    y = module.apply_rotary_pos_emb(torch.from_numpy(x[..., :r].swapaxes(1, 2).copy()), sin, cos).numpy().swapaxes(1, 2)
    assert check(case, np.concatenate([y, x[..., r:]], -1)).passed


def test_gptj_builds_the_table_of_base_10000():
    torch, module = modeling("gptj")
    sin, cos = module.create_sinusoidal_positions(64, 8).split(4, dim=1)
    angle = np.arange(64)[:, None] * rope.frequencies(np.ones(1), 8, 10000)
    assert np.allclose(cos, np.cos(angle), atol=1e-5) and np.allclose(sin, np.sin(angle), atol=1e-5)
    assert not np.allclose(cos, np.cos(angle), atol=1e-9), "angles are float32"


def test_llama_is_not_interleaved():
    case = GOLDEN["first_tokens_neighbours"]
    assert diagnose(case, by_llama(case)).mistake == "layout_swapped"


@pytest.mark.parametrize("start", [500, 4000, 130000])
def test_float32_tables_drift(start):
    """The error of a float32 angle grows with the position, as the budget does."""
    torch, module = modeling("llama")
    p = start + np.arange(100)
    cos, _ = module.LlamaRotaryEmbedding(config(8, 8, 10000))(torch.ones(1), torch.from_numpy(p)[None])
    error = np.abs(cos[0, :, :4].numpy() - np.cos(p[:, None] * rope.frequencies(np.ones(1), 8, 10000))).max()
    assert 1e-9 * start < error < 2.0 ** -23 * start
