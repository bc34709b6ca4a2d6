"""The Mamba-2 block: convolution, state space duality, gated norm.       Dao & Gu 2024, arXiv:2405.21060, section 7

    [z, u, dt'] = x W_in        u: x, B and C side by side        dt = clip(softplus(dt' + dt_bias), dt_min, dt_max)
    [v, B, C]_t = silu(conv_bias + sum_i conv_weight_i u_{t-W+i})       W + 1 taps of each channel, the last for token t
    y = ssd(v, dt, -exp(A_log), B, C, D)                                 heads and groups as in ssd
    o = (norm(y silu(z)) norm_weight) W_o        norm: u / sqrt(mean u^2 + 1e-5) over the channels of a group

u before the first token is conv_state, W tokens, the oldest first. Weights are (in, out), taps (W + 1, channels). Where
code in the wild differs: one token at a time dt is not clipped, in transformers as in mamba_ssm; the conv state keeps
W + 1 columns, (channels, tokens); states lie as (H, dv, dk); norm comes before the gate, or over all channels at once.
"""
import numpy as np

from .. import kit
from ..core import merge_heads, per_head, sigmoid, softplus, split_heads
from ..shapes import cotangents, sizes
from . import ssd

INPUTS = dict(x="B T D", initial_state="B H dk dv", conv_state="B W H*dv+2*G*dk", w_in="D 2*H*dv+2*G*dk+H",
              conv_weight="W+1 H*dv+2*G*dk", conv_bias="H*dv+2*G*dk", dt_bias="H", A_log="H", D="H",
              norm_weight="H*dv", w_o="H*dv D", dt_min="", dt_max="", chunk_size="int >=1")
OUTPUTS = dict(o="B T D", final_state="B H dk dv", final_conv_state="B W H*dv+2*G*dk")
CONVENTIONS = dict(heads=ssd.CONVENTIONS["heads"], state="(dk, dv), after the last token", D="multiplies v, not dt v",
                   conv_state="what comes in of the last W tokens, the oldest first", norm="after the gate, per group",
                   projections="(in, out), z then x, B, C then dt", dt="softplus of the sum with its bias, then limits")
EPS = 1e-5


def recurrent(x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, w_o, *,
              dt_min=0.0, dt_max=np.inf, chunk_size=64):
    """o (B, T, D) and both states after the last token, one token at a time; ValueError where a shape does not fit."""
    T = sizes(INPUTS, locals())["T"]
    parameters = w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, w_o, dt_min, dt_max
    o, state = np.zeros_like(x), initial_state
    for t in range(T):
        o[:, t], state, conv_state = step(x[:, t], state, conv_state, *parameters)
    return o, state, conv_state


def step(x, state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, w_o, dt_min, dt_max):
    """One token x (B, D) on the two states: its o (B, D) and the next states."""
    z, u, dt = project(x, w_in, conv_bias, norm_weight)
    seen = np.concatenate([conv_state, u[:, None]], axis=1)
    mixed = silu((conv_weight * seen).sum(1) + conv_bias)[:, None]
    v, B, C = (a[:, :, 0] for a in heads(mixed, state))
    y, state = ssd.step(v, clip(softplus(dt + dt_bias), dt_min, dt_max), -np.exp(A_log), B, C, D, state)
    return gated_norm(y.reshape(z.shape), z, norm_weight, B.shape[1]) @ w_o, state, seen[:, 1:]


def dense(x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, w_o, *,
          dt_min=0.0, dt_max=np.inf, chunk_size=64):
    """The whole sequence at once, ssd in its dual form."""
    sizes(INPUTS, locals())
    z, given, seen = before(x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight,
                            dt_min, dt_max)
    y, state = ssd.dense(**given)
    return gated_norm(merge_heads(y), z, norm_weight, given["B"].shape[1]) @ w_o, state, seen[:, x.shape[1]:]


def chunkwise(x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, w_o, *,
              dt_min=0.0, dt_max=np.inf, chunk_size=64):
    """Dense inside a chunk, the two states from chunk to chunk; the last chunk may be shorter."""
    T = sizes(INPUTS, locals())["T"]
    parameters = w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, w_o
    o, states = np.zeros_like(x), (initial_state, conv_state)
    for start in range(0, T, chunk_size):
        chunk = np.s_[:, start:start + chunk_size]
        o[chunk], *states = dense(x[chunk], *states, *parameters, dt_min=dt_min, dt_max=dt_max)
    return o, *states


def before(x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, dt_min, dt_max):
    """z (B, T, H*dv), the inputs of ssd, and what the convolution sees: conv_state, then u (B, W + T, channels)."""
    z, u, dt = project(x, w_in, conv_bias, norm_weight)
    seen = np.concatenate([conv_state, u], axis=1)
    v, B, C = heads(silu(convolve(seen, conv_weight) + conv_bias), initial_state)
    dt = clip(softplus(dt + dt_bias), dt_min, dt_max).swapaxes(1, 2)
    return z, dict(x=v, dt=dt, A=-np.exp(A_log), B=B, C=C, D=D, initial_state=initial_state), seen


def project(x, w_in, conv_bias, norm_weight):
    """z (..., H*dv), u (..., channels of the convolution) and dt (..., H) before its bias."""
    inner = len(norm_weight)
    return np.split(x @ w_in, [inner, inner + len(conv_bias)], axis=-1)


def convolve(seen, weight):
    """sum_i weight_i seen_{t+i} (B, T, channels) for seen (B, W + T, channels) and weight (W + 1, channels)."""
    T = seen.shape[1] - len(weight) + 1
    return sum(w * seen[:, i:i + T] for i, w in enumerate(weight))


def heads(u, state):
    """u (B, T, H*dv + 2*G*dk) -> v (B, H, T, dv), B and C (B, G, T, dk)."""
    (H, dk, dv), width = state.shape[1:], u.shape[2]
    v, B, C = np.split(u, [H * dv, (width + H * dv) // 2], axis=-1)
    G = B.shape[2] // dk
    return split_heads(v, H), split_heads(B, G), split_heads(C, G)


def clip(dt, dt_min, dt_max):
    """dt between the limits."""
    return np.minimum(np.maximum(dt, dt_min), dt_max)


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


def gated_norm(y, z, weight, groups):
    """y silu(z) (..., H*dv) over its root mean square within each group of channels, times weight."""
    return normed(y * silu(z), weight, groups)


def normed(u, weight, groups):
    """u over its root mean square within each group of channels, times weight."""
    parts = grouped(u, groups)
    return (parts / root_mean_square(parts)).reshape(u.shape) * weight


def grouped(a, groups):
    """(..., channels) -> (..., groups, channels / groups)."""
    return a.reshape(*a.shape[:-1], groups, a.shape[-1] // groups)


def root_mean_square(u):
    """sqrt(mean u^2 + 1e-5) over the last axis, which stays as 1; u^2 itself may be too large for float16."""
    return np.sqrt((u * (u / u.shape[-1])).sum(-1, keepdims=True) + EPS)


def loop(x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, w_o, *,
         dt_min=0.0, dt_max=np.inf, chunk_size=64):
    """Scalar loops for the convolution, the scan and the norm, between two matrix products."""
    sizes(INPUTS, locals())
    z, u, dt = project(x, w_in, conv_bias, norm_weight)
    mixed, conv_state = conv_loop(u, conv_state, conv_weight, conv_bias)
    v, B, C = heads(mixed, initial_state)
    dt = clip(softplus(dt + dt_bias), dt_min, dt_max).swapaxes(1, 2)
    y, state = ssd.loop(v, dt, -np.exp(A_log), B, C, D, initial_state)
    o = norm_loop(*(grouped(a, B.shape[1]) for a in (merge_heads(y), z, norm_weight)))
    return o.reshape(z.shape) @ w_o, state, conv_state


@per_head(dict(u="B T F", state="B W F", weight="W+1 F", bias="F"), dict(mixed="B T F", state="B W F"))
def conv_loop(u, state, weight, bias):
    """One channel at a time: the W tokens before in a line that moves by one, then silu."""
    (T, F), W, o, line = u.shape, len(state), np.zeros_like(u), state.copy()
    for c in range(F):
        for t in range(T):
            a = bias[c] + weight[W, c] * u[t, c]
            for i in range(W):
                a += weight[i, c] * line[i, c]
            for i in range(W):
                line[i, c] = line[i + 1, c] if i < W - 1 else u[t, c]
            o[t, c] = a / (1 + np.exp(-a))
    return o, line


@per_head(dict(y="B T G c", z="B T G c", weight="G c"), dict(o="B T G c"))
def norm_loop(y, z, weight):
    """One token and group at a time: gate, sum of squares, division."""
    o = np.zeros_like(y)
    T, G, n = y.shape
    for t in range(T):
        for g in range(G):
            square = 0 * y[t, g, 0]
            for c in range(n):
                o[t, g, c] = y[t, g, c] * z[t, g, c] / (1 + np.exp(-z[t, g, c]))
                square += o[t, g, c] * o[t, g, c]
            for c in range(n):
                o[t, g, c] *= weight[g, c] / np.sqrt(square / n + EPS)
    return o


def vjp(do, dfinal_state, dfinal_conv_state, x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log,
        D, norm_weight, w_o, *, dt_min=0.0, dt_max=np.inf, chunk_size=64):
    """Gradients of x, both states and all parameters; a dt at a limit passes none."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    z, given, seen = before(x, initial_state, conv_state, w_in, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight,
                            dt_min, dt_max)
    y, groups, (T, W) = merge_heads(ssd.dense(**given)[0]), given["B"].shape[1], (x.shape[1], conv_state.shape[1])
    dy, dz, dnorm_weight = gated_norm_vjp(do @ w_o.T, y, z, norm_weight, groups)
    d = ssd.vjp(split_heads(dy, len(D)), dfinal_state, **given)
    dmixed = np.concatenate([merge_heads(d[name]) for name in ("dx", "dB", "dC")], axis=-1)
    dseen, dconv_weight, dconv_bias = convolve_vjp(dmixed, seen, conv_weight, conv_bias)
    dseen[:, T:] += dfinal_conv_state
    raw = project(x, w_in, conv_bias, norm_weight)[2] + dt_bias
    free = (dt_min < softplus(raw)) & (softplus(raw) < dt_max)
    ddt = np.where(free, sigmoid(raw) * d["ddt"].swapaxes(1, 2), 0)
    dp = np.concatenate([dz, dseen[:, W:], ddt], axis=-1)
    o = gated_norm(y, z, norm_weight, groups)
    return dict(dx=dp @ w_in.T, dinitial_state=d["dinitial_state"], dconv_state=dseen[:, :W],
                dw_in=(x.swapaxes(1, 2) @ dp).sum(0), dconv_weight=dconv_weight, dconv_bias=dconv_bias,
                ddt_bias=ddt.sum((0, 1)), dA_log=given["A"] * d["dA"], dD=d["dD"], dnorm_weight=dnorm_weight,
                dw_o=(o.swapaxes(1, 2) @ do).sum(0))


def silu_slope(x):
    """The derivative of silu."""
    return sigmoid(x) * (1 + x * sigmoid(-x))


def gated_norm_vjp(do, y, z, weight, groups):
    """Gradients of y, z and weight."""
    u = grouped(y * silu(z), groups)
    root = root_mean_square(u)
    n, dn = u / root, grouped(do * weight, groups)
    du = ((dn - n * (dn * n).sum(-1, keepdims=True) / n.shape[-1]) / root).reshape(y.shape)
    return du * silu(z), du * y * silu_slope(z), (do * n.reshape(y.shape)).sum((0, 1))


def convolve_vjp(dmixed, seen, weight, bias):
    """Gradients of seen, weight and bias through silu(convolve(seen, weight) + bias)."""
    da, T = dmixed * silu_slope(convolve(seen, weight) + bias), dmixed.shape[1]
    dseen, windows = np.zeros_like(seen), [np.s_[:, i:i + T] for i in range(len(weight))]
    for w, window in zip(weight, windows):
        dseen[window] += w * da
    return dseen, np.stack([(seen[window] * da).sum((0, 1)) for window in windows]), da.sum((0, 1))


FORMS = recurrent, dense, chunkwise, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

BEFORE = [name for name in INPUTS if name not in ("w_o", "chunk_size")]


def but(given, /, **changes):
    """The right formula on changed inputs."""
    return dense(**given | changes)


def parts(x):
    """What `before` gives for the inputs of a case."""
    return before(*(x[name] for name in BEFORE))


def block(x, change=lambda given: {}, scan=ssd.dense, norm=gated_norm):
    """The block with changed inputs of ssd, another ssd, or another norm."""
    z, given, seen = parts(x)
    y, state = scan(**given | change(given))
    y = norm(merge_heads(y), z, x["norm_weight"], given["B"].shape[1])
    return y @ x["w_o"], state, seen[:, x["x"].shape[1]:]


def raw(x):
    """dt (B, T, H) before bias and softplus."""
    return project(x["x"], x["w_in"], x["conv_bias"], x["norm_weight"])[2]


def limited(x, dt):
    return clip(dt, x["dt_min"], x["dt_max"])


def with_dt(x, dt):
    """The block with other step sizes dt (B, T, H)."""
    return block(x, lambda given: dict(dt=dt.swapaxes(1, 2)))


def with_conv(x, conv):
    """The block with conv(seen, weight, bias) in place of the convolution and its silu."""
    mixed = conv(parts(x)[2], x["conv_weight"], x["conv_bias"])
    return block(x, lambda given: dict(zip(("x", "B", "C"), heads(mixed, x["initial_state"]))))


def on_x_only(x):
    """B and C pass the silu but not the convolution."""
    def conv(seen, weight, bias):
        unmixed = silu(seen[:, len(weight) - 1:])
        return np.where(np.arange(len(bias)) < len(x["norm_weight"]), silu(convolve(seen, weight) + bias), unmixed)
    return with_conv(x, conv)


def sees_next(seen, weight, bias):
    """The taps moved by one token: the last is for the next token, 0 after the end."""
    return silu(convolve(np.concatenate([seen[:, 1:], np.zeros_like(seen[:, :1])], axis=1), weight) + bias)


def with_conv_state(x, change):
    """Right but for the state of the convolution, which is the end of change(what the convolution sees)."""
    return *dense(**x)[:2], change(parts(x)[2])[:, x["x"].shape[1]:]


def only_new(x):
    """What the convolution sees, 0 in the place of the tokens before the call."""
    W = x["conv_state"].shape[1]
    return lambda seen: np.concatenate([np.zeros_like(seen[:, :W]), seen[:, W:]], axis=1)


def u_before_z(x):
    z, u = len(x["norm_weight"]), len(x["conv_bias"])
    w = x["w_in"]
    return but(x, w_in=np.concatenate([w[:, u:u + z], w[:, :u], w[:, z + u:]], axis=1))


def without_epsilon(y, z, weight, groups):
    u = grouped(y * silu(z), groups)
    return (u / np.sqrt((u * u).sum(-1, keepdims=True) / u.shape[-1])).reshape(y.shape) * weight


def tiled(given):
    """Group h mod G for head h."""
    return {name: ssd.tiled(given, name) for name in ("B", "C")}


BUGS = dict(
    dt_limits_ignored=("dt is not clipped, as in code that goes token by token", lambda x: but(
        x, dt_min=0.0, dt_max=np.inf)),
    dt_limits_before_softplus=("dt is clipped before the softplus", lambda x: with_dt(
        x, softplus(limited(x, raw(x) + x["dt_bias"])))),
    dt_bias_twice=("layer and kernel both add the bias of dt", lambda x: but(x, dt_bias=2 * x["dt_bias"])),
    dt_bias_after_softplus=("the bias is added after the softplus", lambda x: with_dt(
        x, limited(x, softplus(raw(x)) + x["dt_bias"]))),
    dt_softplus_twice=("layer and kernel both apply the softplus", lambda x: with_dt(
        x, limited(x, softplus(softplus(raw(x) + x["dt_bias"]))))),
    decay_of_log=("A_log is taken for A", lambda x: block(x, lambda given: dict(A=x["A_log"]))),
    groups_tiled=("head h reads group h mod G", lambda x: block(x, tiled)),
    u_before_z=("W_in is read as u, z, dt", u_before_z),
    conv_on_x_only=("B and C do not pass the convolution", on_x_only),
    conv_silu_missing=("no silu after the convolution", lambda x: with_conv(
        x, lambda seen, weight, bias: convolve(seen, weight) + bias)),
    conv_taps_reversed=("the first tap is for the current token", lambda x: but(
        x, conv_weight=x["conv_weight"][::-1].copy())),
    conv_sees_next=("the convolution sees the next token", lambda x: with_conv(x, sees_next)),
    conv_state_ignored=("the convolution starts from 0", lambda x: with_conv(x, lambda seen, weight, bias: silu(
        convolve(only_new(x)(seen), weight) + bias))),
    conv_state_of_this_call=("the state of the convolution after a call shorter than it is filled up with 0",
                             lambda x: with_conv_state(x, only_new(x))),
    conv_state_one_late=("the state of the convolution ends before the last token", lambda x: with_conv_state(
        x, lambda seen: np.roll(seen, 1, axis=1))),
    norm_before_gate=("the norm comes before the gate", lambda x: block(
        x, norm=lambda y, z, weight, groups: normed(y, weight, groups) * silu(z))),
    norm_over_all_groups=("one norm over all channels", lambda x: block(
        x, norm=lambda y, z, weight, groups: gated_norm(y, z, weight, 1))),
    norm_without_epsilon=("nothing is added to the mean square", lambda x: block(x, norm=without_epsilon)),
    state_transposed=("the states of ssd lie as (dv, dk)", lambda x: block(
        x, scan=lambda **given: kit.transposed_state(given, ssd.dense))),
    strides_ignored=("strided views are read as if they were contiguous", lambda x: but(
        x, **kit.changed(x, ("x", "w_in", "w_o"), kit.memory_order))),
)


def ungated_slope(x):
    """The gradient of dt before its bias, but for the factor that softplus and limits give: (B, T, H)."""
    z, given, _ = parts(x)
    y = merge_heads(ssd.dense(**given)[0])
    dy, _, _ = gated_norm_vjp(x["do"] @ x["w_o"].T, y, z, x["norm_weight"], given["B"].shape[1])
    return ssd.vjp(split_heads(dy, len(x["D"])), x["dfinal_state"], **given)["ddt"].swapaxes(1, 2)


def with_slope(x, slope):
    """The gradients of dt_bias and w_in for another slope of dt (B, T, H)."""
    ddt = slope * ungated_slope(x)
    dw_dt = (x["x"].swapaxes(1, 2) @ ddt).sum(0)
    return dict(ddt_bias=ddt.sum((0, 1)), dw_in=np.concatenate([vjp(**x)["dw_in"][:, :-len(x["D"])], dw_dt], axis=1))


def slope_at_output(dt, dt_min, dt_max):
    return sigmoid(dt) * ((dt_min < dt) & (dt < dt_max))


VJP_BUGS = dict(
    dt_gradient_at_limits=("a dt at a limit passes a gradient", lambda x: with_slope(
        x, sigmoid(raw(x) + x["dt_bias"]))),
    softplus_slope_at_output=("the slope of the softplus is taken at its output", lambda x: with_slope(
        x, slope_at_output(softplus(raw(x) + x["dt_bias"]), x["dt_min"], x["dt_max"]))),
    decay_gradient_of_rate=("the gradient of A is given for that of A_log", lambda x: dict(
        dA_log=-vjp(**x)["dA_log"] * np.exp(-x["A_log"]))),
    final_state_cotangent_lost=("the gradient that comes through the final state is lost", lambda x: vjp(
        **x | {"dfinal_state": 0 * x["dfinal_state"]})),
    conv_state_cotangent_lost=("the gradient that comes through the final state of the convolution is lost",
                               lambda x: vjp(**x | {"dfinal_conv_state": 0 * x["dfinal_conv_state"]})),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, T=5, D=12, W=4, H=6, G=3, dk=7, dv=8)
SMALL = dict(B=2, T=5, D=10, W=3, H=4, G=2, dk=3, dv=5)
NEUTRAL = dict(dt_min=0.0, dt_max=64.0, chunk_size=2)


def strided(x):
    """Tokens lie in memory as (T, B, D), weights as (out, in)."""
    return kit.strided(x, ("x",), (0, 1)) | kit.strided(x, ("w_in", "w_o"), (0, 1))


def in_two_calls(x, y):
    """The final states carry everything that a second call needs."""
    first, second = ({"x": x["x"][:, part]} for part in (slice(2), slice(2, None)))
    o, state, conv = dense(**x | first)
    rest = dense(**x | second | dict(initial_state=state, conv_state=conv))
    return np.allclose(np.concatenate([o, rest[0]], 1), y["o"], 1e-12) and np.allclose(rest[1], y["final_state"], 1e-12)


def faint(x):
    """Tokens so small that the mean square before the norm is comparable with 1e-5."""
    return dict(x=x["x"] / 16, conv_bias=x["conv_bias"] / 16, initial_state=x["initial_state"] / 16)


def mean_square(x):
    """Before the norm (B, T, G, 1)."""
    z, given, _ = parts(x)
    u = grouped(merge_heads(ssd.dense(**given)[0]) * silu(z), given["B"].shape[1])
    return (u * u).sum(-1, keepdims=True) / u.shape[-1]


CASES = dict(
    basic=dict(
        why="every size differs and none is 1, there are two states, and the chunk does not divide T", sizes=SIZES,
        catches=(
            "dt_bias_twice", "dt_bias_after_softplus", "dt_softplus_twice", "decay_of_log", "groups_tiled",
            "u_before_z", "conv_on_x_only", "conv_silu_missing", "conv_taps_reversed", "conv_sees_next",
            "conv_state_ignored", "conv_state_one_late", "norm_before_gate", "norm_over_all_groups",
            "state_transposed", "softplus_slope_at_output", "decay_gradient_of_rate", "final_state_cotangent_lost",
            "conv_state_cotangent_lost")),
    one_token=dict(
        why="one token: the convolution reads its state, which moves by one", sizes=SMALL | dict(T=1),
        catches=("conv_state_of_this_call", "conv_state_one_late", "conv_state_ignored", "state_transposed")),
    width_of_convolution=dict(
        why="T = 3: the new tokens are just all that the convolution keeps", sizes=SMALL | dict(T=3), light=True,
        shows=lambda x, y: x["x"].shape[1] == y["final_conv_state"].shape[1]),
    one_more=dict(
        why="T = 4: the first new token has left the convolution", sizes=SMALL | dict(T=4), light=True, chunk_size=3,
        shows=in_two_calls),
    limits=dict(
        why="dt between two limits, some at each and some between them", sizes=SMALL, dt_min=0.5, dt_max=1.0,
        catches=("dt_limits_ignored", "dt_limits_before_softplus", "dt_gradient_at_limits"),
        shows=lambda x, y: {0.5, 1.0} < set(parts(x)[1]["dt"].flat)),
    one_group=dict(
        why="one B, C and norm for all heads, as most models have", sizes=SMALL | dict(G=1), light=True,
        chunk_size=8, catches=("norm_before_gate",)),
    no_states=dict(
        why="nothing came before: both states are 0", sizes=SMALL | dict(T=7), light=True, chunk_size=3,
        initial_state=lambda n: np.zeros((n.B, n.H, n.dk, n.dv)),
        conv_state=lambda n: np.zeros((n.B, n.W, n.H * n.dv + 2 * n.G * n.dk)), shows=in_two_calls),
    faint=dict(
        why="the mean square before the norm comes down to 1e-5, which is added to it", sizes=SMALL, light=True,
        change=faint, shows=lambda x, y: 1e-5 < np.median(mean_square(x)) < 1e-4, catches=("norm_without_epsilon",)),
    long=dict(
        why="32 tokens in chunks of 8", sizes=SMALL | dict(B=1, T=32), light=True, chunk_size=8, shows=in_two_calls),
    strided=dict(
        why="tokens lie in memory as (T, B, D), weights as (out, in)", sizes=SMALL, light=True,
        change=strided, catches=("strides_ignored",)),
)
