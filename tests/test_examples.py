"""The worked examples in C, JavaScript and Rust: the commands in their first lines verify them; mistakes are named."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_ref import sdpa

EXAMPLES = Path(__file__).parents[1] / "docs/examples"
SOURCES = dict(c=("c/sdpa.c", "cc"), javascript=("javascript/sdpa.mjs", "node"), rust=("rust/sdpa.rs", "rustc"))
PLANTED = [
    ("c", "scale_missing", {"scale * at(q": "at(q"}),
    ("javascript", "softcap_after_bias", {"s = 0;": "s = at(bias, b, h, i, j);", "s + at(bias, b, h, i, j)": "s"}),
    ("rust", "sink_ignored", {"(sink - m).exp()": "0.0"}),
]


def commands(text):
    """The commands in the comment at the top of a source file."""
    return re.findall(r"^(?://| \*)     (.*)$", text, re.M)


def verify(folder, language, changes):
    """Write the example, changed, into folder and do what its comment says; the last command's process."""
    name, tool = SOURCES[language]
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    text = (EXAMPLES / name).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / Path(name).name).write_text(text)
    script = f"attention-ref() {{ '{sys.executable}' -m attention_ref \"$@\"; }}\n"
    for command in commands(text):
        done = subprocess.run(["bash", "-c", script + command], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or " compare " in command, done.stderr
    assert " compare " in command and not done.stderr, done.stderr
    return done


@pytest.mark.parametrize("language", SOURCES)
def test_an_example_is_right(tmp_path, language):
    done = verify(tmp_path, language, {})
    assert done.returncode == 0 and f"{len(sdpa.CASES)} passed, 0 failed, 0 unsupported" in done.stdout


@pytest.mark.parametrize("language, mistake, changes", PLANTED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_planted_mistake_is_named(tmp_path, language, mistake, changes):
    done = verify(tmp_path, language, changes)
    named = re.findall(r"^  (\w+): .* \(explains ", done.stdout.partition("\ndiagnosis:\n")[2], re.M)
    assert done.returncode == 1 and named == [mistake], done.stdout[-900:]


@pytest.mark.parametrize("language", SOURCES)
def test_an_example_is_short_and_its_reader_shorter(language):
    lines = (EXAMPLES / SOURCES[language][0]).read_text().splitlines()
    assert len(lines) < 80 and max(map(len, lines)) <= 120
    start = next(i for i, line in enumerate(lines) if re.search(r"^(static int read|function read|fn read)", line))
    assert next(i for i, line in enumerate(lines[start:]) if line == "}") <= 11


def test_c_is_clean(tmp_path):
    if not shutil.which("cc"):
        pytest.skip("cc is not installed")
    strict = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-o", os.devnull]
    done = subprocess.run([*strict, EXAMPLES / "c/sdpa.c", "-lm"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("language", SOURCES)
def test_an_example_without_its_input_says_so(tmp_path, language):
    name, tool = SOURCES[language]
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    shutil.copy(EXAMPLES / name, tmp_path)
    build = [c for c in commands((EXAMPLES / name).read_text()) if "attention-ref" not in c]
    for command in build:
        subprocess.run(command, cwd=tmp_path, shell=True, check=True)
    run = ["node", "sdpa.mjs"] if language == "javascript" else ["./sdpa"]
    done = subprocess.run([*run, "no-such-file", "out"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode not in (0, 77) and done.stderr and not (tmp_path / "out").exists()
