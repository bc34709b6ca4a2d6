"""Conventions: every other reading is verified as strictly as ours, and a run that differs by one is told so."""
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from attention_ref import load_cases, sdpa, variants
from attention_ref.conformance import conventions
from attention_ref.conformance.cli import main
from attention_ref.conformance.conventions import CONVENTIONS, choices, parse, under
from attention_ref.conformance.diagnosis import mistakes, wrong_outputs
from attention_ref.conformance.implementations import judge
from attention_ref.conformance.verify import TIERS, check, compare

READINGS = [(variant, name, reading) for variant, module in variants().items()
            for name, found in choices(module).items() for reading, slugs in found.items() if slugs]
MINE = '''
import numpy as np
from attention_ref import kit, sdpa


def uniform(**x):
    o, lse = sdpa.dense(**x)
    return kit.at_empty_rows((o, lse), kit.mean_value(x["v"]))[0], lse


def with_nan(**x):
    return kit.nan_at_empty_rows(x, sdpa.dense(**x))[0]


def ours(**x):
    return sdpa.dense(**x)


def inexact(**x):
    return sdpa.dense(**x)[0] * (1 + x["q"].dtype.type({}))
'''


@cache
def read(variant, name, reading):
    """(a golden case, the same in another reading) of the cases that the reading moves."""
    pairs = [(case, under(case, {name: reading})) for case in load_cases(variant)]
    return [(case, other) for case, other in pairs if other is not case]


@pytest.fixture
def verify(tmp_path, monkeypatch, capsys):
    """attention-ref verify sdpa on a function of MINE, with an error of 5e-7 in one of them: (exit code, output)."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_with_conventions.py").write_text(MINE.replace("{}", "5e-7"))

    def run(name, *options):
        return main(["verify", "sdpa", "--impl", f"mine_with_conventions:{name}", *options]), capsys.readouterr().out
    return run


# The table

def test_every_entry_is_a_mistake_and_stands_once():
    slugs = [slug for _, readings, _ in CONVENTIONS.values() for found in readings.values() for slug in found]
    assert len(set(slugs)) == len(slugs)
    assert set(slugs) <= set().union(*(mistakes(module) for module in variants().values()))


@pytest.mark.parametrize("variant", variants())
def test_a_variant_has_one_reading_of_its_own(variant):
    for name, found in choices(variants()[variant]).items():
        ours, *others = found.values()
        assert ours == () and others and all(others), name


def test_own_readings_differ_where_the_mistakes_do():
    windows = {variant: next(iter(choices(variants()[variant])["window"])) for variant in ("masked", "ring_cache")}
    assert windows == dict(masked="keys-beside", ring_cache="own-key-too")
    assert "mask_true" not in choices(variants()["masked"]), "it takes no mask"


# Cases in another reading

@pytest.mark.parametrize("variant, name, reading", READINGS)
def test_a_reading_is_verified(variant, name, reading):
    """What is a mistake in ours is right there, in every type, and ours is wrong; only outputs are asked."""
    slugs = choices(variants()[variant])[name][reading]
    assert read(variant, name, reading)
    for ours, other in read(variant, name, reading):
        assert other.conventions[name] == reading and not other.steps and not other.gradients
        assert not check(other, ours.outputs).passed
        for dtype in ("float64", "float32", "float16"):
            outputs = {o: y for slug in slugs for o, y in wrong_outputs(ours, slug, dtype).items()}
            result = check(other, {o: y.astype(dtype) for o, y in outputs.items()}, dtype)
            assert result.passed, f"{other.name}, {dtype}: {result.worst}"


def test_our_own_reading_changes_nothing():
    for case in load_cases("sdpa"):
        assert under(case, {name: next(iter(found)) for name, found in choices(sdpa).items()}) is case


def test_a_reading_leaves_the_other_numbers_alone():
    for ours, other in read("sdpa", "empty_row", "uniform"):
        moved = other.outputs["o"] != ours.outputs["o"]
        assert np.array_equal(moved.any(-1), ours.outputs["lse"] == -np.inf)
        assert np.array_equal(other.outputs["lse"], ours.outputs["lse"])
        assert np.array_equal(other.conditioning["o"][~moved], ours.conditioning["o"][~moved])


def test_nan_must_be_met():
    ours, other = next((a, b) for a, b in read("sdpa", "empty_row", "nan") if a.name == "empty_row")
    lost = other.outputs["o"].copy()
    lost[0, 0, 0, 0] = np.nan
    assert check(other, other.outputs["o"]).passed
    assert not check(other, lost).passed and not check(other, ours.outputs["o"]).passed


def test_any_value_is_right_where_two_readings_meet():
    case = load_cases("sdpa", "causal_wide")[0]
    other = under(case, parse("lse_base=2,causal_anchor=top-left", sdpa))
    free = np.isnan(other.outputs["lse"])
    assert free.all() and not other.conditioning["lse"].any(), "this diagonal is another in every row"
    right = under(case, {"causal_anchor": "top-left"}).outputs["o"]
    assert check(other, (right, np.full(free.shape, 7.0))).passed and not check(other, (case.outputs["o"],)).passed


def test_readings_of_different_outputs_do_not_meet():
    case, = (c for c in load_cases("sdpa") if c.name == "empty_row")
    other = under(case, parse("empty_row=uniform,empty_row_lse=zero,lse_base=2", sdpa))
    o, lse = other.outputs["o"], other.outputs["lse"]
    assert not np.isnan(o).any() and (lse[:, :, 1] == 0).all()
    assert np.allclose(o[:, :, 1], case.inputs["v"].mean(2)) and np.allclose(lse[:, :, 0] * np.log(2),
                                                                          case.outputs["lse"][:, :, 0])


def test_what_is_too_large_for_a_type_is_infinite():
    exact, K = np.array([80000.0]), np.array([1.0])
    assert compare("lse", np.array([np.inf], np.float16), exact, K, "float16").score == 0
    for got, dtype in ((-np.inf, "float16"), (65504, "float16"), (np.inf, "float32")):
        assert compare("lse", np.array([got], dtype), exact, K, dtype).score > 1


# The command

def test_verify_in_another_reading(verify):
    assert verify("uniform", "--convention", "empty_row=uniform")[0] == 0
    code, out = verify("ours", "--convention", "empty_row=uniform,lse_base=e")
    assert code == 1 and "convention of this case: empty_row = uniform" in out
    assert "right under" not in out and "no known mistake matches" in out


def test_where_a_convention_leaves_outputs_only_is_said(verify):
    said = r"^no steps and no gradients are known under this convention in (.*)$"
    out = verify("uniform", "--convention", "empty_row=uniform")[1]
    moved = [case.name for case, _ in read("sdpa", "empty_row", "uniform") if case.steps or case.gradients]
    assert re.search(said, out, re.M)[1] == ", ".join(moved) and "causal_tall" in moved
    assert not re.search(said, verify("ours")[1], re.M)


def test_a_run_that_differs_by_a_convention_is_told_so(verify):
    code, out = verify("uniform")
    assert code == 1 and "right under another convention: --convention empty_row=uniform\n" in out
    assert re.search(r"  empty_row=uniform: o of a query without keys; read so by .*jax nn\.dot_product_attention", out)
    assert "--convention empty_row=nan\n" in verify("with_nan", "--dtype", "float32")[1]


def test_a_mistake_beside_a_convention_is_no_convention():
    def half_right(**x):
        o, lse = mistakes(sdpa)["scale_applied_twice"][1](x).values()
        return wrong_outputs_at_empty_rows(o, lse)

    def wrong_outputs_at_empty_rows(o, lse):
        return np.where((lse == -np.inf)[..., None], np.nan, o), lse
    results, diagnosis = judge(half_right, load_cases("sdpa"), "float64")
    assert diagnosis.findings and conventions.right_under(results, diagnosis) == {}


def test_what_raises_is_not_right_elsewhere():
    def raising(**x):
        if not x["k"].shape[2]:
            raise ValueError("no keys")
        y = sdpa.dense(**x)
        return np.where((y[1] == -np.inf)[..., None], np.nan, y[0]), y[1]
    results, diagnosis = judge(raising, load_cases("sdpa"), "float64")
    assert diagnosis.mistake == "empty_row_nan" and conventions.right_under(results, diagnosis) == {}


@pytest.mark.parametrize("text, message", [
    ("empty_rows=nan", "expected name=reading with a name among mask_true, .*, got 'empty_rows=nan'"),
    ("empty_row", "empty_row is read as one of zero, nan, uniform, got ''"),
    ("empty_row=nan,empty_row=zero", "empty_row is given twice, as nan and as zero"),
    ("lse_base=10", "lse_base is read as one of e, 2, got '10'"),
    ("kv_heads=h%Hkv", "expected name=reading with a name among .*, got 'kv_heads=h%Hkv'")])
def test_a_convention_that_does_not_exist(capsys, text, message):
    code = main(["verify", "sdpa", "--impl", "attention_ref.dense.sdpa:dense", "--convention", text])
    assert code == 2 and re.fullmatch(f"attention-ref: convention: {message}\n", capsys.readouterr().err)


@pytest.mark.parametrize("option", [("--convention", "empty_row=nan"), ("--tier", "fast")])
def test_options_that_go_with_an_implementation(capsys, option):
    assert main(["verify", "sdpa", *option]) == 2 and f"{option[0]} goes with --impl" in capsys.readouterr().err


def test_the_table_is_printed(capsys):
    assert main(["conventions", "gqa"]) == 0
    out = capsys.readouterr().out
    ours, other = "  h//group  ours in gqa; torch .*(\n {12}.*)*", "  h%Hkv     a mistake elsewhere: heads_tiled"
    assert re.search(f"^kv_heads: .*\n{ours}\n{other}$", out, re.M)
    assert "window:" not in out and main(["conventions"]) == 0 and "window:" in capsys.readouterr().out
    assert main(["conventions", "gqqa"]) == 2


def test_readers_are_known_readings():
    assert json.loads(Path(conventions.READERS).read_text()) == conventions.readers()
    for library, measured in conventions.readers().items():
        assert measured["version"] and len(measured) > 3, library
        assert all(reading in CONVENTIONS[name].readings for name, reading in measured.items() if name != "version")


# Tiers and the distribution of errors

def test_a_tier_accepts_more_and_says_so(verify):
    passed = {}
    for tier, limit in TIERS.items():
        code, out = verify("inexact", "--dtype", "float32", "--tier", tier)
        passed[tier] = code == 0
        assert (f"warning: {limit:g} times the budget of an honest run was accepted" in out) == (limit > 1)
    assert passed == dict(strict=False, fast=True, loose=True)
    assert verify("inexact", "--dtype", "float64", "--tier", "loose")[0] == 1


def test_a_case_has_the_limit_of_its_tier():
    case = load_cases("sdpa", "basic")[0]
    error = 3 * 2 * (2.0 ** -53 * np.abs(case.outputs["o"]) + 2.0 ** -53 * case.conditioning["o"])
    result = check(case, case.outputs["o"] + error)
    assert 2.9 < result.score < 3.1 and not result.passed
    case.limit = TIERS["fast"]
    assert check(case, case.outputs["o"] + error).passed


def test_the_verdict_shows_where_all_errors_lie(verify):
    out = verify("ours", "--dtype", "float32")[1]
    table = out[out.index("error/budget  exact  to 1/4"):].splitlines()
    for line, name in zip(table[2:], sdpa.OUTPUTS, strict=False):
        cells = re.split("  +", line)
        sizes = [case.outputs[name].size for case in load_cases("sdpa")]
        assert cells[0] == name and sum(map(int, cells[1:7])) == sum(sizes) and cells[5:7] == ["0", "0"]
        assert re.fullmatch(r"0\.\d\d", cells[7]) and re.match(r"\w+, batch \d, head \d, query \d", cells[8])
