"""The delta rules against the ONNX operator LinearAttention and against the functions of Qwen3-Next and Kimi Linear.

All of them compute in float32 inside, whatever the type of their inputs, so they get the budget of float32.
"""
import numpy as np
import pytest
from exact import changed

from attention_ref import check, delta_rule, gated_delta_rule, load_cases
from attention_ref.conformance.cases import by_name, named
from attention_ref.conformance.numbers import conditioning
from attention_ref.conformance.verify import compare
from attention_ref.core import merge_heads, split_heads

RULES = dict(delta=delta_rule, gated_delta=gated_delta_rule)
GOLDEN = [case for module in RULES.values() for case in load_cases(module.__name__.rsplit(".", 1)[1])]


def closed(case):
    """Whether a gate is 0, or so small that a sum of logarithms holds nothing beside its own."""
    return np.min(case.inputs.get("log_decay", 0)) < -1e4


# ONNX

node_cases = pytest.importorskip("onnx.backend.test.case.node")
pytest.importorskip("onnx.backend.test.case.node.linear_attention")         # from 1.23 on; its import fills the list
from onnx.reference.ops.op_linear_attention import LinearAttention
from onnx_nodes import LINEAR_ATTENTION, recurrent_arguments, rule, unpack

ALL = {case.name: case for case in node_cases._NodeTestCases if case.name.startswith("test_linear_attention")}
CASES = {name: case for name, case in ALL.items() if rule(case) in RULES}


@pytest.mark.parametrize("form", ["recurrent", "dense", "chunkwise", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_node_case(name, form):
    x, a, (o, state) = unpack(CASES[name], LINEAR_ATTENTION)
    module, given = RULES[rule(CASES[name])], recurrent_arguments(x, a)
    K = conditioning([named(module.recurrent, module.OUTPUTS)], given, runs=16)
    exact = by_name(module.OUTPUTS, getattr(module, form)(**given, chunk_size=3))
    group = a["q_num_heads"] // a["kv_num_heads"]
    exact["final_state"], K["final_state"] = exact["final_state"][:, ::group], K["final_state"][:, ::group]
    found = dict(o=split_heads(o, a["q_num_heads"]), final_state=state)
    for name, y in found.items():                        # each in the type that the node stores it in
        assert compare(name, y, exact[name], K[name], str(y.dtype)).score <= 1


def test_no_node_case_is_dropped():
    """The others are linear and gated attention, and the same nodes expanded into other operators."""
    others = {name for name in ALL if name not in CASES and not name.endswith("_expanded")}
    assert {rule(ALL[name]) for name in others} == {"linear", "gated"}
    assert len(CASES) >= 10 and {rule(case) for case in CASES.values()} == set(RULES)
    expanded = {name for name in ALL if name.endswith("_expanded")}
    assert expanded == {f"{name}_expanded" for name in ALL if name not in expanded}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.id)
def test_golden_through_onnx(case):
    x, H = case.in_dtype("float32"), case.sizes["H"]
    gates = dict(decay=merge_heads(x["log_decay"])) if "log_decay" in x else {}
    y = LinearAttention.__new__(LinearAttention)._run(
        *(merge_heads(x[name]) for name in "qkv"), x["initial_state"], beta=x["beta"].swapaxes(1, 2), **gates,
        q_num_heads=H, kv_num_heads=H, scale=x["scale"], update_rule="gated_delta" if gates else "delta")
    assert check(case, dict(o=split_heads(y[0], H), final_state=y[1]), "float32").passed


# transformers

torch = pytest.importorskip("torch")


def functions(per_channel):
    """Its recurrent and its chunked function for a gate per head or per channel."""
    model = "kimi_linear" if per_channel else "qwen3_next"
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    if per_channel:
        return module.recurrent_kimi_delta_attention, module.chunk_kimi_delta_attention
    return module.torch_recurrent_gated_delta_rule, module.torch_chunk_gated_delta_rule


def through(function, case, x=None, **options):
    """o and final_state of a golden case; the functions scale by 1/sqrt(dk), which the queries undo."""
    x = x or {name: torch.tensor(y) for name, y in case.in_dtype("float32").items() if isinstance(y, np.ndarray)}
    g = x.get("log_decay", torch.zeros((*x["beta"].shape, 1)))
    g = g if g.shape[3] == x["k"].shape[3] > 1 else g[..., 0]
    o, state = function(
        *(x[name].transpose(1, 2) for name in "qkv"), g=g.transpose(1, 2), beta=x["beta"].transpose(1, 2),
        initial_state=x["initial_state"], output_final_state=True, **options)
    return o.transpose(1, 2), state


def scaled(case):
    """The case with scale = 1/sqrt(dk), as the functions have it."""
    return changed(case, scale=case.sizes["dk"] ** -0.5)


def per_channel(case):
    return case.sizes["dk"] > 1 and case.inputs.get("log_decay", np.zeros(1)).shape[-1] > 1


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.id)
def test_recurrent_of_transformers(case):
    o, state = through(functions(per_channel(case))[0], case)
    assert check(scaled(case), dict(o=o.numpy(), final_state=state.numpy()), "float32").passed


@pytest.mark.parametrize("case", [case for case in GOLDEN if not closed(case)], ids=lambda case: case.id)
def test_chunks_of_transformers(case):
    o, state = through(functions(per_channel(case))[1], case, chunk_size=4)
    assert check(scaled(case), dict(o=o.numpy(), final_state=state.numpy()), "float32").passed


@pytest.mark.parametrize("case", [case for case in GOLDEN if closed(case)], ids=lambda case: case.id)
def test_chunks_of_transformers_fail_for_gates_of_0(case):
    """They take exp(b_i - b_j) of sums of log gates: -inf less -inf is NaN, and -29952 leaves no digits."""
    o, state = through(functions(per_channel(case))[1], case, chunk_size=4)
    zero = np.min(case.inputs["log_decay"]) == -np.inf
    assert bool(torch.isnan(o).any()) == zero
    assert zero or not check(scaled(case), dict(o=o.numpy(), final_state=state.numpy()), "float32").passed


@pytest.mark.parametrize("case", [case for case in GOLDEN if case.gradients], ids=lambda case: case.id)
def test_autograd_of_transformers(case):
    case = scaled(case)
    x = {name: torch.tensor(y, requires_grad=True) for name, y in case.in_dtype("float32").items()
         if isinstance(y, np.ndarray)}
    o, state = through(functions(per_channel(case))[0], case, x)
    do, dstate = (torch.tensor(case.cotangents[name].astype(np.float32)) for name in ("do", "dfinal_state"))
    torch.autograd.backward([o, state], [do, dstate])
    assert check(case, {"d" + name: y.grad.numpy() for name, y in x.items()}, "float32").passed
