"""Rotary position embedding (RoPE).               Su et al. 2021, arXiv:2104.09864, eq. 13 to 16, and 34 as computed

    y_i    = R_{p_i} x_i             theta_t = base^(-2t / rotary)             t = 0 ... rotary/2 - 1
    R_p    : (a, b) -> (a cos(p theta_t) - b sin(p theta_t),  b cos(p theta_t) + a sin(p theta_t))  for every pair t
    pair t = channels (2t, 2t + 1) if interleaved, (t, t + rotary/2) if half; the channels from rotary on stay

Queries and keys are turned after the split into heads, all heads alike; values are not. (R_p q) . (R_s k) depends on
p - s only; attention with it is `sdpa` on turned q and k. Where code in the wild differs: the layout, a permutation of
channels (interleaved: the paper, Llama of Meta, GPT-J; half: GPT-NeoX, Llama of transformers); angles in float32, or in
bfloat16, whose error grows with the position. Linear scaling divides theta, and so every angle, by a factor.
"""
import numpy as np

from .. import kit
from ..core import merge_heads, per_head, split_heads
from ..shapes import cotangents, sizes

INPUTS = dict(x="B H T dk", positions="int B? T", rotary="int >=2 <=dk", base=">0", layout="str half|interleaved")
OUTPUTS = dict(y="B H T dk")
CONVENTIONS = dict(angle="p theta_t turns a towards b; computed in the number type of x", axes="B H T d",
                   turned="the first rotary channels of each head, all heads alike")


def frequencies(x, rotary, base):
    """theta (rotary/2,) in the number type of x, in which base must be finite. Raises ValueError if rotary is odd."""
    if rotary % 2:
        raise ValueError(f"rotary: expected an even number, got {rotary}")
    t = np.full_like(x, np.arange(rotary // 2), shape=rotary // 2)
    return base ** (-2 * t / rotary)


def ntk_base(base, rotary, factor):
    """NTK-aware scaling: the base under which the slowest pair turns `factor` times slower, the fastest as before."""
    return base * factor ** (rotary / (rotary - 2))


def angles(x, positions, rotary, base):
    """p theta_t for every token and pair, (B?, 1, T, rotary/2)."""
    return positions.astype(x.dtype)[..., None, :, None] * frequencies(x, rotary, base)


def pairs(rotary, layout):
    """The channels of the first and those of the second of each pair, two arrays (rotary/2,)."""
    t = np.arange(rotary // 2)
    return (t, t + rotary // 2) if layout == "half" else (2 * t, 2 * t + 1)


def rotate(x, cos, sin, layout):
    """x (..., T, dk) with its pairs turned by the angles of a given table; cos, sin (..., T, rotary/2) broadcast."""
    first, second = pairs(2 * cos.shape[-1], layout)
    a, b, y = x[..., first], x[..., second], x.copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = b * cos + a * sin
    return y


def dense(x, positions, *, rotary, base, layout):
    """y (B, H, T, dk), token i turned to its position, by the equations above. ValueError for a shape that misfits."""
    sizes(INPUTS, locals())
    angle = angles(x, positions, rotary, base)
    return rotate(x, np.cos(angle), np.sin(angle), layout)


def matrix(x, positions, *, rotary, base, layout):
    """R_p of eq. 15, written out (B?, 1, T, dk, dk), times x."""
    dk = sizes(INPUTS, locals())["dk"]
    angle = angles(x, positions, rotary, base)
    first, second = pairs(rotary, layout)
    R = np.full_like(x, np.eye(dk), shape=(*angle.shape[:-1], dk, dk))
    R[..., first, first] = R[..., second, second] = np.cos(angle)
    R[..., first, second], R[..., second, first] = -np.sin(angle), np.sin(angle)
    return (R @ x[..., None])[..., 0]


def loop(x, positions, *, rotary, base, layout):
    """`one_head` for every head, with the frequencies, which are the same for all."""
    sizes(INPUTS, locals())
    return one_head(x, positions, frequencies(x, rotary, base), layout)


@per_head(dict(x=INPUTS["x"], positions=INPUTS["positions"], theta="pairs", layout=INPUTS["layout"]), OUTPUTS)
def one_head(x, positions, theta, layout):
    """One token and one pair at a time; what no pair holds is copied."""
    y, half = x.copy(), len(theta)
    for i in range(len(x)):
        for t in range(half):
            a, b = (t, t + half) if layout == "half" else (2 * t, 2 * t + 1)
            angle = positions[i] * theta[t]
            cos, sin = np.cos(angle), np.sin(angle)
            y[i, a] = x[i, a] * cos - x[i, b] * sin
            y[i, b] = x[i, b] * cos + x[i, a] * sin
    return y


def vjp(dy, x, positions, *, rotary, base, layout):
    """The gradient of x for a cotangent dy (B, H, T, dk): it is turned back."""
    sizes(INPUTS | cotangents(OUTPUTS), locals())
    angle = angles(x, positions, rotary, base)
    return dict(dx=rotate(dy, np.cos(angle), -np.sin(angle), layout))


FORMS = dense, matrix, loop


# Mistakes: a name -> what is wrong in one sentence, and the wrong outputs for the inputs x of a case.

def but(x, /, **changes):
    """The right formula on changed inputs."""
    return dense(**x | changes)


def angles_of(x, theta=None):
    """The right angles (B, 1, T, rotary/2), or those of other frequencies."""
    theta = frequencies(x["x"], x["rotary"], x["base"]) if theta is None else theta
    B, _, T, _ = x["x"].shape
    return np.broadcast_to(x["positions"].astype(x["x"].dtype), (B, T))[:, None, :, None] * theta


def turned(x, angle):
    return rotate(x["x"], np.cos(angle), np.sin(angle), x["layout"])


def exponents(x, exponent):
    """The output for frequencies base^-exponent(t, rotary)."""
    t = np.arange(x["rotary"] // 2)
    return turned(x, angles_of(x, x["base"] ** np.full_like(x["x"], -exponent(t, x["rotary"]), shape=t.shape)))


def other(layout):
    return dict(half="interleaved", interleaved="half")[layout]


def repeated(table, layout):
    """A table of width rotary/2 made as wide as rotary: each entry twice in a row, or the whole table twice."""
    return np.concatenate([table, table], -1) if layout == "half" else np.repeat(table, 2, -1)


def wrong_table(x):
    """x cos + rotate_half(x) sin with tables that were repeated for the other layout."""
    cos, sin = (repeated(f(angles_of(x)), other(x["layout"])) for f in (np.cos, np.sin))
    r, (first, second), y = x["rotary"], pairs(x["rotary"], x["layout"]), x["x"].copy()
    y[..., first], y[..., second] = -x["x"][..., second], x["x"][..., first]
    return np.concatenate([x["x"][..., :r] * cos + y[..., :r] * sin, x["x"][..., r:]], -1)


def reflected(x):
    """Both of a pair with a plus sign."""
    first, second = pairs(x["rotary"], x["layout"])
    y, lost = dense(**x), x["x"][..., second] * np.sin(angles_of(x))
    y[..., first] += 2 * lost
    return y


def in_place(x):
    """b cos + a sin with the a that was already turned."""
    first, second = pairs(x["rotary"], x["layout"])
    y, angle = dense(**x), angles_of(x)
    y[..., second] = x["x"][..., second] * np.cos(angle) + y[..., first] * np.sin(angle)
    return y


def tail(x):
    """The last channels turn, the first stay."""
    return np.roll(but(x, x=np.roll(x["x"], x["rotary"], -1)), -x["rotary"], -1)


def before_split(x):
    """The heads side by side are turned as one vector."""
    H = x["x"].shape[1]
    return split_heads(but(x, x=merge_heads(x["x"])[:, None], rotary=H * x["rotary"])[:, 0], H)


def by_head(x):
    """Head h is turned to the position of token h."""
    H, T = x["x"].shape[1:3]
    return turned(x, angles_of(x)[:, 0, np.arange(H) % T][:, :, None])


BUGS = dict(
    layout_swapped=("pairs (2t, 2t + 1) where (t, t + rotary/2) is asked for, or the reverse",
                    lambda x: but(x, layout=other(x["layout"]))),
    turned_backwards=("the minus sign stands on the other half: every angle is negative",
                      lambda x: turned(x, -angles_of(x))),
    minus_missing=("a cos + b sin and b cos + a sin: a reflection, not a rotation", reflected),
    cos_sin_swapped=("cos and sin are exchanged", lambda x: rotate(
        x["x"], np.sin(angles_of(x)), np.cos(angles_of(x)), x["layout"])),
    table_of_other_layout=("tables repeated as t0 t0 t1 t1 against halves, or as t0 t1 t0 t1 against neighbours",
                           wrong_table),
    turned_in_place=("the second of a pair is computed from the first when that has been turned", in_place),
    rest_dropped=("the channels from rotary on are 0", lambda x: (
        dense(**x) * (np.arange(x["x"].shape[3]) < x["rotary"]))),
    tail_turned=("the last rotary channels turn instead of the first", tail),
    rotary_ignored=("all channels turn", lambda x: but(x, rotary=x["x"].shape[3])),
    exponent_of_dk=("-2t / dk in the exponent instead of -2t / rotary", lambda x: exponents(
        x, lambda t, r: 2 * t / x["x"].shape[3])),
    exponent_halved=("-t / rotary in the exponent", lambda x: exponents(x, lambda t, r: t / r)),
    exponent_from_one=("t counts from 1, so that no pair turns by p itself",
                       lambda x: exponents(x, lambda t, r: 2 * (t + 1) / r)),
    base_ignored=("10000 whatever base was asked for", lambda x: but(x, base=10000)),
    positions_ignored=("tokens stand at 0 to T - 1 wherever the sequence goes on",
                       lambda x: but(x, positions=np.arange(x["x"].shape[2]))),
    positions_counted_on=("the first position is read and the others counted on from it", lambda x: but(
        x, positions=x["positions"][..., :1] + np.arange(x["x"].shape[2]))),
    positions_from_one=("every position is one too large", lambda x: but(x, positions=x["positions"] + 1)),
    positions_of_batch_0=("the positions of batch entry 0 serve every entry",
                          lambda x: but(x, positions=np.atleast_2d(x["positions"])[:1])),
    negative_positions_cut=("a negative position is read as 0",
                            lambda x: but(x, positions=np.maximum(x["positions"], 0))),
    position_of_head=("the axis of heads is taken for that of tokens", by_head),
    turned_before_split=("the heads are turned side by side, as one wide vector", before_split),
    turned_twice=("what was turned already, a cached key perhaps, is turned again",
                  lambda x: turned(x, 2 * angles_of(x))),
    angles_in_bfloat16=("angles are rounded to bfloat16", lambda x: turned(x, kit.rounded(angles_of(x), 8))),
    angles_in_float16=("angles are rounded to float16", lambda x: turned(x, kit.rounded(angles_of(x), 11))),
)

VJP_BUGS = dict(
    gradient_turned_forward=("dy is turned by the same angle as x, not back",
                             lambda x: dict(dx=dense(**{name: x[name] for name in INPUTS} | {"x": x["dy"]}))),
    gradient_of_rest_lost=("the channels from rotary on get no gradient", lambda x: dict(
        dx=vjp(**x)["dx"] * (np.arange(x["x"].shape[3]) < x["rotary"]))),
)

# Cases: a name -> why it exists, its sizes, and what differs from the drawn inputs; a light case has outputs only.

SIZES = dict(B=2, H=3, T=5, dk=8)
NEUTRAL = dict(positions=lambda n: np.arange(n.T), rotary=lambda n: n.dk, base=10000)
APART = np.array([[3, 4, 5, 6, 7], [11, 12, 13, 14, 15]])


def first_stays(x, y):
    """The token at position 0 is not turned, the next one is."""
    return (y["y"][:, :, 0] == x["x"][:, :, 0]).all() and (y["y"][:, :, 1] != x["x"][:, :, 1]).all()


CASES = dict(
    basic=dict(
        why="halves, fewer channels than dk, another base, positions that differ from row to row", sizes=SIZES,
        positions=APART, rotary=6, base=100.0, layout="half",
        catches=("layout_swapped", "turned_backwards", "minus_missing", "cos_sin_swapped", "table_of_other_layout",
                 "turned_in_place", "rest_dropped", "tail_turned", "rotary_ignored", "exponent_of_dk",
                 "exponent_halved", "exponent_from_one", "positions_ignored", "positions_of_batch_0",
                 "turned_before_split", "turned_twice", "positions_from_one")),
    neighbours=dict(
        why="the same in the interleaved layout", sizes=SIZES, positions=APART, rotary=6, base=100.0,
        layout="interleaved",
        catches=("layout_swapped", "table_of_other_layout", "tail_turned", "gradient_turned_forward",
                 "gradient_of_rest_lost")),
    one_pair=dict(
        why="rotary = 2 turns one pair by the position itself", sizes=SIZES, positions=APART, rotary=2, base=100.0,
        layout="half", light=True, shows=lambda x, y: (y["y"][..., 2:] == x["x"][..., 2:]).all()),
    first_tokens=dict(
        why="positions from 0 and base 10000, as most code has them", sizes=SIZES, layout="half", shows=first_stays),
    first_tokens_neighbours=dict(
        why="the same in the interleaved layout, of two heads", sizes=SIZES | dict(H=2, T=4), layout="interleaved",
        light=True, shows=first_stays),
    other_base=dict(
        why="a base that is not 10000 must be honoured", sizes=SIZES, base=16.0, layout="half", light=True,
        catches=("base_ignored",)),
    one_new_token=dict(
        why="decoding: the only token of the call stands at its place in the sequence", sizes=SIZES | dict(T=1),
        positions=np.array([[37], [5]]), layout="half", light=True,
        catches=("positions_ignored", "positions_of_batch_0")),
    packed=dict(
        why="two sequences in one row: positions begin again", sizes=SIZES, positions=np.array([0, 1, 2, 0, 1]),
        base=100.0, layout="half", light=True, catches=("positions_counted_on",)),
    negative=dict(
        why="positions may be negative, and not in order", sizes=SIZES, positions=np.array([-1, 2, -3, 0, 1]),
        base=100.0, layout="interleaved", catches=("negative_positions_cut", "positions_counted_on")),
    more_heads_than_tokens=dict(
        why="seven heads turn alike", sizes=SIZES | dict(H=7, T=3), positions=np.array([2, 5, 6]), base=100.0,
        layout="half", light=True, catches=("position_of_head", "turned_before_split")),
    far=dict(
        why="positions at which an angle of 8 or 11 bits is seen to be rounded", sizes=SIZES,
        positions=np.array([17, 29, 43, 53, 61]), layout="half", light=True,
        catches=("angles_in_bfloat16", "angles_in_float16")),
    strided=dict(
        why="x is a view of (B, T, H, d) memory", sizes=SIZES, positions=APART, base=100.0, layout="half",
        change=lambda x: kit.strided(x, "x"), shows=lambda x, y: not x["x"].flags.c_contiguous),
)
