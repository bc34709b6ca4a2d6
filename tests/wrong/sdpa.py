"""Wrong implementations of sdpa."""
import numpy as np

from attention_ref.core import softmax, unread

from .right import attend, softcapped


def softmax_down_the_column(q, k, v, mask, scale):
    """The softmax sums over queries instead of keys: a wrong number of the axis.

    labmlai/annotated_deep_learning_paper_implementations issue 146
    """
    s = np.where(mask, scale * q @ unread(k, mask).swapaxes(-1, -2), -np.inf)
    s = np.broadcast_to(s, (*q.shape[:3], k.shape[2]))
    p, _ = softmax(s.swapaxes(-1, -2), s.swapaxes(-1, -2) > -np.inf)
    return p.swapaxes(-1, -2) @ unread(v, mask)


def scaled_by_the_model(q, k, v, mask, bias, scale):
    """Scores are divided by the root of all channels of all heads.

    Graylab/DL4Proteins-notebooks issue 12
    """
    return attend(q, k, v, mask, (q.shape[1] * q.shape[3]) ** -0.5, bias)


def causal_flag_at_the_top(q, k, v, mask, bias, scale):
    """A causal mask is recognised and replaced by a flag, whose diagonal starts at the other corner.

    ml-explore/mlx issue 2835
    """
    Tq, Tk = q.shape[2], k.shape[2]
    flag = np.array_equal(np.squeeze(mask), np.tri(Tq, Tk, Tk - Tq, dtype=bool))
    return attend(q, k, v, np.tri(Tq, Tk, dtype=bool) if flag else mask, scale, bias)


def minus_1e9_in_half(q, k, v, mask, bias, scale):
    """-1e9 is added where the mask hides, which is -inf in half precision.

    bentrevett/pytorch-seq2seq issue 191
    """
    s = scale * q @ k.swapaxes(-1, -2) + bias + np.where(mask, 0.0, -1e9).astype(q.dtype)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def probabilities_times_mask(q, k, v, mask, scale):
    """All keys share the softmax, then the mask zeroes some weights: rows no longer sum to 1.

    huggingface/pytorch-image-models PR 2236
    """
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2))
    return (p * mask) @ v


def float_mask_of_ones(q, k, v, mask, scale):
    """A mask of 0 and 1 is added to the scores, which hides nothing.

    pytorch/pytorch issue 21518
    """
    return softmax(scale * q @ k.swapaxes(-1, -2) + np.asarray(mask, q.dtype))[0] @ v


def cap_comes_last(q, k, v, mask, bias, sink, scale, softcap):
    """Bias and mask are added first and capped with the scores: -inf becomes -c, which is visible.

    onnx/onnx issue 7865
    """
    s = np.where(mask, scale * q @ k.swapaxes(-1, -2) + bias, -np.inf)
    p, _ = softmax(softcapped(s, softcap), sink=np.reshape(sink, (-1, 1, 1)))
    return p @ v


def extra_one_unshifted(q, k, v, mask, bias, sink, scale):
    """The extra term of the denominator is exp(sink), although the rest was shifted by the maximum.

    kyegomez/AttentionIsOFFByOne issue 5
    """
    s = np.where(mask, scale * q @ unread(k, mask).swapaxes(-1, -2) + bias, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    m = np.where(m == -np.inf, 0, m)
    e = np.exp(s - m)
    z = e.sum(-1, keepdims=True) + np.exp(np.reshape(sink, (-1, 1, 1))).astype(q.dtype)
    return e / np.where(z == 0, 1, z) @ unread(v, mask)


def hidden_scores_overflow(q, k, v, mask, bias, scale):
    """exp of every score is times the mask, and that of a hidden one may be infinite: inf 0 is NaN.

    deepmodeling/deepmd-kit PR 5717
    """
    s = scale * q @ unread(k, mask).swapaxes(-1, -2) + bias
    m = np.where(mask, s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(m == -np.inf, 0, m)) * mask
    z = e.sum(-1, keepdims=True)
    return e / np.where(z == 0, 1, z) @ unread(v, mask)


def infinities_cleaned_up(q, k, v, mask, bias, scale):
    """Infinite scores are set to 0 against overflow, after the mask wrote its own.

    huggingface/transformers issue 35151
    """
    s = np.where(mask, scale * q @ k.swapaxes(-1, -2) + bias, -np.inf)
    return softmax(np.where(np.isinf(s), 0, s))[0] @ v


def log2e_on_scores_only(q, k, v, mask, bias, scale):
    """exp2 of scores times log2 e, and a bias that was not rescaled.

    meta-pytorch/segment-anything-fast PR 71
    """
    s = np.where(mask, scale * np.log2(np.e).item() * q @ unread(k, mask).swapaxes(-1, -2) + bias, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp2(s - np.where(m == -np.inf, 0, m))
    z = p.sum(-1, keepdims=True)
    return p / np.where(z == 0, 1, z) @ unread(v, mask)


def scaled_after_the_product(q, k, v, mask, bias, scale):
    """q k^T is stored in half precision before the scale makes it small.

    ggml-org/llama.cpp issue 7805
    """
    s = scale * (q @ unread(k, mask).swapaxes(-1, -2)) + bias
    return softmax(s, mask)[0] @ unread(v, mask)


def most_negative_number(q, k, v, mask, bias, scale):
    """The mask adds the most negative number of the type: with a negative score it overflows.

    huggingface/transformers PR 17306
    """
    s = scale * q @ k.swapaxes(-1, -2) + bias + np.where(mask, 0, np.finfo(q.dtype).min)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    return e / e.sum(-1, keepdims=True) @ v


def values_in_memory_order(q, k, v, mask, bias, scale):
    """The values, and they alone, are read in the order of memory, whatever the strides say.

    ROCm/pytorch issue 3230
    """
    flat = np.ravel(v, order="K").reshape(v.shape)
    p, lse = softmax(scale * q @ unread(k, mask).swapaxes(-1, -2) + bias, mask)
    return p @ unread(flat, mask), lse


def unscaled_key_gradient(do, q, k, v, mask, bias, scale):
    """The backward scales dq and forgets that dk has the same factor.

    markroxor/fromscratchtoml issue 65
    """
    k, v = unread(k, mask), unread(v, mask)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2) + bias, mask)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    q = unread(q, np.swapaxes(np.atleast_2d(mask), -1, -2))
    return dict(dq=scale * ds @ k, dk=ds.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do)
