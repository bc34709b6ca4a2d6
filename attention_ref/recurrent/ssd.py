"""State space duality, the mixer of Mamba-2.               Dao & Gu 2024, arXiv:2405.21060, sections 5 and 6, eq. 16

    S_t = exp(dt_t A) S_{t-1} + B_t^T (dt_t x_t)              S_t in R^{dk x dv}, S_0 = initial_state
    o_t = C_t S_t + D x_t                                     head h reads B and C of group h // (H / G)

    dual:  o = (L * C B^T) (dt x) + D x + (initial_state, decayed, read by C)   L_ij = exp(sum_{j<r<=i} dt_r A)

dk and dv are N and P of the paper. This is gla with q = C, k = B, v = dt x and one gate per head and token; x enters by
an Euler step, dt x, not by ((exp(dt A) - 1) / A) x. Where code in the wild differs: the state lies as (dv, dk), the
tokens as (B, T, H, d); dt comes before its bias and softplus, A as log(-A); L is built from differences of running
sums, which lose their digits behind a large dt.
"""
import numpy as np

from .. import kit
from ..core import decay_between, per_head, repeat_heads, scan, scan_back, sum_groups
from ..masks import grid
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(x="B H T dv", dt="B H T", A="H", B="B G T dk", C="B G T dk", D="H", initial_state="B H dk dv",
              chunk_size="int >=1")
OUTPUTS = dict(o="B H T dv", final_state="B H dk dv")
CONVENTIONS = dict(heads="head h reads B and C of group h // (H/G)", order="decay, then write, then read",
                   dt="after softplus; 0 leaves the state alone", D="multiplies x, not dt x", layout="B H T d",
                   state="(dk, dv), after the last token")


def recurrent(x, dt, A, B, C, D, initial_state, *, chunk_size=64):
    """o (B, H, T, dv) and the state (B, H, dk, dv) after the last token; ValueError for a shape that does not fit."""
    T = sizes(INPUTS, locals())["T"]
    o, state = np.zeros_like(x), initial_state
    for t in range(T):
        o[:, :, t], state = step(x[:, :, t], dt[:, :, t], A, B[:, :, t], C[:, :, t], D, state)
    return o, state


def step(x, dt, A, B, C, D, state):
    """One token, x (B, H, dv), dt (B, H), B and C (B, G, dk), on a state: its o (B, H, dv) and the next state."""
    B, C = repeat_heads(B, x.shape[1]), repeat_heads(C, x.shape[1])
    write = B[..., None] * (dt[..., None] * x)[..., None, :]
    state = np.exp(dt * A)[..., None, None] * state + write
    return (C[..., None, :] @ state)[..., 0, :] + D[:, None] * x, state


def dense(x, dt, A, B, C, D, initial_state, *, chunk_size=64):
    """The dual form: one matrix M = L * C B^T for all pairs of tokens."""
    sizes(INPUTS, locals())
    return mix(x, dt, decays(dt, A), B, C, D, initial_state)


def decays(dt, A):
    """d_ij (B, H, T + 1, T + 1), what is left at i of the write of token j, 0 the initial state; L is d[1:, 1:]."""
    a = np.exp(dt * A[:, None])[..., None]
    start = np.ones_like(a, shape=(*a.shape[:2], 1, 1))
    return decay_between(np.concatenate([start, a], axis=2))[..., 0]


def mix(x, dt, d, B, C, D, initial_state):
    """M (dt x) + D x and the initial state as C reads it; the state that the last row of d leaves."""
    B, C = repeat_heads(B, x.shape[1]), repeat_heads(C, x.shape[1])
    M, write = d[:, :, 1:, 1:] * (C @ B.swapaxes(-1, -2)), dt[..., None] * x
    o = M @ write + d[:, :, 1:, :1] * (C @ initial_state) + D[:, None, None] * x
    left = (B * d[:, :, -1, 1:, None]).swapaxes(-1, -2) @ write
    return o, d[:, :, -1, :1, None] * initial_state + left


def chunkwise(x, dt, A, B, C, D, initial_state, *, chunk_size=64):
    """Section 6: blocks of M on the diagonal as in the dual form, all blocks below it through the state."""
    T = sizes(INPUTS, locals())["T"]
    o, state = np.zeros_like(x), initial_state
    for start in range(0, T, chunk_size):
        chunk = np.s_[:, :, start:start + chunk_size]
        o[chunk], state = mix(x[chunk], dt[chunk], decays(dt[chunk], A), B[chunk], C[chunk], D, state)
    return o, state


@per_head(INPUTS, OUTPUTS)
def loop(x, dt, A, B, C, D, initial_state, chunk_size=64):
    """One token at a time, one number of the state at a time: decay, write, read."""
    (T, dv), dk = x.shape, B.shape[1]
    state, o = initial_state.copy(), np.zeros_like(x)
    for t in range(T):
        a = np.exp(dt[t] * A)
        for j in range(dv):
            for c in range(dk):
                state[c, j] = a * state[c, j] + B[t, c] * dt[t] * x[t, j]
                o[t, j] += C[t, c] * state[c, j]
            o[t, j] += D * x[t, j]
    return o, state


def vjp(do, dfinal_state, x, dt, A, B, C, D, initial_state, *, chunk_size=64):
    """Gradients of every array: dt acts through the gate exp(dt A) and through what is written, dt x."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    s, ds = states(do, dfinal_state, x, dt, A, B, C, initial_state)
    (H, G), old, new, dnew = (x.shape[1], B.shape[1]), s[:, :, :-1], s[:, :, 1:], ds[:, :, 1:]
    dwrite = (repeat_heads(B, H)[..., None, :] @ dnew)[..., 0, :]
    dlog_a = np.exp(dt * A[:, None]) * (dnew * old).sum((-2, -1))
    dB, dC = (dnew @ (dt[..., None] * x)[..., None])[..., 0], (new @ do[..., None])[..., 0]
    return dict(dx=dt[..., None] * dwrite + D[:, None, None] * do, ddt=(x * dwrite).sum(-1) + A[:, None] * dlog_a,
                dA=(dt * dlog_a).sum((0, 2)), dB=sum_groups(dB, G), dC=sum_groups(dC, G),
                dD=(x * do).sum((0, 2, 3)), dinitial_state=ds[:, :, 0])


def states(do, dfinal_state, x, dt, A, B, C, initial_state):
    """S_0 ... S_T by the recurrence and their cotangents by the recurrence backwards, each (B, H, T + 1, dk, dv)."""
    B, C, a = repeat_heads(B, x.shape[1]), repeat_heads(C, x.shape[1]), np.exp(dt * A[:, None])[..., None, None]
    write = B[..., None] * (dt[..., None] * x)[..., None, :]
    return scan(a, write, initial_state), scan_back(a, C[..., None] * do[..., None, :], dfinal_state)


FORMS = recurrent, dense, chunkwise, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

ARRAYS = "x", "dt", "B", "C"


def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def gates(x):
    """exp(dt A) (B, H, T)."""
    return np.exp(x["dt"] * x["A"][:, None])


def mixed(x, change=lambda d, i, j: d, factor=None):
    """The dual form with decays change(d, i, j), 0 the initial state, or with another factor of x in the write."""
    d, factor = decays(x["dt"], x["A"]), x["dt"] if factor is None else factor
    return mix(x["x"], factor, change(d, *grid(*d.shape[2:])), x["B"], x["C"], x["D"], x["initial_state"])


def from_sums(x, between):
    """The dual form with between(b_i, b_j) of running sums b of dt A."""
    b = np.cumsum(x["dt"] * x["A"][:, None], axis=2)
    b = np.concatenate([np.zeros_like(b, shape=(*b.shape[:2], 1)), b], axis=2)
    return mixed(x, lambda d, i, j: np.where(j <= i, between(b[..., None], b[..., None, :]), 0))


def chunked(x, one=lambda part: dense(**part), carry=lambda part, new: new):
    return kit.chunked(x, ARRAYS, one, carry)


def without_decay(part):
    """A chunk whose tokens see each other without decay, and the right state after it."""
    return mixed(part, lambda d, i, j: np.where((1 <= j) & (j <= i), 1, d))[0], dense(**part)[1]


def padded(x):
    """The last chunk filled up with tokens whose dt is softplus(0)."""
    o, state = dense(**x)
    return o, state * np.exp(-o.shape[2] % x["chunk_size"] * kit.LN2 * x["A"])[:, None, None]


def tiled(x, name):
    """B or C for every head, group h mod G for head h."""
    return x[name][:, np.arange(x["x"].shape[1]) % x[name].shape[1]]


BUGS = dict(
    skip_missing=("D x is not added", lambda x: but(x, D=0 * x["D"])),
    skip_times_dt=("D multiplies dt x", lambda x: kit.with_o(
        dense(**x), but(x, D=0 * x["D"])[0] + x["D"][:, None, None] * x["dt"][..., None] * x["x"])),
    dt_not_in_write=("x is written without dt", lambda x: mixed(x, factor=np.ones_like(x["dt"]))),
    zero_order_hold=("x is written with (exp(dt A) - 1) / A, not with dt", lambda x: mixed(
        x, factor=np.expm1(x["dt"] * x["A"][:, None]) / x["A"][:, None])),
    decay_after_write=("the new token is decayed too", lambda x: mixed(x, factor=x["dt"] * gates(x))),
    read_before_write=("token t reads S_{t-1}", lambda x: (
        mixed(x, lambda d, i, j: np.roll(d, 1, axis=2))[0], dense(**x)[1])),
    decay_sign=("the gate is exp(-dt A)", lambda x: but(x, A=-x["A"])),
    decay_taken_for_log=("A is taken for log(-A)", lambda x: but(x, A=-np.exp(x["A"]))),
    read_and_write_swapped=("B reads and C writes", lambda x: but(x, B=x["C"], C=x["B"])),
    groups_tiled=("head h reads group h mod G", lambda x: but(x, B=tiled(x, "B"), C=tiled(x, "C"))),
    difference_of_sums=("exp(b_i - b_j) of running sums of dt A: digits lost behind a large dt",
                        lambda x: from_sums(x, lambda bi, bj: np.exp(bi - bj))),
    factored_decay=("exp(b_i) goes into C and exp(-b_j) into B: overflow",
                    lambda x: from_sums(x, lambda bi, bj: np.exp(bi) * np.exp(-bj))),
    initial_state_ignored=("the recurrence starts from 0", lambda x: but(x, initial_state=0 * x["initial_state"])),
    initial_state_not_decayed=("the initial state is added without decay",
                               lambda x: mixed(x, lambda d, i, j: np.where(j == 0, 1, d))),
    final_state_without_tail=("what is written does not decay to the end of the sequence", lambda x: (
        dense(**x)[0], mixed(x, lambda d, i, j: np.where((i == i.max()) & (j > 0), 1, d))[1])),
    chunk_state_lost=("every chunk starts from 0", lambda x: chunked(x, carry=lambda part, new: 0 * new)),
    chunk_state_not_decayed=("the state is carried over a chunk without decay", lambda x: chunked(
        x, carry=lambda part, new: part["initial_state"] + but(part, initial_state=0 * new)[1])),
    chunk_without_decay=("inside a chunk there is a causal mask and no decay", lambda x: chunked(x, without_decay)),
    padding_decays=("the last chunk is filled up before the softplus: dt = log 2 decays the final state", padded),
    state_transposed=("the states lie as (dv, dk)", lambda x: kit.transposed_state(x, dense)),
    layout_time_first=("the arrays are read and written as (B, T, H, d)", lambda x: kit.time_first(x, ARRAYS, dense)),
    strides_ignored=("strided views are read as if they were contiguous", lambda x: but(
        x, **kit.changed(x, ARRAYS, kit.memory_order))),
)


def states_of(x):
    return states(*(x[name] for name in ("do", "dfinal_state", "x", "dt", "A", "B", "C", "initial_state")))


def gate_gradient(x, shift=0):
    """The gradient of dt A (B, H, T); shift=1 takes S_t in the place of S_{t-1}."""
    s, ds = states_of(x)
    return gates(x) * (ds[:, :, 1:] * s[:, :, shift:x["x"].shape[2] + shift]).sum((-2, -1))


def of_last_head(x):
    """dC of the last head of each group, not the sum."""
    s, _ = states_of(x)
    heads = x["x"].shape[1] // x["C"].shape[1]
    return (s[:, :, 1:] @ x["do"][..., None])[:, heads - 1::heads, ..., 0]


VJP_BUGS = dict(
    gate_gradient_reads_new_state=("the gradient of the gate is taken with S_t in the place of S_{t-1}", lambda x: dict(
        dA=(x["dt"] * gate_gradient(x, shift=1)).sum((0, 2)))),
    dt_gradient_without_gate=("dt gets no gradient through exp(dt A)", lambda x: dict(
        ddt=vjp(**x)["ddt"] - x["A"][:, None] * gate_gradient(x))),
    dt_gradient_without_write=("dt gets no gradient through dt x", lambda x: dict(
        ddt=x["A"][:, None] * gate_gradient(x))),
    dx_without_skip=("dx lacks the path through D x", lambda x: dict(dx=vjp(**x | {"D": 0 * x["D"]})["dx"])),
    group_gradient_last_head=("dC of a group is that of its last head, not the sum", lambda x: dict(
        dC=of_last_head(x))),
    final_state_cotangent_lost=("the gradient that comes through the final state is lost", lambda x: vjp(
        **x | {"dfinal_state": 0 * x["dfinal_state"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=6, G=3, T=5, dk=4, dv=7)
NEUTRAL = dict(chunk_size=2)


def large_step(x):
    """dt = 8192 at token 2, whose x is small; dt and A use all bits of a bfloat16, so that their sums round."""
    dt, A, token = kit.rounded(0.7 * x["dt"], 8), kit.rounded(0.7 * x["A"], 8), x["x"].copy()
    dt[:, :, 2], token[:, :, 2] = 8192, token[:, :, 2] / 8192
    return dict(dt=dt, A=A, x=token)


def with_padding(x):
    """Batch entry 1 has three tokens, and token 1 of entry 0 is padding: dt = 0."""
    dt = x["dt"].copy()
    dt[1, :, 3:], dt[0, :, 1] = 0, 0
    return dict(dt=dt)


CASES = dict(
    basic=dict(
        why="every size differs and none is 1, T is no multiple of the chunk, and there is an initial state",
        sizes=SIZES, catches=(
            "skip_missing", "skip_times_dt", "dt_not_in_write", "zero_order_hold", "decay_after_write",
            "read_before_write", "decay_sign", "decay_taken_for_log", "read_and_write_swapped",
            "groups_tiled", "initial_state_ignored", "initial_state_not_decayed", "final_state_without_tail",
            "chunk_state_lost", "chunk_state_not_decayed", "chunk_without_decay", "padding_decays",
            "state_transposed", "layout_time_first", "gate_gradient_reads_new_state", "dt_gradient_without_gate",
            "dt_gradient_without_write", "dx_without_skip", "group_gradient_last_head",
            "final_state_cotangent_lost")),
    one_token=dict(
        why="T = 1: the initial state is decayed once, and the new token is not", sizes=SIZES | dict(T=1),
        catches=("decay_after_write", "read_before_write", "initial_state_not_decayed", "state_transposed")),
    no_tokens=dict(
        why="T = 0 is legal: the final state is the initial state", sizes=SIZES | dict(T=0), light=True,
        shows=lambda x, y: (y["final_state"] == x["initial_state"]).all()),
    one_group=dict(
        why="one B and C for all heads, as most models have", sizes=SIZES | dict(G=1), light=True,
        shows=lambda x, y: x["B"].shape[1] == 1),
    group_per_head=dict(
        why="each head has its own B and C", sizes=SIZES | dict(H=3), light=True, chunk_size=3,
        shows=lambda x, y: x["B"].shape[1] == x["x"].shape[1]),
    equal_widths=dict(
        why="dk = dv: a transposed state fits", sizes=SIZES | dict(H=3, G=1, dv=4), light=True,
        catches=("state_transposed",)),
    zero_state=dict(
        why="without an initial state the first token gives (C . B) dt x + D x", sizes=SIZES | dict(T=7), light=True,
        chunk_size=3, initial_state=lambda n: np.zeros((n.B, n.H, n.dk, n.dv)),
        shows=lambda x, y: kit.restarted(recurrent, ARRAYS, x, y, 0)),
    whole_chunks=dict(
        why="T is a multiple of the chunk: nothing is padded", sizes=SIZES | dict(T=6, H=3, G=1), light=True,
        chunk_size=3,
        catches=("chunk_without_decay", "chunk_state_not_decayed")),
    long_chunk=dict(
        why="a chunk longer than the sequence", sizes=SIZES | dict(H=3, G=1), light=True, chunk_size=8,
        catches=("padding_decays",)),
    large_step=dict(
        why="a gate that is 0 in every type: nothing before its token is left, and running sums lose their digits",
        sizes=SIZES | dict(H=4, G=2), change=large_step, shows=lambda x, y: kit.restarted(recurrent, ARRAYS, x, y, 2),
        catches=("difference_of_sums", "factored_decay")),
    padding=dict(
        why="padding, dt = 0, leaves the state alone at the end and inside", sizes=SIZES | dict(H=4, G=2),
        change=with_padding, shows=lambda x, y: kit.stops_at_padding(recurrent, ARRAYS, x, y)),
    long=dict(
        why="over 64 tokens the first 16 are forgotten by the head that decays fastest",
        sizes=SIZES | dict(B=1, H=2, G=1, T=64, dv=3), light=True, chunk_size=16,
        change=lambda x: dict(A=np.array([-1.25, -2.5]), x=draw("q", x["x"].shape)),
        shows=lambda x, y: np.allclose(y["final_state"], kit.since(recurrent, ARRAYS, x, 16)[1], 1e-5, 1e-5),
        catches=("factored_decay",)),
    strided=dict(
        why="x, dt, B and C are views of (B, T, H, d) memory", sizes=SIZES | dict(H=4, G=2),
        change=lambda x: kit.strided(x, ARRAYS), catches=("strides_ignored",)),
)
