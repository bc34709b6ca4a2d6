"""Wrong implementations of masked."""
import numpy as np

from .right import attend, positions, same_segment, windowed


def causal_from_the_top(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    """The diagonal starts at the top left, whatever was asked for.

    Dao-AILab/flash-attention issue 282
    """
    i, j = positions("top-left", lengths, q.shape[2], k.shape[2])
    keep = (j < lengths[:, None, None, None]) & same_segment(query_segments, key_segments)
    keep = keep & ((j <= i) | (not causal)) & windowed(j - i, left, right, dilation)
    return attend(q, k, v, keep, scale)


def own_key_counted(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    """The left size is taken for a number of keys with the query's own: one key too few.

    huggingface/transformers issue 39408
    """
    i, j = positions(anchor, lengths, q.shape[2], k.shape[2])
    keep = (j < lengths[:, None, None, None]) & same_segment(query_segments, key_segments)
    keep = keep & ((j <= i) | (not causal))
    keep = keep & windowed(j - i, None if left is None else left - 1, right, dilation)
    return attend(q, k, v, keep, scale)


def negative_is_open(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    """-left is passed for left, and a negative size means no bound.

    proger/hippogriff issue 7
    """
    i, j = positions(anchor, lengths, q.shape[2], k.shape[2])
    keep = (j < lengths[:, None, None, None]) & same_segment(query_segments, key_segments)
    left = -left if left is not None else -1
    keep = keep & ((j <= i) | (not causal)) & windowed(j - i, None if left < 0 else left, right, dilation)
    return attend(q, k, v, keep, scale)


def causal_only_with_padding(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation,
                             scale):
    """The causal branch lies inside the branch of the padding mask.

    facebookresearch/xformers issue 103
    """
    i, j = positions(anchor, lengths, q.shape[2], k.shape[2])
    keep = same_segment(query_segments, key_segments) & windowed(j - i, left, right, dilation)
    if (lengths < k.shape[2]).any():
        keep = keep & (j < lengths[:, None, None, None])
        if causal:
            keep = keep & (j <= i)
    return attend(q, k, v, keep, scale)


def longest_row_for_all(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    """One number of past keys for the whole batch, that of the longest row.

    microsoft/onnxruntime PR 27992
    """
    i, j = positions(anchor, np.full_like(lengths, lengths.max()), q.shape[2], k.shape[2])
    keep = (j < lengths[:, None, None, None]) & same_segment(query_segments, key_segments)
    keep = keep & ((j <= i) | (not causal)) & windowed(j - i, left, right, dilation)
    return attend(q, k, v, keep, scale)


def lengths_not_passed_on(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    """The lengths are accepted and hide no key.

    jax-ml/jax issue 23349
    """
    i, j = positions(anchor, lengths, q.shape[2], k.shape[2])
    keep = same_segment(query_segments, key_segments) & ((j <= i) | (not causal))
    return attend(q, k, v, keep & windowed(j - i, left, right, dilation), scale)


def diagonal_of_the_padded_row(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation,
                               scale):
    """The causal mask is made for the padded number of keys and not moved to the true one.

    facebookresearch/xformers PR 66
    """
    i, j = positions(anchor, np.full_like(lengths, k.shape[2]), q.shape[2], k.shape[2])
    keep = (j < lengths[:, None, None, None]) & same_segment(query_segments, key_segments)
    keep = keep & ((j <= i) | (not causal)) & windowed(j - i, left, right, dilation)
    return attend(q, k, v, keep, scale)


def window_needs_a_mask(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    """The window is applied in the branch that has some other mask, and is dropped without one.

    jax-ml/jax issue 32300
    """
    i, j = positions(anchor, lengths, q.shape[2], k.shape[2])
    keep = (j < lengths[:, None, None, None]) & same_segment(query_segments, key_segments)
    keep = keep & ((j <= i) | (not causal))
    if not keep.all():
        keep = keep & windowed(j - i, left, right, dilation)
    return attend(q, k, v, keep, scale)


def packed_row_is_one_sequence(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation,
                               scale):
    """Nothing is reset where one packed sequence ends and the next begins.

    PrimeIntellect-ai/prime-rl PR 3001
    """
    i, j = positions(anchor, lengths, q.shape[2], k.shape[2])
    keep = (j < lengths[:, None, None, None]) & ((j <= i) | (not causal))
    return attend(q, k, v, keep & windowed(j - i, left, right, dilation), scale)
