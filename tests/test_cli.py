"""The command: what it prints, what it accepts, and its exit code: 0 right, 1 wrong, 2 not runnable as asked."""
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from attention_ref import gqa, kv_cache, load_cases, sdpa, variants
from attention_ref.conformance import cases, cli, numbers
from attention_ref.conformance.cli import main

MODULE = '''
import numpy as np
from attention_ref import sdpa
from attention_ref.core import softmax


def right(q, k, v, mask, bias, sink, scale, softcap):
    return sdpa.dense(q, k, v, mask, bias, sink, scale=scale, softcap=softcap)


def first_output(**x):
    return sdpa.dense(**x)[0]


def as_dict(**x):
    return dict(zip(("o", "lse"), sdpa.dense(**x)))


def upside_down(**x):
    return sdpa.BUGS["mask_polarity"][1](x)


def few_arguments(q, k, v, scale):
    return sdpa.dense(q, k, v, scale=scale)[0]


def no_arguments():
    return 0


def one_more(q, k, v, mask, bias, sink, scale, softcap, dropout):
    return sdpa.dense(q, k, v, mask, bias, sink, scale=scale, softcap=softcap)


def no_softcap(q, k, v, mask, bias, sink, scale, softcap):
    if softcap is not None:
        raise NotImplementedError("softcap is not there\\nsee the manual")
    return sdpa.dense(q, k, v, mask, bias, sink, scale=scale)


def raising(**x):
    raise ZeroDivisionError("on purpose")


def leaving(**x):
    raise SystemExit(0)


def steps_only(**x):
    return dict(zip(sdpa.STEPS, sdpa.steps(**x)))


def only_causal(q, k, v, mask, scale):
    return sdpa.dense(q, k, v, mask, scale=scale)


class Attention:
    @staticmethod
    def forward(**x):
        return sdpa.dense(**x)

    def __call__(self, **x):
        return sdpa.dense(**x)


layer = Attention()
number = 7
nothing = lambda **x: None
text = lambda **x: "abc"
three = lambda **x: (*sdpa.dense(**x), 0)
empty = lambda **x: ()
texts = lambda **x: np.full(sdpa.dense(**x)[0].shape, "x")
unknown = lambda **x: dict(attention=sdpa.dense(**x)[0])
'''
BROKEN = dict(
    library=("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    syntax=("def f(:", "SyntaxError: invalid syntax"),
    attribute=("import os; os.nothing", "AttributeError: module 'os' has no attribute 'nothing'"),
    raising=("raise RuntimeError('no GPU here')", "RuntimeError: no GPU here"),
    value=("raise ValueError('odd')", "ValueError: odd"),
    file=("open('no such file')", "FileNotFoundError: "),
    silent=("assert False", "AssertionError"),
    leaving=("import sys; sys.exit(0)", "SystemExit: 0"),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module in it, on nobody's path."""
    (tmp_path / "attempt_of_a_user.py").write_text(MODULE)
    for name, (text, _) in BROKEN.items():
        (tmp_path / f"broken_{name}.py").write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    yield tmp_path
    for name in [m for m in sys.modules if m == "attempt_of_a_user" or m.startswith("broken_")]:
        del sys.modules[name]


@pytest.fixture
def call(capsys):
    """The command as a function: (exit code, output, messages)."""
    def run(*arguments):
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()
    return run


def verify(call, name, *arguments, variant="sdpa"):
    """Verify a function of the user's module."""
    return call("verify", variant, "--impl", f"attempt_of_a_user:{name}", *arguments)


def command(*arguments, **options):
    """The command as others start it."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
    return subprocess.run([sys.executable, "-m", "attention_ref", *arguments], text=True, timeout=120, **pipes)


# list and show

def test_list(call):
    code, out, err = call("list")
    assert code == 0 and not err
    assert [line.split()[0] for line in out.splitlines()] == ["variant", "-" * max(map(len, variants())), *variants()]


def test_list_as_json(call):
    code, out, err = call("list", "--json")
    found = json.loads(out)
    assert code == 0 and [v["variant"] for v in found] == list(variants())
    for v in found:
        module = variants()[v["variant"]]
        mistakes = len(module.BUGS) + len(getattr(module, "VJP_BUGS", {}))
        assert (v["forms"], v["cases"], v["mistakes"]) == (len(module.FORMS), len(module.CASES), mistakes)
        assert f".{v['family']}." in module.__name__ and v["title"] in module.__doc__


@pytest.mark.parametrize("variant", variants())
def test_show(call, variant):
    code, out, err = call("show", variant)
    module = variants()[variant]
    assert code == 0 and not err and module.__doc__.strip() in out
    rows = [re.split("  +", line, maxsplit=1) for line in out.splitlines()]
    for name in [*module.INPUTS, *module.OUTPUTS, *module.CONVENTIONS]:
        assert name in [row[0] for row in rows], name
    for name, case in module.CASES.items():
        assert [name, case["why"]] in rows
    for slug, (sentence, _) in (module.BUGS | getattr(module, "VJP_BUGS", {})).items():
        assert [slug, sentence] in rows
    assert all(form.__name__ in out for form in module.FORMS)


def test_show_has_the_formula(call):
    assert "s_ij = scale q_i . k_j" in call("show", "sdpa")[1]


# verify with an implementation

@pytest.mark.parametrize("name", ["right", "first_output", "as_dict", "Attention.forward", "layer"])
def test_a_right_function(call, here, name):
    code, out, err = verify(call, name)
    assert (code, err) == (0, "")
    assert f"sdpa in float64: {len(sdpa.CASES)} passed, 0 failed, 0 unsupported" in out
    assert "largest error " in out and "FAILED" not in out and "diagnosis" not in out


@pytest.mark.parametrize("dtype", numbers.UNIT)
def test_types(call, here, dtype):
    code, out, _ = verify(call, "right", "--dtype", dtype)
    assert code == 0 and f"sdpa in {dtype}: {len(sdpa.CASES)} passed" in out


def test_who_claims_wider_sums_has_less_budget(call, here):
    assert verify(call, "right", "--dtype", "float16", "--case", "softcap")[0] == 0
    assert verify(call, "right", "--dtype", "float16", "--case", "softcap", "--accumulate", "float64")[0] == 1


def test_cases_can_be_chosen(call, here):
    code, out, _ = verify(call, "right", "--case", "causal")
    chosen = [name for name in sdpa.CASES if "causal" in name]
    assert code == 0 and [line.split()[1] for line in out.splitlines() if line.startswith("ok ")] == chosen


def test_a_wrong_function_is_told_its_mistake(call, here):
    code, out, err = verify(call, "upside_down", "--case", "causal")
    assert (code, err) == (1, "")
    assert "FAILED sdpa/causal_wide (float64): Tq < Tk tells the causal anchors apart" in out
    assert re.search(r"o at batch \d, head \d, query \d, channel \d: got .*, expected .*, .* times the budget", out)
    assert "convention of this case: causal = bottom-right" in out
    assert re.search("\ndiagnosis:\n  mask_polarity: True is read as masked", out)


def test_a_function_that_raises(call, here):
    code, out, err = verify(call, "raising")
    assert (code, err) == (1, "") and f"0 passed, {len(sdpa.CASES)} failed, 0 unsupported" in out
    assert "the implementation raised ZeroDivisionError: on purpose" in out and "diagnosis" not in out


def test_a_function_that_leaves(call, here):
    code, out, _ = verify(call, "leaving", "--case", "basic")
    assert code == 1 and "the implementation raised SystemExit: 0" in out


@pytest.mark.parametrize("name, message", dict(
    nothing="outputs: expected some of ", text="o: expected shape (2, 3, 5, 7), got ()",
    three="1 to 2 arrays (o, lse), got 3", empty="1 to 2 arrays (o, lse), got 0",
    texts="o: expected floating numbers, got dtype <U1", unknown="outputs: expected names among o, lse, ",
    no_arguments="takes no q, k, v", one_more="missing 1 required positional argument: 'dropout'").items())
def test_a_function_that_makes_no_sense(call, here, name, message):
    code, out, err = verify(call, name, "--case", "basic")
    assert (code, err) == (1, "") and message in out and "0 passed" in out


def test_what_is_not_implemented_is_not_wrong(call, here):
    code, out, _ = verify(call, "no_softcap")
    capped = [c.name for c in load_cases("sdpa") if c.inputs["softcap"] is not None]
    assert code == 0 and 2 <= len(capped) < len(sdpa.CASES)
    assert f"{len(sdpa.CASES) - len(capped)} passed, 0 failed, {len(capped)} unsupported" in out
    assert len(re.findall("^unsupported .* softcap is not there$", out, re.M)) == len(capped)
    assert "see the manual" not in out, "one line for a case"
    assert verify(call, "no_softcap", "--case", "softcap")[0] == 1, "nothing was verified"


def test_fewer_arguments(call, here):
    code, out, _ = verify(call, "few_arguments")
    plain = [c.name for c in load_cases("sdpa") if all(map(c.is_neutral, ("mask", "bias", "sink", "softcap")))]
    assert code == 0 and [line.split()[1] for line in out.splitlines() if line.startswith("ok ")] == plain
    assert re.search("^unsupported  everything .* takes no mask, bias, sink, softcap$", out, re.M)


def test_steps_are_judged_where_a_case_has_them(call, here):
    code, out, _ = verify(call, "steps_only")
    light = [c.name for c in load_cases("sdpa") if not c.steps]
    assert code == 0 and light
    assert f"{len(sdpa.CASES) - len(light)} passed, 0 failed, {len(light)} unsupported" in out


def test_another_variant(call, here):
    code, out, _ = call("verify", "gqa", "--impl", "attention_ref.dense.gqa:dense", "--dtype", "float32")
    assert code == 0 and f"gqa in float32: {len(gqa.CASES)} passed, 0 failed" in out


# verify on the package itself

@pytest.fixture
def small(monkeypatch):
    """A variant cut down to its definition and a few mistakes; changes to it are seen by whoever verifies."""
    monkeypatch.setattr(cli, "ProcessPoolExecutor", ThreadPoolExecutor, raising=False)
    monkeypatch.setattr(kv_cache, "FORMS", kv_cache.FORMS[:1])
    monkeypatch.setattr(kv_cache, "BUGS", dict(list(kv_cache.BUGS.items())[:3]))
    monkeypatch.setattr(kv_cache, "VJP_BUGS", {}, raising=False)
    return monkeypatch


def test_the_package_is_right(call, small):
    code, out, err = call("verify", "kv_cache")
    row = re.split("  +", out.splitlines()[2])
    assert code == 0 and "FAILED" not in out and "\x1b" not in err
    assert row[:3] == ["kv_cache", "1", str(len(kv_cache.CASES))] and row[-3:] == ["3/3", "3/3", "ok"]
    assert float(row[3]) <= 1 and "suite score: 3 of 3 mistakes caught, 3 named" in out


def test_a_form_that_is_wrong(call, small):
    def dense(**x):
        o, *present = kv_cache.dense(**x)
        return 1.01 * o, *present
    small.setattr(kv_cache, "FORMS", (dense,))
    code, out, _ = call("verify", "kv_cache")
    assert code == 1 and re.search("^FAILED kv_cache/.*\n  o at batch .*times the budget", out, re.M)


def test_a_mistake_that_is_none(call, small):
    harmless = ("this is no mistake at all", lambda x: kv_cache.dense(**x))
    small.setitem(kv_cache.BUGS, "harmless", harmless)
    code, out, _ = call("verify", "kv_cache")
    assert code == 1 and "suite score: 3 of 4 mistakes caught, 3 named" in out


# What cannot be run as asked

@pytest.mark.parametrize("arguments, message", [
    (["show", "spda"], "variant: expected one of .*sdpa.*, got 'spda'"),
    (["verify", "spda"], "variant: expected one of .*sdpa.*, got 'spda'"),
    (["verify", "spda", "--impl", "m:f"], "variant: expected one of .*sdpa.*, got 'spda'"),
    (["golden", "spda", "--out", "nowhere"], "variant: expected one of .*sdpa.*, got 'spda'"),
    (["golden", "sdpa", "--out", "attempt_of_a_user.py"], ".*File exists.*attempt_of_a_user.py"),
    (["verify", "--impl", "attempt_of_a_user:right"], "--impl needs the VARIANT it implements"),
    (["verify", "sdpa", "--case", "basic"], "--case goes with --impl"),
    (["verify", "sdpa", "--dtype", "float16"], "--dtype goes with --impl"),
    (["verify", "sdpa", "--accumulate", "float32"], "--accumulate goes with --impl"),
    (["verify", "sdpa", "--impl", "m:f", "--case", "none such"], "case: expected .part of. one of basic, "),
])
def test_not_runnable(call, here, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and re.fullmatch(f"attention-ref: {message}.*\n", err), err


@pytest.mark.parametrize("impl, message", [
    ("attempt_of_a_user", "expected module:function, got 'attempt_of_a_user'"),
    (":right", "expected module:function, got ':right'"),
    ("attempt_of_a_user:", "expected module:function, got 'attempt_of_a_user:'"),
    ("nowhere:f", "cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'"),
    (".relative:f", "cannot import .relative: TypeError: "),
    ("attempt_of_a_user.py:right", "cannot import attempt_of_a_user.py: ModuleNotFoundError: "),
    ("attempt_of_a_user:wrong", "module attempt_of_a_user has no wrong"),
    ("attempt_of_a_user:right.er", "module attempt_of_a_user has no right.er"),
    ("attempt_of_a_user:number", "expected a function, attempt_of_a_user:number is a int")])
def test_no_function(call, here, impl, message):
    code, out, err = call("verify", "sdpa", "--impl", impl)
    assert (code, out) == (2, "") and err.startswith(f"attention-ref: impl: {message}") and err.count("\n") == 1


@pytest.mark.parametrize("name", BROKEN)
def test_a_module_that_fails_on_import(call, here, name):
    code, out, err = call("verify", "sdpa", "--impl", f"broken_{name}:f")
    message = f"attention-ref: impl: cannot import broken_{name}: {BROKEN[name][1]}"
    assert (code, out) == (2, "") and err.startswith(message) and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [
    [], ["verfy"], ["show"], ["show", "sdpa", "gqa"], ["list", "sdpa"], ["verify", "sdpa", "--dtype", "float8"],
    ["verify", "sdpa", "--impl"], ["verify", "--accumulate", "int8"], ["golden", "--out"], ["--json"]])
def test_a_command_that_does_not_exist(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and err.startswith("usage: attention-ref")


def test_golden_data_that_was_changed(call, here, monkeypatch):
    monkeypatch.setattr(cases, "read", lambda path: (_ for _ in ()).throw(ValueError("golden data: changed")))
    monkeypatch.setattr(cases, "_load", cases._load.__wrapped__)
    for arguments in (["show", "sdpa"], ["verify", "sdpa"], ["verify", "sdpa", "--impl", "attempt_of_a_user:right"]):
        assert call(*arguments) == (2, "", "attention-ref: golden data: changed\n")


# golden

def test_golden_makes_the_shipped_files(call, tmp_path):
    folder = tmp_path / "new" / "folder"
    code, out, err = call("golden", "kv_cache", "--out", str(folder))
    assert (code, err) == (0, "")
    assert re.fullmatch(r" *\d+ s  kv_cache: \d+ cases, certified with up to \d+ bits\n", out)
    assert sorted(os.listdir(folder)) == ["index.json", "kv_cache.json", "kv_cache.safetensors"]
    for name in ("kv_cache.json", "kv_cache.safetensors"):
        assert (folder / name).read_bytes() == (cases.GOLDEN / name).read_bytes()
    entries = [json.loads((f / "index.json").read_text())["files"]["kv_cache.json"] for f in (folder, cases.GOLDEN)]
    assert entries[0] == entries[1]
    assert load_cases("kv_cache", "basic", folder=folder)


# As a program

def test_from_another_folder(here):
    done = command("verify", "sdpa", "--impl", "attempt_of_a_user:right", "--case", "basic", cwd=here)
    assert done.returncode == 0 and "1 passed, 0 failed, 0 unsupported" in done.stdout and not done.stderr
    done = command("verify", "sdpa", "--impl", "attempt_of_a_user:upside_down", "--case", "causal_wide", cwd=here)
    assert done.returncode == 1 and "mask_polarity" in done.stdout and not done.stderr
    done = command("verify", "sdpa", "--impl", "broken_raising:f", cwd=here)
    assert done.returncode == 2 and not done.stdout and "no GPU here" in done.stderr and "Traceback" not in done.stderr


def test_the_installed_script_finds_the_current_folder(here):
    script = shutil.which("attention-ref", path=os.path.dirname(sys.executable))
    if not script:
        pytest.skip("attention-ref is not installed beside this Python")
    arguments = ["verify", "sdpa", "--impl", "attempt_of_a_user:right", "--case", "basic"]
    done = subprocess.run([script, *arguments], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stderr


def test_help_has_examples():
    for arguments in (["--help"], ["verify", "--help"]):
        done = command(*arguments)
        assert done.returncode == 0 and not done.stderr
        assert "attention-ref verify sdpa --impl mymodule:attention" in done.stdout
        assert "exit codes: 0 right, 1 wrong, 2 the command could not be run as asked" in done.stdout


def test_version():
    from attention_ref import __version__
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"attention_ref {__version__}\n")


@pytest.mark.parametrize("arguments", [["list"], ["show", "sdpa"]])
def test_a_reader_who_stops_reading(arguments):
    """As in `attention-ref show sdpa | head -1`, with a reader that has gone before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = command(*arguments, stdout=pipe, env=os.environ | dict(PYTHONUNBUFFERED=""))
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_is_for_terminals_only(here):
    done = command("verify", "sdpa", "--impl", "attempt_of_a_user:right", "--case", "basic", cwd=here)
    assert "\x1b" not in done.stdout + done.stderr
