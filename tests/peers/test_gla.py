"""Gated linear attention, state space duality and Mamba-2 against ONNX and transformers.

Both compute these in float32 inside, whatever the type of their inputs, so they get the budget of float32.
"""
import numpy as np
import pytest
from exact import agrees, changed

from attention_ref import check, diagnose, gla, load_cases, mamba2
from attention_ref.conformance.cases import by_name, named
from attention_ref.conformance.numbers import conditioning
from attention_ref.conformance.verify import compare
from attention_ref.core import split_heads

GOLDEN = {variant: {case.name: case for case in load_cases(variant)} for variant in ("gla", "ssd", "mamba2")}

# ONNX: the nodes of LinearAttention whose rule is linear or gated, and all of CausalConvWithState

nodes = pytest.importorskip("onnx.backend.test.case.node")
pytest.importorskip("onnx.backend.test.case.node.linear_attention")         # from 1.23 on; their import fills the list
pytest.importorskip("onnx.backend.test.case.node.causal_conv_with_state")
from onnx_nodes import LINEAR_ATTENTION, recurrent_arguments, rule, unpack

ALL = {case.name: case for case in nodes._NodeTestCases
       if case.model.graph.node[0].op_type in ("LinearAttention", "CausalConvWithState")}
LINEAR = {name: case for name, case in ALL.items() if rule(case) in ("linear", "gated")}
CONV = {name: case for name, case in ALL.items() if case.model.graph.node[0].op_type == "CausalConvWithState"}


@pytest.mark.parametrize("form", gla.FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_node(name, form):
    x, a, (o, state) = unpack(LINEAR[name], LINEAR_ATTENTION)
    given, group = recurrent_arguments(x, a), a["q_num_heads"] // a["kv_num_heads"]
    given.setdefault("log_decay", np.zeros((*given["k"].shape[:3], 1)))
    K = conditioning([named(gla.recurrent, gla.OUTPUTS)], given, runs=16)
    exact = by_name(gla.OUTPUTS, form(**given, chunk_size=3))
    assert compare("o", split_heads(o, a["q_num_heads"]), exact["o"], K["o"], str(o.dtype)).score <= 1
    exact, K = exact["final_state"][:, ::group], K["final_state"][:, ::group]
    assert compare("final_state", state, exact, K, str(state.dtype)).score <= 1


def convolution(x, weight, bias, past_state, activation):
    """Outputs of a node of CausalConvWithState, (B, channels, T) as its inputs, by the convolution of mamba2."""
    seen = np.concatenate([past_state, x], axis=2).swapaxes(1, 2)
    y = mamba2.convolve(seen, weight[:, 0].T) + bias
    y = mamba2.silu(y) if activation else y
    return dict(o=y.swapaxes(1, 2), state=seen[:, x.shape[2]:].swapaxes(1, 2))


@pytest.mark.parametrize("name", CONV)
def test_convolution_node(name):
    x, a, outputs = unpack(CONV[name], ("input", "weight", "bias", "past_state"))
    x = {name: y.astype(np.float64) for name, y in x.items()}
    B, F, K = len(x["input"]), *x["weight"].shape[::2]
    given = dict(x=x["input"], weight=x["weight"], bias=x.get("bias", np.zeros(F)),
                 past_state=x.get("past_state", np.zeros((B, F, K - 1))),
                 activation=a.get("activation", b"none") != b"none")
    exact, K = convolution(**given), conditioning([convolution], given, runs=16)
    for (output, y), got in zip(exact.items(), outputs, strict=True):
        assert compare(output, got, y, K[output], str(got.dtype)).score <= 1


def test_no_node_is_dropped():
    assert len(LINEAR) >= 4 and len(CONV) >= 13
    assert all("delta" in name or name[len("test_linear_attention_"):] in DELTA for name in set(ALL) - {*LINEAR, *CONV})


DELTA = {"decode_step", "prefill_with_past", "no_past_explicit_zeros", "explicit_scale", "fp16"}    # rule left out


# transformers

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2 import modeling_mamba2 as theirs

torch.set_num_threads(1)                                 # small arrays: threads would only wait for each other


def ids(case):
    return case.id


def time_first(x, *names):
    """Arrays (B, H, T, ...) of a case as float32 tensors (B, T, H, ...)."""
    return [torch.from_numpy(x[name].astype(np.float32)).transpose(1, 2) for name in names]


def scan(case):
    """o and the final state of the chunked scan of transformers."""
    x, (v, dt, B, C) = case.in_dtype("float32"), time_first(case.inputs, "x", "dt", "B", "C")
    A, D, state = (torch.from_numpy(x[name]) for name in ("A", "D", "initial_state"))
    o, state = theirs.mamba2_chunk_scan(v, dt, A, B, C, x["chunk_size"], D=D, return_final_states=True,
                                        initial_states=state.transpose(2, 3))
    return o.transpose(1, 2).numpy(), state.transpose(2, 3).numpy()


def stepped(case):
    """o and the final state of transformers' update of the state, token by token."""
    (v, dt, B, C), x = time_first(case.inputs, "x", "dt", "B", "C"), case.in_dtype("float32")
    state, outputs = torch.from_numpy(x["initial_state"]).transpose(2, 3).contiguous(), []
    wide = [torch.from_numpy(x[name])[:, None].expand(-1, v.shape[3]) for name in ("A", "D")]
    A, D = wide[0][..., None].expand(-1, -1, B.shape[3]), wide[1]
    for t in range(v.shape[1]):
        dt_t = dt[:, t, :, None].expand(-1, -1, v.shape[3])
        outputs.append(theirs.mamba2_selective_state_update(state, v[:, t], dt_t, A, B[:, t], C[:, t], D))
    return torch.stack(outputs, 2).numpy(), state.transpose(2, 3).numpy()


SSD = [case for case in GOLDEN["ssd"].values() if case.inputs["x"].shape[2]]


@pytest.mark.parametrize("form", [scan, stepped])
@pytest.mark.parametrize("case", SSD, ids=ids)
def test_scan(case, form):
    if form is stepped or case.name != "large_step":
        assert agrees(case, form(case), "float32")


def test_the_chunked_scan_loses_digits_behind_a_large_step():
    """Its decay to the end of a chunk is a difference of running sums; o has its decays from sums of segments."""
    case = GOLDEN["ssd"]["large_step"]
    o, state = check(case, scan(case), "float32").comparisons
    assert state.score > 100, state.score


def mixer(case):
    """The mixer of transformers with the parameters of a case, and its cache with the states of the case."""
    x, (H, dk, dv) = case.in_dtype("float32"), case.inputs["initial_state"].shape[1:]
    D, (W, F) = x["x"].shape[2], x["conv_state"].shape[1:]
    config = Mamba2Config(
        num_heads=H, head_dim=dv, hidden_size=D, expand=H * dv // D, state_size=dk, n_groups=(F - H * dv) // (2 * dk),
        conv_kernel=W + 1, chunk_size=x["chunk_size"], time_step_limit=(x["dt_min"], x["dt_max"]), use_bias=False,
        layer_norm_epsilon=mamba2.EPS, num_hidden_layers=1)
    model, cache = theirs.Mamba2Mixer(config, 0).eval(), DynamicCache(config=config)
    weights = {"conv1d.weight": x["conv_weight"].T[:, None], "conv1d.bias": x["conv_bias"], "dt_bias": x["dt_bias"],
               "A_log": x["A_log"], "D": x["D"], "in_proj.weight": x["w_in"].T, "norm.weight": x["norm_weight"],
               "out_proj.weight": x["w_o"].T}
    model.load_state_dict({name: torch.tensor(np.ascontiguousarray(y)) for name, y in weights.items()})
    kept = np.pad(x["conv_state"], [(0, 0), (1, 0), (0, 0)]).swapaxes(1, 2)             # W + 1 columns
    cache.update_conv_state(torch.tensor(kept), 0, conv_kernel_size=W + 1)
    cache.update_recurrent_state(torch.tensor(x["initial_state"]).transpose(2, 3).contiguous(), layer_idx=0)
    return model, cache, torch.from_numpy(x["x"])


def block(case, parts):
    """Outputs of the mixer, which is called with as many tokens at once as parts say."""
    model, cache, x = mixer(case)
    with torch.no_grad():
        o = torch.cat([model(part, cache=cache) for part in x.split(parts, dim=1)], dim=1)
    state, conv = cache.get_recurrent_state(0, state_idx=0), cache.get_conv_state(0, state_idx=0)
    return o.numpy(), state.transpose(2, 3).numpy(), conv[..., 1:].transpose(1, 2).numpy()


UNLIMITED = [case for case in GOLDEN["mamba2"].values() if case.name != "limits"]


@pytest.mark.parametrize("case", UNLIMITED, ids=ids)
def test_block_token_by_token(case):
    assert agrees(case, block(case, 1), "float32")


@pytest.mark.parametrize("case", [c for c in GOLDEN["mamba2"].values() if c.inputs["x"].shape[1] > 1], ids=ids)
def test_block_at_once(case):
    assert agrees(case, block(case, case.inputs["x"].shape[1]), "float32")


def test_limits_are_ignored_token_by_token():
    """The scan clips dt, the update of one token does not: prefill and decode differ, and the mistake has a name."""
    case = GOLDEN["mamba2"]["limits"]
    found = block(case, 1)
    assert not check(case, found, "float32").passed
    assert diagnose(case, found, "float32").mistake == "dt_limits_ignored"
    assert agrees(changed(case, dt_min=0.0, dt_max=64.0), found, "float32")
