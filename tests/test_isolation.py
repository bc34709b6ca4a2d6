"""A function in a process of its own: what hangs, crashes or leaves costs one case, and what is done is kept."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attention_ref import load_cases, sdpa
from attention_ref.conformance import experiments, isolation, probe
from attention_ref.conformance.cli import main
from attention_ref.conformance.isolation import NoAnswer, NotAsked, Worker

MODULE = '''
import os, signal, sys, time
import numpy as np
from attention_ref import sdpa

def at_one_token(what):
    """The right function, which does something else where there is one query."""
    def function(**x):
        if x["q"].shape[2] == 1:
            return what()
        return sdpa.dense(**x)
    return function

def hang():
    print("thinking")
    time.sleep(60)

def leave():
    print("no licence", file=sys.stderr)
    os._exit(3)

def recurse():
    return recurse()

def refuse():
    raise MemoryError("8 PiB")

def interrupt():
    raise KeyboardInterrupt

hangs, leaves = at_one_token(hang), at_one_token(leave)
crashes = at_one_token(lambda: os.kill(os.getpid(), signal.SIGSEGV))
recurses, refuses, interrupts = at_one_token(recurse), at_one_token(refuse), at_one_token(interrupt)
exits, unpicklable = at_one_token(lambda: sys.exit(0)), at_one_token(lambda: (lambda: 0))

def right(**x):
    return sdpa.dense(**x)

def always_leaves(**x):
    os._exit(0)

def noisy(**x):
    print("called")
    os.write(1, b"from C\\\\n")
    return sdpa.dense(**x)

def slow(**x):
    time.sleep(0.1)
    return sdpa.dense(**x)

def counts(**x):
    counts.calls += 1
    print("call", counts.calls, "in", os.getpid())
    return sdpa.dense(**x)

counts.calls = 0

def other_names(query, key, value, attn_mask=None, dropout_p=0.0):
    return query

def one_more(q, k, v, mask, bias, sink, scale, softcap, dropout):
    return q

def causal_hangs(q, k, v, causal=False):
    if causal:
        time.sleep(60)
    return sdpa.dense(q, k, v, scale=q.shape[-1] ** -0.5)[0]
'''
LIBRARIES = dict(torch='''
import torch
def function(q, k, v, scale):
    assert isinstance(q, torch.Tensor) and "jax" not in __import__("sys").modules
    s = scale * q @ k.mT
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
''', jax='''
import jax
def function(q, k, v, scale):
    assert isinstance(q, jax.Array) and "torch" not in __import__("sys").modules
    s = scale * q @ k.swapaxes(-1, -2)
    return jax.nn.softmax(s, -1) @ v, jax.nn.logsumexp(s, -1)
''')
ONE_TOKEN = [c.name for c in load_cases("sdpa") if c.sizes["Tq"] == 1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module in it."""
    (tmp_path / "risky.py").write_text(MODULE)
    (tmp_path / "dies_on_import.py").write_text("import os\nos.abort()\n")
    (tmp_path / "prints_on_import.py").write_text("print('welcome')\nfrom risky import right\n")
    for name, text in LIBRARIES.items():
        (tmp_path / f"with_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verify(capsys, name, *arguments):
    """(exit code, output, messages) of verify for a function of the module, or of another one."""
    impl = name if ":" in name else f"risky:{name}"
    return main(["verify", "sdpa", "--impl", impl, *arguments]), *capsys.readouterr()


@pytest.mark.parametrize("name, message", dict(
    hangs="no answer after 1 s; stderr: thinking", leaves="the process left with exit code 3; stderr: no licence",
    crashes=r"the process was ended by signal 11 \(.*SIGSEGV\); stderr: Fatal Python error: Segmentation fault(?s:.*)"
            r'File ".*risky.py", line \d+ in <lambda>',
    recurses="the implementation raised RecursionError: maximum recursion", exits="raised SystemExit: 0",
    refuses="the implementation raised MemoryError: 8 PiB", interrupts="raised KeyboardInterrupt",
    unpicklable=r"o: expected shape .*, got \(\)").items())
def test_one_case_fails_and_the_others_go_on(here, capsys, name, message):
    code, out, err = verify(capsys, name, "--timeout", "1", "--case", "one_")
    assert code == 1 and "one_key" in re.findall("^ok +(.*?) ", out, re.M)
    assert re.findall("^FAILED +(\\w+) ", out, re.M) == ["one_token"] and "one_token" in ONE_TOKEN
    assert re.search(message, out) and "isolation.py" not in out


def test_after_three_without_an_answer_the_rest_is_not_asked(here, capsys):
    code, out, _ = verify(capsys, "always_leaves", "--json", "v.json", "--junit", "v.xml")
    rest = len(sdpa.CASES) - isolation.PATIENCE
    assert code == 1 and f"0 passed, 3 failed, 0 unsupported, {rest} not asked: incomplete" in out
    assert len(re.findall("^not asked .* 3 calls in a row had no answer$", out, re.M)) == rest
    found = json.loads((here / "v.json").read_text())
    assert (found["complete"], found["verdict"], found["counts"]["not_asked"]) == (False, "wrong", rest)
    suite = ElementTree.parse(here / "v.xml").find("testsuite")
    assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped")) == rest


def test_what_a_function_prints_is_apart_from_the_report(here, capsys):
    code, out, err = verify(capsys, "noisy", "--case", "basic", "--json", "-")
    assert code == 0 and json.loads(out)["complete"] and "called\nfrom C" in err
    assert "welcome" in verify(capsys, "prints_on_import:right", "--case", "basic")[2]


def test_a_worker_is_kept(here, capsys):
    _, _, err = verify(capsys, "counts", "--case", "one", "--repeat", "2")
    calls = re.findall(r"call (\d+) in (\d+)", err)
    assert len(calls) > 3 and [int(n) for n, _ in calls] == list(range(1, len(calls) + 1))
    assert len({process for _, process in calls}) == 1 and str(os.getpid()) != calls[0][1]


def test_in_process(here, capsys):
    code, out, err = verify(capsys, "counts", "--case", "basic", "--in-process")
    assert code == 0 and f"call 1 in {os.getpid()}" in out and not err
    del sys.modules["risky"]


@pytest.mark.parametrize("name, arguments, message", [
    ("dies_on_import:f", [], "impl: cannot be loaded: the process was ended by signal 6"),
    ("right", ["--timeout", "0"], "timeout: expected a number of seconds > 0, got 0"),
    ("right", ["--timeout", "1", "--in-process"], "timeout: a call in this process cannot be stopped"),
    ("right", ["--device", "moon"], "device: NumPy arrays are on cpu, got 'moon'"),
    ("right", ["--backend", "torch", "--device", "moon"], "device: torch has no 'moon'")])
def test_not_runnable(here, capsys, name, arguments, message):
    if "torch" in arguments:
        pytest.importorskip("torch")
    code, out, err = verify(capsys, name, *arguments)
    assert (code, out) == (2, "") and err.startswith(f"attention-ref: {message}")


def test_they_go_with_an_implementation(capsys):
    for option in (["--timeout", "1"], ["--in-process"]):
        assert main(["verify", "sdpa", *option]) == 2
        assert f"{option[0]} goes with --impl" in capsys.readouterr().err


@pytest.mark.parametrize("backend, dtype", [("torch", "bfloat16"), ("torch", "float64"), ("jax", "float32")])
def test_libraries_with_gradients(here, capsys, backend, dtype):
    pytest.importorskip(backend)
    more = ["--strides"] if backend == "torch" else []
    code, out, _ = verify(capsys, f"with_{backend}:function", "--backend", backend, "--dtype", dtype, "--grad",
                          "--repeat", "2", "--case", "basic", *more)
    assert code == 0 and "judged: o, lse, dq, dk, dv in 1 of 1 cases\n" in out, out


def test_the_verdict_says_what_was_judged(here, capsys):
    _, out, _ = verify(capsys, "right", "--case", "one_")
    asked = len([name for name in sdpa.CASES if "one_" in name])
    assert f"judged: o, lse in {asked} of {asked} cases; gradients not asked: --grad or --vjp\n" in out
    _, out, _ = verify(capsys, "causal_hangs", "--case", "basic")
    assert "judged: o in 1 of 1 cases; not returned: lse; gradients not asked" in out


def test_other_names_are_joined(here, capsys):
    code, out, _ = verify(capsys, "other_names", "--case", "basic")
    assert code == 1 and "your function takes query, key, value, attn_mask, dropout_p\nsdpa has q, k, v, mask" in out
    options = re.search("--rename (.*)", out)[1]
    assert options == "q=query,k=key,v=value,mask=attn_mask" and "attention-ref adapter sdpa" in out
    _, out, _ = verify(capsys, "other_names", "--case", "basic", "--rename", options)
    assert "your function takes" not in out and "judged: o" in out
    assert "your function takes q, k, v, mask, bias" in verify(capsys, "one_more", "--case", "basic")[1]
    assert "your function takes" not in verify(capsys, "leaves", "--case", "one_token")[1]


# Ctrl-C

def test_ctrl_c_keeps_what_is_done(here):
    reports = ["--json", "v.json", "--junit", "v.xml", "--html", "v.html"]
    command = [sys.executable, "-m", "attention_ref", "verify", "sdpa", "--impl", "risky:slow", *reports]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    head = [process.stdout.readline() for _ in range(4)]             # rows come while it runs
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert head[2].startswith("ok") and (process.returncode, err) == (130, "")
    done = int(re.search(r"(\d+) passed, 0 failed, 0 unsupported, \d+ not asked: incomplete", out)[1])
    assert 2 <= done < len(sdpa.CASES)
    found = json.loads((here / "v.json").read_text())
    assert (found["verdict"], found["complete"], found["counts"]["passed"]) == ("incomplete", False, done)
    assert [c["not_asked"] for c in found["cases"]] == [""] * done + ["interrupted"] * (len(sdpa.CASES) - done)
    suite = ElementTree.parse(here / "v.xml").find("testsuite")
    assert suite.find("properties/property[@name='complete']").get("value") == "false"
    assert f"{len(sdpa.CASES) - done} not asked</span>: incomplete" in (here / "v.html").read_text()


# The probe

def test_probe_goes_on_after_a_hang(here, capsys, monkeypatch):
    chosen = experiments.returns, experiments.linear, experiments.causal_argument, experiments.order
    monkeypatch.setattr(probe, "EXPERIMENTS", chosen)
    monkeypatch.setattr(probe, "variants", lambda: dict(sdpa=sdpa))
    assert main(["probe", "--impl", "risky:causal_hangs", "--timeout", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [fact["name"] for fact in found["facts"]] == ["layout", "returns", "linear in v", "order"]
    assert found["broken"] == {"causal_argument": "no answer after 1 s; stderr: nothing"} and found["matches"]
    assert main(["probe", "--impl", "risky:always_leaves"]) == 2
    assert "NoAnswer: the process left with exit code 0" in capsys.readouterr().err


# The worker itself

class Asked:
    """What a worker holds in these tests."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def echo(self, x):
        return self.arguments, x

    def process(self):
        return os.getpid()

    def leave(self):
        os._exit(1)

    def spawn(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

    def raises(self, x):
        raise dict(e=LookupError, v=UnicodeError, n=NotImplementedError)[x](x)


def alive(process):
    """Whether a process runs, and is not only waited for."""
    try:
        return ") Z" not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def test_worker():
    with Worker(Asked, 1, "two") as worker:
        assert worker.ask("echo", [3]) == ((1, "two"), [3])
        first = worker.ask("process")
        for x, kind, name in (("e", Exception, "LookupError"), ("v", ValueError, "UnicodeError"),
                              ("n", NotImplementedError, "NotImplementedError")):
            with pytest.raises(kind, match=f"^{x}$") as raised:
                worker.ask("raises", x)
            assert raised.type.__name__ == name
        for _ in range(2):
            with pytest.raises(NoAnswer, match="left with exit code 1"):
                worker.ask("leave")
        second = worker.ask("process")
        assert first != second and not alive(first) and alive(second)
        for kind in [NoAnswer] * isolation.PATIENCE + [NotAsked]:
            with pytest.raises(kind):
                worker.ask("leave")
    assert not alive(second)


@pytest.mark.skipif(not os.path.exists("/proc"), reason="there is no /proc")
def test_what_a_worker_started_ends_with_it():
    with Worker(Asked) as worker:
        started = worker.ask("spawn")
        assert alive(started)
    deadline = time.time() + 5
    while alive(started) and time.time() < deadline:
        time.sleep(0.01)
    assert not alive(started)
