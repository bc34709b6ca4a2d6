"""RWKV-7: one key takes out what it reads, another one writes.               Peng et al. 2025, arXiv:2503.14456

    x_t = e_t S_{t-1}                                   e = removal_key: what the state holds before it decays
    S_t = diag(a_t) S_{t-1} - b_t^T x_t + k_t^T v_t     a = exp(log_decay), b = removal_rate e channel by channel
    o_t = scale q_t S_t                                 q is called r, receptance; S_0 given

    D_ij = a_{j+1} ... a_i, 1 for i = j, 0 for i < j    what is left after token i of what token j wrote; D_i0 of S_0
    X = (I + N)^{-1} ((D_{.-1,0} E) S_0 + L V)          N_ij = e_i D_{i-1,j} b_j^T and L_ij = e_i D_{i-1,j} k_j^T, i > j
    O = scale ((D_.0 Q) S_0 + P V - R X)                P_ij = q_i D_ij k_j^T     R_ij = q_i D_ij b_j^T

Diagonal plus low rank (DPLR), with vectors -e and b. Removal keys have length 1 and come as they are to be used. Where
code in the wild differs: the paper has S transposed and no scale; Kimi Delta Attention reads the decayed state; kernels
take -e and b, or log(-log a). The paper's gates exceed exp(-exp(-1/2)) = 0.545; here a gate may be 0.
"""
import numpy as np

from .. import kit
from ..core import chunks, decay_between, decayed, per_head, solve_unit_lower, tokens
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H T dk", k="B H T dk", v="B H T dv", removal_key="B H T dk", removal_rate="B H T dk",
              log_decay="B H T dk", initial_state="B H dk dv", scale="", chunk_size="int >=1")
OUTPUTS = dict(o="B H T dv", final_state="B H dk dv")
STEPS = dict(removed="B H T dv")
CONVENTIONS = dict(order="read what is removed, then decay, remove and write, then read",
                   log_decay="natural log of the gate, <= 0", keys="used as they come, never normalised",
                   state="(dk, dv), o = q S", layout="B H T d")


def step(q, k, v, removal_key, removal_rate, log_decay, state, *, scale):
    """One token, T = 1: o (B, H, 1, dv) and the state (B, H, dk, dv) after it."""
    b, a = removal_rate * removal_key, np.exp(log_decay).swapaxes(-1, -2)
    state = a * state - b.swapaxes(-1, -2) @ (removal_key @ state) + k.swapaxes(-1, -2) @ v
    return scale * q @ state, state


def recurrent(q, k, v, removal_key, removal_rate, log_decay, initial_state, *, scale, chunk_size=64):
    """o (B, H, T, dv) and final_state (B, H, dk, dv), token by token. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    o, state = np.zeros_like(v), initial_state
    for t in tokens(q):
        o[t], state = step(q[t], k[t], v[t], removal_key[t], removal_rate[t], log_decay[t], state, scale=scale)
    return o, state


def decays(log_decay):
    """D after each token (B, H, T, T, dk) and of S_0 (B, H, T, dk), and both before each token."""
    a = np.exp(log_decay)
    d = decay_between(a)
    start = d[..., 0, :] * a[..., :1, :]
    before = np.concatenate([np.zeros_like(d[..., :1, :, :]), d[..., :-1, :, :]], -3)
    return d, start, before, np.concatenate([np.ones_like(start[..., :1, :]), start[..., :-1, :]], -2)


def steps(k, v, removal_key, removal_rate, log_decay, initial_state):
    """removed X (B, H, T, dv): what each token reads in order to take it out."""
    _, _, before, start = decays(log_decay)
    n = decayed(removal_key, before, removal_rate * removal_key)
    return solve_unit_lower(n, start * removal_key @ initial_state + decayed(removal_key, before, k) @ v)


def dense(q, k, v, removal_key, removal_rate, log_decay, initial_state, *, scale, chunk_size=64):
    """The same with all tokens (T >= 1) at once."""
    sizes(INPUTS, locals())
    d, start, _, _ = decays(log_decay)
    b, x = removal_rate * removal_key, steps(k, v, removal_key, removal_rate, log_decay, initial_state)
    o = scale * (start * q @ initial_state + decayed(q, d, k) @ v - decayed(q, d, b) @ x)
    k_end, b_end = ((d[..., -1, :, :] * y).swapaxes(-1, -2) for y in (k, b))
    return o, start[..., -1, :, None] * initial_state + k_end @ v - b_end @ x


def chunkwise(q, k, v, removal_key, removal_rate, log_decay, initial_state, *, scale, chunk_size=64):
    """The same chunk by chunk: dense inside a chunk, a recurrence from chunk to chunk."""
    sizes(INPUTS, locals())
    o, state = [v[:, :, :0]], initial_state
    for x in zip(*(chunks(y, chunk_size) for y in (q, k, v, removal_key, removal_rate, log_decay))):
        y, state = dense(*x, state, scale=scale)
        o.append(y)
    return np.concatenate(o, 2), state


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, removal_key, removal_rate, log_decay, initial_state, scale, chunk_size):
    """One token at a time, one column of the state after the other: no column knows of another."""
    (T, dk), dv = q.shape, v.shape[1]
    o, s, a = np.zeros((T, dv), q.dtype), initial_state.copy(), np.zeros(dk, q.dtype)
    for t in range(T):
        for i in range(dk):
            a[i] = np.exp(log_decay[t, i])
        for j in range(dv):
            x = removal_key[t, 0] * s[0, j]
            for i in range(1, dk):
                x += removal_key[t, i] * s[i, j]
            for i in range(dk):
                s[i, j] = a[i] * s[i, j] - removal_rate[t, i] * removal_key[t, i] * x + k[t, i] * v[t, j]
                o[t, j] += scale * q[t, i] * s[i, j]
    return o, s


def vjp(do, dfinal_state, q, k, v, removal_key, removal_rate, log_decay, initial_state, *, scale, chunk_size=64):
    """Gradients of all arrays, from the last token to the first: ds is that of the state."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    x = q, k, v, removal_key, removal_rate, log_decay
    (dq, dk, dv, de, drate, dg), states, ds = map(np.zeros_like, x), [initial_state], dfinal_state
    for t in tokens(q):
        states.append(step(*(y[t] for y in x), states[-1], scale=scale)[1])
    for t in reversed(tokens(q)):
        after, before = states.pop(), states[-1]
        e, b, a = removal_key[t], removal_rate[t] * removal_key[t], np.exp(log_decay[t]).swapaxes(-1, -2)
        dq[t] = scale * do[t] @ after.swapaxes(-1, -2)
        ds = ds + scale * q[t].swapaxes(-1, -2) @ do[t]
        dk[t], dv[t] = v[t] @ ds.swapaxes(-1, -2), k[t] @ ds
        db, dx = -(e @ before) @ ds.swapaxes(-1, -2), -b @ ds
        de[t] = dx @ before.swapaxes(-1, -2) + removal_rate[t] * db
        drate[t] = e * db
        dg[t] = (a * ds * before).sum(-1)[:, :, None]
        ds = a * ds + e.swapaxes(-1, -2) @ dx
    return dict(dq=dq, dk=dk, dv=dv, dremoval_key=de, dremoval_rate=drate, dlog_decay=dg, dinitial_state=ds)


FORMS = recurrent, dense, chunkwise, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

ORDER = "q", "k", "v", "removal_key", "removal_rate", "log_decay"


def but(x, **changes):
    """The right formula on changed inputs."""
    return recurrent(**x | changes)


def right(k, v, e, b, a, s):
    """The right update of the state s for gates a (B, H, dk, 1)."""
    return a * s - kit.T(b) @ (e @ s) + kit.T(k) @ v


def scan(x, update=right):
    """Outputs and all states, the initial one first, of a recurrence with another update of the state."""
    o, states = np.zeros_like(x["v"]), [x["initial_state"]]
    for t in tokens(x["q"]):
        q, k, v, e, rate, g = (x[name][t] for name in ORDER)
        states.append(update(k, v, e, rate * e, kit.T(np.exp(g)), states[-1]))
        o[t] = x["scale"] * q @ states[-1]
    return o, states


def updated(x, update):
    """The outputs of a recurrence with another update of the state."""
    o, states = scan(x, update)
    return o, states[-1]


def before_write(x):
    """o of the state before each token."""
    return np.concatenate([x["scale"] * x["q"][t] @ s for t, s in zip(tokens(x["q"]), scan(x)[1])], 2), but(x)[1]


BUGS = dict(
    scale_missing=("the queries are not scaled", lambda x: but(x, scale=1.0)),
    read_before_write=("a token reads the state before it, as in RWKV-6", before_write),
    removal_missing=("nothing is removed: gated linear attention",
                     lambda x: but(x, removal_rate=0 * x["removal_rate"])),
    removal_added=("what is read with the removal key is added", lambda x: but(x, removal_rate=-x["removal_rate"])),
    removal_of_decayed_state=("what is removed is read after the decay, as in Kimi Delta Attention: D_ij for D_{i-1,j}",
                              lambda x: updated(x, lambda k, v, e, b, a, s: right(k, v, e, b, 1, a * s))),
    removal_of_new_state=("what is removed is read after the write", lambda x: updated(
        x, lambda k, v, e, b, a, s: a * s + kit.T(k) @ v - kit.T(b) @ (e @ (s + kit.T(k) @ v)))),
    removal_with_write_key=("the key that writes also removes: the delta rule", lambda x: but(x, removal_key=x["k"])),
    removal_key_writes=("the removal key also writes", lambda x: but(x, k=x["removal_key"])),
    rate_ignored=("all that is read is removed", lambda x: but(x, removal_rate=1 + 0 * x["removal_rate"])),
    rate_on_the_read=("the rate multiplies the key that reads, not the one that removes", lambda x: updated(
        x, lambda k, v, e, b, a, s: a * s - kit.T(e) @ (b @ s) + kit.T(k) @ v)),
    rate_on_both=("the rate multiplies the key that reads and the one that removes", lambda x: updated(
        x, lambda k, v, e, b, a, s: a * s - kit.T(b) @ (b @ s) + kit.T(k) @ v)),
    rate_of_channel_0=("one rate, that of channel 0, for the whole head", lambda x: but(
        x, removal_rate=x["removal_rate"][..., :1] + 0 * x["removal_rate"])),
    write_decayed=("the new token is decayed too", lambda x: updated(
        x, lambda k, v, e, b, a, s: a * (s + kit.T(k) @ v) - kit.T(b) @ (e @ s))),
    removal_decayed=("what is removed is decayed too", lambda x: updated(
        x, lambda k, v, e, b, a, s: a * (s - kit.T(b) @ (e @ s)) + kit.T(k) @ v)),
    decay_missing=("the state never decays", lambda x: but(x, log_decay=np.zeros_like(x["log_decay"]))),
    gate_base_2=("2 to the log gate", lambda x: but(x, log_decay=x["log_decay"] * kit.LN2)),
    initial_state_ignored=("the state before the first token is 0",
                           lambda x: but(x, initial_state=0 * x["initial_state"])),
    states_transposed=("states lie in memory as (dv, dk), as the paper writes them",
                       lambda x: kit.states_stored_transposed(x, recurrent)),
    strides_ignored=("a strided view is read as if it were contiguous",
                     lambda x: but(x, **kit.changed(x, "qkv", kit.memory_order))),
)


def backward(x, read=1, removed=1, met=lambda before, after: before,
             passed=lambda ds, a, e, dx: a * ds + kit.T(e) @ dx):
    """dremoval_key by one of its two ways, dlog_decay with another state met, dinitial_state with ds passed else."""
    de, dg, states, ds = np.zeros_like(x["k"]), np.zeros_like(x["k"]), scan(x)[1], x["dfinal_state"]
    for t, before, after in list(zip(tokens(x["q"]), states, states[1:]))[::-1]:
        e, rate, a = x["removal_key"][t], x["removal_rate"][t], kit.T(np.exp(x["log_decay"][t]))
        ds = ds + x["scale"] * kit.T(x["q"][t]) @ x["do"][t]
        dx = -rate * e @ ds
        de[t] = read * dx @ kit.T(before) - removed * rate * ((e @ before) @ kit.T(ds))
        dg[t] = (a * ds * met(before, after)).sum(-1)[:, :, None]
        ds = passed(ds, a, e, dx)
    return dict(dremoval_key=de, dlog_decay=dg, dinitial_state=ds)


VJP_BUGS = dict(
    dremoval_key_of_read=("the removal key gets the gradient of what it reads and not of what it removes",
                          lambda x: dict(dremoval_key=backward(x, removed=0)["dremoval_key"])),
    dremoval_key_of_removed=("the removal key gets the gradient of what it removes and not of what it reads",
                             lambda x: dict(dremoval_key=backward(x, read=0)["dremoval_key"])),
    dgate_from_new_state=("the gradient of a gate is taken from the state after the token",
                          lambda x: dict(dlog_decay=backward(x, met=lambda before, after: after)["dlog_decay"])),
    dstate_without_removal=("the gradient of the state passes a token as if nothing were removed",
                            lambda x: backward(x, passed=lambda ds, a, e, dx: a * ds)),
    dstate_not_decayed=("the gradient of the state passes a token without the gate",
                        lambda x: backward(x, passed=lambda ds, a, e, dx: ds + kit.T(e) @ dx)),
    dfinal_state_ignored=("the gradient that comes through the final state is lost",
                          lambda x: vjp(**x | {"dfinal_state": 0 * x["dfinal_state"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=7, dk=5, dv=6)
NEUTRAL = dict(scale=1.0, chunk_size=64, initial_state=lambda n: np.zeros((n.B, n.H, n.dk, n.dv)))
DRAWN = dict(sizes=SIZES, k=lambda n: draw("k", (n.B, n.H, n.T, n.dk)) / 2, removal_key=kit.unit_keys, scale=0.75,
             chunk_size=2, initial_state=lambda n: draw("initial_state", (n.B, n.H, n.dk, n.dv)))


def closed(x):
    """Gates of 0 in the last three channels, for head 0 at token 0, head 1 at token 3 and head 2 at the last."""
    g = x["log_decay"].copy()
    for h, t in enumerate((0, 3, -1)):
        g[:, h, t, -3:] = -np.inf
    return dict(log_decay=g)


def padded(x):
    """The last two tokens of batch entry 0 write and remove nothing and let the state be."""
    k, rate, g = (x[name].copy() for name in ("k", "removal_rate", "log_decay"))
    for y in k, rate, g:
        y[0, :, -2:] = 0
    return dict(k=k, removal_rate=rate, log_decay=g)


CASES = dict(
    basic=dict(
        DRAWN, why="every size differs and none is 1; removal keys of length 1, a state to start from, a tail",
        catches=tuple(slug for slug in BUGS if slug != "strides_ignored") + tuple(VJP_BUGS)),
    one_token=dict(
        why="one token and no state: nothing to remove, o = scale (q . k) v", sizes=dict(B=1, H=1, T=1, dk=1, dv=1),
        light=True, scale=0.5, shows=lambda x, y: np.allclose(y["o"], 0.5 * x["q"] * x["k"] * x["v"])),
    chunk_longer=dict(
        DRAWN, why="a chunk longer than the sequence, and no state to start from", chunk_size=16, light=True,
        initial_state=NEUTRAL["initial_state"], catches=("removal_of_decayed_state", "removal_added")),
    whole_chunks=dict(
        DRAWN, why="chunks of three tokens without a tail", sizes=SIZES | dict(T=6, dk=8), chunk_size=3, scale=0.25,
        light=True, catches=("rate_on_the_read", "removal_with_write_key")),
    gate_of_0=dict(
        DRAWN, why="a gate of exactly 0 in three channels of five: what is removed is still read", change=closed,
        catches=("removal_of_decayed_state", "removal_decayed")),
    rate_0=dict(
        DRAWN, why="a rate of 0: nothing is removed", light=True,
        removal_rate=lambda n: np.zeros((n.B, n.H, n.T, n.dk)),
        shows=lambda x, y: np.allclose(y["o"], updated(x, lambda k, v, e, b, a, s: a * s + kit.T(k) @ v)[0])),
    forgets_key=dict(
        DRAWN, why="a rate and a gate of 1 and nothing written: the state holds nothing more for the last removal key",
        light=True, log_decay=lambda n: np.zeros((n.B, n.H, n.T, n.dk)), k=lambda n: np.zeros((n.B, n.H, n.T, n.dk)),
        removal_rate=lambda n: np.ones((n.B, n.H, n.T, n.dk)), catches=("removal_missing",),
        shows=lambda x, y: np.allclose(x["removal_key"][:, :, -1:] @ y["final_state"], 0)),
    padding=dict(
        DRAWN, why="a token without key and rate and with gates of 1 leaves the state alone", change=padded,
        shows=lambda x, y: np.allclose(y["final_state"][0], scan(x)[1][5][0])),
    long=dict(
        DRAWN, why="a long sequence forgets the state it started from", sizes=dict(B=1, H=1, T=70, dk=5, dv=3),
        v=lambda n: draw("q", (n.B, n.H, n.T, n.dv)), chunk_size=32, light=True,
        shows=lambda x, y: np.allclose(y["final_state"], but(x, initial_state=0 * x["initial_state"])[1])),
    equal_widths=dict(DRAWN, **kit.EQUAL_WIDTHS, catches=("states_transposed",)) | dict(sizes=SIZES | dict(dv=5)),
    strided=dict(
        DRAWN, why="all but the state are views of (B, T, H, d) memory", change=lambda x: kit.strided(x, ORDER),
        catches=("strides_ignored",)),
)
