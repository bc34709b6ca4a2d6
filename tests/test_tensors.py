"""The safetensors container: what is written is read back, by others too; what does not fit is refused."""
import json
import os

import numpy as np
import pytest

from attention_ref.conformance import tensors

ARRAYS = dict(
    F64=np.array([[0.1, -np.inf, np.nan], [0.0, -0.0, 5e-324]]), F32=np.array([1.5, -2.0 ** -149], np.float32),
    F16=np.array([[[65504.0]], [[6e-8]]], np.float16), I64=np.array([-2 ** 63, 2 ** 63 - 1]),
    I32=np.arange(3, dtype=np.int32), U8=np.array([0, 255], np.uint8), BOOL=np.array([[True], [False]]),
    scalar=np.array(2.5), empty=np.zeros((2, 0, 3)), view=np.arange(24.0).reshape(2, 3, 4).swapaxes(0, 2))


def same(x, y):
    """Equal bit for bit, in shape and in type."""
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def file(header, body=b""):
    """A safetensors file; the header may be text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(**changes):
    """The header of one float64, 8 bytes."""
    return dict(dtype="F64", shape=[1], data_offsets=[0, 8]) | changes


# Writing and reading

@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_written_is_read(name):
    back = tensors.unpack(tensors.pack({name: ARRAYS[name]}))
    assert list(back) == [name] and same(back[name], np.ascontiguousarray(ARRAYS[name]).reshape(ARRAYS[name].shape))
    assert back[name].flags.writeable


def test_many_tensors_and_none():
    back = tensors.unpack(tensors.pack(ARRAYS))
    assert all(same(back[name], np.array(x, order="C")) for name, x in ARRAYS.items())
    assert tensors.unpack(tensors.pack({})) == {}


@pytest.mark.parametrize("order", [reversed, lambda names: sorted(names, key=str.swapcase)], ids=["reversed", "sorted"])
def test_order_does_not_matter(order):
    assert tensors.pack({name: ARRAYS[name] for name in order(list(ARRAYS))}) == tensors.pack(ARRAYS)


def test_byte_order_does_not_matter():
    for x in ARRAYS.values():
        assert tensors.pack(dict(x=x.astype(x.dtype.newbyteorder(">")))) == tensors.pack(dict(x=x))


def test_the_header_is_padded():
    data = tensors.pack(dict(x=np.ones(1)))
    assert int.from_bytes(data[:8], "little") % 8 == 0 and data[-8:] == np.float64(1).tobytes()


def test_metadata_is_skipped():
    assert list(tensors.unpack(file(dict(__metadata__={"by": "someone"}, x=entry()), bytes(8)))) == ["x"]


def test_bfloat16_holds_what_it_can_hold():
    x = np.array([1.0, -1.5, 2.0 ** -126, 0.0, -np.inf, np.nan, 3.38953139e38])
    x[-1] = np.float64(np.array(0x7F7F0000, np.uint32).view(np.float32))
    data = tensors.pack(dict(x=x, y=x), bfloat16=["x"])
    back = tensors.unpack(data)
    assert back["x"].dtype == np.float32 and np.array_equal(back["x"], x, equal_nan=True)
    assert back["y"].dtype == np.float64 and len(data) < len(tensors.pack(dict(x=x, y=x)))
    with pytest.raises(ValueError, match="'x' holds numbers that are no bfloat16"):
        tensors.pack(dict(x=np.array([1 + 2.0 ** -8])), bfloat16=["x"])


@pytest.mark.parametrize("x", [np.ones(1, complex), np.array(["a"]), np.array([None]), np.ones(1, np.int16)])
def test_other_types_are_refused(x):
    with pytest.raises(ValueError, match=r"^safetensors: 'x': expected a dtype among float64, .*, got "):
        tensors.pack(dict(x=x))


# The official library

def test_the_official_library_reads_ours():
    official = pytest.importorskip("safetensors.numpy")
    theirs = official.load(tensors.pack(ARRAYS))
    assert theirs.keys() == ARRAYS.keys()
    assert all(same(theirs[name], np.array(x, order="C")) for name, x in ARRAYS.items())


def test_we_read_the_official_library():
    official = pytest.importorskip("safetensors.numpy")
    arrays = {name: np.array(x, order="C") for name, x in ARRAYS.items()}
    back = tensors.unpack(official.save(arrays, metadata={"by": "someone"}))
    assert back.keys() == arrays.keys() and all(same(back[name], x) for name, x in arrays.items())


def test_both_read_the_same_bfloat16(tmp_path):
    """NumPy has no bfloat16: the official library takes it from ml_dtypes."""
    official, ml_dtypes = pytest.importorskip("safetensors.numpy"), pytest.importorskip("ml_dtypes")
    x = np.array([1.0, -3.5, np.inf, 2.0 ** -130])
    (tmp_path / "x").write_bytes(tensors.pack(dict(x=x), bfloat16=["x"]))
    theirs = official.load_file(tmp_path / "x")["x"]
    assert theirs.dtype == ml_dtypes.bfloat16 and np.array_equal(theirs.astype(np.float64), x)
    assert np.array_equal(tensors.unpack(official.save(dict(x=theirs)))["x"], x)


# Hostile files

HOSTILE = dict(
    nothing=b"",
    short=b"1234567",
    no_header=bytes(8),
    length_beyond_the_file=(100).to_bytes(8, "little") + b"{}",
    length_one_too_large=(3).to_bytes(8, "little") + b"{}",
    length_2_63=(2 ** 63).to_bytes(8, "little") + b"{}",
    length_all_ones=b"\xff" * 8 + b"{}",
    not_json=file(b"hello"),
    not_text=file(b"\xff\xfe{}"),
    half_json=file(b'{"x":'),
    a_list=file([]),
    a_number=file(b"7"),
    null=file(b"null"),
    a_string=file(b'"x"'),
    deep=file(b"[" * 200_000 + b"]" * 200_000),
    deep_objects=file(b'{"x":' * 100_000 + b"1" + b"}" * 100_000),
    long_integer=file(b'{"x":' + b"9" * 5000 + b"}"),
    name_twice=file(b'{"x":%s,"x":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    key_twice=file(b'{"x":{"dtype":"F64","dtype":"I64","shape":[1],"data_offsets":[0,8]}}', bytes(8)),
    entry_is_a_number=file(dict(x=1)),
    entry_is_a_list=file(dict(x=[1])),
    entry_is_null=file(dict(x=None)),
    no_dtype=file(dict(x=dict(shape=[1], data_offsets=[0, 8])), bytes(8)),
    no_shape=file(dict(x=dict(dtype="F64", data_offsets=[0, 8])), bytes(8)),
    no_offsets=file(dict(x=dict(dtype="F64", shape=[1])), bytes(8)),
)
ENTRIES = dict(
    dtype=["F8", "f64", "<f8", "float64", "O", "", None, 8, ["F64"], {}],
    data_offsets=[
        [-8, 0], [-16, -8], [8, 0], [0, 4], [0, 16], [0, 0], [8, 16], [2 ** 64, 2 ** 64 + 8], [0.0, 8.0], ["0", "8"],
        "08", [False, 8], [None, 8], [0, float("nan")], [8], [0, 8, 8], [], 8, None, {"0": 0, "8": 8}],
    shape=[
        [-1], [-1, -1], [1.0], [True], ["1"], [[1]], 1, None, [2], [0], [2 ** 62], [2 ** 32, 2 ** 32 + 1], [1] * 100],
)
HIDDEN_BY_ZERO = [0, 2 ** 63], [2 ** 31, 2 ** 31, 0], [0, 2 ** 64], [0] * 65
LAYOUTS = dict(
    overlap=([0, 8], [0, 8], 8),
    partial_overlap=([0, 8], [4, 12], 12),
    gap=([0, 8], [16, 24], 24),
    gap_in_front=([8, 16], [16, 24], 24),
    bytes_left_over=([0, 8], [8, 16], 24),
    truncated=([0, 8], [8, 16], 15),
    nothing_there=([0, 8], [8, 16], 0),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name):
    with pytest.raises(ValueError, match="^safetensors: (expected a header of|the header is not readable)"):
        tensors.unpack(HOSTILE[name])


@pytest.mark.parametrize("field, value", [(field, value) for field in ENTRIES for value in ENTRIES[field]])
def test_a_hostile_entry_is_refused(field, value):
    with pytest.raises(ValueError, match="^safetensors: (the header is not readable|the tensors do not fill)"):
        tensors.unpack(file(dict(x=entry(**{field: value})), bytes(8)))


@pytest.mark.parametrize("shape", HIDDEN_BY_ZERO, ids=str)
def test_sizes_hidden_by_a_zero_are_refused(shape):
    with pytest.raises(ValueError, match="^safetensors: the header is not readable: .* does not fit its offsets"):
        tensors.unpack(file(dict(x=entry(shape=shape, data_offsets=[0, 0]))))


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_must_fill_the_file(name):
    first, second, size = LAYOUTS[name]
    data = file(dict(x=entry(data_offsets=first), y=entry(data_offsets=second)), bytes(size))
    with pytest.raises(ValueError, match=f"^safetensors: the tensors do not fill the {size} bytes"):
        tensors.unpack(data)


@pytest.mark.parametrize("keep", [7, 8, 40, -9, -1])
def test_a_truncated_file_is_refused(keep):
    with pytest.raises(ValueError, match="^safetensors: "):
        tensors.unpack(tensors.pack(ARRAYS)[:keep])


def test_every_changed_byte_of_a_header_is_refused_or_harmless():
    """Whatever stands in the header, the answer is tensors that fit the file or one kind of error."""
    data = tensors.pack(dict(x=np.ones(2), y=np.zeros((2, 1), np.int32)))
    refused = 0
    for i in range(len(data) - 24):
        for value in (0, 0x22, 0x2D, 0x39, 0x5B, 0xFF):
            try:
                back = tensors.unpack(data[:i] + bytes([value]) + data[i + 1:])
            except ValueError as error:
                refused += 1
                assert str(error).startswith("safetensors: ")
            else:
                assert sum(x.nbytes for x in back.values()) == 24
    assert refused > 500


def test_nothing_large_is_taken_for_a_small_file():
    """A thousand tensors that share the same megabyte would be a gigabyte."""
    header = {f"x{i}": entry(shape=[2 ** 17], data_offsets=[0, 2 ** 20]) for i in range(1000)}
    with pytest.raises(ValueError, match="do not fill"):
        tensors.unpack(file(header, bytes(2 ** 20)))


# Whole or not at all

def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "x.json"
    for text in (b"old", b"new and longer", b""):
        tensors.write_whole(path, text)
        assert path.read_bytes() == text and os.listdir(tmp_path) == ["x.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_folder_in_the_way(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError):
        tensors.write_whole(tmp_path / "x.json", b"new")
    assert os.listdir(tmp_path) == ["x.json"] and (tmp_path / "x.json").is_dir()


@pytest.mark.parametrize("step", ["replace", "chmod", "fdopen"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "interrupt"])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, step, error):
    def fail(*arguments):
        raise error
    path = tmp_path / "x.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        tensors.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.json"]


def test_a_value_that_is_no_bytes_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        tensors.write_whole(path, "text")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.json"]


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        tensors.write_whole(tmp_path / "nowhere" / "x.json", b"new")
