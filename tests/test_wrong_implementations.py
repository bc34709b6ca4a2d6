"""Wrong implementations from public threads are refused, and named as `wrong/named.py` says; a right one passes."""
from importlib import import_module

import numpy as np
import pytest
from wrong.named import HALF, NAMED, described, variant

from attention_ref import load_cases
from attention_ref.conformance.call import Call
from attention_ref.conformance.implementations import judge


@pytest.mark.parametrize("name, mistake", NAMED.items())
def test_wrong_is_refused_and_named(name, mistake):
    module, function = name.split(".")
    torch = module.endswith("_torch")
    if torch:
        pytest.importorskip("torch")
    call = Call(getattr(import_module(f"wrong.{module}"), function), backend="torch" if torch else "numpy", grad=torch)
    results, diagnosis = judge(call, load_cases(variant(name)), "float16" if name in HALF else "float32")
    assert any(r.outputs and not r.passed for r in results), "not caught"
    assert (diagnosis.mistake or None) == mistake, str(diagnosis)


def test_the_table_is_whole_and_most_have_a_name():
    assert set(NAMED) == set(described())
    assert sum(mistake is not None for mistake in NAMED.values()) >= 0.9 * len(NAMED)
    assert len({variant(name) for name in NAMED}) == 8


def weighted(scores, v, sink):
    """Softmax over one list of scores, with a sink."""
    top = max(scores.max(initial=-np.inf), sink)
    if top == -np.inf:
        return np.zeros(v.shape[1])
    e = np.exp(scores - top)
    return (e / (e.sum() + np.exp(sink - top))) @ v


def right(q, k, v, mask, bias, sink, scale, softcap):
    """One query of one head at a time; a masked key is never touched."""
    B, H, Tq, _ = q.shape
    mask, bias = (np.broadcast_to(x, (B, H, Tq, k.shape[2])) for x in (mask, bias))
    sink, o = np.broadcast_to(sink, (H,)), np.zeros((B, H, Tq, v.shape[3]), q.dtype)
    for b, h, i in np.ndindex(B, H, Tq):
        keep = mask[b, h, i]
        s = k[b, h, keep] @ (scale * q[b, h, i])
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        o[b, h, i] = weighted(s + bias[b, h, i, keep], v[b, h, keep], sink[h])
    return o


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_right_is_accepted(dtype):
    results, diagnosis = judge(right, load_cases("sdpa"), dtype)
    assert all(r.passed for r in results), str(diagnosis)
