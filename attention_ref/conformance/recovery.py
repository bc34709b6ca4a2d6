"""Experiments that recover numbers and rules from the weights: scale, soft cap, bias, mask, kv heads, decay."""
import numpy as np
from scipy.optimize import least_squares

from .blackbox import draw
from .experiments import Fact, near, raised, seen, short, weights


def log_ratios(box, n, q, k, pairs, **roles):
    """log w_ij less its mean over the keys of its row that are in pairs, and the same for keys of zero; 0 elsewhere."""
    found = []
    for keys in (k, 0 * k):
        with np.errstate(all="ignore"):
            logs = np.where(pairs, np.log(weights(box, n, q, keys, **roles)), 0)
        found.append(centred(logs, pairs))
    return found


def centred(x, pairs):
    """x less its mean over the pairs of its row, 0 elsewhere."""
    mean = np.where(pairs, x, 0).sum(-1, keepdims=True) / np.maximum(1, pairs.sum(-1, keepdims=True))
    return np.where(pairs, x - mean, 0)


def fitted(box, dk=4, **roles):
    """(scale, softcap or None, relative misfit) of w ~ exp(cap(scale q.k) + position); None if w is not like that.

    Keys of zero show what depends on the position alone; it is taken off before the fit.
    """
    n = box.sizes(Tq=7, Tk=9, dk=dk)
    q, k, _ = draw(n, size=1.5)
    w = weights(box, n, q, k, **roles)
    pairs = seen(w, box) & seen(weights(box, n, q, 0 * k, **roles), box)
    if (w < 0).any() or pairs.sum(-1).max() < 2:
        return None
    y, at_zero = log_ratios(box, n, q, k, pairs, **roles)
    y, x = y - at_zero, q @ k.swapaxes(-1, -2)
    size = np.abs(y).max()
    line = centred(x, pairs)
    scale = float((line * y).sum() / (line ** 2).sum())
    misfit = np.abs(y - scale * line).max() / size
    if misfit < 1e3 * box.eps:
        return scale, None, misfit

    def off(p):
        return (y - centred(p[1] * np.tanh(p[0] * x / p[1]), pairs)).ravel()
    fit = min((least_squares(off, (scale * up, c), x_scale=(abs(scale), c), xtol=1e-15, ftol=1e-15, gtol=1e-15)
               for c in (1.0, 5.0, 30.0) for up in (1, 3)), key=lambda f: f.cost)
    return float(fit.x[0]), abs(float(fit.x[1])), np.abs(fit.fun).max() / size


def scale_name(scales, sizes):
    """The formula that gives all the scales for their sizes, or their numbers."""
    rules = {"1/sqrt(dk)": lambda n: n.dk ** -0.5, "1/dk": lambda n: 1 / n.dk, "1": lambda n: 1.0,
             "1/sqrt(H dk)": lambda n: (n.H * n.dk) ** -0.5, "1/sqrt(dv)": lambda n: n.dv ** -0.5,
             "1/sqrt(Tk)": lambda n: n.Tk ** -0.5, "1/sqrt(Tq)": lambda n: n.Tq ** -0.5,
             "sqrt(dk)": lambda n: n.dk ** 0.5}
    for factor, text in ((1.0, ""), (np.log(2), " ln 2 (powers of 2)"), (-1.0, " with a minus")):
        for name, rule in rules.items():
            if all(abs(s - factor * rule(n)) < 1e-4 * abs(s) for s, n in zip(scales, sizes)):
                return name + text
    return f"the constant {scales[0]:.4g}" if abs(scales[0] - scales[1]) < 1e-4 else f"{short(scales)} at dk 4, 8"


def kernel(box):
    """What the weights are of q.k: exponential, linear, or something else."""
    if not box.linear:
        return None
    n = box.sizes(Tq=7, Tk=9)
    q, k, _ = draw(n)
    w, twice = weights(box, n, q, k), weights(box, n, 2 * q, k)
    straight = near(twice, 2 * w, box)
    box.fit = None if straight else fitted(box)
    if box.fit and box.fit[2] < max(1e-6, 1e3 * box.eps):
        return Fact("weights", "exponential in q.k", f"misfit of log w {box.fit[2]:.2g}")
    box.fit = None
    homogeneous = " (unchanged when q doubles)" if near(twice, w, box) else ""
    return Fact("weights", "linear in q" if straight else f"neither exponential nor linear in q.k{homogeneous}",
                f"w(2q) - 2 w(q) <= {np.abs(twice - 2 * w).max():.2g}")


def scale(box):
    """The scale of the scores, from log w_ij - log w_ij' against q_i.k_j - q_i.k_j'; with and without an argument."""
    if box.fit is None:
        return None
    own = [fitted(box, dk) for dk in (4, 8)]
    scales, spaces = [f[0] for f in own], [box.sizes(Tq=7, Tk=9, dk=dk) for dk in (4, 8)]
    value, evidence = scale_name(scales, spaces), f"slope {scales[0]:.6g} at dk 4, {scales[1]:.6g} at dk 8"
    if box.takes("scale"):
        given = fitted(box, scale=0.3)[0]
        stated = "" if "scale" not in box.required else " (given as 1/sqrt(dk))"
        value = f"{value}{stated}; the argument {'is the scale' if abs(given - 0.3) < 1e-4 else 'is not the scale'}"
        evidence += f", {given:.6g} for an argument of 0.3"
    return Fact("scale", value, evidence)


def softcap(box):
    """The soft cap, from the bend of log w against q.k."""
    if box.fit is None:
        return None
    _, cap, misfit = box.fit
    value = "none" if cap is None else f"{cap:.4g} tanh(s / {cap:.4g})"
    if box.takes("softcap"):
        given = fitted(box, softcap=2.0)
        same = given and given[1] and abs(given[1] - 2) < 1e-3
        value += f"; an argument of 2 {'caps at 2' if same else 'does not cap at 2'}"
    return Fact("softcap", value, f"misfit {misfit:.2g} of the size of log w")


def position(box):
    """Whether the place of a key counts, from keys that are all equal."""
    if box.fit is None and not (box.linear and box.rows):
        return None
    n = box.sizes(Tq=7, Tk=9)
    q, k, _ = draw(n)
    w = weights(box, n, q, np.broadcast_to(k[:, :, :1], k.shape).copy())
    if (w < 0).any():
        return None
    pairs = seen(weights(box, n, q, 0 * k), box) & seen(w, box)
    logs, at_zero = log_ratios(box, n, q, np.broadcast_to(k[:, :, :1], k.shape).copy(), pairs)
    if np.abs(logs - at_zero).max() > 1e4 * box.eps:
        return Fact("position", "turns q and k (rotary), for it depends on them",
                    f"equal keys: log w varies by {np.ptp(logs):.3g}; keys of zero: by {np.ptp(at_zero):.3g}")
    if np.abs(at_zero).max() < 1e4 * box.eps:
        return Fact("position", "does not count", f"equal keys: log w varies by {np.ptp(logs):.2g}")
    i, j = np.arange(n.Tq)[:, None], np.arange(n.Tk)
    for name, d in {"|i - j|": abs(i - j), "i - j": i - j, "|i + Tk - Tq - j|": abs(i + n.Tk - n.Tq - j)}.items():
        d = centred(np.broadcast_to(d, pairs.shape).astype(float), pairs)
        slopes = -(d * at_zero).sum((0, 2, 3)) / (d ** 2).sum((0, 2, 3))
        misfit = np.abs(at_zero + slopes[:, None, None] * d).max()
        if misfit < 1e4 * box.eps * np.abs(at_zero).max():
            return Fact("position", f"adds -slope {name}, as in ALiBi", f"slope {short(slopes)} of the heads")
    return Fact("position", "adds a bias of another form", f"equal keys: row 0 of log w is {short(at_zero[0, 0, 0])}")


def bias(box):
    """Whether an added bias is scaled, from one pair with a bias of 1."""
    role = next((r for r in ("bias", "mask") if box.takes(r)), None)
    if role is None or box.fit is None:
        return None
    n = box.sizes(Tq=7, Tk=9)
    q, k, _ = draw(n, size=0.2)
    extra = np.zeros((n.Tq, n.Tk))
    try:
        plain, extra[n.Tq - 1, 0] = weights(box, n, q, k, **{role: extra}), 1.0
    except Exception as error:
        return Fact(f"bias ({box.names[role]})", "takes no numbers", raised(error))
    with np.errstate(all="ignore"):
        step = np.log(weights(box, n, q, k, **{role: extra}) / plain)[:, :, -1]
    moved = float(np.median(step[..., 0] - step[..., 1]))
    scale = box.fit[0]
    value = ("after the scale" if abs(moved - 1) < 1e-3 else "before the scale, which multiplies it too"
             if abs(moved - scale) < 1e-3 else "not as a number in the exponent")
    return Fact(f"bias ({box.names[role]})", value, f"a bias of 1 moves log w by {moved:.4f}, the scale is {scale:.4g}")


def mask(box):
    """What a boolean mask does: which value keeps, whether the rest is renormalised, and a row without keys."""
    if not (box.takes("mask") and box.linear):
        return None
    n = box.sizes(Tq=7, Tk=9)
    q, k, _ = draw(n)
    some, none = np.tri(n.Tq, n.Tk, 2, dtype=bool), np.ones((n.Tq, n.Tk), bool)
    some[:, 1] = none[0] = False
    w = weights(box, n, q, k, mask=some)
    S = seen(w, box).any((0, 1))
    value = ("True keeps" if (S == some).all() else "True hides" if (S == ~some).all() else
             "does not decide which pairs count" if S.all() else "hides other pairs than it says")
    sums = w.sum(-1)
    value += "" if near(sums, 1, box) or not box.rows else "; what is left does not sum to 1: masked after the softmax"
    v = draw(n)[2]
    empty = none if value.startswith("True keeps") else ~none
    row = box(q, k, v, mask=empty)[:, :, 0]
    kind = ("NaN" if np.isnan(row).all() else "0" if not row.any() else "the mean of all values"
            if near(row, v.mean(2), box) else "something else")
    return Fact(f"mask ({box.names['mask']})", f"{value}; a row without keys gives {kind}",
                f"rows sum to {short([sums.min(), sums.max()])}; empty row {short(row.ravel()[:3])}")


def head_map(box):
    """Which kv head each query head reads, from the values of one kv head moved."""
    if box.sizes().H == 1:
        return None
    n = box.sizes(H=4, Hq=4)
    q, k, v = draw(n)
    k, v = k[:, :2], v[:, :2]
    try:
        before = box(q, k, v)
        read = [np.abs(box(q, k, v + np.eye(2)[g][:, None, None]) - before).max((0, 2, 3)) > 1e3 * box.eps
                for g in range(2)]
    except Exception as error:
        return Fact("kv heads", "must be as many as query heads", raised(error))
    heads = ["".join(str(g) for g in range(2) if read[g][h]) or "none" for h in range(before.shape[1])]
    kinds = {"0011": "repeated (0 0 1 1)", "0101": "tiled (0 1 0 1)"}
    return Fact("kv heads", kinds.get("".join(heads), "neither repeated nor tiled"),
                f"query heads 0 to {len(heads) - 1} read kv heads {', '.join(heads)}")


def decay(box):
    """By what factor a weight falls with every step back, for a function linear in q, from equal queries and keys."""
    if not box.linear or box.fit or box.support is None or describe_future(box):
        return None
    n = box.sizes(Tq=8, Tk=8)
    q, k, _ = draw(n)
    q, k = (np.broadcast_to(x[:, :, :1], x.shape).copy() for x in (q, k))
    facts = []
    for roles in [{}] + [dict(log_decay=np.full((n.B, n.H, n.Tk), -0.3))] * box.takes("log_decay"):
        w = weights(box, n, q, k, **roles)[0, :, -1]
        steps = w[:, :-1] / w[:, 1:]
        even = np.ptp(steps, axis=1).max() < 1e-6 + 1e4 * box.eps
        facts.append((short(steps.mean(1)) if even else "not one factor", short(steps[0])))
    value = "none" if facts[0][0].replace(", ", "").strip("1") == "" else f"{facts[0][0]} a step"
    value += f"; {facts[1][0]} for {box.names['log_decay']} = -0.3 (exp: 0.7408)" if facts[1:] else ""
    return Fact("decay", value, f"w(t, s - 1) / w(t, s) of head 0: {facts[-1][1]}")


def describe_future(box):
    """Whether a later key counts."""
    return bool(np.triu(box.support, 1).any())
