"""How a function is called: names, layouts, array libraries, gradients, views of memory, repeated runs, adapter.py."""
import re
import sys
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest

from attention_ref import delta_rule, gqa, kv_cache, load_cases, sdpa, variants
from attention_ref.conformance.call import Call
from attention_ref.conformance.cases import by_name
from attention_ref.conformance.cli import main
from attention_ref.conformance.implementations import examine, judge, run
from attention_ref.conformance.libraries import VIEWS, to_numpy
from attention_ref.conformance.report import explain
from attention_ref.names import STATES

CASES = {name: {case.name: case for case in load_cases(name)} for name in variants()}
BASIC, EVERYTHING = CASES["sdpa"]["basic"], CASES["sdpa"]["everything"]
TYPES = "float64", "float32", "float16", "bfloat16"


def text_of(call, case=BASIC, dtype="float64"):
    """What is said of one case that must fail."""
    result = examine(call, case, dtype)
    assert not result.passed and not result.unsupported
    return explain(result)


def all_pass(call, variant="sdpa", dtype="float64"):
    """Results of all cases of a variant, none of which failed and one of which passed."""
    results, _ = judge(call, load_cases(variant), dtype)
    failed = [explain(r) for r in results if not r.passed and not r.unsupported]
    assert not failed and any(r.passed for r in results), failed
    return results


def torch_attention(torch):
    """o and lse of sdpa as one writes them in torch, a row without keys included."""
    def attention(q, k, v, mask, bias, sink, scale, softcap):
        used = mask.expand(*q.shape[:3], k.shape[2]).any(2)[..., None]
        k, v = torch.where(used, k, 0), torch.where(used, v, 0)
        s = scale * q @ k.transpose(-1, -2)
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        s = torch.where(mask, s + bias, -torch.inf)
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:1], s.shape[1], s.shape[2], 1)], -1)
        empty = (s == -torch.inf).all(-1, keepdim=True)
        lse = torch.logsumexp(torch.where(empty, 0, s), -1)
        p = torch.where(empty, 0, torch.exp(s - lse[..., None]))[..., :-1]
        return p @ v, torch.where(empty[..., 0], -torch.inf, lse)
    return attention


def jax_attention(jax):
    """o of sdpa without a sink, as one writes it in JAX."""
    def attention(q, k, v, mask, bias, scale, softcap):
        s = scale * q @ k.swapaxes(-1, -2)
        s = s if softcap is None else softcap * jax.numpy.tanh(s / softcap)
        p = jax.nn.softmax(s + bias, where=mask, axis=-1) if k.shape[2] else s
        return jax.numpy.where(mask, p, 0) @ v
    return attention


# Names and layouts

def test_renamed_arguments_and_outputs():
    def attention(query, key, value, keep, scale):
        assert keep.dtype == bool
        return dict(out=gqa.dense(query, key, value, keep, scale=scale)[0])
    names = dict(q="query", k="key", v="value", mask="keep", o="out")
    assert not any(r.unsupported for r in all_pass(Call(attention, rename=names), "gqa"))


def test_names_may_be_exchanged():
    def attention(k, q, v, mask, scale):
        return gqa.dense(k, q, v, mask, scale=scale)
    assert all_pass(Call(attention, rename=dict(q="k", k="q")), "gqa")
    assert not run(attention, CASES["gqa"]["basic"], "float64").passed


def split(x, heads):
    """(B, T, H, d) or (B, T, H*d) as (B, H, T, d)."""
    B, T = x.shape[:2]
    return x.reshape(B, T, heads, np.prod(x.shape[2:], dtype=int) // heads).swapaxes(1, 2)


def join(y, packed):
    """(B, H, T, d) as (B, T, H, d) or (B, T, H*d)."""
    B, H, T, d = y.shape
    return y.swapaxes(1, 2).reshape((B, T, H * d) if packed else (B, T, H, d))


@pytest.mark.parametrize("layout", ["BTHD", "packed"])
def test_layouts_with_grouped_heads(layout):
    packed, contiguous = layout == "packed", []

    def attention(q, k, v, mask, scale, Hq, Hkv):
        contiguous.append(q.flags.c_contiguous)
        o, lse = gqa.dense(split(q, Hq), split(k, Hkv), split(v, Hkv), mask, scale=scale)
        return join(o, packed), lse

    def backward(do, dlse, q, k, v, mask, scale, Hq, Hkv):
        inputs = split(q, Hq), split(k, Hkv), split(v, Hkv)
        return tuple(join(g, packed) for g in gqa.vjp(split(do, Hq), dlse, *inputs, mask, scale=scale).values())
    results = all_pass(Call(attention, layout=layout, vjp=backward), "gqa")
    assert not any(r.unsupported for r in results)
    assert {c.name for r in results for c in r.comparisons} == {"o", "lse", "dq", "dk", "dv"}
    assert all(contiguous)                               # the strided case too: it lies in memory as (B, T, H, d)


STATEFUL = [name for name, module in variants().items() if STATES & set(module.INPUTS) and hasattr(module, "vjp")]


def turned(x):
    """The states of a dict, and their cotangents or gradients, with the last two axes exchanged."""
    return {name: y.swapaxes(-1, -2) if STATES & {name, name[1:]} else y for name, y in x.items()}


@pytest.mark.parametrize("variant", STATEFUL)
def test_states_in_the_other_layout(variant):
    """A state comes, and is given back, as (B, H, dv, dk); so do its cotangent and its gradient."""
    module, shapes = variants()[variant], set()

    def dense(**x):
        shapes.add(x["initial_state"].shape[2:])
        return turned(by_name(module.OUTPUTS, module.dense(**turned(x))))

    def backward(**x):
        return turned(module.vjp(**turned(x)))
    backward.__signature__ = signature(module.vjp)
    call = Call(dense, state_layout="BHVK", vjp=backward)
    names = {c.name for r in all_pass(call, variant) for c in r.comparisons}
    assert {"final_state", "dinitial_state"} <= names
    assert shapes == {c.inputs["initial_state"].shape[:1:-1] for c in load_cases(variant)}


def test_states_that_are_not_there():
    with pytest.raises(ValueError, match="state_layout: sdpa has no final_state or initial_state"):
        judge(Call(sdpa.dense, state_layout="BHVK"), [BASIC], "float64")
    with pytest.raises(ValueError, match="state_layout: expected one of BHKV, BHVK, got 'BVHK'"):
        Call(sdpa.dense, state_layout="BVHK")


def test_a_state_of_the_wrong_layout_is_told():
    def plain(**x):
        return delta_rule.dense(**turned(x))
    text = text_of(Call(plain, state_layout="BHVK"), CASES["delta_rule"]["basic"])
    assert re.search(r"final_state: expected shape \(.*\) in layout BHVK, got \(", text)


@pytest.mark.parametrize("layout", ["BTHD", "packed"])
def test_a_cache_has_the_layout_too(layout):
    def decode(Hq, Hkv, past_length, scale, chunk_size, q, **x):
        inputs = dict(q=split(q, Hq)) | {name: split(a, Hkv) for name, a in x.items()}
        options = dict(past_length=past_length, scale=scale, chunk_size=chunk_size)
        return [join(y, layout == "packed") for y in kv_cache.dense(**inputs, **options)]
    assert not any(r.unsupported for r in all_pass(Call(decode, layout=layout), "kv_cache"))


@pytest.mark.parametrize("variant", ["multi_head", "cross"])
def test_what_has_no_heads_has_one_layout(variant):
    module = variants()[variant]
    assert not any(r.unsupported for r in all_pass(Call(module.dense, layout="BTHD", vjp=module.vjp), variant))


def test_the_wrong_layout_is_named():
    def attention(q, k, v, scale):
        return gqa.dense(*(x.swapaxes(1, 2) for x in (q, k, v)), scale=scale)[0]
    case = CASES["gqa"]["basic"]
    B, H, T, d = case.outputs["o"].shape
    assert f"o: expected shape {(B, T, H, d)} in layout BTHD, got {(B, H, T, d)}" in text_of(
        Call(attention, layout="BTHD"), case)


# Array libraries

@pytest.mark.parametrize("dtype", TYPES)
def test_torch_with_gradients(dtype):
    torch = pytest.importorskip("torch")
    attention, seen = torch_attention(torch), set()

    def watched(**x):
        seen.update(a.dtype for a in x.values() if torch.is_tensor(a) and a.is_floating_point())
        return attention(**x)
    watched.__signature__ = signature(attention)
    if dtype in ("float64", "float32"):
        results = all_pass(Call(watched, "torch", grad=True, strides=True, repeat=2), "sdpa", dtype)
        assert {"o", "lse", "dq", "dk", "dv", "dbias", "dsink"} <= {c.name for r in results for c in r.comparisons}
        assert not any(r.unsupported for r in results)
    else:                                                # torch sums the rows of half precision in half precision
        assert run(Call(watched, "torch", grad=True), BASIC, dtype).passed
    assert seen == {getattr(torch, dtype)}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_jax_with_gradients(dtype):
    jax = pytest.importorskip("jax")
    attention, seen = jax_attention(jax), set()

    def watched(q, k, v, mask, bias, scale, softcap):
        seen.add(str(q.dtype))
        return attention(q, k, v, mask, bias, scale, softcap)
    call = Call(watched, "jax", device="cpu", grad=True)
    results, _ = judge(call, [CASES["sdpa"][name] for name in ("softcap", "causal_tall")], dtype)
    assert all(r.passed for r in results), [explain(r) for r in results if not r.passed]
    assert {c.name for c in results[0].comparisons} == {"o", "dq", "dk", "dv", "dbias"} and seen == {dtype}
    assert jax.numpy.zeros(1).dtype == "float32", "the setting of the process has changed"


def test_numpy_bfloat16_is_that_of_ml_dtypes_or_float32(monkeypatch):
    ml_dtypes, seen = pytest.importorskip("ml_dtypes"), []

    def attention(**x):
        seen.append(x["q"].dtype)
        return sdpa.dense(**x)
    for module in (ml_dtypes, None):
        monkeypatch.setitem(sys.modules, "ml_dtypes", module)
        assert run(attention, BASIC, "bfloat16").passed
    assert seen == [np.dtype(ml_dtypes.bfloat16), np.float32]


def test_cupy(monkeypatch):
    """A stand-in: arrays that NumPy cannot read until they are fetched from the device."""
    class OnDevice:
        __cuda_array_interface__ = {}

        def __init__(self, x):
            self.x = x

        def __array__(self, *_, **__):
            raise TypeError("implicit conversion to a NumPy array is not allowed")

        def get(self):
            return self.x
    devices = []

    class Device:
        def __init__(self, number):
            devices.append(number)
        __enter__ = __exit__ = lambda *_: None
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(asarray=OnDevice, cuda=SimpleNamespace(Device=Device)))

    def attention(**x):
        return tuple(map(OnDevice, sdpa.dense(**{n: a.get() if isinstance(a, OnDevice) else a for n, a in x.items()})))
    assert run(Call(attention, "cupy", device="cuda:1"), BASIC, "float32").passed and devices == [1]


def test_arrays_of_any_library_come_back():
    x = np.arange(6.0).reshape(2, 3)
    exchange = SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)
    for y in (x, x.tolist(), memoryview(x), exchange):
        assert np.array_equal(to_numpy(y), x)


def test_tensors_come_back_from_autograd():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.ones(2, 3, dtype=dtype, requires_grad=True)
        assert np.array_equal(to_numpy(y), np.ones((2, 3))) and to_numpy(y).dtype == np.float32

    def attention(q, k, v, scale):
        q = torch.from_numpy(q).requires_grad_()
        return (torch.softmax(scale * q @ torch.from_numpy(k).mT, -1) @ torch.from_numpy(v)), None
    assert run(attention, BASIC, "float32").passed


# Gradients

def test_what_is_not_returned_has_no_cotangent():
    """The golden gradients have a part that comes through lse: who returns o only is not asked for it."""
    torch = pytest.importorskip("torch")
    attention = torch_attention(torch)

    def only_o(q, k, v, mask, bias, sink, scale, softcap):
        return attention(q, k, v, mask, bias, sink, scale, softcap)[0]

    def lse_detached(q, k, v, mask, bias, sink, scale, softcap):
        o, lse = attention(q, k, v, mask, bias, sink, scale, softcap)
        return o, lse.detach()
    assert run(Call(only_o, "torch", grad=True), EVERYTHING, "float32").passed
    _, diagnosis = judge(Call(lse_detached, "torch", grad=True), [EVERYTHING], "float32")
    assert diagnosis.mistakes == ["dlse_ignored"]


def test_a_backward_need_not_take_every_cotangent():
    def backward(do, **x):
        return sdpa.vjp(do, 0 * BASIC.cotangents["dlse"], **{n: a for n, a in x.items() if n != "dlse"})

    def without_dlse(do, q, k, v, scale):
        found = sdpa.vjp(do, 0 * BASIC.cotangents["dlse"], q, k, v, scale=scale)
        return [found[name] for name in ("dq", "dk", "dv")]
    assert run(Call(sdpa.dense, vjp=without_dlse), BASIC, "float64").passed
    _, diagnosis = judge(Call(sdpa.dense, vjp=backward), [BASIC], "float64")
    assert diagnosis.mistakes == ["dlse_ignored"]


def test_a_wrong_backward_is_named():
    def backward(do, dlse, **x):
        return sdpa.VJP_BUGS["dq_scale_missing"][1](dict(do=do, dlse=dlse, **x))
    _, diagnosis = judge(Call(sdpa.dense, vjp=backward), load_cases("sdpa"), "float64")
    assert diagnosis.mistakes == ["dq_scale_missing"]


@pytest.mark.parametrize("change, message", [
    (lambda torch, o: o.detach(), "o: no autograd history: detached, or computed outside torch"),
    (lambda torch, o: torch.from_numpy(o.detach().numpy()), "o: no autograd history"),
    (lambda torch, o: o[..., :-1], "o: expected shape (2, 3, 5, 7), got (2, 3, 5, 6)")])
def test_no_gradients_can_be_had(change, message):
    torch = pytest.importorskip("torch")

    def attention(q, k, v, scale):
        return change(torch, torch.softmax(scale * q @ k.mT, -1) @ v)
    assert message in text_of(Call(attention, "torch", grad=True))


# Views and repeated runs

@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4, 5), (2, 0, 3)])
def test_a_view_holds_the_same_numbers(view, shape):
    x = np.random.default_rng(0).normal(size=shape)
    put, take = VIEWS[view]
    assert np.array_equal(take(put(x)), x) and (not x.size or x.ndim == 1 or not take(put(x)).flags.c_contiguous)


def from_the_start(x):
    """x as code reads it that takes the first number and walks on: strides ignored."""
    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return np.resize(owner.ravel("K"), x.shape)


def test_who_ignores_strides_is_told_the_view():
    def careless(q, k, v, mask, bias, scale):
        return sdpa.dense(*map(from_the_start, (q, k, v)), mask, bias, scale=scale)
    assert run(careless, BASIC, "float64").passed
    text = text_of(Call(careless, strides=True))
    assert "on transposed arrays only: o at batch " in text and "times the budget" in text
    assert str(judge(Call(careless, strides=True), [BASIC], "float64")[1]) == "nothing to diagnose"
    all_pass(Call(sdpa.dense, strides=True))


@pytest.mark.parametrize("view, refuses", dict(
    sliced=lambda q: q.strides[-1] > q.itemsize and q.strides[-2] == 2 * q.itemsize * q.shape[-1],
    reversed=lambda q: q.strides[-1] < 0).items())
def test_who_refuses_a_view_fails_or_does_not_support_it(view, refuses):
    def refusing(error):
        def attention(q, k, v, scale):
            if refuses(q):
                raise error("no such strides")
            return sdpa.dense(q, k, v, scale=scale)
        return Call(attention, strides=True)
    assert f"on {view} arrays only: the implementation raised ValueError: no such strides" in text_of(
        refusing(ValueError))
    assert examine(refusing(NotImplementedError), BASIC, "float64").passed


def test_strides_reach_torch():
    torch, seen = pytest.importorskip("torch"), set()

    def attention(q, k, v, scale):
        seen.add(q.stride()[-2:])
        return torch.softmax(scale * q @ k.mT, -1) @ v
    assert examine(Call(attention, "torch", strides=True), BASIC, "bfloat16").passed
    assert seen == {(4, 1), (1, 5), (8, 2)}


def test_runs_that_differ():
    count = iter(range(100))

    def attention(**x):
        o, lse = sdpa.dense(**x)
        if next(count) == 2:
            o[1, 2, 3, 4] = np.nextafter(o[1, 2, 3, 4], 9)
        return o, lse
    text = text_of(Call(attention, repeat=3))
    assert "o: run 3 differs from run 1 in 1 of 210 numbers, first at batch 1, head 2, query 3, channel 4: " in text
    assert run(attention, BASIC, "float64").passed
    for dtype in TYPES:
        assert examine(Call(sdpa.dense, repeat=2), BASIC, dtype).passed


@pytest.mark.parametrize("later, message", [
    (lambda o: 1 // 0, "the implementation raised ZeroDivisionError"),
    (lambda o: o[:, :1], "o: expected shape (2, 3, 5, 7), got (2, 1, 5, 7)"),
    (lambda o: dict(lse=o), "lse: expected shape")])
def test_a_later_run_that_fails(later, message):
    count = iter(range(100))

    def attention(**x):
        o, lse = sdpa.dense(**x)
        return later(o) if next(count) else (o, lse)
    assert message in text_of(Call(attention, repeat=2))


# The command

MODULE = """
import numpy as np
from attention_ref import sdpa

def dense(query, key, value, mask, bias, sink, scale, softcap):
    return sdpa.dense(query, key, value, mask, bias, sink, scale=scale, softcap=softcap)

def vjp(do, dlse, query, key, value, mask, bias, sink, scale, softcap):
    return sdpa.vjp(do, dlse, query, key, value, mask, bias, sink, scale=scale, softcap=softcap)

def torch_sdpa(q, k, v, mask, scale):
    from torch.nn.functional import scaled_dot_product_attention
    return scaled_dot_product_attention(q, k, v, mask, scale=scale)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module in it, on nobody's path."""
    (tmp_path / "function_of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    yield tmp_path
    for name in ("function_of_a_user", "adapter"):
        sys.modules.pop(name, None)


def command(capsys, *arguments):
    """The command as a function: (exit code, output, messages)."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def verify(capsys, name, *arguments):
    """Verify a function of the user's module."""
    return command(capsys, "verify", "sdpa", "--impl", f"function_of_a_user:{name}", *arguments)


def test_every_option_at_once(capsys, here):
    names = "--rename", "q=query,k=key,v=value", "--layout", "BHTD"
    place = "--backend", "numpy", "--device", "cpu"
    more = "--vjp", "function_of_a_user:vjp", "--strides", "--repeat", "2"
    code, out, err = verify(capsys, "dense", *names, *place, *more)
    assert (code, err) == (0, "") and f"{len(sdpa.CASES)} passed, 0 failed, 0 unsupported" in out


def test_torch_from_the_command(capsys, here):
    pytest.importorskip("torch")
    arguments = "--backend", "torch", "--grad", "--dtype", "float32", "--case"
    assert verify(capsys, "torch_sdpa", *arguments, "causal_wide")[0] == 0
    code, out, _ = verify(capsys, "torch_sdpa", *arguments, "masked_nan")
    assert code == 1 and "masked_nan_poison" in out


@pytest.mark.parametrize("arguments, message", [
    (["--rename", "query=q"], "rename: sdpa has q, k, v, .*, got 'query'"),
    (["--rename", "q=Q"], "rename: the function has bias, key, .*, got 'Q'"),
    (["--device", "cuda"], "device: NumPy arrays are on cpu, got 'cuda'"),
    (["--grad"], "grad: numpy has no autograd: name a backward with --vjp module:function"),
    (["--vjp", "function_of_a_user:nothing"], "vjp: module function_of_a_user has no nothing"),
    (["--vjp", "function_of_a_user:dense"], "vjp: expected a function that takes do, dlse, or some of them"),
    (["--repeat", "0"], "repeat: expected a number of runs >= 1, got 0"),
    (["--backend", "cupy"], "backend: cannot import cupy: .*")])
def test_not_runnable(capsys, here, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "cupy", None)
    code, out, err = verify(capsys, "dense", *arguments)
    assert (code, out) == (2, "") and re.fullmatch(f"attention-ref: {message}\n", err), err


@pytest.mark.parametrize("arguments", [
    ["--rename", "q"], ["--rename", "q=a=b"], ["--rename", "=q"], ["--layout", "TBHD"], ["--backend", "numpi"],
    ["--repeat", "often"]])
def test_options_that_cannot_be_read(capsys, here, arguments):
    code, out, err = verify(capsys, "dense", *arguments)
    assert (code, out) == (2, "") and err.startswith("usage: attention-ref")


@pytest.mark.parametrize("library, device", [
    ("torch", "cuda:99"), ("torch", "moon"), ("jax", "moon"), ("jax", "cpu:99")])
def test_devices_that_are_not_there(library, device):
    pytest.importorskip(library)
    with pytest.raises(ValueError, match=f"device: {library} has no '{device}'"):
        Call(sdpa.dense, library, device=device)


def test_what_does_not_go_together():
    pytest.importorskip("jax")
    with pytest.raises(ValueError, match="strides: arrays of jax have none"):
        Call(sdpa.dense, "jax", strides=True)
    with pytest.raises(ValueError, match="grad: the function takes cotangents: it is a backward"):
        judge(Call(sdpa.vjp, vjp=sdpa.vjp), [BASIC], "float64")
    with pytest.raises(ValueError, match="layout: expected one of BHTD, BTHD, packed, got 'TBHD'"):
        Call(sdpa.dense, layout="TBHD")


@pytest.mark.parametrize("variant", variants())
def test_the_adapter_file_runs_as_it_is(capsys, here, variant):
    code, out, err = command(capsys, "adapter", variant)
    assert (code, err) == (0, "") and f"attention-ref verify {variant} --impl adapter:run" in out
    text = (here / "adapter.py").read_text()
    assert all(name in text for name in [*variants()[variant].INPUTS, *variants()[variant].CONVENTIONS])
    code, out, err = command(capsys, "verify", variant, "--impl", "adapter:run", "--vjp", "adapter:backward")
    assert (code, err) == (0, "") and ", 0 failed, 0 unsupported" in out


def test_the_adapter_file_is_not_overwritten(capsys, here):
    (here / "adapter.py").write_text("mine")
    code, out, err = command(capsys, "adapter", "sdpa")
    assert (code, out) == (2, "") and "adapter.py is there and is not overwritten" in err
    assert (here / "adapter.py").read_text() == "mine"
