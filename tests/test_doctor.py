"""The doctor finds what is missing, old or changed; golden data that does not follow its schema is not read."""
import json
import shutil
import sys
from importlib import metadata

import pytest

import attention_ref
from attention_ref import load_cases, variants
from attention_ref.conformance import cases, doctor, schema
from attention_ref.conformance.cli import main

INDEX = json.loads((cases.GOLDEN / "gqa.json").read_text())


def failures(folder=cases.GOLDEN):
    return {finding.part: finding.found for finding in doctor.examine(folder) if not finding.healthy}


@pytest.fixture
def golden(tmp_path):
    """A copy of the golden data, and a function that puts other text for gqa.json into it, index and all."""
    folder = tmp_path / "golden"
    shutil.copytree(cases.GOLDEN, folder)

    def put(text):
        (folder / "gqa.json").write_text(text)
        cases.write_index(folder)
        return folder
    return put


def without(index, field):
    return {name: value for name, value in index.items() if name != field}


# The doctor

def test_this_installation_is_whole(capsys):
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert code == 0 and "FAILED" not in out and not failures()
    assert all(f"\n{name} " in out for name in ("Python", "numpy", "numba", *doctor.file_names(), "sdpa/basic"))
    assert "schema as stated" in out


def test_without_fastjsonschema_the_fields_are_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastjsonschema", None)
    found = doctor.data("gqa.json", cases.GOLDEN)
    assert found.healthy and "(fastjsonschema, which sees more, is not installed)" in found.found


@pytest.mark.parametrize("found, bound, healthy", [
    ("2.0.1", "2.0", True), ("1.26", "2.0", False), ("2.13.0+cpu", "2.9", True), ("0.9", "0.10", False)])
def test_versions(found, bound, healthy):
    assert doctor.version("numpy", found, bound).healthy == healthy


def test_packages(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)
    monkeypatch.setattr(metadata, "version", absent)
    assert doctor.package("numpy", "2.0", None) == ("numpy", "missing", False)
    assert doctor.package("torch", "0", "peers") == ("torch", "not installed: pip install 'attention_ref[peers]'", True)
    found = {f.part: f.healthy for f in doctor.software()}
    assert {name for name, healthy in found.items() if not healthy} == {"numpy", "scipy", "numba", "matplotlib"}


def test_changed_data(golden, monkeypatch, capsys):
    folder = golden(json.dumps(INDEX))
    path = folder / "sdpa.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (folder / "flash.json").unlink()
    found = failures(folder)
    assert list(found) == ["flash.json", "sdpa.safetensors", "sdpa/basic"]
    assert "sha256 is not the one in index.json" in found["sdpa.safetensors"] and "cannot read" in found["flash.json"]
    monkeypatch.setattr(doctor.examine, "__defaults__", (folder,))
    assert main(["doctor"]) == 1 and "FAILED" in capsys.readouterr().out


def test_a_judge_that_passes_everything_is_noticed(monkeypatch):
    monkeypatch.setattr(doctor, "wrong_outputs", lambda case, slug, dtype: case.outputs)
    assert list(failures()) == ["sdpa/basic"]


# Golden data on reading

CASE = INDEX["cases"][0]
BROKEN = dict(
    no_json=('{"format": ', "expected JSON, got "),
    no_object=("[]", "expected format 'attention_ref-golden-1', got a list"),
    other_format=(json.dumps(INDEX | dict(format="attention_ref-golden-9")), "got 'attention_ref-golden-9'"),
    missing=(json.dumps(without(INDEX, "steps")), "gqa.json: steps is missing"),
    unknown=(json.dumps(INDEX | dict(surprise=1)), "gqa.json: surprise is not known"),
    wrong_type=(json.dumps(INDEX | dict(cases={})), "cases: expected array, got dict"),
    case_no_object=(json.dumps(INDEX | dict(cases=[7])), "gqa.json, case 0: expected an object, got a int"),
    case_missing=(json.dumps(INDEX | dict(cases=[CASE, without(CASE, "why")])), "gqa.json, case 1: why is missing"),
    case_type=(json.dumps(INDEX | dict(cases=[CASE | dict(bits="128")])), "case 0: bits: expected integer, got str"),
    no_tensor=(json.dumps(INDEX | dict(cases=[CASE | dict(name="renamed")])), "gqa.json names 'renamed/k'"),
)


@pytest.mark.parametrize("name", BROKEN)
def test_an_index_that_is_not_as_it_should_be(golden, name):
    text, message = BROKEN[name]
    folder = golden(text)
    with pytest.raises(ValueError, match="^golden data: gqa.*") as caught:
        load_cases("gqa", folder=folder)
    assert message in str(caught.value)
    assert name == "no_tensor" or "gqa.json" in failures(folder)


def test_a_library_sees_more(golden):
    found = failures(golden(json.dumps(INDEX | dict(cases=[CASE | dict(radius="small")]))))
    assert "radius" in found["gqa.json"]


def test_the_version_is_one():
    assert json.loads(schema.SCHEMA.read_text())["properties"]["format"]["const"] == cases.FORMAT


# The interface

def test_all_is_what_there_is():
    found = {}
    exec("from attention_ref import *", found)
    assert set(attention_ref.__all__) == found.keys() - {"__builtins__"} == {*variants()} | {
        "variants", "load_cases", "check", "diagnose"}
    assert dir(attention_ref) == sorted(attention_ref.__all__)
