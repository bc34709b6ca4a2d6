"""Experiments on how a black box runs: its state, its determinism, its sums, and what a call costs."""
import time

import numpy as np

from .blackbox import draw
from .experiments import Fact, near, short

LENGTHS = 64, 128, 256, 512, 1024, 2048
PATIENCE = 0.15                                           # seconds of one call after which no longer one is made


def state(box):
    """What an initial state adds to the first output, and whether the state that comes back carries a sequence on."""
    if not box.takes("initial_state"):
        return None
    n = box.sizes(Tq=6, Tk=6)
    q, k, v = draw(n)
    S = np.random.default_rng(5).standard_normal((n.B, n.H, n.dk, n.dv))
    added = (box(q, k, v, initial_state=S) - box(q, k, v, initial_state=0 * S))[:, :, 0]
    qS = (q[:, :, :1] @ S)[:, :, 0]
    factor = float((added * qS).sum() / (qS * qS).sum())
    plain = near(added, factor * qS, box)
    value = f"the first output gets {factor:.4g} q S" if plain else "the first output gets no multiple of q S"
    evidence = f"misfit {np.abs(added - factor * qS).max():.2g}"
    if len(box.outputs) > 1 and box.outputs[-1].shape == box.give("initial_state", S).shape:
        error = carried(box, q, k, v, S)
        value += "; the returned state " + ("carries on" if error < 1e4 * box.eps else "does not carry on")
        evidence += f"; 3 + 3 tokens against 6 differ by {error:.2g}"
    return Fact("initial state", value, evidence)


def carried(box, q, k, v, S):
    """The largest difference between a sequence and its two halves, the second from the state of the first."""
    whole = box(q, k, v, initial_state=S)
    first = box(*(x[:, :, :3] for x in (q, k, v)), initial_state=S)
    between = box.outputs[-1].reshape(S.shape)
    second = box(*(x[:, :, 3:] for x in (q, k, v)), initial_state=between)
    return np.abs(np.concatenate([first, second], axis=2) - whole).max()


def determinism(box):
    """Whether two calls give the same bits, and leave their arguments as they were."""
    n = box.sizes(Tk=64, Tq=64)
    given = draw(n)
    runs = [box(*given) for _ in range(3)]
    equal = all(np.array_equal(runs[0], y, equal_nan=True) for y in runs[1:])
    left = box.callee.left()
    clean = all(np.array_equal(left[box.names[role]], box.give(role, x)) for role, x in zip("qkv", given))
    value = "the same bits every time" if equal else "differs from call to call"
    return Fact("determinism", value + ("" if clean else "; arguments are overwritten"),
                f"3 calls, largest difference {max(np.abs(runs[0] - y).max() for y in runs):.3g}")


def accumulation(box):
    """How the error in float32 grows with the length, against the same function in float64."""
    if box.inside != "float64":
        return Fact("sums", f"in {box.inside} even for float64", "the output follows a step of 1e-8 in q as roughly")
    errors, lengths = [], []
    for T in LENGTHS:
        lengths.append(T)
        start = time.perf_counter()
        errors.append(unit_error(box, T, "float32"))
        if time.perf_counter() - start > 4 * PATIENCE:
            break
    came, growth = box.outputs[0].dtype, slope(lengths, errors)
    halves = unit_error(box, lengths[-1], "float16")
    kind = ("wider than float32" if max(errors) <= 1 else f"in float32, the error grows as T^{growth:.1f}"
            if growth > 0.3 and errors[-1] > 8 else "in float32, the error hardly grows: pairwise or in blocks")
    kind += "" if came == "float32" else f"; float32 is answered with {came}"
    half = "" if halves is None else ("; of float16, wider" if halves < 4 else "; of float16, in float16")
    numbers = "" if halves is None else f"; in float16 {halves:.3g}"
    return Fact("sums", kind + half, f"error in units of rounding {short(errors)} at T = {short(lengths)}{numbers}")


def unit_error(box, T, dtype):
    """The largest error of the last query in units of rounding, scores near 0 and values near 1; None if it raises."""
    n = box.sizes(B=1, H=1, Hq=1, Tq=T, Tk=T, dk=8, dv=8)
    q, k, v = (np.float16(x).astype(np.float64) for x in draw(n, seed=3, size=0.125))
    v = np.float16(1.5 + np.clip(v / 8, -0.4, 0.4)).astype(np.float64)
    exact, box.dtype = box(q, k, v)[:, :, -1], dtype
    try:
        got = box(q, k, v)[:, :, -1].astype(np.float64)
    except Exception:
        return None
    finally:
        box.dtype = "float64"
    return float(np.abs(got - exact).max() / (np.abs(exact).max() * np.finfo(dtype).eps / 2))


def slope(lengths, numbers):
    """The exponent of numbers against lengths, from all of them."""
    logs = np.log(np.maximum(numbers, 1e-30))
    return float(np.polyfit(np.log(lengths), logs, 1)[0]) if len(lengths) > 1 else 0.0


def cost(box):
    """The exponents of time and, for NumPy, of the largest memory against the length."""
    seconds, bytes_, lengths = [], [], []
    for T in LENGTHS:
        n = box.sizes(B=1, H=1, Hq=1, Tq=T, Tk=T, dk=16, dv=16)
        given = draw(n)
        box(*given)
        lengths.append(T)
        seconds.append(min(timed(box, given) for _ in range(9)))
        bytes_.append(peak(box, given))
        if seconds[-1] > PATIENCE:
            break
    steps = np.divide(seconds[1:], seconds[:-1])
    uneven = " (unevenly: the machine is busy)" * bool(len(steps) and (steps.max() > 12 or steps.min() < 0.9))
    text = f"time T^{slope(lengths[-3:], seconds[-3:]):.1f}{uneven}"
    evidence = f"{short(np.multiply(1e3, seconds))} ms at T = {short(lengths)}"
    if box.callee.measures_memory:
        text += f", memory T^{slope(lengths[-3:], bytes_[-3:]):.1f}"
        evidence += f"; {short(np.array(bytes_) / 2 ** 20)} MiB"
    return Fact("cost", text, evidence)


def timed(box, given):
    """Seconds of one call."""
    box(*given)
    return box.seconds


def peak(box, given):
    """Bytes that NumPy held at most during one call, more than before it."""
    box.traced = True
    try:
        box(*given)
    finally:
        box.traced = False
    return box.bytes
