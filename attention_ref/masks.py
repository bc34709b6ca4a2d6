"""Boolean masks: True where query i may attend to key j. They are arrays, so `&`, `|` and `~` compose them.

Tq, Tk are the numbers of queries and keys. The anchor says which corner of a rectangle the diagonal starts from:
"top-left" keeps j <= i, "bottom-right" keeps j <= i + Tk - Tq (the last query sees every key). With Tq = Tk they agree.
An anchor may also be the position of query 0 itself, an integer or an array of them that broadcasts with (Tq, Tk).
"""
import numpy as np

ANCHORS = "top-left", "bottom-right"


def grid(Tq, Tk):
    """Query positions i (Tq, 1) and key positions j (1, Tk)."""
    at_least(0, Tq=Tq, Tk=Tk)
    return np.arange(Tq)[:, None], np.arange(Tk)[None, :]


def diagonal(Tq, Tk, anchor="bottom-right"):
    """The position of query 0: 0, Tk - Tq, or the anchor itself if it is integer. Tk may be an array of lengths."""
    if np.asarray(anchor).dtype.kind in "iu":
        return anchor
    if not isinstance(anchor, str) or anchor not in ANCHORS:
        raise ValueError(f"anchor: expected one of {ANCHORS} or integers, got {anchor!r}")
    return Tk - Tq if anchor == "bottom-right" else 0


def full(Tq, Tk):
    """(Tq, Tk) every query sees every key."""
    at_least(0, Tq=Tq, Tk=Tk)
    return np.ones((Tq, Tk), bool)


def causal(Tq, Tk, anchor="bottom-right"):
    """(Tq, Tk) no query sees a key after its own position; some rows are empty when Tq > Tk at the bottom right."""
    i, j = grid(Tq, Tk)
    return j <= i + diagonal(Tq, Tk, anchor)


def padding(lengths, Tk):
    """(B, 1, 1, Tk) batch entry b has lengths[b] keys, 0 to Tk; the rest is padding."""
    lengths = np.asarray(lengths)
    if not integers(lengths) or lengths.ndim != 1 or (lengths < 0).any() or (lengths > Tk).any():
        raise ValueError(f"lengths: expected numbers of keys from 0 to {Tk}, shape (B,), got {lengths}")
    return (np.arange(Tk) < lengths[:, None])[:, None, None, :]


def window(Tq, Tk, left=None, right=None, dilation=1, anchor="bottom-right"):
    """(Tq, Tk) `left` keys before and `right` keys after the query's own, `dilation` apart; None leaves a side open.

    dilation may be an array of integers that broadcasts with (Tq, Tk), as one per head (H, 1, 1) does.
    """
    at_least(0, left=left, right=right)
    at_least(1, dilation=dilation)
    i, j = grid(Tq, Tk)
    steps, rest = np.divmod(j - i - diagonal(Tq, Tk, anchor), dilation)
    keep = rest == 0
    if left is not None:
        keep = keep & (steps >= -left)
    return keep if right is None else keep & (steps <= right)


def integers(x):
    """Whether x is an integer or an array of them; nothing else counts, but an empty list."""
    return np.asarray(x).dtype.kind in "iu" or not np.size(x)


def at_least(least, **numbers):
    """Raise ValueError for a number, or one of an array, that is no integer or is below `least`; None is right."""
    for name, n in numbers.items():
        if n is not None and not (integers(n) and np.min(n, initial=least) >= least):
            raise ValueError(f"{name}: expected an integer >= {least}, got {n}")


def blocks(pattern, size, Tq, Tk):
    """(..., Tq, Tk) from a boolean pattern (..., query blocks, key blocks) of blocks `size` wide, the last cut off."""
    at_least(1, size=size)
    pattern, rows, columns = np.asarray(pattern), -(-Tq // size), -(-Tk // size)
    if pattern.dtype != bool or pattern.shape[-2:] != (rows, columns):
        raise ValueError(f"pattern: expected bool (..., {rows}, {columns}), got {pattern.dtype} {pattern.shape}")
    return pattern.repeat(size, -2).repeat(size, -1)[..., :Tq, :Tk]


def packed(query_segments, key_segments):
    """(..., Tq, Tk) from segment numbers (..., Tq) and (..., Tk): sequences in one row see only themselves."""
    for name, segments in dict(query_segments=query_segments, key_segments=key_segments).items():
        if not integers(segments) or not np.ndim(segments):
            raise ValueError(f"{name}: expected integers, one for each token, got {segments}")
    return np.asarray(query_segments)[..., :, None] == np.asarray(key_segments)[..., None, :]


def global_(Tq, Tk, tokens):
    """(Tq, Tk) the rows and the columns of the given token positions are full."""
    i, j = grid(Tq, Tk)
    if not integers(tokens) or np.size(tokens) and not 0 <= np.min(tokens) <= np.max(tokens) < max(Tq, Tk):
        raise ValueError(f"tokens: expected positions from 0 to {max(Tq, Tk) - 1}, got {tokens}")
    return np.isin(i, tokens) | np.isin(j, tokens)


def graph(edges, Tq, Tk=None):
    """(Tq, Tk or Tq) from edges (E, 2) of (source key j, target query i): a node sees the nodes that point at it."""
    keep, edges = ~full(Tq, Tq if Tk is None else Tk), np.asarray(edges)
    edges = edges if edges.size else np.zeros((0, 2), int)
    if not integers(edges) or edges.shape[1:] != (2,) or (edges < 0).any() or (edges >= keep.shape[::-1]).any():
        raise ValueError(f"edges: expected (source, target) below {keep.shape[::-1]}, got {edges.tolist()}")
    source, target = edges.T
    keep[target, source] = True
    return keep
