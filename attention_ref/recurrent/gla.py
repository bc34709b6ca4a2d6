"""Gated linear attention.                                          Yang et al. 2023, arXiv:2312.06635, eq. 3

    S_t = diag(a_t) S_{t-1} + k_t^T v_t        a_t = exp(log_decay_t), in [0, 1]^dk        S_0 = initial_state
    o_t = scale q_t S_t                        S_t in R^{dk x dv}, read after token t is written

A last axis of 1 in log_decay is one gate per head: simple GLA; constant in time it is RetNet (arXiv:2307.08621) or
Lightning attention (arXiv:2401.04658), see `retnet_decay` and `lightning_decay`. A log gate of -inf forgets all. Where
code in the wild differs: the gate itself is passed, or its base-2 logarithm; scale is 1/sqrt(dk) without being asked
for; the state lies as (dv, dk), the tokens as (B, T, H, d); exp(b_i - b_j) of running sums b is NaN once a gate is 0.
"""
import numpy as np

from .. import kit
from ..core import decay_between, per_head, scan, scan_back, sum_to
from ..masks import grid
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H T dk", k="B H T dk", v="B H T dv", log_decay="B? H T? dk?", initial_state="B H dk dv", scale="",
              chunk_size="int >=1")
OUTPUTS = dict(o="B H T dv", final_state="B H dk dv")
CONVENTIONS = dict(gate="natural log, of the rows of the state (the key channels)", layout="B H T d",
                   order="decay, then write, then read", state="(dk, dv), after the last token",
                   padding="k = 0 and log_decay = 0 leave the state alone")


def recurrent(q, k, v, log_decay, initial_state, *, scale, chunk_size=64):
    """o (B, H, T, dv) and the state (B, H, dk, dv) after the last token; ValueError for a shape that does not fit."""
    T = sizes(INPUTS, locals())["T"]
    log_decay = np.broadcast_to(log_decay, k.shape)
    o, state = np.zeros_like(v), initial_state
    for t in range(T):
        o[:, :, t], state = step(q[:, :, t], k[:, :, t], v[:, :, t], log_decay[:, :, t], state, scale=scale)
    return o, state


def step(q, k, v, log_decay, state, *, scale):
    """One token, q, k and log_decay (B, H, dk), v (B, H, dv), on a state: its o (B, H, dv) and the next state."""
    state = np.exp(log_decay)[..., None] * state + k[..., None] * v[..., None, :]
    return scale * (q[..., None, :] @ state)[..., 0, :], state


def dense(q, k, v, log_decay, initial_state, *, scale, chunk_size=64):
    """All pairs of tokens at once: o = scale (P V + (Q * decay since the start) S_0)."""
    sizes(INPUTS, locals())
    return mix(q, k, v, decays(log_decay, k), initial_state, scale)


def decays(log_decay, k):
    """d_ij (B, H, T + 1, T + 1, dk), what is left at token i of the write of token j; token 0 is the initial state."""
    a = np.exp(np.broadcast_to(log_decay, k.shape))
    start = np.ones_like(a, shape=(*a.shape[:2], 1, a.shape[3]))
    return decay_between(np.concatenate([start, a], axis=2))


def mix(q, k, v, d, initial_state, scale):
    """P_ij = sum_c q_ic d_ijc k_jc applied to v, and the state that the last row of d leaves."""
    p = (q[:, :, :, None] * d[:, :, 1:, 1:] * k[:, :, None]).sum(-1)
    o = scale * (p @ v + (q * d[:, :, 1:, 0]) @ initial_state)
    left = (k * d[:, :, -1, 1:]).swapaxes(-1, -2) @ v
    return o, d[:, :, -1, 0, :, None] * initial_state + left


def chunkwise(q, k, v, log_decay, initial_state, *, scale, chunk_size=64):
    """Dense inside a chunk, recurrent from chunk to chunk; the last chunk may be shorter."""
    T = sizes(INPUTS, locals())["T"]
    log_decay = np.broadcast_to(log_decay, k.shape)
    o, state = np.zeros_like(v), initial_state
    for start in range(0, T, chunk_size):
        chunk = np.s_[:, :, start:start + chunk_size]
        o[chunk], state = mix(q[chunk], k[chunk], v[chunk], decays(log_decay[chunk], k[chunk]), state, scale)
    return o, state


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, log_decay, initial_state, scale, chunk_size=64):
    """One token at a time, one number of the state at a time: decay, write, read."""
    (T, dk), dv = q.shape, v.shape[1]
    state, o = initial_state.copy(), np.zeros_like(v)
    for t in range(T):
        for c in range(dk):
            a = np.exp(log_decay[t, c])
            for j in range(dv):
                state[c, j] = a * state[c, j] + k[t, c] * v[t, j]
                o[t, j] += scale * q[t, c] * state[c, j]
    return o, state


def vjp(do, dfinal_state, q, k, v, log_decay, initial_state, *, scale, chunk_size=64):
    """Gradients of q, k, v, log_decay (its own shape) and initial_state."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    a = np.exp(np.broadcast_to(log_decay, k.shape))
    s, ds = states(do, dfinal_state, q, k, v, a, initial_state, scale)
    old, new, dnew = s[:, :, :-1], s[:, :, 1:], ds[:, :, 1:]
    return dict(dq=scale * (new @ do[..., None])[..., 0], dk=(dnew @ v[..., None])[..., 0],
                dv=(k[..., None, :] @ dnew)[..., 0, :],
                dlog_decay=sum_to(a * (dnew * old).sum(-1), log_decay.shape), dinitial_state=ds[:, :, 0])


def states(do, dfinal_state, q, k, v, a, initial_state, scale):
    """S_0 ... S_T by the recurrence and their cotangents by the recurrence backwards, each (B, H, T + 1, dk, dv)."""
    return (scan(a[..., None], k[..., None] * v[..., None, :], initial_state),
            scan_back(a[..., None], scale * q[..., None] * do[..., None, :], dfinal_state))


def retnet_decay(heads):
    """log_decay (heads, 1, 1) of RetNet: head h keeps 1 - 2^(-5 - h) of its state. Sun et al. 2023, section 3.1."""
    return np.log1p(-2.0 ** (-5 - np.arange(heads)))[:, None, None]


def lightning_decay(heads, layer=0, layers=1):
    """log_decay (heads, 1, 1) of Lightning attention in MiniMax-01 (arXiv:2501.08313), as transformers has it.

    Head h of H in layer l of L: -2^(-8 (h + 1) / H) (1 - l / (L - 1 + 1e-5) + 1e-5).
    """
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    return -(slopes * (1 - layer / (layers - 1 + 1e-5) + 1e-5))[:, None, None]


FORMS = recurrent, dense, chunkwise, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

ARRAYS = "q", "k", "v", "log_decay"


def but(x, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def gates(x):
    """log_decay of every channel (B, H, T, dk)."""
    return np.broadcast_to(x["log_decay"], x["k"].shape)


def right(s, a, kv):
    return a * s + kv


def recur(x, write=right, read=lambda old, new: new, gate=np.exp):
    """The recurrence with another write(S, a, kv), another read(old S, new S) or another gate."""
    a, o, s = gate(gates(x)), np.zeros_like(x["v"]), x["initial_state"]
    for t in range(o.shape[2]):
        old, kv = s, x["k"][:, :, t, :, None] * x["v"][:, :, t, None, :]
        s = write(old, a[:, :, t, :, None], kv)
        o[:, :, t] = x["scale"] * (x["q"][:, :, t, None, :] @ read(old, s))[..., 0, :]
    return o, s


def mixed(x, change):
    """The parallel form with products of gates change(d, i, j), i and j the tokens, 0 the initial state."""
    d = decays(x["log_decay"], x["k"])
    i, j = (n[..., None] for n in grid(*d.shape[2:4]))
    return mix(x["q"], x["k"], x["v"], change(d, i, j), x["initial_state"], x["scale"])


def from_sums(x, between):
    """The parallel form with between(b_i, b_j) of running sums b of log gates."""
    b = np.cumsum(gates(x), axis=2)
    b = np.concatenate([np.zeros_like(b, shape=(*b.shape[:2], 1, b.shape[3])), b], axis=2)
    return mixed(x, lambda d, i, j: np.where(j <= i, between(b[:, :, :, None], b[:, :, None]), 0))


def without_decay(part):
    """A chunk whose tokens see each other without decay, and the right state after it."""
    return mixed(part, lambda d, i, j: np.where((1 <= j) & (j <= i), 1, d))[0], dense(**part)[1]


def chunked(x, one=lambda part: dense(**part), carry=lambda part, new: new):
    return kit.chunked(x | {"log_decay": gates(x)}, ARRAYS, one, carry)


def padded(x):
    """The last chunk filled up with tokens whose gate is the sigmoid of 0."""
    o, state = dense(**x)
    return o, state * 0.5 ** (-o.shape[2] % x["chunk_size"])


def gate_on_values(x):
    """Right where dk is not dv."""
    square = x["k"].shape == x["v"].shape
    return recur(x, lambda s, a, kv: a.swapaxes(-1, -2) * s + kv) if square else dense(**x)


BUGS = dict(
    scale_missing=("q S is not scaled", lambda x: but(x, scale=1.0)),
    scale_ignored=("1/sqrt(dk) whatever scale was asked for", lambda x: but(x, scale=x["q"].shape[3] ** -0.5)),
    decay_after_write=("the new token is decayed too", lambda x: recur(x, lambda s, a, kv: a * (s + kv))),
    read_before_write=("token t reads S_{t-1}", lambda x: recur(x, read=lambda old, new: old)),
    log_gate_as_factor=("the state is multiplied by the log gate", lambda x: recur(x, gate=np.positive)),
    gate_base_2=("the gate is 2^log_decay", lambda x: but(x, log_decay=x["log_decay"] * kit.LN2)),
    gate_of_first_channel=("the gate of channel 0 decays every channel", lambda x: but(
        x, log_decay=x["log_decay"][..., :1])),
    gate_on_values=("the gate decays the columns of the state, the value channels", gate_on_values),
    write_tied_to_gate=("the write is multiplied by 1 - a, as in HGRN", lambda x: but(
        x, k=x["k"] * (1 - np.exp(gates(x))))),
    zero_log_gate_forgets=("a safe exponential gives 0 for a log gate that is not below 0", lambda x: but(
        x, log_decay=np.where(x["log_decay"] < 0, x["log_decay"], -np.inf))),
    difference_of_sums=("exp(b_i - b_j) of running sums: NaN behind a gate of 0, digits lost behind a small one",
                        lambda x: from_sums(x, lambda bi, bj: np.exp(bi - bj))),
    factored_decay=("exp(b_i) goes into q and exp(-b_j) into k: overflow",
                    lambda x: from_sums(x, lambda bi, bj: np.exp(bi) * np.exp(-bj))),
    initial_state_ignored=("the recurrence starts from 0", lambda x: but(x, initial_state=0 * x["initial_state"])),
    initial_state_not_decayed=("the initial state is added without decay",
                               lambda x: mixed(x, lambda d, i, j: np.where(j == 0, 1, d))),
    final_state_without_tail=("what is written does not decay to the end of the sequence", lambda x: (
        dense(**x)[0], mixed(x, lambda d, i, j: np.where((i == i.max()) & (j > 0), 1, d))[1])),
    chunk_state_lost=("every chunk starts from 0", lambda x: chunked(
        x, carry=lambda part, new: 0 * new)),
    chunk_state_not_decayed=("the state is carried over a chunk without decay", lambda x: chunked(
        x, carry=lambda part, new: part["initial_state"] + but(part, initial_state=0 * new)[1])),
    chunk_reads_state_after=("a chunk starts from the state after it: its tokens count twice", lambda x: chunked(
        x, lambda part: (but(part, initial_state=dense(**part)[1])[0], dense(**part)[1]))),
    chunk_without_decay=("inside a chunk there is a causal mask and no decay", lambda x: chunked(x, without_decay)),
    padding_decays=("the last chunk is filled up with gates of 1/2, which decay the final state", padded),
    state_transposed=("the states lie as (dv, dk)", lambda x: kit.transposed_state(x, dense)),
    layout_time_first=("the arrays are read and written as (B, T, H, d)", lambda x: kit.time_first(
        x | {"log_decay": gates(x)}, ARRAYS, dense)),
    strides_ignored=("strided views are read as if they were contiguous", lambda x: but(
        x, **kit.changed(x, ARRAYS, kit.memory_order))),
)


def new_state_gradient(x):
    """The gradient of log_decay with S_t in the place of S_{t-1}."""
    a, given = np.exp(gates(x)), (x[name] for name in ("do", "dfinal_state", "q", "k", "v"))
    s, ds = states(*given, a, x["initial_state"], x["scale"])
    return sum_to(a * (ds[:, :, 1:] * s[:, :, 1:]).sum(-1), x["log_decay"].shape)


def gradient_of_first(x):
    """One entry, not the sum, of each axis along which log_decay was broadcast."""
    full = vjp(**x | {"log_decay": gates(x)})["dlog_decay"]
    shape = (1,) * (4 - x["log_decay"].ndim) + x["log_decay"].shape
    return full[tuple(slice(n) for n in shape)].reshape(x["log_decay"].shape)


VJP_BUGS = dict(
    gate_gradient_reads_new_state=("dlog_decay is taken with S_t in the place of S_{t-1}", lambda x: dict(
        dlog_decay=new_state_gradient(x))),
    gate_gradient_of_gate=("the gradient of a is given for that of log a", lambda x: dict(
        dlog_decay=vjp(**x)["dlog_decay"] * np.exp(-x["log_decay"]))),
    gate_gradient_not_reduced=("dlog_decay is a slice, not the sum, over the axes along which it was broadcast",
                               lambda x: dict(dlog_decay=gradient_of_first(x))),
    final_state_cotangent_lost=("the gradient that comes through the final state is lost", lambda x: vjp(
        **x | {"dfinal_state": 0 * x["dfinal_state"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=5, dk=4, dv=7)
NEUTRAL = dict(scale=lambda n: n.dk ** -0.5, chunk_size=2)


def at_token(t, value, x, channels=slice(None)):
    """log_decay with another value at token t, in some channels."""
    g = x["log_decay"].copy()
    g[:, :, t, channels] = value
    return dict(log_decay=g)


def with_padding(x):
    """Batch entry 1 has three tokens; k = 0 and log_decay = 0 in what follows, and in token 1 of entry 0."""
    k, g = x["k"].copy(), x["log_decay"].copy()
    for place in np.s_[1, :, 3:], np.s_[0, :, 1]:
        k[place], g[place] = 0, 0
    return dict(k=k, log_decay=g)


def in_bfloat16(schedule):
    """A schedule of decays, rounded to numbers that every type holds."""
    return lambda n: kit.rounded(schedule(n.H), 8)


CASES = dict(
    basic=dict(
        why="every size differs and none is 1, T is no multiple of the chunk, and there is an initial state",
        sizes=SIZES, catches=(
            "scale_missing", "decay_after_write", "read_before_write", "log_gate_as_factor", "gate_base_2",
            "gate_of_first_channel", "write_tied_to_gate", "initial_state_ignored", "initial_state_not_decayed",
            "final_state_without_tail", "chunk_state_lost", "chunk_state_not_decayed", "chunk_reads_state_after",
            "chunk_without_decay", "padding_decays", "state_transposed", "layout_time_first",
            "gate_gradient_reads_new_state", "gate_gradient_of_gate", "final_state_cotangent_lost")),
    one_token=dict(
        why="T = 1: the initial state is decayed once, and the new token is not", sizes=SIZES | dict(T=1),
        catches=("decay_after_write", "read_before_write", "initial_state_not_decayed", "state_transposed")),
    no_tokens=dict(
        why="T = 0 is legal: the final state is the initial state", sizes=SIZES | dict(T=0), light=True,
        shows=lambda x, y: (y["final_state"] == x["initial_state"]).all()),
    scale_given=dict(
        why="a scale that is not 1/sqrt(dk) must be honoured, and a width that no 4 divides", sizes=SIZES | dict(dk=6),
        light=True, scale=0.75, catches=("scale_ignored",)),
    equal_widths=dict(
        why="dk = dv: a gate on the wrong axis of the state fits", sizes=SIZES | dict(dv=4), light=True,
        catches=("gate_on_values", "state_transposed")),
    zero_state=dict(
        why="without an initial state the first token gives scale (q . k) v", sizes=SIZES, light=True, chunk_size=3,
        initial_state=lambda n: np.zeros((n.B, n.H, n.dk, n.dv)),
        shows=lambda x, y: kit.restarted(recurrent, ARRAYS, x, y, 0)),
    zero_gate=dict(
        why="a gate of exactly 0 forgets everything before its token, and nothing after it", sizes=SIZES,
        change=lambda x: at_token(2, -np.inf, x), shows=lambda x, y: kit.restarted(recurrent, ARRAYS, x, y, 2),
        catches=("difference_of_sums",)),
    zero_gate_in_some_channels=dict(
        why="a gate of 0 in two channels restarts two rows of the state", sizes=SIZES, light=True, chunk_size=3,
        change=lambda x: at_token(1, -np.inf, x, slice(2)), catches=("difference_of_sums",)),
    small_gate=dict(
        why="a log gate of -32768: running sums lose the digits of all gates behind it", sizes=SIZES, light=True,
        change=lambda x: at_token(2, -32768, x), chunk_size=8,
        shows=lambda x, y: kit.restarted(recurrent, ARRAYS, x, y, 2),
        catches=("difference_of_sums", "factored_decay")),
    padding=dict(
        why="padding, k = 0 and log_decay = 0, leaves the state alone at the end and inside", sizes=SIZES,
        change=with_padding, shows=lambda x, y: kit.stops_at_padding(recurrent, ARRAYS, x, y),
        catches=("zero_log_gate_forgets",)),
    scalar_gate=dict(
        why="one gate per head and token: simple GLA", sizes=SIZES,
        log_decay=lambda n: draw("log_decay", (n.B, n.H, n.T, 1)), catches=("gate_gradient_not_reduced",)),
    retnet=dict(
        why="one gate per head, the same at every token: RetNet", sizes=SIZES, chunk_size=3,
        log_decay=in_bfloat16(retnet_decay), catches=("gate_gradient_not_reduced",)),
    lightning=dict(
        why="the decays of Lightning attention in layer 1 of 4, in whole chunks and without a scale",
        sizes=SIZES | dict(T=6), light=True, scale=1.0,
        log_decay=in_bfloat16(lambda heads: lightning_decay(heads, 1, 4)), catches=("scale_ignored",)),
    long=dict(
        why="over 64 tokens the first 32 are forgotten, and exp(-b) leaves float16", light=True, chunk_size=16,
        sizes=SIZES | dict(B=1, H=2, T=64, dv=3), change=lambda x: dict(v=draw("k", x["v"].shape)),
        shows=lambda x, y: np.allclose(y["final_state"], kit.since(recurrent, ARRAYS, x, 32)[1], 1e-5, 1e-5),
        catches=("factored_decay",)),
    strided=dict(
        why="q, k, v and log_decay are views of (B, T, H, d) memory", sizes=SIZES,
        change=lambda x: kit.strided(x, ARRAYS), catches=("strides_ignored",)),
)
