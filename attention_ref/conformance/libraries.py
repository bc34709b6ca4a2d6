"""Array libraries: NumPy, torch, jax and cupy arrays, their autograd, and how they may lie in memory.

Of each, `array` makes one of theirs, `differentiate` is their autograd, `scope` holds while they are used. `to_numpy`
brings arrays of any library back. A library is imported when it is asked for.
"""
import importlib
from contextlib import nullcontext

import numpy as np

VIEWS = dict(                                            # name -> (what is stored, the view of it that has the numbers)
    transposed=(lambda x: x.swapaxes(-1, -min(2, x.ndim)).copy(), lambda y: y.swapaxes(-1, -min(2, y.ndim))),
    sliced=(lambda x: np.repeat(x, 2, -1), lambda y: y[..., ::2]),
    reversed=(lambda x: x[..., ::-1].copy(), lambda y: y[..., ::-1]))


class NumPy:
    """NumPy arrays; bfloat16 is the type of ml_dtypes where that is installed, else float32."""
    views, autograd = tuple(VIEWS), False

    def __init__(self, device):
        if device not in (None, "cpu"):
            raise ValueError(f"device: NumPy arrays are on cpu, got {device!r}")

    def array(self, x, dtype):
        return x.astype(bfloat16(), order="K") if dtype == "bfloat16" and x.dtype.kind == "f" else x

    def scope(self, dtype):
        return nullcontext()


class CuPy(NumPy):
    """CuPy arrays on the device of that number (0)."""

    def __init__(self, device):
        self.cupy, number = library("cupy"), (device or "0").removeprefix("cuda:")
        if not number.isdecimal():
            raise ValueError(f"device: expected a number or cuda:number, got {device!r}")
        self.device = int(number)

    def array(self, x, dtype):
        return self.cupy.asarray(super().array(x, dtype))

    def scope(self, dtype):
        return self.cupy.cuda.Device(self.device)


class Torch(NumPy):
    """Torch tensors on a device that torch.device understands."""
    views, autograd = ("transposed", "sliced"), True     # there are no negative strides

    def __init__(self, device):
        self.torch = library("torch")
        try:
            self.device = self.torch.zeros(1, device=device).device
        except Exception as error:
            raise ValueError(f"device: torch has no {device!r}: {first_line(error)}") from None

    def array(self, x, dtype):
        y = self.torch.from_numpy(x)
        return y.to(self.device, getattr(self.torch, dtype) if y.is_floating_point() else y.dtype)

    def differentiate(self, function, x, cotangents):
        """(outputs, gradients) of a function of a dict of arrays; an input that was not used has gradient 0."""
        x = {name: y.detach().requires_grad_() for name, y in x.items()}
        outputs = function(x)
        fit = fitting(outputs, cotangents)
        ends = [name for name in fit if getattr(outputs[name], "requires_grad", False)]
        if fit and not ends:
            raise ValueError(f"{', '.join(fit)}: no autograd history: detached, or computed outside torch")
        ys = [outputs[name] for name in ends]
        starts = [cotangents[name].to(y.dtype) for name, y in zip(ends, ys)]
        found = self.torch.autograd.grad(ys, list(x.values()), starts, materialize_grads=True) if ends else ()
        return outputs, dict(zip(x, found))


class Jax(NumPy):
    """JAX arrays on a device like cpu, gpu or gpu:1; float64 is switched on while it is asked for."""
    views, autograd = (), True

    def __init__(self, device):
        self.jax = library("jax")
        kind, _, number = (device or "").partition(":")
        try:
            self.device = self.jax.devices(kind or None)[int(number or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"device: jax has no {device!r}: {first_line(error)}") from None

    def array(self, x, dtype):
        return self.jax.device_put(super().array(x, dtype), self.device)

    def scope(self, dtype):
        return self.jax.enable_x64(True) if dtype == "float64" else nullcontext()

    def differentiate(self, function, x, cotangents):
        """(outputs, gradients) of a function of a dict of arrays."""
        def split(x):
            y = function(x)
            return {name: y[name] for name in fitting(y, cotangents)}, y
        ends, pull, outputs = self.jax.vjp(split, x, has_aux=True)
        return outputs, pull({name: cotangents[name].astype(y.dtype) for name, y in ends.items()})[0] if ends else {}


BACKENDS = dict(numpy=NumPy, torch=Torch, jax=Jax, cupy=CuPy)


def library(name):
    """The module of an array library; ValueError if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"backend: cannot import {name}: {first_line(error)}") from None


def first_line(error):
    """What an error says first."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def bfloat16():
    """The bfloat16 of ml_dtypes, or float32 without it."""
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        return np.dtype(np.float32)


def fitting(outputs, cotangents):
    """The names of the outputs that have a cotangent of their shape."""
    return [name for name, y in outputs.items() if name in cotangents
            and tuple(getattr(y, "shape", ())) == tuple(cotangents[name].shape)]


def to_numpy(y):
    """An array of any library as a NumPy array: from its device, without its autograd, torch's bfloat16 as float32."""
    if y is None:
        raise ValueError("outputs: expected arrays, got None")
    if hasattr(y, "detach"):
        y = y.detach().cpu()
        return (y.float() if str(y.dtype) == "torch.bfloat16" else y).numpy()
    if hasattr(y, "__cuda_array_interface__") and hasattr(y, "get"):
        return y.get()
    if hasattr(y, "__dlpack__") and not hasattr(y, "__array__"):
        return np.from_dlpack(y)
    return np.asarray(y)
