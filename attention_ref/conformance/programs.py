"""What a program in any language wrote: run it case by case, read its results, judge them like those of a function.

DIR is a folder made by `export`. Results lie in DIR/results: CASE.safetensors, CASE.npz, CASE.json or CASE.txt with
outputs by name, laid out like the inputs; or CASE.OUTPUT.npy, CASE.OUTPUT.txt with the numbers of one output.
"""
import io
import json
import os
import shlex
import subprocess
from math import prod
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from . import cases, tensors
from .export import FORMAT, WRITERS, golden_sha256
from .isolation import STDERR, TIMEOUT, ended, kill_group, positive, with_stderr
from .numbers import UNIT
from .verify import Result, check

RESULTS = dict(safetensors=".safetensors", npz=".npz", npy="", json=".json", js=".json")     # else .txt
INPUTS = dict(npy="", c=".h", rust=".rs", js=".mjs")     # else as the format is called
UNSUPPORTED = 77                                         # the exit code that says: this program has no such case


def opened(variant, folder, case=None):
    """The index of an export and the golden cases in it; with case, those whose name contains it.

    ValueError if the folder is no complete export of that variant, or was made from other golden data.
    """
    path = Path(folder, "index.json")
    try:
        index = json.loads(path.read_bytes())
        found = [index[name] for name in ("format", "variant", "golden", "dtype", "files")]
        names = {entry["name"] for entry in index["cases"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"folder: expected what `attention-ref export {variant}` writes, "
                         f"cannot read {path}: {type(error).__name__}: {error}") from None
    if found[:2] != [FORMAT, variant] or str(found[3]) not in UNIT or str(found[4]) not in WRITERS:
        raise ValueError(f"folder: expected {FORMAT} of {variant}, {path} says {', '.join(map(str, found))}")
    golden = [c for c in cases.load_cases(variant, case) if c.name in names]
    if found[2] != golden_sha256(variant):
        raise ValueError(f"folder: {folder} was exported from other golden data: export it anew")
    if not golden:
        raise ValueError(f"case: expected (part of) one of {', '.join(sorted(names))}, got {case!r}")
    return index, golden


def judge_results(folder, golden, dtype, accumulate=None):
    """The Results of what lies in folder/results; a case without a file is unsupported. ValueError if none has one."""
    results = [judge_case(Path(folder, "results"), case, dtype, accumulate) for case in golden]
    if all(r.unsupported for r in results):
        first = f"{golden[0].name}.safetensors or {golden[0].name}.{next(iter(golden[0].outputs))}.txt"
        raise ValueError(f"results: expected files such as {first} in {Path(folder, 'results')}, found none")
    return results


def judge_case(folder, case, dtype, accumulate=None):
    """The Result of the files of one case in folder: an error if they cannot be read, unsupported if there are none."""
    if not result_files(folder, case):
        return Result(case, dtype, unsupported="no result file")
    try:
        outputs = read_results(folder, case)
        result = check(case, outputs, dtype, accumulate)
    except ValueError as error:
        return Result(case, dtype, error=str(error))
    wanted = f"outputs: expected some of {', '.join(case.expected)}, got {', '.join(outputs) or 'none'}"
    return result if result.comparisons else Result(case, dtype, error=wanted)


def judge_program(command, folder, index, golden, accumulate=None, timeout=TIMEOUT):
    """The Results, one by one, of running command for each case, {in} and {out} in it replaced by two paths."""
    words, files, dtype, timeout = words_of(command), index["files"], index["dtype"], positive(timeout)
    Path(folder, "results").mkdir(exist_ok=True)
    for case in golden:
        source = Path(folder, "inputs", case.name + INPUTS.get(files, f".{files}")).absolute()
        target = Path(folder, "results", case.name + RESULTS.get(files, ".txt")).absolute()
        for path in result_files(target.parent, case):
            path.unlink()                                # nothing but what this run writes is judged
        try:
            run_program(words, source, target, timeout)
            result = judge_case(target.parent, case, dtype, accumulate)
            missing = Result(case, dtype, error=f"the program wrote no {target.name}")
            yield missing if result.unsupported else result
        except NotImplementedError as reason:
            yield Result(case, dtype, unsupported=str(reason))
        except RuntimeError as error:
            yield Result(case, dtype, error=str(error))


def words_of(command):
    """The words of a command, as a shell would split it; ValueError if {in} or {out} is in none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command: cannot split {command!r} into words: {error}") from None
    if not all(any(name in word for word in words) for name in ("{in}", "{out}")):
        raise ValueError(f"command: expected one with {{in}} and {{out}} in it, got {command!r}")
    return words


def run_program(words, source, target, timeout):
    """Run a program on two paths, at most timeout seconds; what it writes to stdout is dropped.

    NotImplementedError with the first line of its stderr if it leaves with exit code 77, RuntimeError with the end of
    its stderr if it leaves with another or does not leave; ValueError if it cannot be started.
    """
    words = [word.replace("{in}", str(source)).replace("{out}", str(target)) for word in words]
    with TemporaryFile() as said:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                                       start_new_session=True)
        except OSError as error:
            raise ValueError(f"command: cannot run {words[0]}: {error.strerror}") from None
        ending = wait(process, timeout)
        said.seek(max(0, said.seek(0, os.SEEK_END) - STDERR))
        text = said.read().decode(errors="replace").strip()
    if process.returncode == UNSUPPORTED:
        raise NotImplementedError(text.partition("\n")[0] or "not implemented")
    if ending:
        raise RuntimeError(with_stderr(ending, text))


def wait(process, timeout):
    """How a process ended, "" if with exit code 0; after timeout seconds it is killed with all that it started."""
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"the program was stopped after {timeout:g} seconds"
    finally:
        if process.poll() is None:
            process.kill()
            kill_group(process.pid)
            process.wait()
    return f"the program {ended(code)}" if code else ""


# Readers: the bytes of a result file -> {output: array}

def result_files(folder, case):
    """The result files of a case, of whatever format."""
    known = {".safetensors", ".npz", ".npy", ".json", ".txt"}
    return [path for path in sorted(folder.glob(f"{case.name}.*")) if path.suffix in known]


def read_results(folder, case):
    """Output -> array, of all result files of a case; ValueError for one that cannot be read or repeats another."""
    found = {}
    for path in result_files(folder, case):
        try:
            arrays = read_file(path, case)
            for name, x in arrays.items():
                if x.dtype.kind != "f":
                    raise ValueError(f"{name}: expected floating numbers, got dtype {x.dtype}")
        except Exception as error:                       # whatever a broken file makes a reader raise
            raise ValueError(f"cannot read results/{path.name}: {type(error).__name__}: {error}") from None
        if again := set(found) & set(arrays):
            raise ValueError(f"results: {min(again)} of {case.name} is in several files, results/{path.name} is one")
        found |= arrays
    return found


def read_file(path, case):
    """Output -> array of one file; CASE.OUTPUT.npy and CASE.OUTPUT.txt hold one output, other files name theirs."""
    output, data = path.name[len(case.name) + 1:-len(path.suffix)], path.read_bytes()
    if path.suffix == ".npy":
        if not output:
            raise ValueError(f"expected a name such as {case.name}.{next(iter(case.outputs))}.npy")
        return {output: np.load(io.BytesIO(data), allow_pickle=False)}
    if path.suffix == ".txt" and output:
        numbers, shape = read_numbers(data.decode()), np.shape(case.expected.get(output))
        return {output: numbers.reshape(shape) if numbers.size == prod(shape) else numbers}
    return {".safetensors": tensors.unpack, ".npz": read_npz, ".json": read_json, ".txt": read_txt}[path.suffix](data)


def read_npz(data):
    """Arrays by name."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return dict(archive)


def read_numbers(text):
    """The numbers of a text, between any white space."""
    if not text[-1:].isspace():
        raise ValueError("expected a newline at the end, the file may be half-written")
    return np.array([float(word) for word in text.split()])


def read_txt(data):
    """Arrays by name: a name, its rank, its sizes, its numbers, and so on; ValueError if the text ends within one."""
    text = data.decode()
    words, found = iter(text.split()), {}
    for name in words:
        try:
            shape = [int(next(words)) for _ in range(int(next(words)))]
            found[name] = np.array([float(next(words)) for _ in range(prod(shape))]).reshape(shape)
        except StopIteration:
            raise ValueError(f"the text ends within {name}") from None
    if found and not text[-1].isspace():
        raise ValueError("expected a newline at the end, the file may be half-written")
    return found


def read_json(data):
    """Arrays by name, each an object of shape and data."""
    found = {}
    for name, x in json.loads(data).items():
        if None in x["data"]:
            raise ValueError(f'{name}: null is no number: write "NaN", "Infinity" or "-Infinity"')
        found[name] = np.array([float(number) for number in x["data"]]).reshape(x["shape"])
    return found
