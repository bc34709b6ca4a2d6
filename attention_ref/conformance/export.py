"""Golden cases as files for programs in any language: inputs, what is expected of them, and an index.

DIR/inputs has the arguments of every case and the cotangents of its backward, DIR/expected its outputs, steps and
gradients, DIR/tolerance how far each of their numbers may be off, DIR/results room for what a program writes. Every
format holds the same names; arrays are row-major. Where a format has arrays only, a number is one of rank 0, a word is
the codes of its letters, and None is left out.
"""
import io
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..shapes import parse
from . import cases, tensors
from .numbers import UNIT, cast
from .verify import tolerance

FORMAT = "attention_ref-export-1"
WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}          # as strtod, JavaScript, Rust and Java read them
TXT = WORDS | {"True": "1", "False": "0"}
JSON = {word: f'"{text}"' for word, text in WORDS.items()} | {"True": "true", "False": "false", "None": "null"}
C = {"nan": "NAN", "inf": "INFINITY", "-inf": "-INFINITY", "True": "1", "False": "0", "None": "NAN"}
C_TYPES = dict(float64="double", float32="float", float16="float", int64="int64_t", int32="int32_t", bool="bool")
RUST = {"nan": "0.0 / 0.0", "inf": "1.0 / 0.0", "-inf": "-1.0 / 0.0", "True": "true", "False": "false"}
RUST_TYPES = dict(float64="f64", float32="f32", float16="f32", int64="i64", int32="i32", bool="bool")
JS = TXT | {"None": "null"}
JS_TYPES = dict(float64="Float64Array", float32="Float32Array", float16="Float32Array", int64="Int32Array",
                int32="Int32Array", bool="Uint8Array")


def write(variant, folder, format="safetensors", dtype="float32", case=None):
    """Write the golden cases of a variant (with case, those whose name contains it) into a folder that is empty or new.

    All appears at once, or nothing. Returns the number of cases. ValueError for what does not exist or is in the way.
    """
    golden, folder = cases.load_cases(variant, case), Path(folder)
    for name, value, known in (("format", format, WRITERS), ("dtype", dtype, UNIT)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if dtype == "bfloat16" and format in ("npy", "npz"):
        raise ValueError(f"dtype: {format} has no bfloat16; safetensors has, and text holds the same numbers")
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(p.name for p in folder.iterdir()):
        raise ValueError(f"folder: expected an empty or a new one, {folder} holds {', '.join(found[:3])}")
    with TemporaryDirectory(dir=folder, prefix=".export-") as hidden:
        write_all(Path(hidden), golden, format, dtype)
        for name in ("results", *PARTS, "index.json"):   # the index last: it says that all is there
            os.rename(Path(hidden, name), folder / name)
    return len(golden)


def write_all(folder, golden, format, dtype):
    """The files of an export."""
    (folder / "results").mkdir()
    for part, contents in PARTS.items():
        (folder / part).mkdir()
        for case in golden:
            for suffix, data in WRITERS[format](case, contents(case, dtype), dtype).items():
                (folder / part / (case.name + suffix)).write_bytes(data)
    index = cases.index_of(golden, golden[0].module)
    index |= dict(format=FORMAT, files=format, dtype=dtype, golden=golden_sha256(golden[0].variant))
    (folder / "index.json").write_text(cases.layout(index, 3) + "\n")


def golden_sha256(variant):
    """The sha256 of the golden tensors of a variant."""
    return json.loads((cases.GOLDEN / "index.json").read_bytes())["files"][f"{variant}.safetensors"]["sha256"]


def inputs_of(case, dtype):
    """Name -> array, number, word or None: the arguments of a case and its cotangents."""
    return case.in_dtype(dtype) | cast(case.cotangents, dtype)


def expected_of(case, dtype):
    """Name -> float64 array: outputs, steps and gradients."""
    return case.expected


def tolerance_of(case, dtype):
    """tolerance_NAME -> float64 array: how far each number of NAME may be off; 0 at an infinity, inf at a NaN."""
    found = {}
    for name, exact in case.expected.items():
        allowed = tolerance(exact, case.conditioning[name], dtype)
        found[f"tolerance_{name}"] = np.where(np.isnan(exact), np.inf, np.where(np.isinf(exact), 0, allowed))
    return found


PARTS = dict(inputs=inputs_of, expected=expected_of, tolerance=tolerance_of)


# Writers: case, values, dtype -> {suffix: bytes}

def arrays_of(values):
    """The values as arrays: a number has rank 0, a word is the codes of its letters, None is left out."""
    found = {}
    for name, x in values.items():
        if x is not None:
            found[name] = np.array(list(x.encode()), np.uint8) if isinstance(x, str) else np.array(x, order="C")
    return found


def safetensors(case, values, dtype):
    """One file; bfloat16 is there stored as such."""
    arrays = arrays_of(values)
    short = [name for name, x in arrays.items() if dtype == "bfloat16" and x.dtype == np.float32]
    return {".safetensors": tensors.pack(arrays, bfloat16=short)}


def npy(case, values, dtype):
    """A file for every array."""
    return {f".{name}.npy": _saved(np.save, x) for name, x in arrays_of(values).items()}


def npz(case, values, dtype):
    """One archive of npy files."""
    return {".npz": _saved(np.savez, **arrays_of(values))}


def _saved(save, *arrays, **named):
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def txt(case, values, dtype):
    """For every array a line of name, rank and sizes, and a line of numbers."""
    lines = []
    for name, x in arrays_of(values).items():
        lines += [" ".join(map(str, (name, x.ndim, *x.shape))), " ".join(spelt(x, TXT))]
    return {".txt": ("\n".join(lines) + "\n").encode()}


def as_json(case, values, dtype):
    """An object; an array is an object of shape and data."""
    def text(x):
        if not isinstance(x, np.ndarray):
            return json.dumps(x) if isinstance(x, str) else spelt(x, JSON)[0]
        return f'{{"shape": {list(x.shape)}, "data": [{", ".join(spelt(x, JSON))}]}}'
    return {".json": ("{" + ",\n ".join(f'"{name}": {text(x)}' for name, x in values.items()) + "}\n").encode()}


def c(case, values, dtype):
    """A header of constants CASE_NAME and CASE_NAME_shape. None is NAN; an empty array holds one 0, as C wants."""
    lines = [f"/* {case.id}: {case.why} */", *(f"#include <{h}.h>" for h in ("math", "stdbool", "stdint"))]
    for name, x in values.items():
        kind, key = C_TYPES.get(str(np.asarray(x).dtype), "double"), f"{case.name}_{name}"
        if isinstance(x, np.ndarray):
            lines += [f"static const {kind} {key}[{max(1, x.size)}] = {{{rows(x, C) or 0}}};",
                      f"static const int {key}_shape[] = {{{', '.join(map(str, x.shape)) or 0}}};"]
        elif isinstance(x, str):
            lines.append(f"static const char {key}[] = {json.dumps(x)};")
        else:
            lines.append(f"static const {kind} {key} = {spelt(x, C)[0]};")
    return {".h": ("\n".join(lines) + "\n").encode()}


def rust(case, values, dtype):
    """A module of constants NAME and NAME_SHAPE; what may be None is an Option."""
    lines = [f"// {case.id}: {case.why}"]
    for name, x in values.items():
        key = name.upper()
        if isinstance(x, np.ndarray):
            kind = RUST_TYPES[str(x.dtype)]
            lines += [f"pub static {key}: [{kind}; {x.size}] = [{rows(x, RUST)}];",
                      f"pub static {key}_SHAPE: [usize; {x.ndim}] = {list(x.shape)};"]
        else:
            lines.append(f"pub const {key}: {_option(parse(case.module.INPUTS[name]), x)};")
    return {".rs": ("\n".join(lines) + "\n").encode()}


def _option(spec, x):
    """Type and value of an argument that is no array, in Rust."""
    kind = dict(float="f64", int="i64", bool="bool", str="&str")[spec.kind]
    x = float(x) if x is not None and kind == "f64" else x
    text = json.dumps(x) if isinstance(x, str) else spelt(x, RUST)[0]
    if not spec.optional:
        return f"{kind} = {text}"
    return f"Option<{kind}> = {text if x is None else f'Some({text})'}"


def js(case, values, dtype):
    """A module that exports one object; an array is an object of shape and data, a typed array."""
    def text(x):
        if not isinstance(x, np.ndarray):
            return json.dumps(x) if isinstance(x, str) else spelt(x, JS)[0]
        return f"{{shape: {list(x.shape)}, data: new {JS_TYPES[str(x.dtype)]}([{rows(x, JS)}])}}"
    lines = [f"{name}: {text(x)}," for name, x in values.items()]
    return {".mjs": "\n".join([f"// {case.id}: {case.why}", "export default {", *lines, "};\n"]).encode()}


def spelt(x, words):
    """The numbers of x one by one as text, exact, with the words of a language for what is no number."""
    found = map(repr, np.asarray(x).ravel().tolist())
    return [words.get(text, text) for text in found]


def rows(x, words):
    """The numbers of x, ten in a line."""
    found = spelt(x, words)
    return ",\n ".join(", ".join(found[i:i + 10]) for i in range(0, len(found), 10))


WRITERS = dict(safetensors=safetensors, npz=npz, npy=npy, json=as_json, txt=txt, c=c, rust=rust, js=js)
