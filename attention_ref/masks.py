"""Boolean masks: True where query i may attend to key j. They are arrays, so `&`, `|` and `~` compose them.

Tq, Tk are the numbers of queries and keys. The anchor says which corner of a rectangle the diagonal starts from:
"top-left" keeps j <= i, "bottom-right" keeps j <= i + Tk - Tq (the last query sees every key). With Tq = Tk they agree.
"""
import numpy as np

ANCHORS = "top-left", "bottom-right"


def grid(Tq, Tk):
    """Query positions i (Tq, 1) and key positions j (1, Tk)."""
    return np.arange(Tq)[:, None], np.arange(Tk)[None, :]


def diagonal(Tq, Tk, anchor="bottom-right"):
    """The key position at which query 0 stands: 0 or Tk - Tq."""
    if anchor not in ANCHORS:
        raise ValueError(f"anchor: expected one of {ANCHORS}, got {anchor!r}")
    return Tk - Tq if anchor == "bottom-right" else 0


def full(Tq, Tk):
    """(Tq, Tk) every query sees every key."""
    return np.ones((Tq, Tk), bool)


def causal(Tq, Tk, anchor="bottom-right"):
    """(Tq, Tk) no query sees a key after its own position; some rows are empty when Tq > Tk at the bottom right."""
    i, j = grid(Tq, Tk)
    return j <= i + diagonal(Tq, Tk, anchor)


def padding(lengths, Tk):
    """(B, 1, 1, Tk) batch entry b has lengths[b] keys; the rest is padding."""
    return (np.arange(Tk) < np.asarray(lengths)[:, None])[:, None, None, :]


def window(Tq, Tk, left=None, right=None, dilation=1, anchor="bottom-right"):
    """(Tq, Tk) `left` keys before and `right` keys after the query's own, `dilation` apart; None leaves a side open."""
    for name, size in dict(left=left, right=right).items():
        if size is not None and size < 0:
            raise ValueError(f"{name}: expected a number of keys >= 0 or None (open), got {size}")
    if dilation < 1:
        raise ValueError(f"dilation: expected an integer >= 1, got {dilation}")
    i, j = grid(Tq, Tk)
    steps, rest = np.divmod(j - i - diagonal(Tq, Tk, anchor), dilation)
    keep = rest == 0
    if left is not None:
        keep = keep & (steps >= -left)
    return keep if right is None else keep & (steps <= right)


def blocks(pattern, size, Tq, Tk):
    """(..., Tq, Tk) from a boolean pattern (..., query blocks, key blocks) of blocks `size` wide; the last may be short."""
    pattern = np.asarray(pattern)
    if pattern.dtype != bool or pattern.shape[-2:] != (-(-Tq // size), -(-Tk // size)):
        raise ValueError(f"pattern: expected bool of shape (..., {-(-Tq // size)}, {-(-Tk // size)}), "
                         f"got {pattern.dtype} {pattern.shape}")
    return pattern.repeat(size, -2).repeat(size, -1)[..., :Tq, :Tk]


def packed(query_segments, key_segments):
    """(Tq, Tk) sequences laid end to end in one row: a query sees the keys of its own segment number only."""
    return np.asarray(query_segments)[:, None] == np.asarray(key_segments)[None, :]


def global_(Tq, Tk, tokens):
    """(Tq, Tk) the rows and the columns of the given token positions are full."""
    i, j = grid(Tq, Tk)
    return np.isin(i, tokens) | np.isin(j, tokens)


def graph(edges, Tq, Tk=None):
    """(Tq, Tk) from edges (E, 2) of (source key j, target query i): a node sees the nodes that point at it."""
    keep = np.zeros((Tq, Tq if Tk is None else Tk), bool)
    source, target = np.asarray(edges).T
    keep[target, source] = True
    return keep
