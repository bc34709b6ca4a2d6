"""Wrong implementations of sdpa whose gradients come from torch."""
import torch


def rows_repaired_after_softmax(q, k, v, mask, bias, scale):
    """Rows without keys are NaN, and are set to 0 afterwards: their gradients stay NaN.

    Xilinx/brevitas PR 1591
    """
    minus_inf = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    p = torch.softmax(scale * q @ k.transpose(-1, -2) + bias + minus_inf, -1)
    return torch.where(torch.isnan(p), torch.zeros_like(p), p) @ v
