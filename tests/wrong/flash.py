"""Wrong implementations of flash."""
import numpy as np

from attention_ref.core import softmax, unread

from .right import attend, tiles, whole_mask


def lse_in_two_bases(q, k, v, mask, sink, scale, key_block):
    """Every part gives its lse in base 2, and the merge takes it for natural.

    sgl-project/sglang issue 40903
    """
    mask = whole_mask(mask, q, k)
    parts = [attend(q, k[:, :, j], v[:, :, j], mask[..., j], scale) for j in tiles(k.shape[2], key_block)]
    lse = np.stack([part[1] for part in parts], -1) / np.log(2).astype(q.dtype)
    w, total = softmax(lse[..., None, :], True, np.reshape(sink, (-1, 1, 1, 1)))
    o = np.stack([part[0] for part in parts], -2)
    return (w @ o)[..., 0, :], total[..., 0]


def sink_in_every_split(q, k, v, mask, sink, scale, key_block):
    """Each split of the keys adds the sink to its own sum.

    ROCm/rocm-libraries PR 12229
    """
    mask = whole_mask(mask, q, k)
    parts = [attend(q, k[:, :, j], v[:, :, j], mask[..., j], scale, sink=sink) for j in tiles(k.shape[2], key_block)]
    lse = np.stack([part[1] for part in parts], -1)
    w, total = softmax(lse[..., None, :])
    return (w @ np.stack([part[0] for part in parts], -2))[..., 0, :], total[..., 0]


def maximum_starts_at_minus_infinity(q, k, v, mask, scale, key_block):
    """A first tile without keys leaves the maximum at -inf, and -inf - -inf is NaN.

    ggml-org/llama.cpp PR 12776
    """
    mask = whole_mask(mask, q, k)
    m, z, o = np.full((*q.shape[:3], 1), -np.inf, q.dtype), 0, 0
    for j in tiles(k.shape[2], key_block):
        keep = mask[..., j]
        s = np.where(keep, scale * q @ unread(k[:, :, j], keep).swapaxes(-1, -2), -np.inf)
        new = np.maximum(m, s.max(-1, keepdims=True))
        p, c = np.exp(s - new), np.exp(m - new)
        m, z, o = new, c * z + p.sum(-1, keepdims=True), c * o + p @ unread(v[:, :, j], keep)
    return o / z, (m + np.log(z))[..., 0]


def tail_filled_with_zeros(q, k, v, mask, sink, scale, key_block):
    """The last tile is filled up with zero keys, which nobody masks.

    pytorch/pytorch issue 153799
    """
    mask, more = whole_mask(mask, q, k), -k.shape[2] % key_block
    fill = ((0, 0), (0, 0), (0, more), (0, 0))
    mask = np.pad(mask, ((0, 0), (0, 0), (0, 0), (0, more)), constant_values=True)
    return attend(q, np.pad(k, fill), np.pad(v, fill), mask, scale, sink=sink)


def logarithms_added(q, k, v, mask, scale, key_block):
    """The lse of two blocks is taken for the sum of theirs.

    zhuzilin/ring-flash-attention issue 20
    """
    mask, o, lse = whole_mask(mask, q, k), None, None
    for j in tiles(k.shape[2], key_block):
        y, part = attend(q, k[:, :, j], v[:, :, j], mask[..., j], scale)
        if o is None:
            o, lse = y, part
            continue
        w, _ = softmax(np.stack([lse, part], -1))
        o, lse = w[..., :1] * o + w[..., 1:] * y, lse + part
    return o, lse


def last_key_again(do, dlse, q, k, v, mask, scale, key_block):
    """The backward fills the last tile by reading its last key again.

    pytorch/pytorch issue 153799
    """
    mask, o, lse = (m := whole_mask(mask, q, k)), *attend(q, k, v, m, scale)
    q, D = unread(q, mask.swapaxes(-1, -2)), (do * o).sum(-1, keepdims=True) - dlse[..., None]
    lse = np.where(lse == -np.inf, np.inf, lse)[..., None]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for start in range(0, k.shape[2], key_block):
        j = np.minimum(np.arange(start, start + key_block), k.shape[2] - 1)
        k_j, v_j = unread(k[:, :, j], mask[..., j]), unread(v[:, :, j], mask[..., j])
        p = np.exp(np.where(mask[..., j], scale * q @ k_j.swapaxes(-1, -2), -np.inf) - lse)
        ds = p * (do @ v_j.swapaxes(-1, -2) - D)
        dq += scale * ds @ k_j
        dk[:, :, j], dv[:, :, j] = scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
    return dict(dq=dq, dk=dk, dv=dv)
