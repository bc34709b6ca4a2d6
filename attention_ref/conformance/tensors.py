"""The safetensors container: 8 bytes of header length, a JSON header, then raw little-endian tensors.

Written here in a fixed order, so that equal tensors give equal bytes; read here so that golden data needs no library.
"""
import json
import os
import tempfile
from math import prod

import numpy as np

CODES = dict(F64="<f8", F32="<f4", F16="<f2", BF16="<u2", I64="<i8", I32="<i4", U8="|u1", BOOL="|b1")
NAMES = {np.dtype(t): code for code, t in CODES.items() if code != "BF16"}
LIMIT = 100_000_000                                       # bytes of header, as in the reference implementation


def pack(arrays, bfloat16=()):
    """name -> array as the bytes of a safetensors file, in the order of the names.

    Arrays named in bfloat16 are stored in that type, which must hold their numbers exactly.
    """
    header, blobs, offset = {}, [], 0
    for name in sorted(arrays):
        x = np.asarray(arrays[name])
        x = x.astype(x.dtype.newbyteorder("<"), copy=False)
        if x.dtype not in NAMES:
            wanted = ", ".join(map(str, NAMES))
            raise ValueError(f"safetensors: {name!r}: expected a dtype among {wanted}, got {x.dtype}")
        code = "BF16" if name in bfloat16 else NAMES[x.dtype]
        blob = (_halves(name, x) if code == "BF16" else x).tobytes()
        header[name] = dict(dtype=code, shape=list(x.shape), data_offsets=[offset, offset + len(blob)])
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


def _halves(name, x):
    """The upper halves of float32, as bfloat16 is stored; ValueError if a number needs the lower ones too."""
    bits = x.astype("<f4").view("<u4")
    if not np.array_equal((bits & 0xFFFF0000).view("<f4"), x, equal_nan=True):
        raise ValueError(f"safetensors: {name!r} holds numbers that are no bfloat16")
    return (bits >> 16).astype("<u2")


def unpack(data):
    """The tensors of a safetensors file; ValueError for anything that does not fit, before any memory is taken."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(LIMIT, len(data) - 8):
        raise ValueError(f"safetensors: expected a header of at most {max(0, len(data) - 8)} bytes, it claims {size}")
    try:
        header = json.loads(data[8:8 + size], object_pairs_hook=_no_name_twice)
        header.pop("__metadata__", None)
        entries = {name: _entry(name, e["dtype"], e["shape"], e["data_offsets"]) for name, e in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"safetensors: the header is not readable: {error!r}") from None
    body = memoryview(data)[8 + size:]
    starts, ends = (sorted(entry[i] for entry in entries.values()) for i in (2, 3))
    if starts + [len(body)] != [0] + ends:
        raise ValueError(f"safetensors: the tensors do not fill the {len(body)} bytes after the header one by one")
    return {name: _tensor(body, *entry) for name, entry in entries.items()}


def _no_name_twice(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return dict(pairs)


def _entry(name, code, shape, offsets):
    """(code, shape, start, end) of a tensor that NumPy can hold and that fits its offsets."""
    size = np.dtype(CODES[code]).itemsize
    whole = len(shape) <= 64 and len(offsets) == 2 and all(type(n) is int and n >= 0 for n in (*shape, *offsets))
    if not whole or prod(max(1, n) for n in shape) * size >= 2 ** 63 or offsets[1] - offsets[0] != prod(shape) * size:
        raise ValueError(f"tensor {name!r} of shape {shape} does not fit its offsets {offsets}")
    return code, tuple(shape), *offsets


def _tensor(body, code, shape, start, end):
    x = np.frombuffer(body[start:end], CODES[code]).reshape(shape)
    return (x.astype(np.uint32) << 16).view(np.float32) if code == "BF16" else x.copy()


def write_whole(path, data):
    """Write bytes to path, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
