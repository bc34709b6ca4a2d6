"""What the wrong implementations do right, so that each shows its own mistake and no other."""
import numpy as np

from attention_ref.core import repeat_heads, softmax, unread


def attend(q, k, v, mask, scale, bias=0.0, sink=-np.inf):
    """o and lse of one sequence of queries over one of keys."""
    p, lse = softmax(scale * q @ unread(k, mask).swapaxes(-1, -2) + bias, mask, np.reshape(sink, (-1, 1, 1)))
    return p @ unread(v, mask), lse


def softcapped(scores, softcap):
    """Scores under the soft cap, if there is one."""
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def offset(anchor, lengths, Tq):
    """The position of query 0, (B, 1, 1, 1)."""
    return (lengths - Tq if anchor == "bottom-right" else 0 * lengths)[:, None, None, None]


def positions(anchor, lengths, Tq, Tk):
    """Positions of the queries (B, 1, Tq, 1) and of the keys (Tk,)."""
    return np.arange(Tq)[:, None] + offset(anchor, lengths, Tq), np.arange(Tk)


def windowed(distance, left, right, dilation):
    """Whether a key at this distance after the query (negative: before it) is in the window."""
    keep = distance % dilation == 0
    if left is not None:
        keep = keep & (distance >= -left * dilation)
    return keep if right is None else keep & (distance <= right * dilation)


def same_segment(query_segments, key_segments):
    """(B, 1, Tq, Tk) whether query and key belong to one packed sequence."""
    return (query_segments[:, :, None] == key_segments[:, None, :])[:, None]


def written(past, new, past_length):
    """The cache with the new tokens after the past ones of each row."""
    present = past.copy()
    for b, n in enumerate(past_length):
        present[b, :, n:n + new.shape[2]] = new[b]
    return present


def look(q, key, value, mask, scale):
    """o of grouped heads over a cache."""
    return attend(q, repeat_heads(key, q.shape[1]), repeat_heads(value, q.shape[1]), mask, scale)[0]


def step_by_step(q, k, v, key, value, past_length, scale, slot, seen):
    """Token by token: position p goes to slot(p), and reads the slots seen(p)."""
    o, rows = [], np.arange(len(q))
    key, value = key.copy(), value.copy()
    for t in range(q.shape[2]):
        p = past_length + t
        key[rows, :, slot(p)], value[rows, :, slot(p)] = k[:, :, t], v[:, :, t]
        o.append(look(q[:, :, t:t + 1], key, value, seen(p)[:, None, None], scale))
    return np.concatenate(o, 2), key, value


def tiles(T, size):
    """Slices of T positions, the last maybe short."""
    return [slice(i, min(i + size, T)) for i in range(0, T, size)]


def whole_mask(mask, q, k):
    """The mask as (B, H, Tq, Tk)."""
    return np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
