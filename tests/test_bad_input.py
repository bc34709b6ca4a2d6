"""What does not fit is refused with one ValueError that names the argument, what was expected and what came."""
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from attention_ref import check, diagnose, load_cases, sdpa, variants
from attention_ref.conformance import cases, report
from attention_ref.conformance.implementations import judge, run
from attention_ref.shapes import parse, size_of, symbols

FORMS = {f"{name}.{form.__name__}": (name, form) for name, module in variants().items() for form in module.FORMS}
ALL_FORMS = pytest.mark.parametrize("form", FORMS)
MASK = "mask: expected bool (True = may attend; additive terms are called bias), got "


def basic(variant="sdpa", **changes):
    """The inputs of the basic case of a variant."""
    return load_cases(variant, "basic")[0].in_dtype("float64") | changes


def refusal(function, *arguments, **inputs):
    """The message of the ValueError that the call must raise."""
    with pytest.raises(ValueError) as error:
        function(*arguments, **inputs)
    return str(error.value)


# Scaled dot-product attention: what people get wrong

WRONG = dict(
    q_without_batch=("q", lambda x: x["q"][0], "q: expected shape (B, H, Tq, dk), got (3, 5, 4)"),
    q_with_one_more_axis=("q", lambda x: x["q"][None], "q: expected shape (B, H, Tq, dk), got (1, 2, 3, 5, 4)"),
    q_a_number=("q", lambda x: 1.0, "q: expected an array of shape (B, H, Tq, dk), got float"),
    q_none=("q", lambda x: None, "q: expected an array of shape (B, H, Tq, dk), got NoneType"),
    q_a_list=("q", lambda x: x["q"].tolist(), "q: expected an array of shape (B, H, Tq, dk), got list"),
    q_text=("q", lambda x: "queries", "q: expected an array of shape (B, H, Tq, dk), got str"),
    q_integers=("q", lambda x: x["q"].astype(int), "q: expected float, got dtype int64"),
    q_booleans=("q", lambda x: x["q"] > 0, "q: expected float, got dtype bool"),
    q_objects=("q", lambda x: x["q"].astype(object), "q: expected float, got dtype object"),
    q_texts=("q", lambda x: x["q"].astype(str), "q: expected float, got dtype <U32"),
    k_other_batch=("k", lambda x: x["k"][:1], "k: expected shape (B, H, Tk, dk) with B = 2, got (1, 3, 6, 4)"),
    k_other_heads=("k", lambda x: x["k"][:, :1], "k: expected shape (B, H, Tk, dk) with H = 3, got (2, 1, 6, 4)"),
    k_other_width=("k", lambda x: x["k"][..., :3], "k: expected shape (B, H, Tk, dk) with dk = 4, got (2, 3, 6, 3)"),
    k_layout=("k", lambda x: x["k"].swapaxes(1, 2), "k: expected shape (B, H, Tk, dk) with H = 3, got (2, 6, 3, 4)"),
    v_other_length=("v", lambda x: x["v"][:, :, :5], "v: expected shape (B, H, Tk, dv) with Tk = 6, got (2, 3, 5, 7)"),
    mask_of_0_and_1=("mask", lambda x: x["mask"] * 1.0, MASK + "dtype float64"),
    mask_additive=("mask", lambda x: np.where(x["mask"], 0, -np.inf), MASK + "dtype float64"),
    mask_integers=("mask", lambda x: x["mask"].astype(int), MASK + "dtype int64"),
    mask_a_number=("mask", lambda x: 1.0, MASK + "dtype float64"),
    mask_none=("mask", lambda x: None, MASK + "None"),
    mask_a_list=("mask", lambda x: [[True]], "mask: expected an array of shape (B, H, Tq, Tk), got list"),
    mask_ragged=("mask", lambda x: [[True], []], "mask: expected an array of shape (B, H, Tq, Tk), got list"),
    mask_transposed=("mask", lambda x: x["mask"].swapaxes(2, 3),
                     "mask: expected shape (B, H, Tq, Tk) with Tq = 5, got (1, 1, 6, 5)"),
    mask_per_key=("mask", lambda x: np.ones((2, 6), bool),
                  "mask: expected shape (B, H, Tq, Tk) with Tq = 5, got (2, 6)"),
    mask_of_no_key=("mask", lambda x: np.ones((5, 0), bool),
                    "mask: expected shape (B, H, Tq, Tk) with Tk = 6, got (5, 0)"),
    mask_five_axes=("mask", lambda x: x["mask"][None], "mask: expected shape (B, H, Tq, Tk), got (1, 1, 1, 5, 6)"),
    bias_none=("bias", lambda x: None, "bias: expected float, got None"),
    bias_boolean=("bias", lambda x: x["mask"], "bias: expected float, got dtype bool"),
    bias_integers=("bias", lambda x: np.zeros((5, 6), int), "bias: expected float, got dtype int64"),
    bias_other_keys=("bias", lambda x: np.zeros((5, 5)), "bias: expected shape (B, H, Tq, Tk) with Tk = 6, got (5, 5)"),
    sink_per_batch=("sink", lambda x: np.zeros(2), "sink: expected shape (H) with H = 3, got (2,)"),
    scale_none=("scale", lambda x: None, "scale: expected float, got None"),
    scale_text=("scale", lambda x: "auto", "scale: expected float, got dtype <U4"),
    scale_a_list=("scale", lambda x: [0.5], "scale: expected one float, got list"),
    scale_an_array=("scale", lambda x: np.full(3, 0.5), "scale: expected shape (), got (3,)"),
    scale_boolean=("scale", lambda x: True, "scale: expected float, got dtype bool"),
    softcap_text=("softcap", lambda x: "off", "softcap: expected float, got dtype <U3"),
    softcap_false=("softcap", lambda x: False, "softcap: expected float, got dtype bool"),
)


@pytest.mark.parametrize("form", ["dense", "loop"])
@pytest.mark.parametrize("name", WRONG)
def test_sdpa_says_what_is_wrong(name, form):
    argument, change, message = WRONG[name]
    x = basic()
    assert refusal(getattr(sdpa, form), **x | {argument: change(x)}) == message


@pytest.mark.parametrize("change", [
    dict(scale=1), dict(scale=np.float64(0.5)), dict(mask=True), dict(mask=np.ones(6, bool)), dict(bias=0.0),
    dict(bias=np.zeros((5, 1))), dict(sink=0.5), dict(softcap=2)], ids=lambda change: "".join(map(str, change)))
def test_what_broadcasts_is_taken(change):
    o, lse = sdpa.dense(**basic(**change))
    assert o.shape == (2, 3, 5, 7) and np.isfinite(lse).all()


def test_a_scale_must_be_given():
    x = basic()
    del x["scale"]
    with pytest.raises(TypeError, match="scale"):
        sdpa.dense(**x)


# Every form of every variant

def given(case):
    """The arrays among the inputs."""
    return [name for name, x in case.inputs.items() if isinstance(x, np.ndarray)]


def full_rank(case, name):
    """An array input with its missing axes put in front."""
    x = case.inputs[name]
    return x.reshape((1,) * (len(parse(case.module.INPUTS[name]).axes) - x.ndim) + x.shape)


def bound_axes(case):
    """(argument, axis number, size) of every axis whose size another array determines too."""
    axes = {name: parse(text).axes for name, text in case.module.INPUTS.items()}
    sizes = {axis: size_of(axis, case.sizes) for name in axes for axis in axes[name]}
    holders = {}
    for name in given(case):
        for axis, size in zip(axes[name], full_rank(case, name).shape):
            for symbol in symbols(axis) if size == sizes[axis] else ():
                holders.setdefault(symbol.replace("Hq", "Hkv"), set()).add(name)        # Hq is a multiple of Hkv
    for name in given(case):
        for i, axis in enumerate(axes[name]):
            if set().union(*(holders[symbol] for symbol in symbols(axis.replace("Hq", "Hkv")))) - {name}:
                yield name, i, sizes[axis]


def names_an_argument(message, variant):
    """Whether a message starts with the name of an argument and says what was expected and what came."""
    return re.match(f"({'|'.join(variants()[variant].INPUTS)}): expected .+, got .+", message)


@ALL_FORMS
def test_one_axis_too_many(form):
    variant, function = FORMS[form]
    case = load_cases(variant, "basic")[0]
    for name in given(case):
        if parse(case.module.INPUTS[name]).axes:
            message = refusal(function, **case.inputs | {name: full_rank(case, name)[None]})
            assert message.startswith(f"{name}: expected shape") and names_an_argument(message, variant), message


@pytest.mark.parametrize("variant", [name for name, module in variants().items() if hasattr(module, "vjp")])
def test_a_cotangent_that_does_not_fit(variant):
    """A cotangent with an axis too many, a size too many or no array at all is named, with the shape of its output."""
    case = load_cases(variant, "basic")[0]
    for name, d in case.cotangents.items():
        for wrong in (d[None], d.repeat(2, -1), 0.0, None):
            message = refusal(case.module.vjp, **case.inputs | case.cotangents | {name: wrong})
            assert re.match(f"{name}: expected (an array of )?shape .+, got .+", message), message


@ALL_FORMS
def test_one_size_changed(form):
    variant, function = FORMS[form]
    case, tried = load_cases(variant, "basic")[0], 0
    for name, axis, size in bound_axes(case):
        x = full_rank(case, name)
        wrong = np.resize(np.moveaxis(x, axis, 0), (size + 1, *np.delete(x.shape, axis)))
        message = refusal(function, **case.inputs | {name: np.moveaxis(wrong, 0, axis)})
        assert names_an_argument(message, variant), (name, axis, message)
        tried += 1
    assert tried >= 4


@ALL_FORMS
@pytest.mark.parametrize("value", [None, [1.0], "text", {}, np.datetime64("2020"), np.array(["a"]), np.zeros((2,) * 9)],
                         ids=lambda value: type(value).__name__)
def test_nonsense(form, value):
    variant, function = FORMS[form]
    case = load_cases(variant, "basic")[0]
    for name, text in case.module.INPUTS.items():
        if not (value is None and parse(text).optional):
            message = refusal(function, **case.inputs | {name: value})
            assert message.startswith(f"{name}: expected ") and names_an_argument(message, variant), message


@ALL_FORMS
def test_integers_have_a_domain(form):
    variant, function = FORMS[form]
    case, module = load_cases(variant, "basic")[0], variants()[variant]
    for name, text in module.INPUTS.items():
        spec = parse(text)
        if spec.kind == "int" and (spec.equals or spec.least > -np.inf):
            for wrong in (int(spec.least) - 1, 1.5, True):
                x = case.inputs[name]
                value = np.full(np.shape(x), wrong) if isinstance(x, np.ndarray) else wrong
                assert refusal(function, **case.inputs | {name: value}).startswith(f"{name}: expected "), wrong


@ALL_FORMS
def test_integers_that_point_stay_below(form):
    variant, function = FORMS[form]
    case, module = load_cases(variant, "basic")[0], variants()[variant]
    for name, text in module.INPUTS.items():
        if size := parse(text).below:
            wrong = np.where(np.arange(case.inputs[name].size) == 1, case.sizes[size], case.inputs[name].ravel())
            message = refusal(function, **case.inputs | {name: wrong.reshape(case.inputs[name].shape)})
            assert message == f"{name}: expected numbers < {size} = {case.sizes[size]}, got {case.sizes[size]}"


# Asking for golden data

def test_an_unknown_variant():
    message = refusal(load_cases, "spda")
    assert message.startswith("variant: expected one of ") and "sdpa" in message and message.endswith(", got 'spda'")
    with pytest.raises(AttributeError, match="has no attribute 'spda'; the variants are .*sdpa"):
        __import__("attention_ref").spda


def test_an_unknown_case():
    message = refusal(load_cases, "sdpa", "no such case")
    assert message.startswith("case: expected (part of) one of basic, ") and message.endswith(", got 'no such case'")


@pytest.fixture
def copy(tmp_path):
    """A copy of the golden folder."""
    return shutil.copytree(cases.GOLDEN, tmp_path / "golden")


def change_index(folder, change):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(change(index)))


def flip(path, place):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


TAMPERED = dict(
    json_changed=(lambda d: flip(d / "sdpa.json", 500), "sdpa.json was changed: its sha256 is not"),
    tensors_changed=(lambda d: flip(d / "sdpa.safetensors", -1), "sdpa.safetensors was changed: its sha256 is not"),
    header_changed=(lambda d: flip(d / "sdpa.safetensors", 3), "sdpa.safetensors was changed: its sha256 is not"),
    tensors_cut=(lambda d: (d / "sdpa.safetensors").write_bytes(b""), "sdpa.safetensors was changed"),
    json_missing=(lambda d: (d / "sdpa.json").unlink(), "cannot read sdpa.json in .*FileNotFoundError"),
    tensors_missing=(lambda d: (d / "sdpa.safetensors").unlink(), "cannot read sdpa.safetensors in .*FileNotFound"),
    index_missing=(lambda d: (d / "index.json").unlink(), "cannot read sdpa.json in .*FileNotFoundError"),
    index_a_folder=(lambda d: ((d / "index.json").unlink(), (d / "index.json").mkdir()), "cannot read .*IsADirectory"),
    index_empty=(lambda d: (d / "index.json").write_bytes(b""), "cannot read sdpa.json in .*JSONDecodeError"),
    index_broken=(lambda d: flip(d / "index.json", 0), "cannot read sdpa.json in .*JSONDecodeError"),
    index_not_text=(lambda d: (d / "index.json").write_bytes(b"\xff\xfe\xff"), "cannot read .*UnicodeDecodeError"),
    index_a_list=(lambda d: change_index(d, lambda index: [index]), "cannot read sdpa.json in .*TypeError"),
    index_without_files=(lambda d: change_index(d, lambda index: {}), "cannot read sdpa.json in .*KeyError"),
    no_files=(lambda d: change_index(d, lambda index: index | dict(files={})), "cannot read .*KeyError"),
    files_a_list=(lambda d: change_index(d, lambda index: index | dict(files=[])), "cannot read .*TypeError"),
    entry_text=(lambda d: change_index(d, lambda index: dict(files={"sdpa.json": "x"})), "cannot read .*TypeError"),
    entry_empty=(lambda d: change_index(d, lambda index: dict(files={"sdpa.json": {}})), "cannot read .*KeyError"),
    other_format=(lambda d: change_index(d, lambda index: index | dict(format="attention_ref-golden-0")),
                  f"expected format '{cases.FORMAT}', got 'attention_ref-golden-0'"),
    no_format=(lambda d: change_index(d, lambda index: dict(files=index["files"])), "expected format .*, got None"),
)


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_golden_data(copy, name):
    change, message = TAMPERED[name]
    change(copy)
    text = refusal(load_cases, "sdpa", folder=copy)
    assert re.match(f"golden data: {message}", text), text


def test_an_untouched_copy_is_read(copy):
    assert [c.name for c in load_cases("sdpa", folder=copy)] == list(sdpa.CASES)
    flip(copy / "sdpa.json", 500)
    assert load_cases("gqa", folder=copy), "each variant stands alone"


# Judging outputs

def right(case="basic", dtype=np.float64):
    """A case of sdpa and its right outputs."""
    case = load_cases("sdpa", case)[0]
    return case, {name: y.astype(dtype) for name, y in case.outputs.items()}


def problem(outputs, dtype=None, case="basic"):
    """What check finds wrong with a dict of outputs."""
    result = check(right(case)[0], outputs, dtype)
    assert not result.passed and result.score == np.inf and report.explain(result)
    return result.worst.problem


@pytest.mark.parametrize("outputs, message", [
    (dict(output=0), "outputs: expected names among o, lse, scores, capped, biased, weights, dq, .*, got output"),
    (dict(O=0, o=0), "outputs: expected names among .*, got O, o"),
    ((1, 2, 3), r"outputs: expected 1 to 2 arrays \(o, lse\), got 3"),
    ((), r"outputs: expected 1 to 2 arrays \(o, lse\), got 0"),
    ([], r"outputs: expected 1 to 2 arrays \(o, lse\), got 0")])
def test_outputs_of_another_kind(outputs, message):
    for function in (check, diagnose):
        assert re.match(message, refusal(function, right()[0], outputs))


@pytest.mark.parametrize("dtype", ["float", "f8", "int64", "complex128", "float128", "double", 64, np.float32])
def test_a_dtype_that_is_none(dtype):
    case, outputs = right()
    message = refusal(check, case, outputs, dtype)
    assert message == f"dtype: expected one of float64, float32, float16, bfloat16, got {dtype!r}"


@pytest.mark.parametrize("outputs", [None, {}, (None, None), [None]], ids=str)
def test_no_output_is_not_right(outputs):
    result = check(right()[0], outputs)
    assert not result.passed and result.score == np.inf and "no output to compare" in report.explain(result)


@pytest.mark.parametrize("change", [
    lambda o: o[0], lambda o: o[None], lambda o: o[:, :, :, :-1], lambda o: o.swapaxes(1, 2), lambda o: o[:1],
    lambda o: o[0, 0, 0, 0], lambda o: np.zeros(0), lambda o: o.reshape(-1)])
def test_a_wrong_shape(change):
    case, outputs = right()
    wrong = change(outputs["o"])
    assert problem(outputs | dict(o=wrong)) == f"expected shape (2, 3, 5, 7), got {wrong.shape}"


@pytest.mark.parametrize("dtype", ["int64", "int8", "bool", "complex128", "<U9", "O"])
def test_a_wrong_type(dtype):
    case, outputs = right()
    wrong = np.round(outputs["o"]).astype(dtype)
    assert problem(outputs | dict(o=wrong), "float64") == f"expected floating numbers, got dtype {wrong.dtype}"


@pytest.mark.parametrize("claimed, passes", dict(float16=True, bfloat16=True, float32=False, float64=False).items())
def test_a_narrow_type_is_no_wide_one(claimed, passes):
    """float16 numbers are within the budget of float16, and not of what they claim to be."""
    case, outputs = right(dtype=np.float16)
    assert check(case, outputs).dtype == "float16" and check(case, outputs).passed
    assert check(case, outputs, claimed).passed == passes


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_one_wrong_number_is_enough(value, dtype):
    case, outputs = right()
    outputs["o"][1, 2, 3, 4] = value
    result = check(case, outputs, dtype)
    assert not result.passed and result.worst.place == (1, 2, 3, 4)
    assert "o at batch 1, head 2, query 3, channel 4: got " in report.explain(result)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1e300, -1e9])
def test_an_infinity_is_met_exactly(value):
    case, outputs = right("empty_row")
    assert outputs["lse"][0, 0, 1] == -np.inf and check(case, outputs).passed
    outputs["lse"][0, 0, 1] = value
    for dtype in ("float64", "float16"):
        result = check(case, outputs, dtype)
        assert not result.passed and result.worst.name == "lse" and result.worst.place == (0, 0, 1)


@pytest.mark.parametrize("value", [np.nan, -1e-300, 1e-30])
def test_a_zero_that_marks_absence_is_met_exactly(value):
    case, outputs = right("empty_row")
    outputs["o"][0, 0, 1, 0] = value
    assert not check(case, outputs).passed


def test_any_value_is_right_where_nothing_may_depend_on_it():
    case = load_cases("sdpa", "empty_row")[0]
    hidden = np.isnan(case.steps["scores"])
    assert hidden.any() and not hidden.all()
    for value in (np.nan, np.inf, 7.0):
        assert check(case, dict(scores=np.where(hidden, value, case.steps["scores"]))).passed
    assert not check(case, dict(scores=np.where(hidden, 7.0, case.steps["scores"] + 1e-9))).passed


# Whatever an implementation returns, there is a verdict

RETURNS = dict(
    nothing=None, a_number=1.0, text="abc", texts=("a", "b"), an_empty_tuple=(), an_empty_dict={}, three=(1, 2, 3),
    nested=[[1.0], [2.0]], ragged=([[1.0], [1.0, 2.0]], 0), objects=(object(), object()), a_module=np, a_set={1.0},
    a_namespace=SimpleNamespace(o=1), dict_of_text=dict(o="abc"), dict_of_none=dict(o=None),
    unknown_name=dict(attention=np.zeros(3)), number_as_name={1: np.zeros(3)},
    full_of_text=(np.full((2, 3, 5, 7), "x"),), full_of_none=(np.full((2, 3, 5, 7), None),),
    full_of_complex=(np.full((2, 3, 5, 7), 1j),), full_of_dates=(np.zeros((2, 3, 5, 7), "M8[s]"),),
    full_of_records=(np.zeros((2, 3, 5, 7), "f8,f8"),))


@pytest.mark.parametrize("name", RETURNS)
def test_nonsense_is_wrong_and_no_crash(name):
    results, diagnosis = judge(lambda **x: RETURNS[name], load_cases("sdpa", "basic"), "float64")
    assert not results[0].passed and not results[0].unsupported
    text = report.verdict(results, diagnosis, "float64")
    assert "0 passed, 1 failed, 0 unsupported" in text and "FAILED sdpa/basic" in text


def test_who_writes_into_the_inputs_spoils_nothing():
    def greedy(**x):
        outputs = sdpa.dense(**x)
        for value in x.values():
            if isinstance(value, np.ndarray):
                value[...] = 0
        return outputs
    case = load_cases("sdpa", "empty_row")[0]
    assert all(run(greedy, case, "float64").passed for _ in range(2))
