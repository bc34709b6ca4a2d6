"""Wrong implementations of kv_cache."""
import numpy as np

from attention_ref.core import repeat_heads, softmax, sum_groups

from .right import look, written


def diagonal_at_the_top(q, k, v, past_key, past_value, past_length, scale):
    """A causal flag counts from slot 0, so new token t sees slots 0 to t.

    pytorch/pytorch issue 103082
    """
    key, value = written(past_key, k, past_length), written(past_value, v, past_length)
    return look(q, key, value, np.tri(q.shape[2], key.shape[2], dtype=bool), scale), key, value


def causal_flag_lost(q, k, v, past_key, past_value, past_length, scale):
    """The mask is cut for decoding and loses its causal flag: new tokens see those after them.

    facebookresearch/fairseq2 PR 59
    """
    key, value = written(past_key, k, past_length), written(past_value, v, past_length)
    filled = np.arange(key.shape[2]) < past_length[:, None, None, None] + q.shape[2]
    return look(q, key, value, filled, scale), key, value


def longest_past_for_all(q, k, v, past_key, past_value, past_length, scale):
    """Every row has the length of the longest one, in writing and in reading.

    microsoft/onnxruntime PR 27992
    """
    past_length = np.full_like(past_length, past_length.max())
    key, value = written(past_key, k, past_length), written(past_value, v, past_length)
    seen = np.arange(key.shape[2]) <= past_length[:, None, None, None] + np.arange(q.shape[2])[:, None]
    return look(q, key, value, seen, scale), key, value


def one_token_at_a_time_only(q, k, v, past_key, past_value, past_length, scale):
    """The buffer is written for one new token: of several, the last one is kept.

    facebookresearch/fairseq issue 3908
    """
    key, value = written(past_key, k[:, :, -1:], past_length), written(past_value, v[:, :, -1:], past_length)
    seen = np.arange(key.shape[2]) <= past_length[:, None, None, None] + np.arange(q.shape[2])[:, None]
    return look(q, key, value, seen, scale), key, value


def past_counted_twice(q, k, v, past_key, past_value, past_length, scale):
    """The caller adds the past to the position, and so does the cache.

    skyzh/tiny-llm PR 46
    """
    more = ((0, 0), (0, 0), (0, past_length.max()), (0, 0))
    key, value = (written(np.pad(past, more), new, 2 * past_length)[:, :, :past.shape[2]]
                  for past, new in ((past_key, k), (past_value, v)))
    seen = np.arange(key.shape[2]) <= past_length[:, None, None, None] + np.arange(q.shape[2])[:, None]
    return look(q, key, value, seen, scale), key, value


def read_before_written(q, k, v, past_key, past_value, past_length, scale):
    """A token reads the cache first and writes itself afterwards.

    open-lm-engine/lm-engine PR 496
    """
    key, value, o = past_key.copy(), past_value.copy(), []
    for t in range(q.shape[2]):
        seen = np.arange(key.shape[2]) < (past_length + t)[:, None, None, None]
        o.append(look(q[:, :, t:t + 1], key, value, seen, scale))
        key = written(key, k[:, :, t:t + 1], past_length + t)
        value = written(value, v[:, :, t:t + 1], past_length + t)
    return np.concatenate(o, 2), key, value


def gradient_of_the_cache_dropped(do, dpresent_key, dpresent_value, q, k, v, past_key, past_value, past_length, scale):
    """What flows back through the cache that is handed on is dropped.

    fla-org/flash-linear-attention PR 459
    """
    T, heads = q.shape[2], k.shape[1]
    key, value = written(past_key, k, past_length), written(past_value, v, past_length)
    seen = np.arange(key.shape[2]) <= past_length[:, None, None, None] + np.arange(T)[:, None]
    read = seen.any(-2)[..., None]
    key, value = (repeat_heads(np.where(read, y, 0), q.shape[1]) for y in (key, value))
    p, _ = softmax(scale * q @ key.swapaxes(-1, -2), seen)
    dp = do @ value.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dkey = sum_groups(scale * ds.swapaxes(-1, -2) @ q, heads)
    dvalue = sum_groups(p.swapaxes(-1, -2) @ do, heads)
    dk, dv = (np.stack([y[b, :, n:n + T] for b, n in enumerate(past_length)]) for y in (dkey, dvalue))
    return dict(dq=scale * ds @ key, dk=dk, dv=dv, dpast_key=written(dkey, 0 * k, past_length),
                dpast_value=written(dvalue, 0 * v, past_length))
