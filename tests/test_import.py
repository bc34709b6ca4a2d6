"""What an import costs and pulls in, and what still works where an optional library is missing."""
import json
import subprocess
import sys

import pytest

HEAVY = {"numba", "matplotlib", "scipy", "flint", "torch", "jax", "onnx", "safetensors", "ml_dtypes"}
LIMIT = 0.3                                              # seconds over `import numpy`


def python(code, *arguments):
    """What a fresh Python prints for code; its exit code and messages."""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("code", [
    "import attention_ref",
    "import attention_ref; attention_ref.variants()",
    "from attention_ref import check, load_cases; check(load_cases('sdpa')[0], load_cases('sdpa')[0].outputs)",
    "from attention_ref.conformance.cli import main; main(['list'])",
    "from attention_ref.conformance.cli import main; main(['show', 'sdpa'])",
    "from attention_ref import sdpa; from attention_ref.conformance import golden, suite, teach"])
def test_no_heavy_library_is_imported(code):
    done = python(f"{code}\nimport sys\nprint('\\n' + ' '.join(m for m in sys.modules if '.' not in m))")
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.splitlines()[-1].split())


def test_the_import_is_quick():
    """CPU time of both imports in turn; the least of five counts, for whatever else the machine does only adds."""
    code = "import time; start = time.process_time(); {}; print(time.process_time() - start)"
    ours = "import attention_ref; attention_ref.variants(); import attention_ref.conformance.cli"
    times = [[float(python(code.format(text)).stdout) for text in ("import numpy", ours)] for _ in range(5)]
    numpy, everything = map(min, zip(*times))
    assert everything - numpy < LIMIT, times


# Without numba

WITHOUT_NUMBA = """
import json, sys, warnings
sys.modules["numba"] = None
warnings.simplefilter("always")
from attention_ref import check, load_cases, variants
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    scores = {}
    for variant in sorted(variants(), key=lambda name: name != "sdpa"):
        loop = next(form for form in variants()[variant].FORMS if form.__name__ == "loop")
        for case in load_cases(variant)[:3]:
            for dtype in ("float64", "float32"):
                scores[f"{case.id} {dtype}"] = check(case, loop(**case.in_dtype(dtype)), dtype).score
print(json.dumps([scores, [[w.category.__name__, str(w.message), w.filename] for w in caught]]))
"""


def test_loops_run_without_numba():
    done = python(WITHOUT_NUMBA)
    assert done.returncode == 0, done.stderr
    scores, caught = json.loads(done.stdout)
    assert len(scores) >= 6 and all(score <= 1 for score in scores.values()), scores
    assert len(caught) == 1, "one warning, however many loops run"
    category, message, place = caught[0]
    assert category == "RuntimeWarning" and "numba is not installed" in message
    assert place == "<string>", "the warning names the caller's line"


def test_loops_give_the_same_without_numba():
    code = """
import sys, warnings
warnings.simplefilter("ignore")
if sys.argv[1:]: sys.modules["numba"] = None
from attention_ref import load_cases, sdpa
for case in load_cases("sdpa", "sink") + load_cases("sdpa", "empty_row"):
    o, lse = sdpa.loop(**case.inputs)
    print(case.name, [x.hex() for x in o.ravel().tolist() + lse.ravel().tolist()])
"""
    def numbers(done):
        assert done.returncode == 0, done.stderr
        lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
        return {name: [float.fromhex(x.strip("' ")) for x in text[1:-1].split(",")] for name, text in lines}
    compiled, plain = numbers(python(code)), numbers(python(code, "without"))
    assert compiled.keys() == plain.keys() and len(plain) >= 4
    for name in plain:
        assert plain[name] == pytest.approx(compiled[name], rel=1e-13, abs=1e-15), name


# Without flint

def test_verify_works_without_flint():
    code = """
import sys
sys.modules["flint"] = None
from attention_ref.conformance.cli import main
sys.exit(main(["verify", "sdpa", "--impl", "attention_ref.dense.sdpa:dense"]))
"""
    done = python(code)
    assert done.returncode == 0 and " 0 failed, 0 unsupported" in done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["golden"], ["golden", "sdpa"], ["golden", "--out", "nowhere"]])
def test_golden_says_what_to_install(arguments, tmp_path):
    code = """
import os, sys
sys.modules["flint"] = None
os.chdir(sys.argv[1])
from attention_ref.conformance.cli import main
sys.exit(main(sys.argv[2:]))
"""
    done = python(code, str(tmp_path), *arguments)
    assert done.returncode == 2 and "pip install 'attention_ref[golden]'" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())
