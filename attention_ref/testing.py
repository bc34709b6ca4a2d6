"""Golden cases as pytest tests of somebody else's project; needs pytest, which the package does not install.

    from attention_ref.testing import conforms
    from mine import attention

    test_attention = conforms("sdpa", dtype="float32")(attention)

gives one test per golden case: test_attention[sdpa-basic], test_attention[sdpa-causal_wide], ...
"""
import pytest

from . import load_cases
from .conformance.call import Call
from .conformance.conventions import declared
from .conformance.implementations import judge
from .conformance.numbers import UNIT
from .conformance.report import explain


def conforms(variant, dtype="float64", *, case=None, accumulate=None, convention=None, tier=None,
             expected_failures=None, **call):
    """A decorator that turns an implementation of a variant into a pytest test with one parameter, the golden case.

    The implementation takes arguments by the names of INPUTS and returns the outputs in order, or the first of them.
    dtype: the type of the arrays it gets; accumulate: the type of its sums, if wider. case: only the cases whose name
    contains this. convention: other readings, as in "empty_row=nan,lse_base=2"; tier: "fast" or "loose" accepts 4 or 32
    times the budget. expected_failures: case name -> reason; such a case must fail, else the test does. call: how it is
    called, as in backend="torch", layout="BTHD", rename=dict(q="query"), grad=True; the fields of `call.Call`.
    A case that needs an argument the implementation does not take is skipped. ValueError for what does not exist.
    """
    for name, given in dict(dtype=dtype, accumulate=accumulate or dtype).items():
        if given not in UNIT:
            raise ValueError(f"{name}: expected one of {', '.join(UNIT)}, got {given!r}")
    expected_failures = expected_failures or {}
    golden = declared(load_cases(variant, case), convention, tier)
    unknown = sorted(set(expected_failures) - {c.name for c in golden})
    if unknown:
        raise ValueError(f"expected_failures: expected names of cases of {variant}, got {', '.join(unknown)}")
    parameters = [_parameter(c, expected_failures.get(c.name)) for c in golden]

    def make_test(function):
        implementation = Call(function, **call)

        @pytest.mark.parametrize("case", parameters)
        def test(case):
            _judge_one(implementation, case, dtype, accumulate)
        test.__name__ = test.__qualname__ = getattr(function, "__name__", variant)
        test.__module__, test.__doc__ = function.__module__, function.__doc__
        return test
    return make_test


def _parameter(case, reason):
    """A case as a parameter; with a reason, its failure is expected."""
    marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
    return pytest.param(case, id=case.id.replace("/", "-"), marks=marks)


def _judge_one(implementation, case, dtype, accumulate):
    """Run one case; fail with its explanation and diagnosis, skip what the implementation does not support."""
    __tracebackhide__ = True
    [result], diagnosis = judge(implementation, [case], dtype, accumulate)
    if result.unsupported:
        pytest.skip(result.unsupported)
    if not result.passed:
        pytest.fail(explain(result, diagnosis), pytrace=False)
