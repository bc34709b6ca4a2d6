"""Golden cases in your own test suite: run `pytest` in this folder, with attention_ref installed."""
from mine import attention, grouped

from attention_ref import check, load_cases
from attention_ref.testing import conforms

# One test per case, test_attention[sdpa-causal_wide] and so on. What it has no argument for (a sink, a soft cap) is
# skipped. What is known to be wrong stands here with its reason; the day it is mended, the suite asks to remove it.
test_attention = conforms("sdpa", dtype="float32", expected_failures={
    "masked_nan": "0 * NaN is NaN: values that no query may see must be finite",
})(attention)


# The same as a decorator, where names, order or layout of the arguments are not those of `attention-ref show gqa`.
@conforms("gqa", dtype="float32", case="causal")
def test_grouped(q, k, v, mask, scale):
    return grouped(q, k, v, mask, scale)


def test_grouped_by_hand():
    """The plain loop: cases are data, check is a function, and what you assert is yours."""
    for case in load_cases("gqa", "causal"):
        result = check(case, grouped(**case.inputs))
        assert result.passed, f"{case.id}: {result.worst}"
