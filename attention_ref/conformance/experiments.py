"""Small experiments on a black box, each of which gives one Fact, or None where it cannot be asked.

Where the output is linear in the values, one-hot values show the weights: o_i = sum_j w_ij v_j. All other experiments
look at these w, or at which outputs move when one number does.
"""
from typing import NamedTuple

import numpy as np

from ..masks import blocks, causal, window
from .blackbox import draw
from .isolation import NoAnswer, NotAsked
from .libraries import first_line


class Fact(NamedTuple):
    """What was inferred, and the numbers that say so."""
    name: str
    value: str
    evidence: str


def weights(box, n, q, k, **roles):
    """w (B, H, Tq, Tk) of a function that is linear in v, from values that are 1 in one channel of one key."""
    shape = (n.B, n.H, n.Tk, n.dv)
    base = box(q, k, np.zeros(shape), **roles)
    w = np.zeros((n.B, n.H, n.Tq, n.Tk))
    for j in range(0, n.Tk, n.dv):
        keys = np.arange(j, min(j + n.dv, n.Tk))
        v = np.zeros(shape)
        v[..., keys, keys - j] = 1
        w[..., keys] = (box(q, k, v, **roles).astype(np.float64) - base)[..., :len(keys)]
    return w


def seen(w, box):
    """Where a weight is not zero, up to the rounding of its row."""
    size = np.abs(w).max(-1, keepdims=True, initial=0)
    return np.abs(w) > 1e-3 * box.eps * size


def near(x, y, box, factor=1e3):
    """Whether two arrays agree up to rounding."""
    return bool(np.max(np.abs(x - y), initial=0) <= factor * box.eps * (1 + np.max(np.abs(y), initial=0)))


def short(x):
    """Numbers as one text, four digits each."""
    return ", ".join(f"{y:.4g}" for y in np.ravel(x))


def raised(error):
    """An error in a few words."""
    name = "" if isinstance(error, (NoAnswer, NotAsked)) else f"{type(error).__name__}: "
    return f"{name}{first_line(error)}"[:100]


def returns(box):
    """How many arrays come back; what the second is, if it is a log of row sums."""
    n = box.sizes(Tk=8, Tq=8)
    q, k, v = draw(n)
    box(q, k, v)
    shapes = ", ".join(str(y.shape) for y in box.outputs)
    if len(box.outputs) == 1:
        return Fact("returns", "one array", shapes)
    value, second = f"{len(box.outputs)} arrays", None
    box(q, 0 * k, v)
    second = box.outputs[1]
    for base, log in dict(e=np.log, two=np.log2).items():
        if second.size == n.B * n.H * n.Tq and abs(np.max(second) - log(n.Tk)) < 1e-3:
            return Fact("returns", f"{value}, the second the log-sum-exp in base {base}",
                        f"{shapes}; equal scores of 8 keys give {np.max(second):.4f}")
    return Fact("returns", value, shapes)


def sizes(box):
    """Which sizes may differ."""
    n = box.sizes()
    text = [f"Tq and Tk may differ: {'yes' if 'Tq' in box.free else 'no'}",
            f"dk and dv may differ: {'yes' if 'dv' in box.free else 'no'}"]
    return Fact("sizes", "; ".join(text), f"called with Tq {n.Tq}, Tk {n.Tk}, dk {n.dk}, dv {n.dv}")


def independence(box):
    """Which axes stay apart: batch entries, heads, and queries, each moved in turn."""
    n = box.sizes()
    q, k, v = draw(n)
    before, moved = box(q, k, v), q.copy()
    moved[:, :, 0] += 0.5
    change = np.abs(box(moved, k, v) - before).max((0, 1, 3))
    apart = change[1:].max(initial=0) <= 1e3 * box.eps
    heads = "batch entries or heads mix" if box.mixes else "batch entries and heads apart"
    return Fact("independence", f"{heads}; queries {'apart' if apart else 'move each other'}",
                f"query 0 moved: outputs 0 to {n.Tq - 1} moved by {short(change)}")


def linear(box):
    """Whether the output is linear in the values."""
    n = box.sizes()
    q, k, v = draw(n)
    u = draw(n, seed=1)[2]
    error = np.abs(box(q, k, 2 * v - 3 * u) - (2 * box(q, k, v) - 3 * box(q, k, u))).max()
    box.linear = bool(error < 1e3 * box.eps)
    return Fact("linear in v", "yes" if box.linear else "no", f"|f(2v - 3u) - (2 f(v) - 3 f(u))| <= {error:.2g}")


def normalised(box):
    """Over which axis the weights sum to 1."""
    n = box.sizes()
    q, k, v = draw(n)
    w = weights(box, n, q, k)
    rows, columns = w.sum(-1), w.sum(-2)
    ones = box(q, k, np.ones_like(v)).astype(np.float64)
    evidence = (f"v = 1 gives {short([ones.min(), ones.max()])}; weights sum to {short([rows.min(), rows.max()])} over "
                f"keys, {short([columns.min(), columns.max()])} over queries; smallest weight {w.min():.3g}")
    box.rows = near(ones, 1, box)
    value = ("over keys" if box.rows else "over queries" if near(columns, 1, box) else
             "over keys, a part of it on nothing" if w.min() >= 0 and rows.max() < 1 else "over no axis")
    return Fact("normalised", value, evidence)


def describe(S):
    """The words for a boolean pattern (Tq, Tk): every reading that fits, the simplest first."""
    Tq, Tk = S.shape
    anchors = {", anchor bottom-right": Tk - Tq, ", anchor top-left": 0} if Tq != Tk else {", Tq = Tk": 0}
    if S.all():
        return ["full"]
    diagonals = [at for at, offset in anchors.items() if (S == causal(Tq, Tk, np.int64(offset))).all()]
    if diagonals:
        return ["causal" + diagonals[0]]
    found = [bands(S, offset, at) for at, offset in anchors.items()] + [[squares(S)]]
    return [text for texts in found for text in texts if text] or ["another pattern"]


def bands(S, offset, at):
    """The words for a window around a diagonal, a list of one or none."""
    (Tq, Tk), anchor = S.shape, np.int64(offset)
    d = np.arange(Tk) - np.arange(Tq)[:, None] - offset
    low, high = (int(f(d[S])) if S.any() else 0 for f in (np.min, np.max))
    if not low <= 0 <= high:
        strict = high < 0 and (S == (d <= high)).all()
        return [f"causal, {-high} keys back and more{at}"] if strict and high == -1 else []
    left, right = (None if low == d.min() else -low), (None if high == d.max() else high)
    for dilation in range(1, Tk // 2):
        steps = [None if side is None else side // dilation for side in (left, right)]
        if (S == window(Tq, Tk, *steps, dilation, anchor)).all():
            return [f"window, left {steps[0]}, right {steps[1]}" + f", dilation {dilation}" * (dilation > 1) + at]
    return []


def squares(S):
    """The words for blocks on the diagonal or below it, "" for none."""
    for size in range(2, max(S.shape)):
        parts = [-(-T // size) for T in S.shape]
        for name, pattern in dict(diagonal=np.eye(*parts, dtype=bool), causal=np.tri(*parts, dtype=bool)).items():
            if (S == blocks(pattern, size, *S.shape)).all():
                return f"blocks of {size}, {name}"
    return ""


def supports(box, Tq=11, **roles):
    """Patterns (Tq, Tk) of the pairs that matter, of every batch entry and head, for four draws of q and k."""
    n = box.sizes(Tq=Tq, Tk=16, dv=16)
    found = [seen(weights(box, n, *draw(n, seed)[:2], **roles), box) for seed in range(4)]
    return np.concatenate([S.reshape(-1, n.Tq, n.Tk) for S in found])


def picture(S):
    """Rows of a pattern as one text, # where a pair matters."""
    return "all pairs" if S.all() else " ".join("".join(".#"[int(x)] for x in row) for row in S)


def pattern(box, **roles):
    """Words and a picture for the pairs that matter; a second Tq decides where one allows two readings."""
    S = supports(box, **roles)
    any_, texts = S.any(0), describe(S.any(0))
    if len(texts) > 1 and "Tq" in box.free:
        again = describe(supports(box, Tq=13, **roles).any(0))
        texts = [text for text in texts if text in again] or texts
    if (S == any_).all():
        return texts[0], picture(any_)
    counts = np.unique(S.sum(-1))
    count = f"{counts[0]} keys for every query" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} keys a query"
    return f"depends on the data, {count}, within: {texts[0]}", f"of one draw: {picture(S[0])}"


def support(box):
    """Which pairs of query and key matter."""
    if not box.linear:
        return None
    box.support = supports(box).any(0)
    return Fact("support", *pattern(box))


def causal_argument(box):
    """Which pairs matter when the function is asked to be causal."""
    if not (box.takes("causal") and box.linear):
        return None
    return Fact(f"{box.names['causal']}=True", *pattern(box, causal=True))


def hidden(box):
    """Whether keys of weight zero are read: moved, and then NaN together with their values."""
    if box.support is None or box.support.all():
        return None
    n = box.sizes(Tq=11, Tk=16)
    q, k, v = draw(n)
    j = int(np.argmax((~box.support).sum(0)))
    unseen = ~box.support[:, j]
    before, k2, v2, bad = box(q, k, v), k.copy(), v.copy(), np.full(n.dk, np.nan)
    k2[:, :, j] += 2
    moved = np.abs(box(q, k2, v) - before)[:, :, unseen].max()
    k2[:, :, j], v2[:, :, j] = bad, np.nan
    poisoned = np.isnan(box(q, k2, v2))[:, :, unseen].any((0, 1, 3)).sum()
    value = "move the result, as in a mask after the softmax" if moved > 1e3 * box.eps else "change nothing"
    value += "; NaN in them comes through" if poisoned else "; not even NaN"
    return Fact("hidden keys", value, f"key {j} moved: {unseen.sum()} queries that give it no weight change by "
                f"{moved:.3g}; NaN in it: {poisoned} of them are NaN")


def order(box):
    """Whether keys, and queries, may be permuted."""
    n = box.sizes()
    q, k, v = draw(n)
    y = box(q, k, v)
    keys, rows = np.roll(np.arange(n.Tk), 2)[::-1], np.roll(np.arange(n.Tq), 2)[::-1]
    errors = [np.abs(y1 - y2).max() for y1, y2 in (
        (box(q, k[:, :, keys], v[:, :, keys]), y), (box(q[:, :, rows], k, v), y[:, :, rows]))]
    value = [f"{name} {'may be permuted' if e < 1e3 * box.eps else 'have an order'}"
             for name, e in zip(("keys", "queries"), errors)]
    return Fact("order", "; ".join(value), f"largest change {short(errors)}")
