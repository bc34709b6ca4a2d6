"""What README and docs quote from commands is what the commands print; their code runs; their links lead somewhere."""
import importlib.util
import re
from pathlib import Path

import pytest

from attention_ref import variants
from attention_ref.conformance.diagnosis import mistakes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quotations_are_fresh(capsys):
    assert load(ROOT / "docs/refresh.py").main(check=True) == 0, capsys.readouterr().out


def test_a_stale_quotation_is_noticed():
    refresh = load(ROOT / "docs/refresh.py")
    assert refresh.same("sdpa 0.31 budgets", "sdpa 0.42 budgets") and not refresh.same("sdpa passed", "sdpa failed")


def test_python_in_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(?!# \w+\.py)(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(block, {})
    assert "sdpa/causal_wide" in capsys.readouterr().out


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing, missing


def test_classes_named_as_covered_exist():
    slugs = {slug for module in variants().values() for slug in mistakes(module)}
    named = set(re.findall(r"`(\w+)\.(\w+)`", (ROOT / "docs/not_covered.md").read_text()))
    assert named and {slug for _, slug in named} <= slugs
    assert all(slug in mistakes(variants()[variant]) for variant, slug in named)
