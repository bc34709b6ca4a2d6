"""Every named mistake is caught by a golden case, by a wide margin, and named from what a port with it would give."""
import numpy as np
import pytest

from attention_ref import diagnose, load_cases, sdpa, variants
from attention_ref.conformance import suite
from attention_ref.conformance.diagnosis import (diagnose_all, distance, golden_cases, golden_mistake, mistakes,
                                                 port_outputs, wrong_outputs)
from attention_ref.conformance.golden import caught
from attention_ref.conformance.implementations import judge
from attention_ref.conformance.verify import check, tolerance

MISTAKES = [(name, slug) for name, module in variants().items() for slug in mistakes(module)]
IDS = [f"{variant}-{slug}" for variant, slug in MISTAKES]


@pytest.mark.parametrize("variant, slug", MISTAKES, ids=IDS)
def test_caught_and_named(variant, slug):
    assert suite.name_mistake(variant, slug) == (True, True)


@pytest.mark.parametrize("variant", variants())
def test_margin(variant):
    """At least ten times the budget in float32, or in float16 for a mistake that only float16 makes."""
    golden, module = load_cases(variant), variants()[variant]
    catching = {slug: [case for case in golden if slug in case.catches] for slug in mistakes(module)}
    assert all(catching.values()), "no case catches it"
    margin = {slug: max(caught(case, slug, dtype) for case in found for dtype in ("float32", "float16"))
              for slug, found in catching.items()}
    assert min(margin.values()) >= 10, min(margin, key=margin.get)


def test_a_port_is_not_the_mistake_itself():
    """The outputs that have to be named are half a budget off in every number that has a budget."""
    case, slug = load_cases("sdpa", "basic")[0], "scale_missing"
    port, wrong = port_outputs(case, slug, "float32"), wrong_outputs(case, slug, "float32")
    assert set(port) == set(wrong) and all((port[name] != wrong[name]).mean() > 0.9 for name in wrong)
    result = check(case, port, "float32")
    assert 0.1 < distance(result, slug) < 0.5 and diagnose(case, port, "float32").mistake == slug


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


@pytest.mark.parametrize("variant", variants())
def test_mistakes_run_on_every_case(variant):
    for case in golden_cases(variant).values():
        for slug in mistakes(case.module):
            assert set(golden_mistake(variant, case.name, slug, "float32")) <= set(case.expected), slug


def coarse(case, budgets):
    """The right outputs of a case, every finite number up to so many budgets of float32 off."""
    random, outputs = np.random.default_rng(1), {}
    for name, y in case.outputs.items():
        with np.errstate(invalid="ignore"):
            off = random.uniform(-budgets, budgets, y.shape) * tolerance(y, case.conditioning[name], "float32")
        outputs[name] = (y + np.where(np.isfinite(off), off, 0)).astype(np.float32)
    return check(case, outputs, "float32")


@pytest.mark.parametrize("variant", variants())
def test_coarse_arithmetic_is_no_mistake(variant):
    """A right formula whose sums lose digits everywhere is wrong and nameless."""
    results = [coarse(case, 1000) for case in golden_cases(variant).values()]
    assert any(r.failed for r in results) and not diagnose_all(results).findings


def in_types(**slugs):
    """An sdpa that makes another mistake in each number type, "" for none."""
    return lambda **x: mistakes(sdpa)[slugs[str(x["q"].dtype)]][1](x) if slugs[str(x["q"].dtype)] else sdpa.dense(**x)


@pytest.mark.parametrize("wider, mistake", [("", "score_overflow"), ("no_max_subtracted", "no_max_subtracted")])
def test_a_wider_type_refutes_what_only_float16_can_show(wider, mistake):
    function = in_types(float16="score_overflow", float32=wider, float64=wider)
    results, diagnosis = judge(function, load_cases("sdpa", "large_scores"), "float16")
    assert results[0].failed and diagnosis.mistake == mistake and not diagnosis.unexplained


def test_a_refuted_name_leaves_the_case_unexplained():
    def function(**x):
        return in_types(float16="score_overflow")(**x) if x["q"].dtype == "float16" else sdpa.dense(**x)[0] + 1
    diagnosis = judge(function, load_cases("sdpa", "large_scores"), "float16")[1]
    assert not diagnosis.findings and diagnosis.unexplained == ["large_scores"]


def test_an_error_in_one_type_alone_keeps_its_name():
    function = in_types(float16="scale_missing", float32="", float64="")
    assert judge(function, load_cases("sdpa"), "float16")[1].mistakes == ["scale_missing"]
