"""Golden cases as pytest tests in somebody else's project."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_ref import check, load_cases
from attention_ref.testing import conforms

ROOT = Path(__file__).parents[1]
TESTS = '''
from attention_ref import kit, sdpa
from attention_ref.testing import conforms

test_right = conforms("sdpa", dtype="float32", case="causal")(sdpa.dense)


@conforms("sdpa", dtype="float32", case="causal_wide")
def test_wrong(**x):
    """True means masked."""
    return sdpa.BUGS["mask_polarity"][1](x)


@conforms("sdpa", case="causal", expected_failures={"causal_wide": "known", "causal_tall": "thought to be known"})
def test_expected(**x):
    return sdpa.dense(**x) if x["mask"].shape[-2] > x["mask"].shape[-1] else sdpa.dense(**x | dict(mask=~x["mask"]))


@conforms("sdpa", case="basic")
def test_raising(**x):
    raise ZeroDivisionError("on purpose")


@conforms("sdpa", case="softcap")
def test_unsupported(q, k, v, mask, scale):
    return sdpa.dense(q, k, v, mask, scale=scale)


@conforms("sdpa", case="empty_row", convention="empty_row=nan")
def test_convention(**x):
    return kit.nan_at_empty_rows(x, sdpa.dense(**x))


@conforms("sdpa", case="basic", tier="fast")
def test_tier(**x):
    return sdpa.dense(**x)[0] * (1 + 2 ** -49)


@conforms("sdpa", dtype="float32", case="basic", layout="BTHD", rename=dict(q="query"))
def test_call(query, k, v, mask, scale):
    q, k, v = (x.swapaxes(1, 2) for x in (query, k, v))
    return sdpa.dense(q, k, v, mask, scale=scale)[0].swapaxes(1, 2)
'''


def run_pytest(folder, *arguments, **variables):
    """What pytest prints in a folder, started as others start it, and its exit code."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rxs", "-W", "error", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=os.environ | variables)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The printed outcome of TESTS."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_mine.py").write_text(TESTS)
    code, out = run_pytest(folder)
    assert code == 1, out
    return out


def outcomes(out, name):
    """Case -> outcome of one test function."""
    return dict(re.findall(rf"::{name}\[sdpa-(\w+)\] (\w+)", out))


def test_one_test_per_case(outcome):
    assert outcomes(outcome, "test_right") == {c.name: "PASSED" for c in load_cases("sdpa", "causal")}


def test_a_failure_is_explained_and_named(outcome):
    assert outcomes(outcome, "test_wrong") == dict(causal_wide="FAILED")
    said = r"^FAILED sdpa/causal_wide \(float32\): Tq < Tk.*\n  o at batch .* times the budget\n"
    assert re.search(said, outcome, re.M)
    assert "  mask_polarity: True is read as masked" in outcome and "_judge_one" not in outcome


def test_expected_failures_are_strict(outcome):
    found = outcomes(outcome, "test_expected")
    assert (found["causal_wide"], found["causal_tall"], found["causal_top_left"]) == ("XFAIL", "FAILED", "FAILED")
    assert "[XPASS(strict)] thought to be known" in outcome and "test_expected[sdpa-causal_wide] - known" in outcome


def test_what_raises_fails_and_what_is_unsupported_is_skipped(outcome):
    assert outcomes(outcome, "test_raising") == dict(basic="FAILED") and "ZeroDivisionError: on purpose" in outcome
    assert outcomes(outcome, "test_unsupported") == dict(softcap="SKIPPED") and "takes no bias, softcap" in outcome


def test_layout_and_names_are_those_of_the_call(outcome):
    assert outcomes(outcome, "test_call") == dict(basic="PASSED")


def test_conventions_and_tiers_are_those_of_the_command(outcome):
    assert set(outcomes(outcome, "test_convention").values()) == {"PASSED"}
    assert outcomes(outcome, "test_tier") == dict(basic="PASSED")
    case = load_cases("sdpa", "basic")[0]
    assert 1 < check(case, case.outputs["o"] * (1 + 2 ** -49)).score < 4


@pytest.mark.parametrize("arguments, message", [
    (dict(variant="spda"), "variant: expected one of .*sdpa.*, got 'spda'"),
    (dict(variant="sdpa", dtype="float8"), "dtype: expected one of float64, .*, got 'float8'"),
    (dict(variant="sdpa", accumulate="int8"), "accumulate: expected one of .*, got 'int8'"),
    (dict(variant="sdpa", case="none such"), "case: expected .*, got 'none such'"),
    (dict(variant="sdpa", expected_failures={"nowhere": "why"}), "expected_failures: .* of sdpa, got nowhere"),
    (dict(variant="sdpa", convention="empty_row=one"), "convention: empty_row is read as one of zero, .*, got 'one'"),
    (dict(variant="sdpa", tier="lax"), "tier: expected one of strict, fast, loose, got 'lax'"),
    (dict(variant="sdpa", layout="HBTD"), "layout: expected one of .*, got 'HBTD'")])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        conforms(**arguments)(lambda **x: None)


def test_a_project_with_the_package_installed(tmp_path):
    """docs/examples/pytest with the wheel that pip builds, in a folder of its own."""
    site, project = tmp_path / "site", tmp_path / "project"
    source = tmp_path / "source"
    shutil.copytree(ROOT / "attention_ref", source / "attention_ref", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    if "hatchling" in done.stderr or "connection" in done.stderr.lower():
        pytest.skip("pip cannot fetch the build backend here")
    assert done.returncode == 0, done.stderr
    shutil.copytree(ROOT / "docs/examples/pytest", project, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "test_place.py").write_text(
        f"import attention_ref\n\n\ndef test_place():\n    assert attention_ref.__file__.startswith({str(site)!r})\n")
    code, out = run_pytest(project, PYTHONPATH=str(site))
    assert code == 0, out
    assert "test_attention[sdpa-causal_wide] PASSED" in out and "test_attention[sdpa-masked_nan] XFAIL" in out
    assert "test_grouped_by_hand PASSED" in out and "test_place PASSED" in out and "takes no softcap" in out
