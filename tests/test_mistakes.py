"""Every named mistake is caught by a golden case, by a wide margin, and named from its low-precision output."""
import pytest

from attention_ref import diagnose, load_cases, variants
from attention_ref.conformance import suite
from attention_ref.conformance.golden import caught
from attention_ref.conformance.diagnosis import mistakes, wrong_outputs

MISTAKES = [(name, slug) for name, module in variants().items() for slug in mistakes(module)]
IDS = [f"{variant}-{slug}" for variant, slug in MISTAKES]


@pytest.mark.parametrize("variant, slug", MISTAKES, ids=IDS)
def test_caught_and_named(variant, slug):
    assert suite.name_mistake(variant, slug) == (True, True)


@pytest.mark.parametrize("variant, slug", MISTAKES, ids=IDS)
def test_margin(variant, slug):
    """At least ten times the budget in float32, or in float16 for a mistake that only float16 makes."""
    catching = [case for case in load_cases(variant) if slug in case.catches]
    assert catching, "no case catches it"
    assert max(caught(case, slug, dtype) for case in catching for dtype in ("float32", "float16")) >= 10


@pytest.mark.parametrize("variant", variants())
def test_right_output_is_not_diagnosed(variant):
    for case in load_cases(variant):
        found = diagnose(case, case.outputs)
        assert not found.mistake and str(found) == "nothing to diagnose"


@pytest.mark.parametrize("variant", variants())
def test_unknown_mistake_is_not_named(variant):
    """Outputs that are wrong in a way nobody has named stay nameless."""
    case = next(c for c in load_cases(variant) if c.name == "basic")
    found = diagnose(case, {name: y + 1000 for name, y in case.outputs.items()})
    assert found.failing == 1 and not found.mistake and str(found) == "no known mistake matches basic"


@pytest.mark.parametrize("variant, slug", MISTAKES, ids=IDS)
def test_mistake_runs_on_every_case(variant, slug):
    for case in load_cases(variant):
        outputs = wrong_outputs(case, slug, "float32")
        assert set(outputs) <= set(case.expected)
