"""What every variant shares: the masked softmax, chunks, head groups and the lifting of scalar loops.

Everything here is generic over number systems: the same lines run on float16/32/64, complex128 (complex-step
derivatives), ball arithmetic and noisy arithmetic. Only `per_head` knows numba, and imports it when first called.
"""
import functools
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from inspect import signature

import numpy as np

from .shapes import GRID, expand, head, parse, sizes


def softmax(s, mask=True, sink=-np.inf):
    """Softmax of scores s (..., Tq, Tk) over the keys that mask (boolean, broadcastable) allows.

    sink (broadcastable to (..., Tq, 1)) is the logit of one more key that has no value; -inf means there is none.
    Returns weights (..., Tq, Tk) and lse (..., Tq) = log(sum_j exp(s_j) + exp(sink)), natural log.
    A masked score is never read. A row with no key and no sink has weights 0 and lse -inf.
    """
    s = np.where(mask, s, -np.inf)
    sink = np.asarray(sink, s.dtype)
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m.real == -np.inf, 0, m)
    e = np.exp(s - m)
    z = e.sum(-1, keepdims=True) + np.exp(sink - m)
    empty = z == 0
    z = np.where(empty, 1, z)
    return e / z, np.where(empty, -np.inf, m + np.log(z))[..., 0]


def per_row(sink, q):
    """sink (H,) -> (H, 1, 1) in the number system of q, to stand beside scores (B, H, Tq, Tk)."""
    return np.reshape(sink, (-1, 1, 1)).astype(q.dtype)


def unread(x, mask):
    """x (..., Tk, d) with zeros in place of the keys that mask (..., Tq, Tk) hides from every query.

    Whatever stands there, NaN included, cannot reach a result: a key that no query may attend to is never read.
    For the queries that see no key, pass the mask with its last two axes swapped.
    """
    seen = np.atleast_2d(mask).any(-2)[..., None]
    return np.where(seen, x, 0)


def gather(x, j):
    """x (B, H, T, d) at positions j, integers that broadcast to (B, H, n); zeros for a position outside 0..T-1.

    What scatters is also a gather, from where each number comes: so a band, and its transpose, need nothing else.
    """
    B, H, T, d = x.shape
    x = np.concatenate([x, np.zeros((B, H, 1, d), x.dtype)], 2)
    b, h = np.ogrid[:B, :H]
    return x[b[..., None], h[..., None], np.where((0 <= j) & (j < T), j, T)]


def take(x, j):
    """x (B, H, T, d) at positions j (B or 1, H or 1, ...): (B, H, ..., d), as `gather` for one axis."""
    found = gather(x, j.reshape(*j.shape[:2], -1))
    return found.reshape(*found.shape[:2], *j.shape[2:], x.shape[-1])


def sum_to(x, shape):
    """Sum x over the axes along which an array of this shape was broadcast: the VJP of broadcasting."""
    full = (1,) * (x.ndim - len(shape)) + tuple(shape)
    return x.sum(tuple(i for i, n in enumerate(full) if n == 1 and x.shape[i] != 1), keepdims=True).reshape(shape)


def segment_sum(x, segment, count):
    """x (B, H, E, ...) -> (B, H, count, ...): entry e is added to place segment[e]. The VJP of y[:, :, segment]."""
    y = np.zeros_like(x, shape=(*x.shape[:2], count, *x.shape[3:]))
    np.add.at(y, np.s_[:, :, segment], x)
    return y


def segment_softmax(s, segment, count):
    """Softmax of scores s (B, H, E) over the entries of each segment: entry e belongs to segment[e], below count.

    Returns weights (B, H, E) and lse (B, H, count), natural log. A segment without entries has lse -inf, as has one
    whose scores are all -inf, where the weights are 0.
    """
    m = np.full_like(s, -np.inf, shape=(*s.shape[:2], count))
    np.maximum.at(m, np.s_[:, :, segment], s)
    m = np.where(m.real == -np.inf, 0, m)
    e = np.exp(s - m[:, :, segment])
    z = segment_sum(e, segment, count)
    empty = z == 0
    z = np.where(empty, 1, z)
    return e / z[:, :, segment], np.where(empty, -np.inf, m + np.log(z))


def on_edges(x, source, target):
    """x (..., N, d) with zeros in place of the nodes at which no edge starts or ends: they are never read."""
    return np.where(np.isin(np.arange(x.shape[-2]), [source, target])[:, None], x, 0)


def leaky_relu(x, slope):
    """x where it is positive, else slope x. Its derivative at 0 is slope."""
    return np.where(x.real > 0, x, slope * x)


def scatter(x, row, count):
    """(..., Tq, count): of each line of x (..., Tq, Tk), the sum over the places whose row (Tq, Tk) is r, r < count.

    The VJP of picking rows of a table.
    """
    return np.stack([np.where(row == r, x, 0).sum(-1) for r in range(count)], -1)


def repeat_heads(x, heads):
    """x (B, Hkv, T, d) -> (B, heads, T, d): query head h reads kv head h // (heads / Hkv)."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def sum_groups(dx, heads):
    """(B, Hq, T, d) -> (B, heads, T, d), each kv head the sum over its group: the VJP of `repeat_heads`."""
    B, Hq, T, d = dx.shape
    return dx.reshape(B, heads, Hq // heads, T, d).sum(2)


def split_heads(x, heads):
    """x (B, T, H*d) -> (B, H, T, d): head h owns the contiguous columns h*d to (h+1)*d - 1."""
    B, T, width = x.shape
    return x.reshape(B, T, heads, width // heads).swapaxes(1, 2)


def merge_heads(x):
    """x (B, H, T, d) -> (B, T, H*d): the inverse of `split_heads`."""
    B, H, T, d = x.shape
    return x.swapaxes(1, 2).reshape(B, T, H * d)


def chunks(x, size):
    """x (B, H, T, ...) -> list of (B, H, size, ...); the last may be shorter."""
    return [x[:, :, i:i + size] for i in range(0, x.shape[2], size)]


def tokens(x):
    """The place of every token of x (B, H, T, ...), one after the other: x[place] is (B, H, 1, ...)."""
    return [np.s_[:, :, t:t + 1] for t in range(x.shape[2])]


def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.maximum(x, -x)))


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow; its derivative is sigmoid(x) sigmoid(-x)."""
    return np.exp(-softplus(-x))


def decay_between(a):
    """Gates a (..., T, n) -> (..., T, T, n): entry i, j is a_{j+1} ... a_i, 1 on the diagonal, 0 for j > i.

    Each row is the row before it, decayed once more. Nothing is divided and no logarithm is taken, so a gate of exactly
    0 is exact. The last row is what is left of each token at the end.
    """
    T = a.shape[-2]
    d = np.zeros_like(a, shape=(*a.shape[:-2], T, T, a.shape[-1]))
    for i in range(T):
        d[..., i, :i, :] = a[..., i, None, :] * d[..., i - 1, :i, :]
        d[..., i, i, :] = 1
    return d


def decayed(q, d, k):
    """q_i d_ij k_j^T for all pairs (..., T, T), d (..., T, T, n or 1) as `decay_between` gives it."""
    return (q[..., None, :] * d * k[..., None, :, :]).sum(-1)


def scan(a, w, s):
    """S_0 ... S_T (B, H, T + 1, ...) of S_t = a_t S_{t-1} + w_t from S_0 = s; a and w (B, H, T, ...) broadcast."""
    s = [s]
    for t in range(w.shape[2]):
        s.append(a[:, :, t] * s[t] + w[:, :, t])
    return np.stack(s, axis=2)


def scan_back(a, dw, ds):
    """dS_0 ... dS_T (B, H, T + 1, ...) of a scan, for cotangents dw (B, H, T, ...) of S_1 ... S_T and ds more of S_T.

    dS_t = dw_t + a_{t+1} dS_{t+1}: the VJP of `scan`. The gradient of w_t is dS_t, that of a_t is dS_t S_{t-1}.
    """
    ds = [ds]
    for t in reversed(range(dw.shape[2])):
        ds[-1] = ds[-1] + dw[:, :, t]
        ds.append(a[:, :, t] * ds[-1])
    return np.stack(ds[::-1], axis=2)


def solve_unit_lower(n, r):
    """x (..., T, d) with (I + n) x = r, by forward substitution; n (..., T, T) is read below its diagonal only."""
    x = r.copy()
    for i in range(1, x.shape[-2]):
        x[..., i, :] -= (n[..., i, None, :i] @ x[..., :i, :])[..., 0, :]
    return x


def solve_unit_upper(n, r):
    """x (..., T, d) with (I + n)^T x = r, by back substitution; n as for `solve_unit_lower`, of which it is the VJP."""
    x = r.copy()
    for i in reversed(range(x.shape[-2] - 1)):
        x[..., i, :] -= (n[..., i + 1:, i, None].swapaxes(-1, -2) @ x[..., i + 1:, :])[..., 0, :]
    return x


@functools.cache
def njit(loop):
    """The loop compiled by numba, without fastmath; the loop itself, with one warning, where numba is absent."""
    try:
        import numba
    except ImportError:
        _warn_once()
        return loop
    return numba.njit(nogil=True, error_model="numpy")(loop)


@functools.cache
def _warn_once():
    warnings.warn("numba is not installed: loops run as plain Python, right but slow", RuntimeWarning, stacklevel=4)


def per_head(inputs, outputs):
    """Lift a scalar loop over one head to whole arrays, as the two schemas say.

    The loop receives every argument without its B and H axes (an Hkv axis is read at h // (Hq/Hkv), a G axis at
    h // (H/G), a B? or H? axis of size 1 at 0) and returns one array per output; of one with an Hkv axis the first head
    of each group is kept. Where the first output has no head axis ("B T D") the loop sees all heads of one batch entry.
    It is compiled for float32, float64 and complex128, and runs as plain Python on every other number system. Heads are
    independent and run in threads when compiled.
    """
    grid = [axis for axis in parse(next(iter(outputs.values()))).axes if axis in GRID]

    def decorate(loop):
        names = tuple(signature(loop).parameters)

        @functools.wraps(loop)
        def lifted(*args, **kwargs):
            given = signature(loop).bind(*args, **kwargs)
            given.apply_defaults()
            n = sizes(inputs, given.arguments)
            x = {name: expand(inputs[name], given.arguments[name], n, grid) for name in names}
            dtype = x[names[0]].dtype
            fast = dtype in (np.float32, np.float64, np.complex128)
            run, shape = (njit(loop) if fast else loop), [n[axis] for axis in grid]

            def one(place):
                seen = [head(inputs[name], x[name], dict(zip(grid, place)), n, dtype) for name in names]
                return run(*map(_own_memory, seen) if fast else seen)
            places = list(np.ndindex(*shape))
            results = list(_threads().map(one, places) if fast else map(one, places))
            results = [y if isinstance(y, tuple) else (y,) for y in results]
            ys = [np.stack(y).reshape(*shape, *np.shape(y[0])) for y in zip(*results)]
            ys = tuple(y[:, ::n["Hq"] // n["Hkv"]] if "Hkv" in text else y for text, y in zip(outputs.values(), ys))
            return ys if len(outputs) > 1 else ys[0]
        return lifted
    return decorate


def _own_memory(x):
    """An array as contiguous memory that may be written, so that one compilation serves every layout."""
    return np.require(x, requirements="CW") if isinstance(x, np.ndarray) else x


@functools.cache
def _threads():
    return ThreadPoolExecutor(os.cpu_count())
