"""Every node test case of the ONNX operator Attention that the onnx package generates, against our variants."""
import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import onnx.backend.test.case.node.attention  # fills the list of cases
from onnx_attention import arguments, attention, named_outputs, options, read

from attention_ref.conformance.numbers import conditioning
from attention_ref.conformance.verify import compare

INPUTS = "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"
OUTPUTS = "Y", "present_key", "present_value", "qk_matmul_output"
CASES = {case.name: case for case in onnx.backend.test.case.node._NodeTestCases if case.model.graph.node[0].op_type == "Attention"}


def unpack(case):
    """Inputs, attributes and outputs of a case, by name."""
    node, ((inputs, outputs),) = case.model.graph.node[0], case.data_sets
    return read(node.input, inputs, INPUTS), options(node), read(node.output, outputs, OUTPUTS)


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    x, a, y = unpack(CASES[name])
    given = arguments(x, a)
    exact, K = attention(**given), conditioning([attention], given, runs=16)
    for name, got in named_outputs(y, a).items():
        result = compare(name, got, exact[name], K[name], str(got.dtype))
        assert result.score <= 1, result
    if "present_key" in y:
        assert np.array_equal(y["present_key"], given["k"]) and np.array_equal(y["present_value"], given["v"])
