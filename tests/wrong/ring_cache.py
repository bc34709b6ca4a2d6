"""Wrong implementations of ring_cache."""
import numpy as np

from .right import look, step_by_step


def full_one_token_early(q, k, v, ring_key, ring_value, past_length, scale):
    """The ring counts as full one token too early: its last slot stays empty and positions go round in W - 1 slots.

    huggingface/transformers issue 37574
    """
    W = ring_key.shape[2]
    if W == 1:
        raise NotImplementedError("a window of one")
    return step_by_step(q, k, v, ring_key, ring_value, past_length, scale, lambda p: p % (W - 1),
                        lambda p: np.arange(W) < np.minimum(p + 1, W - 1)[:, None])


def all_written_before_any_is_read(q, k, v, ring_key, ring_value, past_length, scale):
    """Several tokens are written at once; the later ones take the slots that the earlier still need.

    ml-explore/mlx-examples PR 856
    """
    W = ring_key.shape[2]
    _, key, value = step_by_step(q, k, v, ring_key, ring_value, past_length, scale, lambda p: p % W,
                                 lambda p: np.arange(W) <= p[:, None])
    filled = np.arange(W) < (past_length + q.shape[2])[:, None, None, None]
    return look(q, key, value, filled, scale), key, value


def mask_longer_than_the_cache(q, k, v, ring_key, ring_value, past_length, scale):
    """The mask is made for the whole sequence, the cache holds the window: the first columns are taken for the last.

    fla-org/flash-linear-attention issue 431
    """
    W, T = ring_key.shape[2], q.shape[2]
    order = (np.arange(W) + past_length[:, None]) % W
    line = [np.concatenate([np.take_along_axis(ring, order[:, None, :, None], 2), new], 2)
            for ring, new in ((ring_key, k), (ring_value, v))]
    p = past_length[:, None, None, None] + np.arange(T)[:, None]
    seen = (np.arange(W + T) <= p) & (np.arange(W + T) > p - W)
    _, key, value = step_by_step(q, k, v, ring_key, ring_value, past_length, scale, lambda p: p % W,
                                 lambda p: np.arange(W) <= p[:, None])
    return look(q, *line, seen, scale), key, value


def window_and_own_key(q, k, v, ring_key, ring_value, past_length, scale):
    """The window is counted without the new token, which makes W + 1 keys.

    microsoft/onnxruntime PR 25927
    """
    W, T = ring_key.shape[2], q.shape[2]
    order = (np.arange(W) + past_length[:, None]) % W
    line = [np.concatenate([np.take_along_axis(ring, order[:, None, :, None], 2), new], 2)
            for ring, new in ((ring_key, k), (ring_value, v))]
    distance = np.arange(T)[:, None] + W - np.arange(W + T)
    seen = (distance >= 0) & (distance <= W) & (np.arange(W + T) >= W - past_length[:, None, None, None])
    _, key, value = step_by_step(q, k, v, ring_key, ring_value, past_length, scale, lambda p: p % W,
                                 lambda p: np.arange(W) <= p[:, None])
    return look(q, *line, seen, scale), key, value


def empty_slots_read(q, k, v, ring_key, ring_value, past_length, scale):
    """The softmax runs over the whole ring, slots that no token has reached included.

    tensorflow/tensorflow issue 512
    """
    W = ring_key.shape[2]
    return step_by_step(q, k, v, ring_key, ring_value, past_length, scale, lambda p: p % W,
                        lambda p: np.ones((len(p), W), bool))


def longest_past_in_the_mask(q, k, v, ring_key, ring_value, past_length, scale):
    """Every row is masked as if it were as long as the longest.

    microsoft/onnxruntime PR 27992
    """
    W = ring_key.shape[2]
    return step_by_step(q, k, v, ring_key, ring_value, past_length, scale, lambda p: p % W,
                        lambda p: np.arange(W) <= np.full_like(p, p.max())[:, None])
