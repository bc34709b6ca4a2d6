"""The code under test: attention as somebody might write it, without sink and without soft cap."""
import numpy as np


def attention(q, k, v, mask, bias, scale):
    """softmax(scale q k^T + bias) v over the keys that mask allows; a row without keys gives 0.

    q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv), mask boolean and bias real, broadcast to (B, H, Tq, Tk).
    """
    scores = np.where(mask, scale * q @ k.swapaxes(-1, -2) + bias, -np.inf)
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total) @ v


def grouped(q, k, v, mask, scale):
    """Grouped-query attention: q has Hq heads, k and v have Hkv, and query head h reads kv head h // (Hq/Hkv)."""
    group = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(group, 1), v.repeat(group, 1), mask, 0.0, scale)
