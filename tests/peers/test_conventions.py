"""The conventions that torch, jax and onnx were measured to have: prose about them is made from the same table."""
import pytest
from conventions import CONVENTIONS, PEERS, measured_conventions, table

EXPECTED = {
    "attention_ref sdpa": ("none: pass a mask", "True = may attend", "0", "never read"),
    "torch scaled_dot_product_attention": ("top-left", "True = may attend", "0", "NaN"),
    "torch nn.MultiheadAttention": ("none: pass a mask", "True = masked", "0", "NaN"),
    "torch nn.MultiheadAttention, need_weights": ("none: pass a mask", "True = masked", "NaN", "NaN"),
    "jax nn.dot_product_attention": ("top-left", "True = may attend", "mean of all values", "NaN"),
    "onnx Attention, reference": ("top-left", "True = may attend", "0", "NaN"),
}
MEASURED = measured_conventions()


@pytest.mark.parametrize("peer", PEERS)
def test_conventions(peer):
    if peer not in MEASURED:
        pytest.skip("not installed")
    measured = dict(MEASURED[peer])
    assert measured.pop("version") and measured == dict(zip(CONVENTIONS, EXPECTED[peer], strict=True))


def test_table():
    lines = table().splitlines()
    assert len(lines) == 2 + len(MEASURED) and all(line.count("|") == len(CONVENTIONS) + 3 for line in lines)
