"""The delta rule.                                          Schlag et al. 2021, arXiv:2102.11174, section 4.2: the rule
                                                         Yang et al. 2024, arXiv:2406.06484, section 3: its chunks

    u_t = beta_t (v_t - k_t S_{t-1})          what the state holds for k_t is replaced by v_t, with strength beta_t
    S_t = S_{t-1} + k_t^T u_t                 = (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t         S_0 given
    o_t = scale q_t S_t                       S in R^{dk x dv}, q_t, k_t, v_t rows

    U   = A (V - K S_0)     A = (I + N)^{-1} diag(beta)     N = strictly lower part of diag(beta) K K^T
    O   = scale (Q S_0 + tril(Q K^T) U)       so that M = scale tril(Q K^T) A stands for the weights

Keys are used as they come: normalise them before, for S only stays bounded while beta_t |k_t|^2 <= 2. Where code in the
wild differs: q and k are normalised inside (x / sqrt(x.x + 1e-6), or over max(|x|, 1e-12)); beta comes before its
sigmoid, or is doubled to reach 2 (negative eigenvalues); states are (dv, dk) in both papers and in some kernels.
"""
import numpy as np

from .. import kit
from ..core import chunks, per_head, solve_unit_lower, tokens
from ..masks import causal
from ..names import draw
from ..shapes import cotangents, sizes

INPUTS = dict(q="B H T dk", k="B H T dk", v="B H T dv", beta="B H T", initial_state="B H dk dv", scale="",
              chunk_size="int >=1")
OUTPUTS = dict(o="B H T dv", final_state="B H dk dv")
STEPS = dict(transform="B H T T", writes="B H T dv")
CONVENTIONS = dict(read="after the write: a token reads itself", beta="after its sigmoid; 0 writes nothing",
                   keys="used as they come, never normalised", state="(dk, dv), o = q S", layout="B H T d")


def step(q, k, v, beta, state, *, scale):
    """One token, T = 1: o (B, H, 1, dv) and the state (B, H, dk, dv) after it."""
    u = beta[..., None] * (v - k @ state)
    state = state + k.swapaxes(-1, -2) @ u
    return scale * q @ state, state


def recurrent(q, k, v, beta, initial_state, *, scale, chunk_size=64):
    """o (B, H, T, dv) and final_state (B, H, dk, dv), token by token. Raises ValueError for what does not fit."""
    sizes(INPUTS, locals())
    o, state = np.zeros_like(v), initial_state
    for at in tokens(q):
        o[at], state = step(q[at], k[at], v[at], beta[at], state, scale=scale)
    return o, state


def triangle(q, k):
    """tril(Q K^T): a query sees the keys up to its own."""
    return np.where(causal(q.shape[2], k.shape[2]), q @ k.swapaxes(-1, -2), 0)


def erase(k, beta):
    """diag(beta) K K^T, of which the solver reads the part below the diagonal: N."""
    return beta[..., None] * (k @ k.swapaxes(-1, -2))


def steps(k, v, beta, initial_state):
    """transform A (B, H, T, T), whose diagonal blocks are those of chunks of any size, and writes U (B, H, T, dv)."""
    transform = solve_unit_lower(erase(k, beta), beta[..., None] * np.eye(k.shape[2], dtype=k.dtype))
    return transform, transform @ (v - k @ initial_state)


def dense(q, k, v, beta, initial_state, *, scale, chunk_size=64):
    """The same with all tokens at once: o = scale q S_0 + M (v - k S_0)."""
    sizes(INPUTS, locals())
    _, u = steps(k, v, beta, initial_state)
    return scale * (q @ initial_state + triangle(q, k) @ u), initial_state + k.swapaxes(-1, -2) @ u


def chunkwise(q, k, v, beta, initial_state, *, scale, chunk_size=64):
    """The same chunk by chunk: A V and A K need no state, and U = A V - (A K) S is written."""
    sizes(INPUTS, locals())
    o, state = [v[:, :, :0]], initial_state
    for q, k, v, beta in zip(*(chunks(x, chunk_size) for x in (q, k, v, beta))):
        n = erase(k, beta)
        av, ak = (solve_unit_lower(n, beta[..., None] * x) for x in (v, k))
        u = av - ak @ state
        o.append(scale * (q @ state + triangle(q, k) @ u))
        state = state + k.swapaxes(-1, -2) @ u
    return np.concatenate(o, 2), state


@per_head(INPUTS, OUTPUTS)
def loop(q, k, v, beta, initial_state, scale, chunk_size):
    """One token at a time, one column of the state after the other: no column knows of another."""
    (T, dk), dv = q.shape, v.shape[1]
    o, s = np.zeros((T, dv), q.dtype), initial_state.copy()
    for t in range(T):
        for j in range(dv):
            u = v[t, j]
            for i in range(dk):
                u -= k[t, i] * s[i, j]
            u *= beta[t]
            for i in range(dk):
                s[i, j] += k[t, i] * u
                o[t, j] += scale * q[t, i] * s[i, j]
    return o, s


def vjp(do, dfinal_state, q, k, v, beta, initial_state, *, scale, chunk_size=64):
    """Gradients of q, k, v, beta and initial_state, from the last token to the first: ds is that of the state."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    dq, dk, dv, dbeta, states = *map(np.zeros_like, (q, k, v, beta)), [initial_state]
    for at in tokens(q):
        states.append(step(q[at], k[at], v[at], beta[at], states[-1], scale=scale)[1])
    ds = dfinal_state
    for at in reversed(tokens(q)):
        after, before, strength = states.pop(), states[-1], beta[at][..., None]
        error = v[at] - k[at] @ before
        dq[at] = scale * do[at] @ after.swapaxes(-1, -2)
        ds = ds + scale * q[at].swapaxes(-1, -2) @ do[at]
        du = k[at] @ ds
        dbeta[at] = (du * error).sum(-1)
        dv[at] = strength * du
        dk[at] = strength * error @ ds.swapaxes(-1, -2) - dv[at] @ before.swapaxes(-1, -2)
        ds = ds - k[at].swapaxes(-1, -2) @ dv[at]
    return dict(dq=dq, dk=dk, dv=dv, dbeta=dbeta, dinitial_state=ds)


FORMS = recurrent, dense, chunkwise, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, **changes):
    """The right formula on changed inputs."""
    return recurrent(**x | changes)


def scan(x, update):
    """Outputs and all states of a recurrence with another update(k, v, beta, state) of the state."""
    o, states = np.zeros_like(x["v"]), [x["initial_state"]]
    for at in tokens(x["q"]):
        states.append(update(x["k"][at], x["v"][at], x["beta"][at][..., None], states[-1]))
        o[at] = x["scale"] * x["q"][at] @ states[-1]
    return o, states


def updated(x, update):
    """The outputs of a recurrence with another update of the state."""
    o, states = scan(x, update)
    return o, states[-1]


def states_of(x):
    """The right states, T + 1 of them, the initial one first."""
    return scan(x, lambda k, v, beta, s: s + kit.T(k) @ (beta * (v - k @ s)))[1]


def by_chunks(x, solve=solve_unit_lower, next_state=lambda s: s, sees=triangle):
    """chunkwise with another solver, another state handed to the next chunk, or other scores."""
    o, s = [], x["initial_state"]
    for q, k, v, beta in zip(*(chunks(x[name], x["chunk_size"]) for name in ("q", "k", "v", "beta"))):
        s = next_state(s) if o else s
        u = solve(erase(k, beta), beta[..., None] * (v - k @ s))
        o.append(x["scale"] * (q @ s + sees(q, k) @ u))
        s = s + kit.T(k) @ u
    return np.concatenate(o, 2), s


def beta_on_columns(x):
    """by_chunks with N = K K^T diag(beta), the transpose of what it is."""
    return by_chunks(x, lambda n, r: solve_unit_lower(kit.T(n), r))


def with_diagonal(n, r):
    """The diagonal of N is added to that of I: every row is divided by 1 + beta |k|^2."""
    pivot = 1 + n.diagonal(0, -2, -1)[..., None]
    return solve_unit_lower(n / pivot, r / pivot)


def by_doubling(n, r):
    """(I + N)^{-1} r = ... (I + N^4)(I + N^2)(I - N) r."""
    power = -np.where(~causal(*n.shape[-2:]).T, n, 0)
    for _ in range(n.shape[-1].bit_length()):
        r, power = r + power @ r, power @ power
    return r


def without_tail(x):
    """Rows of o beyond the last whole chunk are 0, and the state is that before them."""
    T = x["q"].shape[2]
    whole = T - T % x["chunk_size"]
    return but(x)[0] * (np.arange(T) < whole)[:, None], states_of(x)[whole]


BUGS = dict(
    scale_missing=("the queries are not scaled", lambda x: but(x, scale=1.0)),
    scale_ignored=("1/sqrt(dk) whatever scale was asked for", lambda x: but(x, scale=x["q"].shape[3] ** -0.5)),
    read_before_write=("a token reads the state before it: the mask on Q K^T is strict", lambda x: (
        np.concatenate([x["scale"] * x["q"][at] @ s for at, s in zip(tokens(x["q"]), states_of(x))], 2), but(x)[1])),
    beta_sigmoid_again=("beta goes through a sigmoid once more",
                        lambda x: but(x, beta=1 / (1 + np.exp(-x["beta"])))),
    beta_clipped_at_1=("a strength above 1 counts as 1", lambda x: but(x, beta=np.minimum(x["beta"], 1))),
    beta_applied_twice=("values are scaled by beta before the rule scales the correction", lambda x: updated(
        x, lambda k, v, beta, s: s + kit.T(k) @ (beta * (beta * v - k @ s)))),
    beta_missing_in_erase=("beta v - k S: what is held is erased with full strength", lambda x: updated(
        x, lambda k, v, beta, s: s + kit.T(k) @ (beta * v - k @ s))),
    beta_missing_in_write=("v - beta k S: the value is written with full strength", lambda x: updated(
        x, lambda k, v, beta, s: s + kit.T(k) @ (v - beta * (k @ s)))),
    erase_missing=("beta k^T v is added and nothing is erased: linear attention", lambda x: updated(
        x, lambda k, v, beta, s: s + kit.T(k) @ (beta * v))),
    error_after_write=("k S is read after the value was written", lambda x: updated(
        x, lambda k, v, beta, s: s + kit.T(k) @ (beta * (v - k @ (s + kit.T(k) @ (beta * v)))))),
    ut_missing=("the tokens of a chunk correct the state before the chunk and not each other",
                lambda x: by_chunks(x, lambda n, r: r)),
    ut_sign=("(I - N)^{-1} in place of (I + N)^{-1}", lambda x: by_chunks(x, lambda n, r: solve_unit_lower(-n, r))),
    ut_diagonal_kept=("N keeps its diagonal", lambda x: by_chunks(x, with_diagonal)),
    ut_beta_on_columns=("N = K K^T diag(beta): the strength of the key that is read, not of the token that reads",
                        beta_on_columns),
    ut_by_doubling=("(I - N)(I + N^2)(I + N^4) ...: the powers of N overflow where the inverse is small",
                    lambda x: by_chunks(x, by_doubling)),
    future_in_chunk=("Q K^T within a chunk is not masked", lambda x: by_chunks(x, sees=lambda q, k: q @ kit.T(k))),
    state_of_chunk_lost=("every chunk starts from the initial state",
                         lambda x: by_chunks(x, next_state=lambda s: x["initial_state"])),
    tail_lost=("tokens beyond the last whole chunk are not processed", without_tail),
    initial_state_ignored=("the state before the first token is 0",
                           lambda x: but(x, initial_state=0 * x["initial_state"])),
    states_transposed=("states lie in memory as (dv, dk)", lambda x: kit.states_stored_transposed(x, recurrent)),
    keys_normalised=("keys are normalised inside", lambda x: but(x, k=kit.l2_normalised(x["k"]))),
    strides_ignored=("a strided view is read as if it were contiguous",
                     lambda x: but(x, **kit.changed(x, "qkv", kit.memory_order))),
)


def backward(x, held=lambda k, s: k @ s, erased=lambda s: s, pull=lambda k, dr: kit.T(k) @ dr):
    """dk, dbeta and dinitial_state of vjp with another held value in dbeta, erased state in dk, or pull on ds."""
    dk, dbeta, states, ds = np.zeros_like(x["k"]), np.zeros_like(x["beta"]), states_of(x), x["dfinal_state"]
    for at, s in list(zip(tokens(x["q"]), states))[::-1]:
        k, v, beta = x["k"][at], x["v"][at], x["beta"][at][..., None]
        ds = ds + x["scale"] * kit.T(x["q"][at]) @ x["do"][at]
        du = k @ ds
        dbeta[at] = (du * (v - held(k, s))).sum(-1)
        dk[at] = beta * (v - k @ s) @ kit.T(ds) - beta * du @ kit.T(erased(s))
        ds = ds - pull(k, beta * du)
    return dict(dk=dk, dbeta=dbeta, dinitial_state=ds)


VJP_BUGS = dict(
    dk_without_erase=("dk lacks the way through what is erased",
                      lambda x: dict(dk=backward(x, erased=lambda s: 0 * s)["dk"])),
    dbeta_from_value=("dbeta is taken from the value, not from the value less what was held",
                      lambda x: dict(dbeta=backward(x, held=lambda k, s: 0 * (k @ s))["dbeta"])),
    dstate_without_erase=("the gradient of the state passes a token as if nothing were erased",
                          lambda x: backward(x, pull=lambda k, dr: 0 * kit.T(k) @ dr)),
    dfinal_state_ignored=("the gradient that comes through the final state is lost",
                          lambda x: vjp(**x | {"dfinal_state": 0 * x["dfinal_state"]})),
    dq_scale_missing=("dq is not multiplied by scale", lambda x: dict(dq=vjp(**x)["dq"] / x["scale"])),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=7, dk=5, dv=6)
NEUTRAL = dict(initial_state=lambda n: np.zeros((n.B, n.H, n.dk, n.dv)), scale=1.0, chunk_size=64)
DRAWN = dict(sizes=SIZES, k=kit.unit_keys, scale=0.75, chunk_size=2,
             initial_state=lambda n: draw("initial_state", (n.B, n.H, n.dk, n.dv)))


def forgets(x, y):
    """The final state is what it would be from nothing."""
    return np.allclose(y["final_state"], but(x, initial_state=0 * x["initial_state"])[1], rtol=0, atol=1e-5)


CASES = dict(
    basic=dict(
        DRAWN, why="every size differs and none is 1; keys of length 1, a state to start from, chunks with a tail",
        catches=("scale_missing", "read_before_write", "beta_clipped_at_1", "beta_sigmoid_again", "beta_applied_twice",
                 "beta_missing_in_erase", "beta_missing_in_write", "erase_missing", "error_after_write",
                 "ut_diagonal_kept", "initial_state_ignored", "state_of_chunk_lost", "tail_lost", "states_transposed",
                 "future_in_chunk", "dk_without_erase", "dbeta_from_value", "dstate_without_erase",
                 "dfinal_state_ignored", "dq_scale_missing")),
    one_token=dict(
        why="one token and no state: o = scale beta (q . k) v", sizes=dict(B=1, H=1, T=1, dk=1, dv=1), scale=0.5,
        shows=lambda x, y: np.allclose(y["o"][..., 0], 0.5 * x["beta"] * (x["q"] * x["k"] * x["v"])[..., 0])),
    chunk_longer=dict(
        DRAWN, why="a chunk longer than the sequence, and no state to start from", chunk_size=16, light=True,
        initial_state=NEUTRAL["initial_state"],
        catches=("ut_missing", "ut_sign", "ut_beta_on_columns", "ut_diagonal_kept", "tail_lost", "future_in_chunk")),
    scale_given=dict(
        DRAWN, why="a scale that is not 1/sqrt(dk), chunks without a tail", sizes=SIZES | dict(T=6, dk=8), scale=0.25,
        chunk_size=3, light=True, catches=("scale_ignored", "ut_sign", "state_of_chunk_lost")),
    keys_not_unit=dict(
        DRAWN, why="keys as they come, some so long that the state grows", sizes=SIZES | dict(T=5),
        k=lambda n: draw("k", (n.B, n.H, n.T, n.dk)) / 2, catches=("keys_normalised",),
        shows=lambda x, y: (x["beta"] * (x["k"] ** 2).sum(-1)).max() > 2),
    beta_zero=dict(
        DRAWN, why="strength 0: the state is read and never written", beta=lambda n: np.zeros((n.B, n.H, n.T)),
        shows=lambda x, y: (y["final_state"] == x["initial_state"]).all()
        and np.allclose(y["o"], x["scale"] * x["q"] @ x["initial_state"])),
    reflection=dict(
        DRAWN, why="strength 2 and values of 0: every token reflects the state, whose length stays", light=True,
        beta=lambda n: np.full((n.B, n.H, n.T), 2.0), v=lambda n: np.zeros((n.B, n.H, n.T, n.dv)),
        shows=lambda x, y: np.allclose((y["final_state"] ** 2).sum(-2), (x["initial_state"] ** 2).sum(-2)),
        catches=("beta_clipped_at_1",)),
    identical_keys=dict(
        DRAWN, why="64 times the same key with strength 1: only the last value is left, and nothing explodes",
        sizes=dict(B=1, H=2, T=64, dk=5, dv=3), v=lambda n: draw("k", (n.B, n.H, n.T, n.dv)), chunk_size=64,
        k=lambda n: kit.unit_keys(n)[:, :, :1].repeat(n.T, 2),
        beta=lambda n: np.ones((n.B, n.H, n.T)), light=True, catches=("ut_by_doubling",),
        shows=lambda x, y: np.allclose(x["k"][:, :, -1:] @ y["final_state"], x["v"][:, :, -1:])),
    orthonormal_keys=dict(
        why="keys that do not meet: nothing is erased, linear attention of beta v", sizes=SIZES | dict(T=4), light=True,
        k=lambda n: np.eye(n.T, n.dk) + np.zeros((n.B, n.H, 1, 1)), chunk_size=3,
        shows=lambda x, y: np.allclose(y["o"], triangle(x["q"], x["k"]) @ (x["beta"][..., None] * x["v"]))),
    padding=dict(
        DRAWN, why="a token without key or without strength leaves the state alone", change=kit.padded_tokens,
        shows=lambda x, y: all(np.allclose(y["final_state"][b], states_of(x)[n][b]) for b, n in enumerate((5, 4)))),
    long=dict(
        DRAWN, why="a long sequence forgets the state it started from", sizes=dict(B=1, H=1, T=70, dk=5, dv=3),
        beta=lambda n: np.ones((n.B, n.H, n.T)), v=lambda n: draw("k", (n.B, n.H, n.T, n.dv)), chunk_size=32,
        light=True, shows=forgets, catches=("state_of_chunk_lost", "tail_lost")),
    equal_widths=dict(DRAWN, **kit.EQUAL_WIDTHS, catches=("states_transposed",)) | dict(sizes=SIZES | dict(dv=5)),
    strided=dict(
        DRAWN, why="q, k, v and beta are views of (B, T, H, d) memory",
        change=lambda x: kit.strided(x, ("q", "k", "v", "beta")), catches=("strides_ignored",)),
)
