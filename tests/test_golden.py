"""Golden data is certified, follows its schema, is remade byte for byte; every case has the property it exists for."""
import json

import fastjsonschema
import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 in which K is stored)
import numpy as np
import pytest
from safetensors.numpy import load_file

from attention_ref import load_cases, variants
from attention_ref.conformance import cases, golden, tensors

VARIANTS = list(variants())


@pytest.fixture(scope="module")
def remade(tmp_path_factory):
    """A folder with all golden data made anew."""
    folder = tmp_path_factory.mktemp("golden")
    golden.remake(VARIANTS, folder, progress=lambda text: None)
    return folder


@pytest.mark.parametrize("name", [f"{v}{end}" for v in VARIANTS for end in (".json", ".safetensors")] + ["index.json"])
def test_remade_byte_for_byte(remade, name):
    assert (remade / name).read_bytes() == (cases.GOLDEN / name).read_bytes()


def test_no_golden_file_without_a_variant():
    files = {p.name for p in cases.GOLDEN.iterdir()} - {"index.json", "schema.json"}
    assert files == {f"{v}{end}" for v in VARIANTS for end in (".json", ".safetensors")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_schema(variant):
    validate = fastjsonschema.compile(json.loads((cases.GOLDEN / "schema.json").read_text()))
    index = json.loads((cases.GOLDEN / f"{variant}.json").read_text())
    assert validate(index) == index
    with pytest.raises(fastjsonschema.JsonSchemaException):
        validate(index | {"surprise": 1})


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_official_library_reads_the_same(variant):
    path = cases.GOLDEN / f"{variant}.safetensors"
    theirs, ours = load_file(path), tensors.unpack(path.read_bytes())
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[k], ours[k], equal_nan=ours[k].dtype.kind == "f") for k in ours)


@pytest.mark.parametrize("variant", VARIANTS)
def test_certified_and_complete(variant):
    module = variants()[variant]
    found = load_cases(variant)
    assert [c.name for c in found] == list(module.CASES)
    for case in found:
        assert case.bits >= 128 and 0 <= case.radius < 2.0 ** -53
        assert list(case.inputs) == list(module.INPUTS) and list(case.outputs) == list(module.OUTPUTS)
        assert case.conditioning.keys() == case.expected.keys()
        assert all(np.all(k >= 0) and np.all(np.isfinite(k)) for k in case.conditioning.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_why_is_proved(variant):
    for case in load_cases(variant):
        golden.prove(case)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_basic_case_has_no_equal_and_no_unit_size(variant):
    sizes = [n for n in load_cases(variant, "basic")[0].sizes.values()]
    assert len(set(sizes)) == len(sizes) and min(sizes) > 1


def test_a_false_why_is_refused():
    case = load_cases("sdpa", "basic")[0]
    case.catches.remove("scale_missing")
    with pytest.raises(AssertionError, match="does not catch scale_missing"):
        golden.prove(case)
    assert "scale_missing" in load_cases("sdpa", "basic")[0].catches, "a caller's change reached the stored case"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_small(variant):
    assert sum(p.stat().st_size for p in cases.GOLDEN.glob(f"{variant}.*")) < 510_000
