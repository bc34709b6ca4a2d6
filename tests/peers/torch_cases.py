"""Golden cases as torch has them: inputs that record gradients, and what came out as arrays to be checked."""
import numpy as np
import torch

torch.set_num_threads(1)                                 # small arrays: threads would only wait for each other


def floating(case):
    """Names of the inputs that have gradients."""
    return [name for name, x in case.inputs.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"]


def tensors(case, names, dtype="float64"):
    """Inputs of a case as tensors of dtype that record gradients."""
    x = case.in_dtype(dtype)
    return {name: torch.from_numpy(x[name]).requires_grad_() for name in names}


def with_gradients(case, outputs, leaves):
    """Outputs (name -> tensor) and the gradients of leaves for the cotangents of the case, as arrays to be checked."""
    found = {name: y.detach().numpy() for name, y in outputs.items()}
    if case.cotangents:
        cotangents = [torch.from_numpy(case.cotangents["d" + name]).to(y.dtype) for name, y in outputs.items()]
        y, x = list(outputs.values()), list(leaves.values())
        gradients = torch.autograd.grad(y, x, cotangents, materialize_grads=True)
        found |= {"d" + name: g.numpy() for name, g in zip(leaves, gradients)}
    return found
