"""The gated delta rule.                                   Yang et al. 2025, arXiv:2412.06464, eq. 10: one gate per head
                                                        Kimi Linear 2025, arXiv:2510.26692: one per channel (KDA)

    a_t = exp(log_decay_t), a number or one for each of the dk rows of the state
    u_t = beta_t (v_t - k_t diag(a_t) S_{t-1})          decay, then read and correct,
    S_t = diag(a_t) S_{t-1} + k_t^T u_t                 then write,                            S_0 given
    o_t = scale q_t S_t                                 then read

    D_ij = a_{j+1} ... a_i, 1 for i = j, 0 for i < j    what token i finds of what token j wrote; D_i0 of S_0
    U = A (V - (D_.0 K) S_0)     A = (I + N)^{-1} diag(beta)     N_ij = beta_i k_i D_ij k_j^T for i > j
    O = scale ((D_.0 Q) S_0 + P U)                               P_ij = q_i D_ij k_j^T

With a = 1 this is the delta rule; keys are used as they come there and here. D is a product of gates, never a quotient
exp(b_i) / exp(b_j) nor exp(b_i - b_j) of sums b, so a gate of 0 is exact: transformers and fla give NaN for it in their
chunks. Where code in the wild differs: g is a gate, not its logarithm, or a logarithm in base 2; the printed chunks of
the paper mask Q K^T without D; fla takes beta and g in either order.
"""
import numpy as np

from .. import kit
from ..core import chunks, decay_between, decayed, per_head, solve_unit_lower, sum_to, tokens
from ..masks import causal
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H T dk", k="B H T dk", v="B H T dv", beta="B H T", log_decay="B H T dk?",
              initial_state="B H dk dv", scale="", chunk_size="int >=1")
OUTPUTS = dict(o="B H T dv", final_state="B H dk dv")
STEPS = dict(transform="B H T T", writes="B H T dv")
CONVENTIONS = dict(order="decay, then correct and write, then read", log_decay="natural log of the gate, <= 0",
                   beta="after its sigmoid; 0 writes nothing", keys="used as they come, never normalised",
                   state="(dk, dv), o = q S", layout="B H T d")


def step(q, k, v, beta, log_decay, state, *, scale):
    """One token, T = 1: o (B, H, 1, dv) and the state (B, H, dk, dv) after it."""
    state = np.exp(log_decay).swapaxes(-1, -2) * state
    u = beta[..., None] * (v - k @ state)
    state = state + k.swapaxes(-1, -2) @ u
    return scale * q @ state, state


def recurrent(q, k, v, beta, log_decay, initial_state, *, scale, chunk_size=64):
    """o (B, H, T, dv) and final_state (B, H, dk, dv), token by token. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    o, state = np.zeros_like(v), initial_state
    for at in tokens(q):
        o[at], state = step(q[at], k[at], v[at], beta[at], log_decay[at], state, scale=scale)
    return o, state


def decays(log_decay):
    """D (B, H, T, T, dk or 1), and its column for the initial state (B, H, T, dk or 1)."""
    a = np.exp(log_decay)
    d = decay_between(a)
    return d, d[..., 0, :] * a[..., :1, :]


def solve(k, beta, d, r):
    """A r for r (B, H, T, n)."""
    return solve_unit_lower(beta[..., None] * decayed(k, d, k), beta[..., None] * r)


def steps(k, v, beta, log_decay, initial_state):
    """transform A (B, H, T, T), whose diagonal blocks are those of chunks of any size, and writes U (B, H, T, dv)."""
    d, start = decays(log_decay)
    transform = solve(k, beta, d, np.eye(k.shape[2], dtype=k.dtype))
    return transform, transform @ (v - start * k @ initial_state)


def dense(q, k, v, beta, log_decay, initial_state, *, scale, chunk_size=64):
    """The same with all tokens (T >= 1) at once."""
    sizes(INPUTS, locals())
    d, start = decays(log_decay)
    _, u = steps(k, v, beta, log_decay, initial_state)
    o = scale * (start * q @ initial_state + decayed(q, d, k) @ u)
    return o, start[..., -1, :, None] * initial_state + (d[..., -1, :, :] * k).swapaxes(-1, -2) @ u


def chunkwise(q, k, v, beta, log_decay, initial_state, *, scale, chunk_size=64):
    """The same chunk by chunk: A V and A (D_.0 K) need no state, and U = A V - (A (D_.0 K)) S is written."""
    sizes(INPUTS, locals())
    o, state = [v[:, :, :0]], initial_state
    for q, k, v, beta, log_decay in zip(*(chunks(x, chunk_size) for x in (q, k, v, beta, log_decay))):
        d, start = decays(log_decay)
        av, ak = (solve(k, beta, d, x) for x in (v, start * k))
        u = av - ak @ state
        o.append(scale * (start * q @ state + decayed(q, d, k) @ u))
        state = start[..., -1, :, None] * state + (d[..., -1, :, :] * k).swapaxes(-1, -2) @ u
    return np.concatenate(o, 2), state


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, beta, log_decay, initial_state, scale, chunk_size):
    """One token at a time, one column of the state after the other: no column knows of another."""
    (T, dk), dv = q.shape, v.shape[1]
    o, s, a = np.zeros((T, dv), q.dtype), initial_state.copy(), np.zeros(dk, q.dtype)
    for t in range(T):
        for i in range(dk):
            a[i] = np.exp(log_decay[t, i])
        for j in range(dv):
            u = v[t, j]
            for i in range(dk):
                s[i, j] *= a[i]
                u -= k[t, i] * s[i, j]
            u *= beta[t]
            for i in range(dk):
                s[i, j] += k[t, i] * u
                o[t, j] += scale * q[t, i] * s[i, j]
    return o, s


def vjp(do, dfinal_state, q, k, v, beta, log_decay, initial_state, *, scale, chunk_size=64):
    """Gradients of all arrays, each in its own shape, from the last token to the first: ds is that of the state."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    dq, dk, dv, dbeta, dg, states = *map(np.zeros_like, (q, k, v, beta, log_decay)), [initial_state]
    for at in tokens(q):
        states.append(step(q[at], k[at], v[at], beta[at], log_decay[at], states[-1], scale=scale)[1])
    ds = dfinal_state
    for at in reversed(tokens(q)):
        after, before, strength = states.pop(), states[-1], beta[at][..., None]
        a = np.exp(log_decay[at]).swapaxes(-1, -2)
        held = a * before
        error = v[at] - k[at] @ held
        dq[at] = scale * do[at] @ after.swapaxes(-1, -2)
        ds = ds + scale * q[at].swapaxes(-1, -2) @ do[at]
        du = k[at] @ ds
        dbeta[at] = (du * error).sum(-1)
        dv[at] = strength * du
        dk[at] = strength * error @ ds.swapaxes(-1, -2) - dv[at] @ held.swapaxes(-1, -2)
        ds = ds - k[at].swapaxes(-1, -2) @ dv[at]
        dg[at] = sum_to((ds * held).sum(-1)[:, :, None], dg[at].shape)
        ds = a * ds
    return dict(dq=dq, dk=dk, dv=dv, dbeta=dbeta, dlog_decay=dg, dinitial_state=ds)


FORMS = recurrent, dense, chunkwise, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

ORDER = "q", "k", "v", "beta", "log_decay"


def but(x, **changes):
    """The right formula on changed inputs."""
    return recurrent(**x | changes)


def right(k, v, beta, a, s):
    """The right update of the state s for gates a (B, H, dk or 1, 1)."""
    return a * s + kit.T(k) @ (beta * (v - k @ (a * s)))


def scan(x, update=right, gate=np.exp):
    """Outputs and all states, the initial one first, of a recurrence with another update or other gates."""
    o, states = np.zeros_like(x["v"]), [x["initial_state"]]
    for at in tokens(x["q"]):
        q, k, v, beta, log_decay = (x[name][at] for name in ORDER)
        states.append(update(k, v, beta[..., None], kit.T(gate(log_decay)), states[-1]))
        o[at] = x["scale"] * q @ states[-1]
    return o, states


def updated(x, *changes):
    """The outputs of such a recurrence."""
    o, states = scan(x, *changes)
    return o, states[-1]


def same(d):
    return d


def undecayed(d):
    """D for gates of 1: the causal mask."""
    return np.where(causal(*d.shape[-3:-1])[..., None], np.ones_like(d), 0)


def by_chunks(x, between=lambda g: decay_between(np.exp(g)), ut=same, scores=same, read=same, carry=same, write=same):
    """chunkwise with another D, or another one in N, in P, where S is read or handed on, or for what is written."""
    o, s = [], x["initial_state"]
    for q, k, v, beta, g in zip(*(chunks(x[name], x["chunk_size"]) for name in ORDER)):
        d = between(g)
        start = d[..., 0, :] * np.exp(g[..., :1, :])
        u = solve(k, beta, ut(d), v - read(start) * k @ s)
        o.append(x["scale"] * (read(start) * q @ s + decayed(q, scores(d), k) @ u))
        s = kit.T(carry(start)[..., -1:, :]) * s + kit.T(write(d)[..., -1, :, :] * k) @ u
    return np.concatenate(o, 2), s


def by_difference(g):
    """exp(b_i - b_j), b the sums of log gates from the first token of the chunk."""
    b = np.add.accumulate(g, axis=2)
    return np.where(causal(*[g.shape[2]] * 2)[..., None], np.exp(b[..., None, :] - b[..., None, :, :]), 0)


def before_write(x):
    """o of the state that is decayed and not yet written."""
    seen = [kit.T(np.exp(x["log_decay"][at])) * s for at, s in zip(tokens(x["q"]), scan(x)[1])]
    return np.concatenate([x["scale"] * x["q"][at] @ s for at, s in zip(tokens(x["q"]), seen)], 2), but(x)[1]


def swapped(x):
    """beta where the gate belongs and the other way round, where both have one number per token."""
    if x["log_decay"].shape[3] > 1:
        return but(x)
    return but(x, beta=x["log_decay"][..., 0], log_decay=x["beta"][..., None])


def tail_decays(x):
    """The places that fill the last chunk have gates of 1/2."""
    o, s = but(x)
    return o, s * 0.5 ** (-x["q"].shape[2] % x["chunk_size"])


BUGS = dict(
    scale_missing=("the queries are not scaled", lambda x: but(x, scale=1.0)),
    read_before_write=("a token reads the decayed state before it is written", before_write),
    beta_missing_in_erase=("beta v - k S: what is held is erased with full strength", lambda x: updated(
        x, lambda k, v, beta, a, s: a * s + kit.T(k) @ (beta * v - k @ (a * s)))),
    erase_missing=("nothing is erased: gated linear attention", lambda x: updated(
        x, lambda k, v, beta, a, s: a * s + kit.T(k) @ (beta * v))),
    decay_missing=("the state never decays", lambda x: but(x, log_decay=np.zeros_like(x["log_decay"]))),
    decay_after_write=("the new token is decayed too", lambda x: updated(
        x, lambda k, v, beta, a, s: a * right(k, v, beta, 1, s))),
    error_from_undecayed_state=("what is held is read before the decay, and erased after it", lambda x: updated(
        x, lambda k, v, beta, a, s: a * s + kit.T(k) @ (beta * (v - k @ s)))),
    erase_before_decay=("the state is erased before it is decayed", lambda x: updated(
        x, lambda k, v, beta, a, s: a * (s - kit.T(k) @ (beta * (k @ s))) + kit.T(k) @ (beta * v))),
    gate_base_2=("2 to the log gate", lambda x: but(x, log_decay=x["log_decay"] * kit.LN2)),
    gate_not_exponentiated=("the log gate itself multiplies the state", lambda x: updated(x, right, same)),
    gate_of_0_dropped=("the exponential is taken of numbers below 0 only, and is 0 elsewhere",
                       lambda x: updated(x, right, lambda g: np.where(g < 0, np.exp(g), 0))),
    gate_of_channel_0=("every channel has the gate of the first",
                       lambda x: but(x, log_decay=x["log_decay"][..., :1])),
    beta_and_gate_swapped=("beta and the log gate are passed in each other's place", swapped),
    decay_as_difference=("exp(b_i - b_j) of sums of log gates: NaN for a gate of 0, digits lost for a small one",
                         lambda x: by_chunks(x, by_difference)),
    ut_without_decay=("N has no D: the tokens of a chunk erase each other undecayed",
                      lambda x: by_chunks(x, ut=np.ones_like)),
    scores_without_decay=("P has no D: Q K^T under a plain causal mask", lambda x: by_chunks(x, scores=undecayed)),
    state_read_undecayed=("the tokens of a chunk see the state before it undecayed",
                          lambda x: by_chunks(x, read=np.ones_like)),
    state_handed_on_undecayed=("the state before a chunk enters the next one undecayed",
                               lambda x: by_chunks(x, carry=np.ones_like)),
    writes_handed_on_undecayed=("what a chunk writes enters the next one undecayed",
                                lambda x: by_chunks(x, write=np.ones_like)),
    tail_decays_state=("the places that fill the last chunk decay the final state", tail_decays),
    initial_state_ignored=("the state before the first token is 0",
                           lambda x: but(x, initial_state=0 * x["initial_state"])),
    states_transposed=("states lie in memory as (dv, dk)", lambda x: kit.states_stored_transposed(x, recurrent)),
    strides_ignored=("a strided view is read as if it were contiguous",
                     lambda x: but(x, **kit.changed(x, "qkv", kit.memory_order))),
)


def backward(x, erased=same, gate=lambda a, before, after: a * before, passed=lambda ds, a: a * ds):
    """dk, dlog_decay and dinitial_state of vjp with another state erased in dk or met by a gate, or ds handed back."""
    dk, dg, states, ds = np.zeros_like(x["k"]), np.zeros_like(x["log_decay"]), scan(x)[1], x["dfinal_state"]
    for at, before, after in list(zip(tokens(x["q"]), states, states[1:]))[::-1]:
        k, v, beta, a = x["k"][at], x["v"][at], x["beta"][at][..., None], kit.T(np.exp(x["log_decay"][at]))
        ds = ds + x["scale"] * kit.T(x["q"][at]) @ x["do"][at]
        du = beta * (k @ ds)
        dk[at] = beta * (v - k @ (a * before)) @ kit.T(ds) - du @ kit.T(erased(a * before))
        ds = ds - kit.T(k) @ du
        dg[at] = sum_to((ds * gate(a, before, after)).sum(-1)[:, :, None], dg[at].shape)
        ds = passed(ds, a)
    return dict(dk=dk, dlog_decay=dg, dinitial_state=ds)


def of_channel_0(x):
    """The gradient of the gate of a head, taken from channel 0 alone."""
    every = vjp(**x | {"log_decay": np.broadcast_to(x["log_decay"], x["k"].shape)})["dlog_decay"]
    return every[..., :x["log_decay"].shape[3]]


VJP_BUGS = dict(
    dk_without_erase=("dk lacks the way through what is erased",
                      lambda x: dict(dk=backward(x, erased=lambda s: 0 * s)["dk"])),
    dgate_from_new_state=("the gradient of a gate is taken from the state after the token", lambda x: dict(
        dlog_decay=backward(x, gate=lambda a, before, after: a * after)["dlog_decay"])),
    dgate_not_of_log=("the gradient is that of the gate, not of its logarithm", lambda x: dict(
        dlog_decay=backward(x, gate=lambda a, before, after: before)["dlog_decay"])),
    dgate_of_channel_0=("the gradient of the gate of a head is that of channel 0, not the sum of all",
                        lambda x: dict(dlog_decay=of_channel_0(x))),
    dstate_not_decayed=("the gradient of the state passes a token without the gate",
                        lambda x: backward(x, passed=lambda ds, a: ds)),
    dfinal_state_ignored=("the gradient that comes through the final state is lost",
                          lambda x: vjp(**x | {"dfinal_state": 0 * x["dfinal_state"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=7, dk=5, dv=6)
NEUTRAL = dict(log_decay=lambda n: np.zeros((n.B, n.H, n.T, 1)), scale=1.0, chunk_size=64,
               initial_state=lambda n: np.zeros((n.B, n.H, n.dk, n.dv)))
PER_HEAD = dict(sizes=SIZES, k=kit.unit_keys, scale=0.75, chunk_size=2,
                log_decay=lambda n: draw("log_decay", (n.B, n.H, n.T, 1)),
                initial_state=lambda n: draw("initial_state", (n.B, n.H, n.dk, n.dv)))
PER_CHANNEL = PER_HEAD | dict(log_decay=lambda n: draw("log_decay", (n.B, n.H, n.T, n.dk)))


def closed(x, log_gate):
    """Another gate, of the last three channels only, for head 0 at token 0, head 1 at token 3, head 2 at the last."""
    g = x["log_decay"].copy()
    for h, t in enumerate((0, 3, -1)):
        g[:, h, t, -3:] = log_gate
    return dict(log_decay=g)


def padded(x):
    """Padding of the last two tokens of batch entry 0 and the last three of entry 1, with gates of 1."""
    g = x["log_decay"].copy()
    g[0, :, -2:], g[1, :, -3:] = 0, 0
    return kit.padded_tokens(x) | dict(log_decay=g)


def restarts(x, y):
    """Head 1 from token 3 on is a sequence of its own that starts from nothing."""
    late = {name: x[name][:, 1:2, 3:] for name in ORDER}
    o, s = but(x | late, initial_state=0 * x["initial_state"][:, 1:2])
    return np.allclose(y["o"][:, 1:2, 3:], o) and np.allclose(y["final_state"][:, 1:2], s)


def keeps_to_the_end(x, y):
    """The final state of each batch entry is that after its 5 or 4 tokens."""
    return all(np.allclose(y["final_state"][b], scan(x)[1][n][b]) for b, n in enumerate((5, 4)))


CASES = dict(
    basic=dict(
        PER_HEAD, why="every size differs and none is 1; a gate per head, a state to start from, chunks with a tail",
        catches=("scale_missing", "read_before_write", "beta_missing_in_erase", "erase_missing", "decay_missing",
                 "decay_after_write", "error_from_undecayed_state", "gate_base_2", "gate_not_exponentiated",
                 "beta_and_gate_swapped", "ut_without_decay", "scores_without_decay", "state_read_undecayed",
                 "state_handed_on_undecayed", "writes_handed_on_undecayed", "tail_decays_state",
                 "initial_state_ignored", "states_transposed", "dk_without_erase", "dgate_from_new_state",
                 "dgate_not_of_log", "dgate_of_channel_0", "dstate_not_decayed", "dfinal_state_ignored")),
    channels=dict(
        PER_CHANNEL, why="a gate per channel: decay and erasure do not commute", catches=(
            "erase_before_decay", "gate_of_channel_0", "error_from_undecayed_state", "ut_without_decay",
            "scores_without_decay", "dgate_from_new_state", "dgate_not_of_log")),
    one_token=dict(
        why="one token: the state decays before it is read and corrected", sizes=dict(B=1, H=1, T=1, dk=1, dv=1),
        light=True, scale=0.5, **{name: PER_HEAD[name] for name in ("log_decay", "initial_state")},
        shows=lambda x, y: np.allclose(y["final_state"], right(
            x["k"], x["v"], x["beta"][..., None], np.exp(x["log_decay"]), x["initial_state"]))),
    chunk_longer=dict(
        PER_CHANNEL, why="a chunk longer than the sequence, and no state to start from", chunk_size=16, light=True,
        initial_state=NEUTRAL["initial_state"], catches=("ut_without_decay", "tail_decays_state")),
    whole_chunks=dict(
        PER_CHANNEL, why="chunks of three tokens without a tail", sizes=SIZES | dict(T=6, dk=8), chunk_size=3,
        scale=0.25, light=True, catches=("state_read_undecayed", "writes_handed_on_undecayed", "erase_before_decay")),
    gate_of_0=dict(
        PER_HEAD, why="a gate of exactly 0 starts anew, at the first token, amid a chunk and at the last token",
        change=lambda x: closed(x, -np.inf), light=True, shows=restarts, catches=("decay_as_difference",)),
    gate_of_0_in_channels=dict(
        PER_CHANNEL, why="a gate of exactly 0 in three channels of five", change=lambda x: closed(x, -np.inf),
        catches=("decay_as_difference", "erase_before_decay")),
    steep_gates=dict(
        PER_CHANNEL, why="log gates of -29952 among small ones, of which a sum with them keeps no digits", light=True,
        chunk_size=4, change=lambda x: closed(x | dict(log_decay=x["log_decay"] / 64), -29952.0),
        catches=("decay_as_difference",)),
    gate_of_1=dict(
        PER_HEAD, why="a gate of exactly 1 at every other token", light=True,
        change=lambda x: dict(log_decay=x["log_decay"] * (np.arange(7) % 2)[:, None]),
        catches=("gate_of_0_dropped",), shows=lambda x, y: (x["log_decay"][:, :, ::2] == 0).all()),
    no_decay=dict(
        PER_HEAD, why="gates of 1 throughout: the delta rule", light=True, log_decay=NEUTRAL["log_decay"],
        catches=("gate_of_0_dropped",),
        shows=lambda x, y: np.allclose(y["o"], updated(x, lambda k, v, beta, a, s: right(k, v, beta, 1, s))[0])),
    beta_zero=dict(
        PER_CHANNEL, why="strength 0: the state decays and nothing else", light=True,
        beta=lambda n: np.zeros((n.B, n.H, n.T)), shows=lambda x, y: np.allclose(
            y["final_state"], np.exp(x["log_decay"].sum(2))[..., None] * x["initial_state"])),
    padding=dict(
        PER_HEAD, why="a token with a gate of 1, and without key or without strength, leaves the state alone",
        change=padded, shows=keeps_to_the_end),
    long=dict(
        PER_CHANNEL, why="a long sequence forgets the state it started from", sizes=dict(B=1, H=1, T=70, dk=5, dv=3),
        v=lambda n: draw("k", (n.B, n.H, n.T, n.dv)), chunk_size=32, light=True, catches=("tail_decays_state",),
        shows=lambda x, y: np.allclose(y["final_state"], but(x, initial_state=0 * x["initial_state"])[1])),
    equal_widths=dict(PER_HEAD, **kit.EQUAL_WIDTHS, catches=("states_transposed",)) | dict(sizes=SIZES | dict(dv=5)),
    strided=dict(
        PER_CHANNEL, why="q, k, v, beta and log_decay are views of (B, T, H, d) memory",
        change=lambda x: kit.strided(x, ORDER), catches=("strides_ignored",)),
)
