"""The rules of the house: who imports whom, names from the glossary, short functions, tests that can fail."""
import ast
import re
from inspect import getsource, signature
from pathlib import Path

import pytest

from attention_ref import FAMILIES, variants
from attention_ref.conformance.diagnosis import mistakes
from attention_ref.names import NAMES
from attention_ref.shapes import parse

PACKAGE = Path(__file__).parents[1] / "attention_ref"
TESTS = Path(__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
GROUND = {"numpy", "shapes", "masks", "names", "core", "kit"}
# may import other variants
BLOCKS = {"multi_head", "cross", "kv_cache", "ring_cache", "mega", "griffin", "mamba2"}


def imports(path):
    """Last parts of the modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[-1]
            yield from [module] if module else [alias.name for alias in node.names]


def functions(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("variant", variants())
def test_a_variant_imports_the_ground_and_a_block_other_variants(variant):
    path = Path(variants()[variant].__file__)
    allowed = GROUND | (set(variants()) if variant in BLOCKS else set())
    assert set(imports(path)) <= allowed


@pytest.mark.parametrize("variant", variants())
def test_the_kit_is_for_mistakes_and_cases(variant):
    formula, mistakes_and_cases = getsource(variants()[variant]).split("\nFORMS = ")
    assert "kit." not in formula and "kit." in mistakes_and_cases


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_libraries_have_one_door(path):
    doors = dict(numba="core.py", matplotlib="plot.py", flint="conformance/numbers.py conformance/cli.py")
    for library, door in doors.items():
        assert library not in set(imports(path)) or str(path.relative_to(PACKAGE)) in door.split()


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent == PACKAGE], ids=lambda p: p.name)
def test_the_ground_does_not_import_upwards(path):
    above = {"conformance", "cases", "verify", "teach"} | set(variants())
    assert path.name in ("__init__.py", "__main__.py") or not set(imports(path)) & above


@pytest.mark.parametrize("variant", variants())
def test_names_are_those_of_the_glossary(variant):
    module = variants()[variant]
    outputs = getattr(module, "STEPS", {}) | module.OUTPUTS
    assert set(module.INPUTS) | set(outputs) <= set(NAMES)
    for form in module.FORMS:
        assert list(signature(form).parameters) == list(module.INPUTS), form.__name__
    expected = ["d" + o for o in module.OUTPUTS] + list(module.INPUTS)
    assert not hasattr(module, "vjp") or list(signature(module.vjp).parameters) == expected


@pytest.mark.parametrize("variant", variants())
def test_the_record_is_whole(variant):
    module = variants()[variant]
    assert re.search(r"(arXiv:|eq\.|section)", module.__doc__), "the docstring names its source"
    assert module.FORMS[0].__name__ in ("dense", "recurrent") and len(module.FORMS) > 1 and module.CASES and module.BUGS
    for text in (module.INPUTS | module.OUTPUTS).values():
        assert parse(text)
    for slug, (sentence, wrong) in (module.BUGS | getattr(module, "VJP_BUGS", {})).items():
        assert re.fullmatch(r"[a-z][a-z0-9_]+", slug) and len(sentence) > 10 and callable(wrong)
    assert len(mistakes(module)) == len(module.BUGS) + len(getattr(module, "VJP_BUGS", {})), "a mistake is named twice"


@pytest.mark.parametrize("variant", variants())
def test_every_form_checks_its_arguments(variant):
    module = variants()[variant]
    for form in module.FORMS:
        assert hasattr(form, "__wrapped__") or "sizes(" in getsource(form), f"{form.__name__} accepts anything"
    assert not hasattr(module, "vjp") or "sizes(INPUTS | cotangents(OUTPUTS)" in getsource(module.vjp)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_are_short_and_take_few_arguments(path):
    for f in functions(path):
        arguments = len(f.args.args) + len(f.args.kwonlyargs)
        assert f.end_lineno - f.lineno < 40, f"{f.name} has {f.end_lineno - f.lineno + 1} lines"
        most = (14 if f.name == "vjp" else 12) + 3 * (path.stem == "mamba2")
        assert arguments <= most, f"{f.name} takes {arguments} arguments"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_functions_have_a_docstring(path):
    tree = ast.parse(path.read_text())
    helpers = path.parent.name in FAMILIES and path.name != "__init__.py"
    for f in tree.body:
        if isinstance(f, (ast.FunctionDef, ast.ClassDef)) and not f.name.startswith("_"):
            below_forms = helpers and f.lineno > next(n.lineno for n in tree.body if "FORMS" in ast.unparse(n)[:5])
            assert below_forms or path.name == "cli.py" or ast.get_docstring(f), f"{f.name} has no docstring"


@pytest.mark.parametrize("path", SOURCES + sorted(TESTS.rglob("*.py")), ids=lambda p: p.name)
def test_lines_fit(path):
    long = [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"lines {long}"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda p: p.name)
def test_every_test_can_fail(path):
    """Each test function asserts, expects an error, or calls something that does."""
    for f in functions(path):
        if f.name.startswith("test"):
            checks = [n for n in ast.walk(f) if isinstance(n, ast.Assert) or (
                isinstance(n, ast.Call) and re.search(r"raises|warns|prove|agree|assert", ast.unparse(n.func)))]
            assert checks, f"{f.name} asserts nothing"
