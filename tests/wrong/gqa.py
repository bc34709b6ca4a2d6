"""Wrong implementations of gqa."""
import numpy as np

from attention_ref.core import repeat_heads, softmax, unread

from .right import attend, whole_mask


def heads_tiled(q, k, v, mask, scale):
    """The kv heads are repeated as a block, so that neighbours read different ones.

    onnx/onnx PR 7274
    """
    groups = q.shape[1] // k.shape[1]
    return attend(q, np.tile(k, (1, groups, 1, 1)), np.tile(v, (1, groups, 1, 1)), mask, scale)


def values_as_wide_as_keys(q, k, v, mask, scale):
    """The kernel knows one head size, that of the keys; wider values are cut off.

    microsoft/onnxruntime issue 28357
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    o, lse = attend(q, k, v, mask, scale)
    o[..., q.shape[-1]:] = 0
    return o, lse


def causal_when_nothing_is_said(q, k, v, mask, scale):
    """No mask and more than one query is taken for causal.

    kyegomez/OpenMythos PR 2
    """
    if np.all(mask) and q.shape[2] > 1:
        mask = np.tril(np.ones((q.shape[2], k.shape[2]), bool))
    return attend(q, repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), mask, scale)


def nothing_over_nothing(q, k, v, mask, scale):
    """The softmax of a row without keys is 0/0.

    robertknight/rten PR 1321
    """
    k, v = unread(repeat_heads(k, q.shape[1]), mask), unread(repeat_heads(v, q.shape[1]), mask)
    s = np.where(mask, scale * q @ k.swapaxes(-1, -2), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def one_head_of_the_group(do, q, k, v, mask, scale):
    """The gradient of a shared head is that of one of the heads that share it, not their sum.

    marin-community/levanter PR 449
    """
    heads, mask = k.shape[1], whole_mask(mask, q, k)
    k, v = unread(repeat_heads(k, q.shape[1]), mask), unread(repeat_heads(v, q.shape[1]), mask)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2), mask)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dk, dv = scale * ds.swapaxes(-1, -2) @ unread(q, mask.swapaxes(-1, -2)), p.swapaxes(-1, -2) @ do
    group = q.shape[1] // heads
    return dict(dq=scale * ds @ k, dk=dk[:, ::group], dv=dv[:, ::group])
