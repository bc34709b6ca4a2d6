"""Node test cases of ONNX: what goes in and what comes out, and LinearAttention in the terms of our variants."""
import numpy as np
from onnx import helper

from attention_ref.core import repeat_heads, split_heads

LINEAR_ATTENTION = "query", "key", "value", "past_state", "decay", "beta"


def present(names, used, arrays):
    """Name of the schema -> array, for those inputs or outputs that a node has."""
    return dict(zip([name for name, here in zip(names, used) if here], arrays, strict=True))


def unpack(case, names):
    """Inputs by name, attributes by name, and outputs of a node test case."""
    node, ((inputs, outputs),) = case.model.graph.node[0], case.data_sets
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return present(names, node.input, inputs), attributes, outputs


def rule(case):
    """The update rule of a node of LinearAttention, gated_delta where it does not say; "" for another operator."""
    node = case.model.graph.node[0]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return attributes.get("update_rule", b"gated_delta").decode() if node.op_type == "LinearAttention" else ""


def recurrent_arguments(x, a):
    """Inputs x and attributes a of LinearAttention as those of gla and the delta rules, the heads repeated for q.

    log_decay and beta are there if the node has them.
    """
    x = {name: y.astype(np.float64) for name, y in x.items()}
    H, kv = a["q_num_heads"], a["kv_num_heads"]
    q, k, v = split_heads(x["query"], H), *(split_heads(x[name], kv) for name in ("key", "value"))
    given = dict(k=k, v=v, initial_state=x.get("past_state", np.zeros((len(q), kv, k.shape[3], v.shape[3]))))
    if "decay" in x:
        given["log_decay"] = split_heads(x["decay"], kv)
    if "beta" in x:
        given["beta"] = np.broadcast_to(x["beta"], (*x["beta"].shape[:2], kv)).swapaxes(1, 2)[..., None]
    given = {name: repeat_heads(y, H) for name, y in given.items()}
    beta = {"beta": given["beta"][..., 0]} if "beta" in given else {}
    return dict(q=q, scale=a.get("scale", 0.0) or q.shape[3] ** -0.5) | given | beta
