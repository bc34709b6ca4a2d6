"""docs/verify.md: its snippets run from its own text, its readers read what is shipped, and it leaves nothing out."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attention_ref import load_cases, variants
from attention_ref.conformance import cases, export, tensors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/verify.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)


def files():
    """Name -> text of the blocks that name their file in the first line."""
    found = [re.match(r"(?:#|//) (\w+\.\w+)\n", text) for _, text in BLOCKS]
    return {match[1]: match.string for match in found if match}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of the page and the examples in it, as in a clone."""
    path = tmp_path_factory.mktemp("clone")
    for name, text in files().items():
        (path / name).write_text(text)
    shutil.copytree(ROOT / "docs/examples", path / "docs/examples")
    return path


def run(text, folder):
    """A shell snippet; python and attention-ref are the ones under test. What it prints."""
    ours = f"python() {{ '{sys.executable}' \"$@\"; }}\nattention-ref() {{ python -m attention_ref \"$@\"; }}\n"
    done = subprocess.run(["bash", "-ec", ours + text], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


def scores_apart(text):
    """The text with # for what may differ in a last digit; numbers of cases stay."""
    return re.sub(r"\d+\.\d+", "#", text)


def test_shell_snippets_run_and_print_what_the_page_says(folder):
    if not shutil.which("cc"):
        pytest.skip("cc is not installed")
    printed = 0
    for (kind, text), (next_kind, output) in zip(BLOCKS, BLOCKS[1:]):
        if kind == "sh":
            out = run(text, folder)
            printed += next_kind == ""
            assert next_kind or scores_apart(out).endswith(scores_apart(output)), out[-300:]
    assert printed == 2, "the page shows two verdicts"


def test_python_snippets_run(folder):
    snippets = [text for kind, text in BLOCKS if kind == "python" and text not in files().values()]
    assert len(snippets) == 3
    (folder / "snippets.py").write_text("\n".join(snippets))
    assert run("python snippets.py", folder) == ""


def test_a_wrong_number_fails_the_last_snippet(folder):
    snippets = "\n".join(text for kind, text in BLOCKS if kind == "python" and text not in files().values())
    wrong = snippets.replace("mine[i] - exact[i]", "mine[i] * (1 + 1e-6) - exact[i]")
    assert wrong != snippets
    (folder / "wrong.py").write_text(wrong)
    with pytest.raises(AssertionError, match="AssertionError"):
        run("python wrong.py", folder)


@pytest.mark.parametrize("variant", variants())
def test_the_python_reader_reads_all_that_is_shipped(variant):
    space = {}
    exec(files()["read_safetensors.py"], space)
    path = cases.GOLDEN / f"{variant}.safetensors"
    found, wanted = space["read"](path), tensors.unpack(path.read_bytes())
    assert list(found) == list(wanted)
    for name, (shape, numbers) in found.items():
        assert tuple(shape) == wanted[name].shape
        assert np.array_equal(np.array(numbers), wanted[name].ravel(), equal_nan=wanted[name].dtype.kind == "f")


def test_the_javascript_reader_reads_every_export(folder):
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    sample = next(text for kind, text in BLOCKS if text.startswith("q 4"))
    (folder / "sample.txt").write_text(sample)
    export.write("masked", folder / "masked", "txt")
    (folder / "all.mjs").write_text('import { read } from "./read_txt.mjs";\n'
                                    "for (const p of process.argv.slice(2)) console.log(JSON.stringify(read(p)));")
    names = [case.name for case in load_cases("masked")]
    paths = " ".join(f"masked/inputs/{name}.txt" for name in names)
    lines = run(f"node all.mjs sample.txt {paths}", folder).splitlines()
    assert json.loads(lines[0])["q"] == dict(shape=[1, 1, 2, 3], data=[0.25, -1.5, 0, 3, 0.125, 2])
    assert json.loads(lines[0])["scale"] == dict(shape=[], data=[0.5]) and len(lines) == 1 + len(names)
    for case, line in zip(load_cases("masked"), lines[1:]):
        wanted = export.arrays_of(export.inputs_of(case, "float32"))
        found = json.loads(line, parse_constant=pytest.fail)
        assert sorted(found) == sorted(wanted)
        for name, x in wanted.items():
            data = [np.nan if n is None else n for n in found[name]["data"]]      # JSON.stringify has no NaN
            assert found[name]["shape"] == list(x.shape)
            assert np.array_equal(np.array(data, float), np.where(np.isfinite(x), x, np.nan).ravel(), equal_nan=True)


def test_the_page_names_every_field_format_and_type():
    schema = json.loads((cases.GOLDEN / "schema.json").read_text())
    index = export.FORMAT, "files", "dtype", "golden", *schema["required"], schema["properties"]["format"]["const"]
    for name in (*index, *schema["definitions"]["case"]["required"], *export.WRITERS, *export.PARTS):
        assert re.search(rf"`{name}\b|`.*, `{name}`", PAGE), name
    for code in tensors.CODES:
        assert re.search(rf"^\| .*\b{code}\b", PAGE, re.M), code
