"""Golden cases for programs: what every format holds, what a program may write, and what is said of it."""
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from attention_ref import load_cases, sdpa, variants
from attention_ref.conformance import export, programs, tensors
from attention_ref.conformance.cli import main
from attention_ref.conformance.diagnosis import golden_cases, golden_mistake
from attention_ref.conformance.verify import compare


@pytest.fixture
def call(capsys):
    """The command as a function: (exit code, output, messages)."""
    def run(*arguments):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()
    return run


@pytest.fixture
def folder(tmp_path):
    """An export of two cases of sdpa as text."""
    export.write("sdpa", tmp_path / "cases", "txt", case="causal_t")
    return tmp_path / "cases"


def read(path, case):
    """The arrays of one exported file, by the reader of results."""
    return programs.read_file(path, case)


def answer(folder, changes=lambda name, outputs: outputs, names=None):
    """Write the right outputs of every case, changed or not, as text into results."""
    for case in load_cases("sdpa"):
        if (folder / "inputs" / f"{case.name}.txt").exists() and case.name in (names or [case.name]):
            data = export.txt(case, changes(case.name, dict(case.outputs)), "float32")[".txt"]
            (folder / "results" / f"{case.name}.txt").write_bytes(data)


# What is exported

def same(x, y):
    return x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind == "f")


@pytest.mark.parametrize("format", ["safetensors", "npz", "npy", "json", "txt"])
@pytest.mark.parametrize("variant", ["sdpa", "masked"])
def test_what_is_written_is_read(tmp_path, variant, format):
    export.write(variant, tmp_path, format, "float32")
    for case in load_cases(variant):
        for part in ("inputs", "expected", "tolerance"):
            values = export.PARTS[part](case, "float32")
            wanted = export.arrays_of(values)
            found = read_part(tmp_path / part, case, format)
            assert sorted(found) == sorted(wanted), f"{case.id} {part}"
            assert all(same(found[name], wanted[name]) for name in wanted), f"{case.id} {part}"


def read_part(folder, case, format):
    if format == "npy":
        return {p.name.split(".")[1]: np.load(p) for p in folder.glob(f"{case.name}.*.npy")}
    if format != "json":
        return read(folder / f"{case.name}.{format}", case)
    found = json.loads((folder / f"{case.name}.json").read_text(), parse_constant=pytest.fail)
    arrays = {name: np.array([float(n) for n in x["data"]]).reshape(x["shape"]) if isinstance(x, dict) else x
              for name, x in found.items()}
    return export.arrays_of(arrays)


@pytest.mark.parametrize("dtype, code", dict(float64="F64", float32="F32", float16="F16", bfloat16="BF16").items())
def test_types(tmp_path, dtype, code):
    export.write("sdpa", tmp_path, "safetensors", dtype, "everything")
    data = (tmp_path / "inputs/everything.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    assert {name: x["dtype"] for name, x in header.items()} == dict(
        dict.fromkeys(("q", "k", "v", "bias", "sink", "do", "dlse"), code), mask="BOOL", scale="F64", softcap="F64")
    case = load_cases("sdpa", "everything")[0]
    assert all(np.array_equal(x, case.inputs[name]) for name, x in tensors.unpack(data).items() if name in case.inputs)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("format", ["c", "rust", "js"])
def test_source_is_accepted_by_its_compiler(tmp_path, variant, format):
    """All cases of a variant in one program, which prints what is in them."""
    tool = dict(c="cc", rust="rustc", js="node")[format]
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    export.write(variant, tmp_path, format)
    golden = load_cases(variant)
    done = subprocess.run(SOURCE[format](golden, tmp_path), cwd=tmp_path, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sums = [(case.inputs | case.outputs)[name].sum() for case in golden for _, name in first_arrays(case)]
    assert np.allclose([float(word) for word in done.stdout.split()], sums, rtol=1e-12, equal_nan=True)


def first_array(arguments):
    return next(name for name, x in arguments.items() if isinstance(x, np.ndarray))


def first_arrays(case):
    return ("inputs", first_array(case.inputs)), ("expected", first_array(case.outputs))


def c_program(golden, folder):
    lines = [f'#include "{part}/{case.name}.h"' for case in golden for part in ("inputs", "expected", "tolerance")]
    pairs = [(f"{case.name}_{name}", np.size((case.inputs | case.outputs)[name]))
             for case in golden for _, name in first_arrays(case)]
    body = [f"s = 0; for (int i = 0; i < {n}; i++) s += {name}[i]; printf(\"%.17g\\n\", s);" for name, n in pairs]
    text = "\n".join([*lines, "#include <stdio.h>", "int main(void) { double s;", *body, "return 0; }"])
    (folder / "all.c").write_text(text)
    return "cc -std=c99 -Wall -Werror -Wno-unused all.c && ./a.out"


def rust_program(golden, folder):
    lines = [f'#[path = "{part}/{case.name}.rs"] mod {part}_{case.name};' for case in golden for part in export.PARTS]
    body = [f'println!("{{}}", {part}_{case.name}::{name.upper()}.iter().map(|&x| x as f64).sum::<f64>());'
            for case in golden for part, name in first_arrays(case)]
    (folder / "all.rs").write_text("\n".join(["#![allow(dead_code)]", *lines, "fn main() {", *body, "}"]))
    return "rustc -D warnings all.rs && ./all"


def js_program(golden, folder):
    body = [f'console.log((await import("./{part}/{case.name}.mjs")).default.{name}.data.reduce((x, y) => x + y, 0));'
            for case in golden for part, name in first_arrays(case)]
    (folder / "all.mjs").write_text("\n".join(body))
    return "node all.mjs"


SOURCE = dict(c=c_program, rust=rust_program, js=js_program)


def test_arguments_that_are_no_arrays(tmp_path):
    case = load_cases("masked", "window")[0]
    values = export.inputs_of(case, "float32") | dict(left=None, right=2, causal=True, anchor="top-left")
    assert json.loads(export.as_json(case, values, "float32")[".json"])["left"] is None
    found = export.arrays_of(values)
    assert "left" not in found and found["right"] == 2 and found["causal"].dtype == bool
    assert bytes(found["anchor"]) == b"top-left" and found["anchor"].dtype == np.uint8
    text = export.rust(case, values, "float32")[".rs"].decode()
    assert "pub const LEFT: Option<i64> = None;" in text and "pub const RIGHT: Option<i64> = Some(2);" in text
    assert 'pub const ANCHOR: &str = "top-left";' in text and "pub const CAUSAL: bool = true;" in text
    text = export.c(case, values, "float32")[".h"].decode()
    assert f"static const double {case.name}_left = NAN;" in text
    assert f'static const char {case.name}_anchor[] = "top-left";' in text


def test_tolerances_are_those_of_the_verdict():
    for case in load_cases("sdpa"):
        allowed = export.tolerance_of(case, "float32")
        for name, exact in case.expected.items():
            room = allowed[f"tolerance_{name}"]
            assert room.shape == exact.shape and (room[np.isnan(exact)] == np.inf).all()
            for factor, right in ((0.99, True), (1.5, False)):
                got = np.where(np.isfinite(exact), exact + factor * room, exact)
                if np.isfinite(exact).any():
                    assert (compare(name, got, exact, case.conditioning[name], "float32").score <= 1) == right


def test_the_index_says_what_a_case_is(folder):
    index = json.loads((folder / "index.json").read_text())
    assert (index["format"], index["variant"], index["files"], index["dtype"]) == (
        "attention_ref-export-1", "sdpa", "txt", "float32")
    assert (index["inputs"], index["outputs"], index["conventions"]) == (sdpa.INPUTS, sdpa.OUTPUTS, sdpa.CONVENTIONS)
    assert [c["name"] for c in index["cases"]] == ["causal_tall", "causal_top_left"]
    tall = index["cases"][0]
    assert (tall["why"], tall["sizes"]) == (sdpa.CASES["causal_tall"]["why"], dict(sdpa.SIZES, Tq=8))
    assert tall["options"] == dict(scale=0.5, softcap=None) and tall["conventions"] == dict(causal="bottom-right")
    assert tall["inputs"] == ["bias", "k", "mask", "q", "sink", "v"] and tall["outputs"] == ["o", "lse"]


def test_export_says_what_it_did(call, tmp_path):
    code, out, err = call("export", "gqa", tmp_path / "a" / "b", "--format", "npy")
    assert (code, err) == (0, "") and out.startswith(f"gqa: {len(load_cases('gqa'))} cases in ")
    assert sorted(os.listdir(tmp_path / "a/b")) == ["expected", "index.json", "inputs", "results", "tolerance"]
    assert (tmp_path / "a/b/inputs/basic.q.npy").exists() and not os.listdir(tmp_path / "a/b/results")


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(case, values, dtype):
        raise OSError("no space left on device")
    monkeypatch.setitem(export.WRITERS, "txt", full)
    with pytest.raises(OSError):
        export.write("sdpa", tmp_path / "cases", "txt")
    assert os.listdir(tmp_path / "cases") == []


@pytest.mark.parametrize("arguments, message", [
    (["spda", "new"], "variant: expected one of .*, got 'spda'"),
    (["sdpa", "used"], "folder: expected an empty or a new one, used holds file"),
    (["sdpa", "used/file"], ".*File exists: 'used/file'"),
    (["sdpa", "new", "--case", "none such"], "case: expected .part of. one of "),
    (["sdpa", "new", "--format", "npz", "--dtype", "bfloat16"], "dtype: npz has no bfloat16; safetensors has, ")])
def test_what_cannot_be_exported(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    os.mkdir("used")
    Path("used/file").touch()
    code, out, err = call("export", *arguments)
    assert (code, out) == (2, "") and re.fullmatch(f"attention-ref: {message}.*\n", err), err
    assert not os.path.exists("new") and os.listdir("used") == ["file"]


def test_choices_of_python_callers(tmp_path):
    for wrong in (dict(format="xml"), dict(dtype="float8")):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected one of .*, got '{[*wrong.values()][0]}'"):
            export.write("sdpa", tmp_path, **wrong)


# What a program wrote

@pytest.mark.parametrize("format", ["safetensors", "npz", "npy", "json", "txt"])
def test_the_expected_files_are_right_results(call, tmp_path, format):
    export.write("sdpa", tmp_path, format, "float64")
    shutil.copytree(tmp_path / "expected", tmp_path / "results", dirs_exist_ok=True)
    code, out, err = call("compare", "sdpa", tmp_path)
    assert (code, err) == (0, "") and f"sdpa in float64: {len(sdpa.CASES)} passed, 0 failed, 0 unsupported" in out


@pytest.mark.parametrize("format", ["npy", "txt"])
def test_one_file_for_each_output(call, folder, format):
    for case in load_cases("sdpa", "causal_t"):
        for name, y in case.outputs.items():
            path = folder / "results" / f"{case.name}.{name}.{format}"
            np.save(path, y) if format == "npy" else path.write_text("\n".join(map(str, y.ravel())) + "\n")
    code, out, err = call("compare", "sdpa", folder)
    assert (code, err) == (0, "") and "2 passed, 0 failed, 0 unsupported" in out


def test_a_mistake_is_named(call, folder):
    wrong = {case.name: sdpa.BUGS["mask_polarity"][1](case.inputs) for case in load_cases("sdpa", "causal_t")}
    answer(folder, lambda name, outputs: dict(zip(("o", "lse"), wrong[name])))
    code, out, err = call("compare", "sdpa", folder)
    assert (code, err) == (1, "") and "0 passed, 2 failed" in out and "\ndiagnosis:\n  mask_polarity: " in out


def test_a_case_is_named_that_tells_mistakes_apart(call, tmp_path):
    """Two mistakes with the same numbers in what was exported, and the case that has to be exported as well."""
    export.write("sdpa", tmp_path, "txt", case="empty_row_low")
    wrong = golden_mistake("sdpa", "empty_row_low_scores", "empty_row_uniform", "float32")["o"]
    answer(tmp_path, lambda name, outputs: dict(o=wrong))
    code, out, _ = call("compare", "sdpa", tmp_path)
    found = re.search(r"empty_row_uniform can be told from (.*)overflow_clean_up_unmasks by case (\w+) in float32", out)
    assert code == 1 and "; the same numbers as " in out and found
    other = golden_cases("sdpa")[found[2]]
    both = [golden_mistake("sdpa", other.name, slug, "float32")["o"]
            for slug in ("empty_row_uniform", "overflow_clean_up_unmasks")]
    assert not np.allclose(*both, equal_nan=True)


def test_gradients_are_judged_too(call, tmp_path):
    export.write("sdpa", tmp_path, "txt", case="softcap")
    case = load_cases("sdpa", "softcap")[0]
    wrong = case.gradients | sdpa.VJP_BUGS["dq_scale_missing"][1](case.inputs | case.cotangents)
    for gradients, code, text in ((case.gradients, 0, "1 passed"), (wrong, 1, "dq_scale_missing: ")):
        (tmp_path / "results/softcap.txt").write_bytes(export.txt(case, gradients, "float32")[".txt"])
        done = call("compare", "sdpa", tmp_path)
        assert done[0] == code and text in done[1]


def test_a_missing_file_is_not_wrong(call, folder):
    answer(folder, names=["causal_tall"])
    code, out, _ = call("compare", "sdpa", folder)
    assert code == 0 and "1 passed, 0 failed, 1 unsupported" in out
    assert re.search("^unsupported  causal_top_left .* no result file$", out, re.M)


def test_no_file_at_all_is_no_verdict(call, folder):
    code, out, err = call("compare", "sdpa", folder)
    assert (code, out) == (2, "") and "results: expected files such as causal_tall.safetensors or " in err
    shutil.rmtree(folder / "results")
    assert call("compare", "sdpa", folder)[0] == 2


def text_of(**arrays):
    return export.txt(None, arrays, "float32")[".txt"]


HOSTILE = (2 ** 62).to_bytes(8, "little") + b"{}"
CLAIM = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }"
HUGE = b"\x93NUMPY\x01\x00v\x00" + CLAIM.ljust(117) + b"\n"
BROKEN = {
    "causal_tall.txt": [
        (b"", "got none"), (b"o 4 2 3 8 7\n1 2 3\n", "the text ends within o"), (b"o 4 2 3", "the text ends within o"),
        (b"1 2 3\n", "within 1"), (b"o 1 1\n0.5", "expected a newline at the end"), (b"o one\n", "invalid literal"),
        (b"\xff\xfe\n", "UnicodeDecodeError"), (text_of(attention=np.ones(2)), "expected names among o, lse, "),
        (text_of(o=np.ones(3)), r"o: expected shape (2, 3, 8, 7), got (3,)"), (b"o 1 -5\n", "got (0,)")],
    "causal_tall.o.txt": [
        (b"1 2 3\n", "o: expected shape (2, 3, 8, 7), got (3,)"), (b"1 two\n", "could not convert string to float"),
        (b"1 2", "expected a newline at the end")],
    "causal_tall.safetensors": [
        (b"", "expected a header of at most 0 bytes"), (HOSTILE, "it claims 4611686018427387904"),
        (tensors.pack(dict(o=np.ones(9)))[:-5], "the tensors do not fill the"),
        (tensors.pack(dict(o=np.arange(9))), "o: expected floating numbers, got dtype int64")],
    "causal_tall.npz": [(b"PK\x03\x04 cut", "BadZipFile"), (b"", "EOFError"), (b"text", "ValueError")],
    "causal_tall.o.npy": [(HUGE, "cannot read results/causal_tall.o.npy"), (b"\x93NUMPY", "cannot read results/")],
    "causal_tall.npy": [(b"", "expected a name such as causal_tall.o.npy")],
    "causal_tall.json": [
        (b'{"o": {"shape": [1], "data": [', "JSONDecodeError"), (b"[" * 100000, "RecursionError"), (b"[]", "list"),
        (b'{"o": {"shape": [1], "data": [null]}}', 'null is no number: write "NaN", "Infinity" or "-Infinity"')],
}


@pytest.mark.parametrize("name, data, message", [(name, *pair) for name, pairs in BROKEN.items() for pair in pairs])
def test_a_broken_file_fails_its_case_only(call, folder, name, data, message):
    answer(folder, names=["causal_top_left"])
    (folder / "results" / name).write_bytes(data)
    code, out, err = call("compare", "sdpa", folder)
    assert (code, err) == (1, "") and "1 passed, 1 failed, 0 unsupported" in out and message in out, out


def test_a_pickle_is_not_opened(call, folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)
    np.save(folder / "results/causal_tall.o.npy", np.array([Trap()]), allow_pickle=True)
    code, out, _ = call("compare", "sdpa", folder)
    assert code == 1 and "allow_pickle=False" in out and not (tmp_path / "trapped").exists()


def test_an_output_in_two_files(call, folder):
    answer(folder)
    np.save(folder / "results/causal_tall.o.npy", np.ones(3))
    code, out, _ = call("compare", "sdpa", folder)
    assert code == 1 and "o of causal_tall is in several files" in out and "1 passed, 1 failed" in out


@pytest.mark.parametrize("change, message", [
    (lambda f: (f / "index.json").unlink(), "cannot read .*index.json: FileNotFoundError"),
    (lambda f: (f / "index.json").write_text('{"format": '), "cannot read .*index.json: JSONDecodeError"),
    (lambda f: (f / "index.json").write_text("[]"), "cannot read .*index.json: TypeError"),
    (lambda f: (f / "index.json").write_text("[" * 100000), "cannot read .*index.json: RecursionError"),
    (lambda f: edit(f, "variant", "gqa"), "expected attention_ref-export-1 of sdpa, .* says .*, gqa, "),
    (lambda f: edit(f, "format", "attention_ref-export-9"), "expected attention_ref-export-1 of sdpa, "),
    (lambda f: edit(f, "dtype", "float8"), "expected attention_ref-export-1 of sdpa, "),
    (lambda f: edit(f, "files", ["txt"]), "expected attention_ref-export-1 of sdpa, "),
    (lambda f: edit(f, "golden", "0" * 64), ".* was exported from other golden data: export it anew"),
    (lambda f: edit(f, "cases", [dict(name=["causal_tall"])]), "cannot read .*index.json: TypeError")])
def test_an_index_that_does_not_fit(call, folder, change, message):
    answer(folder)
    change(folder)
    code, out, err = call("compare", "sdpa", folder)
    assert (code, out) == (2, "") and re.search(f"^attention-ref: folder: .*{message}.*\n$", err), err


def edit(folder, name, value):
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def test_a_case_that_is_not_there(call, folder):
    answer(folder)
    code, _, err = call("compare", "sdpa", folder, "--case", "basic")
    assert code == 2 and "case: expected (part of) one of causal_tall, causal_top_left, got 'basic'" in err
    code, out, _ = call("compare", "sdpa", folder, "--case", "top")
    assert code == 0 and "1 passed, 0 failed" in out


# Running a program

def run(call, folder, script, *arguments, words="{in} {out}"):
    """Compare with a shell script as the program, $1 its input and $2 its output."""
    (folder.parent / "program.sh").write_text(script + "\n")
    return call("compare", "sdpa", folder, "--command", f"sh '{folder.parent}/program.sh' {words}", *arguments)


COPY = 'cp "${1%/inputs/*}/expected/${1##*/}" "$2"'          # the expected file of a case as its result


def test_a_program_that_is_right(call, folder):
    code, out, err = run(call, folder, "echo talk; echo more >&2; " + COPY)
    assert (code, err) == (0, "") and "2 passed, 0 failed, 0 unsupported" in out and "talk" not in out


def test_the_folder_is_made_if_it_is_empty(call, tmp_path):
    folder = tmp_path / "with a space"
    code, out, err = run(call, folder, COPY)
    assert (code, err) == (0, "") and f"sdpa in float32: {len(sdpa.CASES)} passed" in out
    assert len(os.listdir(folder / "results")) == len(sdpa.CASES)
    (folder / "index.json").unlink()
    assert run(call, folder, COPY)[0] == 2, "what is there is never overwritten"


@pytest.mark.parametrize("script, message", [
    ("echo first >&2; echo 'no kernel image' >&2; exit 3",
     "  the program left with exit code 3; stderr: first\n    no kernel image"),
    ("exit 1", "the program left with exit code 1; stderr: nothing"),
    ("kill -SEGV $$", "the program was ended by signal 11 (Segmentation fault"),
    ("exit 0", "the program wrote no causal_tall.txt"),
    ("printf 'o 4 2 3 8 7\\n1 2' > \"$2\"", "cannot read results/causal_tall.txt: ValueError: the text ends within o"),
    ("yes | head -c 3000 >&2; echo end >&2; exit 1", "    y\n    end\n")])
def test_a_program_that_fails_on_one_case(call, folder, script, message):
    code, out, err = run(call, folder, f'case "$1" in *tall*) {script};; *) {COPY};; esac')
    assert (code, err) == (1, "") and "1 passed, 1 failed, 0 unsupported" in out and message in out, out
    assert len(out) < 8000


def test_a_program_that_hangs_is_stopped_with_its_children(call, folder, tmp_path):
    script = f'case "$1" in *tall*) echo half > "$2"; sleep 60 & echo $! > {tmp_path}/pid; wait;; *) {COPY};; esac'
    code, out, _ = run(call, folder, script, "--timeout", "1.5")
    assert code == 1 and "1 passed, 1 failed" in out and "the program was stopped after 1.5 seconds" in out
    assert (folder / "results/causal_tall.txt").read_text() == "half\n", "what it wrote is kept"
    child = (tmp_path / "pid").read_text().strip()
    for _ in range(50):                                  # a moment for the system to take it away
        state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True).stdout.strip()
        if state[:1] in ("", "Z"):
            break
        time.sleep(0.1)
    assert state[:1] in ("", "Z"), "its child is gone too"


def test_a_program_that_says_it_cannot(call, folder):
    script = f'case "$1" in *tall*) echo no masks >&2; exit 77;; *) {COPY};; esac'
    code, out, _ = run(call, folder, script)
    assert code == 0 and "1 passed, 0 failed, 1 unsupported" in out
    assert re.search("^unsupported  causal_tall .* no masks$", out, re.M)


def test_old_results_are_not_judged(call, folder):
    answer(folder)
    code, out, _ = run(call, folder, "exit 0")
    assert code == 1 and "0 passed, 2 failed" in out and not os.listdir(folder / "results")


@pytest.mark.parametrize("arguments, message", [
    (["--command", "./kernel"], "command: expected one with {in} and {out} in it, got './kernel'"),
    (["--command", "./kernel {in}"], "command: expected one with {in} and {out} in it, "),
    (["--command", "./kernel '{in} {out}"], "command: cannot split .* into words: No closing quotation"),
    (["--command", "./no-such-kernel {in} {out}"], "command: cannot run ./no-such-kernel: No such file or directory"),
    (["--command", "sh {in} {out}", "--timeout", "0"], "timeout: expected a number of seconds > 0, got 0"),
    (["--command", "sh {in} {out}", "--timeout", "nan"], "timeout: expected a number of seconds > 0, got nan")])
def test_a_command_that_cannot_run(call, folder, arguments, message):
    code, out, err = call("compare", "sdpa", folder, *arguments)
    assert (code, out) == (2, "") and re.fullmatch(f"attention-ref: {message}.*\n", err), err


@pytest.mark.parametrize("format", export.WRITERS)
def test_the_paths_that_a_program_gets(call, tmp_path, format):
    """The input is a file, or for npy the start of their names; the result is one that compare reads."""
    export.write("sdpa", tmp_path / "cases", format, case="basic")
    code, out, _ = run(call, tmp_path / "cases", 'ls "$1"* > "$2.seen"; echo "$2" >> "$2.seen"')
    seen = next((tmp_path / "cases/results").glob("*.seen")).read_text().split()
    assert code == 1 and "the program wrote no basic" in out and Path(seen[0]).exists()
    suffix = dict(npy="", c=".txt", rust=".txt", js=".json").get(format, f".{format}")
    assert seen[-1] == str(tmp_path / "cases/results" / f"basic{suffix}")


def test_every_variant_is_exported_and_compared(call, tmp_path):
    for variant in variants():
        export.write(variant, tmp_path / variant, "safetensors", "float32")
        shutil.copytree(tmp_path / variant / "expected", tmp_path / variant / "results", dirs_exist_ok=True)
        code, out, _ = call("compare", variant, tmp_path / variant)
        assert code == 0 and f"{len(load_cases(variant))} passed, 0 failed, 0 unsupported" in out
