"""Wrong implementations of cross."""
import numpy as np

from attention_ref.core import merge_heads, softmax, split_heads, unread

from .right import attend, whole_mask


def mask_lost_between_layers(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    """The mask is an argument of the outer layer and never reaches the inner one.

    facebookresearch/fairseq issue 1682
    """
    q, k, v = split_heads(x @ w_q, heads), split_heads(z @ w_k, heads), split_heads(z @ w_v, heads)
    return merge_heads(attend(q, k, v, True, scale)[0]) @ w_o


def booleans_added(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    """A boolean mask takes the path of an additive one: 1 is added where it is True.

    mlverse/torch PR 1208
    """
    q, k, v = split_heads(x @ w_q, heads), split_heads(z @ w_k, heads), split_heads(z @ w_v, heads)
    p, _ = softmax(scale * q @ k.swapaxes(-1, -2) + np.asarray(mask, x.dtype))
    return merge_heads(p @ v) @ w_o


def axis_two_by_number(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    """softmax over axis 2, written when the scores had three axes: with heads it is the queries.

    FudanNLP/fastNLP issue 254
    """
    q, k, v = split_heads(x @ w_q, heads), split_heads(z @ w_k, heads), split_heads(z @ w_v, heads)
    s = scale * q @ unread(k, mask).swapaxes(-1, -2)
    p, _ = softmax(s.swapaxes(2, 3), whole_mask(mask, q, k).swapaxes(2, 3))
    return merge_heads(p.swapaxes(2, 3) @ unread(v, mask)) @ w_o


def large_negative_everywhere(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    """Hidden scores become -1e6, so a row that is hidden as a whole averages all values.

    d2l-ai/d2l-en PR 2423
    """
    q, k, v = split_heads(x @ w_q, heads), split_heads(z @ w_k, heads), split_heads(z @ w_v, heads)
    p, _ = softmax(np.where(mask, scale * q @ k.swapaxes(-1, -2), -1e6).astype(x.dtype))
    return merge_heads(p @ v) @ w_o
