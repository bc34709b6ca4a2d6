"""The number systems: certified digits, noisy and counted arithmetic, complex step, bfloat16, casting."""
from fractions import Fraction
from math import inf, nextafter

import ml_dtypes
import numpy as np
import pytest
from flint import arb, ctx

from attention_ref import kit, load_cases, variants
from attention_ref.conformance import cases, numbers
from attention_ref.conformance.numbers import Balls, Counted, Noisy, Numbers

SMALLEST, LARGEST = 2.0 ** -1074, nextafter(inf, 0)
KEEPS_CLASS = dict(
    where=lambda x: np.where(x > 0, x, -np.inf),
    concatenate=lambda x: np.concatenate([x, x]),
    stack=lambda x: np.stack([x, x]),
    sum=lambda x: x.sum(0),
    sum_keepdims=lambda x: x.sum((0, 1), keepdims=True),
    cumsum=lambda x: np.cumsum(x, axis=0),
    matmul=lambda x: x @ x.T,
    max=lambda x: x.max(-1, keepdims=True, initial=-np.inf),
    maximum=lambda x: np.maximum(1, x),
    swapaxes=lambda x: x.swapaxes(0, 1),
    split=lambda x: np.split(x, 2)[0],
    repeat=lambda x: np.repeat(x, 2, axis=1),
    view=lambda x: x[None, ::-1],
    take=lambda x: np.take_along_axis(x, np.array([[0]]), 0),
    broadcast=lambda x: np.broadcast_arrays(x, np.zeros((3, 2, 2)))[0],
    zeros_like=np.zeros_like,
    full_like=lambda x: np.full_like(x, np.arange(3), shape=3),
    plain_first=lambda x: np.ones((2, 2)) @ x,
    number_first=lambda x: 2.0 - x,
)
MIXTURES = dict(
    integer=lambda x: x + 1,
    integer_first=lambda x: 2 * x,
    numpy_scalar=lambda x: x - np.float64(0.5),
    float32=lambda x: x / np.float32(3),
    integers=lambda x: x * np.arange(3),
    matmul_of_integers=lambda x: np.arange(3) @ x,
    where_zero=lambda x: np.where(x > 0, x, 0),
    where_integers=lambda x: np.where(x > 0, 1, 0),
    where_nan=lambda x: np.where([True, False, True], x, np.nan),
    exp_of_minus_infinity=lambda x: np.exp(np.where([True, False, True], x, -np.inf)),
    maximum=lambda x: np.maximum(x, 0),
    max_from_minus_infinity=lambda x: x.max(initial=-np.inf),
    power=lambda x: x ** 2,
    negative=lambda x: -x,
    equal=lambda x: x == 1,
    zeros=np.zeros_like,
    sum=lambda x: x.sum(),
    exp_of_a_sum=lambda x: np.exp(x.sum()),
    tanh=np.tanh,
    sin=np.sin,
    cos=np.cos,
    log=lambda x: np.log(x * x),
    power_of_a_number=lambda x: 100.0 ** x,
    power_of_an_integer=lambda x: 10000 ** x,
    stack=lambda x: np.stack([x, np.ones(3)]),
    add_at=lambda x: at(np.add, np.zeros_like(x, shape=2), x),
    maximum_at=lambda x: at(np.maximum, np.full_like(x, -np.inf, shape=2), x),
)


def at(ufunc, y, x):
    """y after its first place has met x[0] and x[2]."""
    ufunc.at(y, [0, 0], x[::2])
    return y


NOISY, COUNTED = numbers.noisy, lambda x: x.view(Counted)


def exact(x):
    """A dyadic fraction as a ball without radius."""
    with ctx.workprec(20000):
        ball = arb(x.numerator) / x.denominator
    assert ball.is_exact()
    return ball


def as_arb(*xs):
    """The numbers as one array of exact balls."""
    return numbers.balls(np.array(xs, np.float64))


# Rounding to float64: Python's own division of integers is correctly rounded, and knows no balls.

STEPS = [Fraction(n, 8) for n in range(-17, 18)]
STARTS = [1.0, 1.5, nextafter(2.0, 0), 2.0 ** 52 + 1, 0.1, 1e300, SMALLEST, 3 * SMALLEST, 2.0 ** -1022, 2.0 ** -1023]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("sign", [1, -1])
def test_nearest_rounds_like_fractions(start, sign):
    ulp = Fraction(nextafter(start, inf)) - Fraction(start)
    for step in STEPS:
        x = sign * (Fraction(start) + step * ulp)
        assert numbers.nearest(exact(x)) == x.numerator / x.denominator, step


@pytest.mark.parametrize("x, expected", [
    (Fraction(2 ** 53 + 1), 2.0 ** 53), (Fraction(2 ** 53 + 3), 2.0 ** 53 + 4), (1 + Fraction(1, 2 ** 53), 1.0),
    (1 + Fraction(3, 2 ** 53), 1 + 2.0 ** -51), (Fraction(1, 2 ** 1075), 0.0), (Fraction(3, 2 ** 1075), 2 * SMALLEST),
    (Fraction(1, 2 ** 1075) + Fraction(1, 2 ** 3000), SMALLEST), (Fraction(1, 2 ** 9000), 0.0),
    (Fraction(2 ** 1024 - 2 ** 970 - 1), LARGEST), (Fraction(2 ** 1024 - 2 ** 970), inf), (Fraction(2 ** 9000), inf)])
@pytest.mark.parametrize("sign", [1, -1])
def test_nearest_at_ties_and_ends(x, expected, sign):
    got = numbers.nearest(exact(sign * x))
    assert got == sign * expected
    assert got or not np.signbit(got), "zero is +0"


def test_nearest_of_what_needs_no_digits():
    near, far = (arb(x).exp().lower() for x in (-1e30, 1e30))
    assert (numbers.nearest(near), numbers.nearest(far), numbers.nearest(-far)) == (0, inf, -inf)
    assert numbers.nearest(arb("inf")) == inf and numbers.nearest(-arb("inf")) == -inf
    assert np.isnan(numbers.nearest(arb("nan")))


@pytest.mark.parametrize("bits", [128, 512])
def test_certified_is_the_nearest_float(bits):
    x = np.array([2.0, 3.0, 10.0, 1e-300, 1e300])
    outputs, took, radius = numbers.certified(lambda x: dict(y=x / 7, z=x * x * x * x), dict(x=x), bits)
    thirds, fourths = [Fraction(v) / 7 for v in x], [Fraction(v) ** 4 for v in x]
    assert outputs["y"].tolist() == [f.numerator / f.denominator for f in thirds] and outputs["y"].dtype == np.float64
    assert outputs["z"].tolist() == [float(f) if f < LARGEST else inf for f in fourths]
    assert took >= bits and radius >= 0


@pytest.mark.parametrize("log, bits", [(-60, 128), (-100, 128), (-150, 256), (-1000, 1024)])
def test_precision_is_doubled_until_the_ends_agree(log, bits):
    """1 + 2^-53 + 2^log is just above half-way between two floats; sqrt of its square is not exact."""
    def near_a_tie(half, gap):
        x = 1 + half + gap
        return dict(y=np.sqrt(x * x))
    arguments = dict(half=np.array([2.0 ** -53]), gap=np.array([2.0 ** log]))
    outputs, took, _ = numbers.certified(near_a_tie, arguments)
    assert outputs["y"][0] == 1 + 2.0 ** -52 and took == bits


def test_precision_is_doubled_where_a_ball_becomes_indeterminate():
    """(x + small) - x is 0 +- something in few bits, so that its inverse says nothing: no value and no NaN."""
    x, small = np.array([3.0]), np.array([2.0 ** -200])
    outputs, took, _ = numbers.certified(lambda x, small: dict(y=1 / (x + small - x)), dict(x=x, small=small))
    assert outputs["y"][0] == 2.0 ** 200 and took == 256


@pytest.mark.parametrize("function", [lambda zero: zero + 1 + 2.0 ** -53, lambda zero: 1 / zero, np.log],
                         ids=["tie", "inverse", "log"])
def test_what_no_precision_decides_is_an_error(function):
    """exp(log 3) - 3 is 0 plus or minus the error of any precision."""
    before = ctx.prec
    with pytest.raises(ArithmeticError, match="its ball holds a rounding boundary at 2\\^14 bits"):
        numbers.certified(lambda x: dict(y=function(np.exp(np.log(x)) - x)), dict(x=np.array([3.0])), 2 ** 13)
    assert ctx.prec == before, "the working precision is given back"


def test_certified_keeps_infinities_and_nan_apart():
    x = np.array([-np.inf, 0.0, -2.0])
    outputs, bits, _ = numbers.certified(
        lambda x: dict(y=np.exp(x), z=x * 1 - 2, w=np.where(x == 0, np.nan, x), v=x - x), dict(x=x))
    assert bits == 128
    for name, expected in dict(y=[0, 1, np.exp(-2.0)], z=x - 2, w=[-np.inf, np.nan, -2], v=[np.nan, 0, 0]).items():
        assert np.array_equal(outputs[name], expected, equal_nan=True), name
    assert not np.signbit(outputs["y"]).any()


# bfloat16

def test_bfloat16_rounds_once():
    """Between any two neighbours: their mean goes to the even one, a hair away from the mean decides it."""
    patterns = np.arange(0x7F80, dtype=np.uint16)                           # 0 to the largest finite
    grid = patterns.view(ml_dtypes.bfloat16).astype(np.float64)
    below, above = grid[:-1], grid[1:]
    middle, even = (below + above) / 2, np.where(patterns[:-1] % 2 == 0, below, above)
    for sign in (1, -1):
        assert np.array_equal(numbers.round_to(sign * grid, "bfloat16"), sign * grid)
        assert np.array_equal(numbers.round_to(sign * middle, "bfloat16"), sign * even)
        for hair in (2.0 ** -52, 2.0 ** -40, 2.0 ** -20):
            assert np.array_equal(numbers.round_to(sign * middle * (1 + hair), "bfloat16"), sign * above)
            assert np.array_equal(numbers.round_to(sign * middle * (1 - hair), "bfloat16"), sign * below)


@pytest.mark.parametrize("x", [1 + 2.0 ** -8 + 2.0 ** -40, 1 + 2.0 ** -7 + 2.0 ** -8 - 2.0 ** -40])
def test_bfloat16_is_not_rounded_twice(x):
    """Over float32 the hair is lost and the tie falls the other way."""
    assert np.float64(np.float32(x).astype(ml_dtypes.bfloat16)) != numbers.round_to(x, "bfloat16")
    assert abs(numbers.round_to(x, "bfloat16") - x) < 2.0 ** -8


def test_bfloat16_ends():
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    middle = largest + 2.0 ** 119                                           # between it and what would come next
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e300, -1e300, middle, nextafter(middle, 0)])
    expected = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, np.inf, -np.inf, np.inf, largest])
    got = numbers.round_to(x, "bfloat16")
    assert np.array_equal(got, expected, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(expected))
    assert numbers.round_to(2.0 ** -134, "bfloat16") == 0
    assert numbers.round_to(3 * 2.0 ** -135, "bfloat16") == 2.0 ** -133


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_round_as_numpy_does(dtype):
    x = np.array([0.1, 1 + 2.0 ** -30, 1e300, -1e-300, 2049.0])
    with np.errstate(over="ignore"):
        assert np.array_equal(numbers.round_to(x, dtype), x.astype(dtype).astype(np.float64))


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 8), ("float16", 11), ("float32", 24)])
def test_rounding_to_so_many_bits_is_that_of_the_type(dtype, bits):
    x = np.random.default_rng(0).normal(size=1000) * 8
    assert np.array_equal(kit.rounded(x, bits), numbers.round_to(x, dtype)) and (kit.rounded(x, bits) != x).any()


# Noisy arithmetic

def used_ufuncs():
    """Names of the ufuncs through which the forms, steps and gradients of all variants send floating numbers."""
    seen = set()

    class Traced(Numbers):
        def compute(self, ufunc, method, xs, options):
            y = super().compute(ufunc, method, xs, options)
            seen.update({ufunc.__name__} if np.asarray(y).dtype.kind == "f" else ())
            return y

    def traced(arguments):
        return {name: x.view(Traced) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
                for name, x in arguments.items()}
    for variant, module in variants().items():
        for case in load_cases(variant)[:3]:
            if case.steps and hasattr(module, "steps"):
                module.steps(**cases.needs(module.steps, traced(case.inputs)))
            if case.gradients:
                module.vjp(**traced(case.cotangents | case.inputs))
            for form in module.FORMS:
                if form.__name__ != "loop":
                    form(**traced(case.inputs))
    return seen


def test_every_ufunc_that_rounds_errs():
    x = {n: np.random.default_rng(n).uniform(0.5, 0.9, (4, 4)) for n in (1, 2)}
    selects = {"maximum", "minimum", "negative", "absolute"}
    for name in used_ufuncs() | {"sqrt", "add", "tanh", "log"} | selects:
        ufunc = getattr(np, name)
        given = [x[1], x[2]][:ufunc.nin]
        plain, got = ufunc(*given), ufunc(*map(numbers.noisy, given))
        assert np.any(np.asarray(got) != plain) == (name not in selects), name
        assert np.all(np.abs(got - plain) <= 9 * Noisy.u * np.abs(plain)), name


@pytest.mark.parametrize("axis", [0, 1, None])
def test_sums_err_by_the_size_of_their_terms(axis, monkeypatch):
    """A sum of cancelling terms errs by its terms, and a longer one by the root of their number."""
    monkeypatch.setattr(Noisy, "random", np.random.default_rng(0))
    x = np.ones((64, 4)) * np.where(np.arange(64) % 2, 1, -1)[:, None]
    error = np.abs(np.asarray(numbers.noisy(x).sum(axis)) - x.sum(axis)) / Noisy.u
    terms = x.shape[axis] if axis is not None else x.size
    assert terms < error.max() <= 1.001 * terms ** 1.5 or axis == 1 and 1 < error.max() <= 8
    running = np.abs(np.asarray(np.cumsum(numbers.noisy(x), axis=0)) - np.cumsum(x, axis=0)) / Noisy.u
    assert 64 * 4 < running.max() <= 1.001 * 64 ** 1.5 and running[0].max() <= 8.001


def test_matmul_errs_by_the_size_of_its_terms():
    x, y = np.ones((20, 64)), np.where(np.arange(64) % 2, 1.0, -1.0)[:, None] * np.ones(20)
    error = np.abs(np.asarray(numbers.noisy(x) @ y)) / Noisy.u
    assert 64 * 4 < error.max() <= 64 * 8


def test_sums_in_place_err_by_the_size_of_their_terms():
    """np.add.at: 64 cancelling terms and 1 at one place, 1 term at another, none at the third."""
    x, places = np.where(np.arange(66) % 2, 1.0, -1.0), np.repeat([0, 1], [65, 1])
    y = numbers.noisy(np.zeros((200, 3)))
    np.add.at(y, np.s_[:, places], numbers.noisy(np.broadcast_to(x, (200, 66))))
    error = np.abs(np.asarray(y) - [-1, 1, 0]).max(0) / Noisy.u
    assert type(y) is Noisy and 65 * 4 < error[0] <= 1.001 * 65 ** 1.5
    assert 0.5 < error[1] <= 1 and error[2] == 0


def test_noise_spares_what_is_exact():
    x = numbers.noisy(np.array([0.0, -np.inf, np.inf, np.nan]))
    assert np.exp(x)[1] == 0 and np.exp(x)[2] == np.inf and np.isnan(np.exp(x)[3])
    assert np.array_equal((x + x)[1:], [-np.inf, np.inf, np.nan], equal_nan=True) and (x * 3)[0] == 0
    assert (numbers.noisy(np.ones(3, np.float32)) == 1).all()
    z = numbers.noisy(np.zeros(3))
    z += np.full(3, 0.1)
    assert type(z) is Noisy and not np.any(np.asarray(z) == 0.1), "an update in place errs too"


@pytest.mark.parametrize("make", [NOISY, COUNTED, numbers.balls], ids=["noisy", "counted", "balls"])
@pytest.mark.parametrize("operation", KEEPS_CLASS)
def test_classes_survive(make, operation):
    x = np.array([[1.0, -2.0], [3.0, -0.5]])
    plain, got = KEEPS_CLASS[operation](x), KEEPS_CLASS[operation](make(x))
    assert type(got) is type(make(x)) and got.shape == plain.shape
    assert np.allclose(np.array(got, dtype=np.float64), plain, atol=0, rtol=1e-5)


@pytest.mark.parametrize("make", [NOISY, COUNTED], ids=["noisy", "counted"])
def test_classes_survive_a_sum_over_everything(make):
    x = make(np.ones((2, 3)))
    assert type(x.sum()) is type(x.max()) is type(np.ones(2) @ make(np.ones(2))) is type(x)
    assert not isinstance((x > 0).all(), Numbers) and np.shape(x) == (2, 3)


# Balls

@pytest.mark.parametrize("mixture", MIXTURES)
def test_balls_mix_with_plain_numbers(mixture):
    x = np.array([1.0, -0.25, 3.0])
    got, plain = MIXTURES[mixture](numbers.balls(x)), MIXTURES[mixture](x)
    assert np.allclose(np.array(got, dtype=np.float64), plain, rtol=1e-14, atol=0, equal_nan=True)


def test_balls_are_exact_and_know_their_error():
    x = as_arb(0.1, 1e300, -np.inf, np.nan)
    assert all(b.rad() == 0 for b in x.flat) and [float(b) for b in x.flat[:3]] == [0.1, 1e300, -np.inf]
    assert (x == -np.inf).tolist() == [False, False, True, False]
    third = (as_arb(1.0) / 3)[0]
    assert third.rad() > 0 and third.lower() < third.upper()
    empty = np.empty(2, object).view(Balls)
    empty[0] = as_arb(2.0)[0]
    assert (empty[:1] * 3)[0] == 6


# Counting

@pytest.mark.parametrize("batch, m, n, k", [((), 1, 1, 1), ((), 2, 3, 5), ((2, 3), 4, 5, 6), ((2,), 0, 3, 4)])
def test_a_matmul_costs_2mnk(batch, m, n, k):
    work = numbers.count(lambda x, y: x @ y, x=np.ones((*batch, m, k)), y=np.ones((*batch, k, n)))
    assert work == dict(flops=2 * int(np.prod(batch)) * m * n * k, exp=0)


@pytest.mark.parametrize("function, flops, exp", [
    (lambda x: np.exp(x), 0, 12), (lambda x: np.exp(x).sum(), 12, 12), (lambda x: x * x + 1, 24, 0),
    (lambda x: np.tanh(x) / 2, 12, 12), (lambda x: np.sqrt((x * x).sum(-1)), 24, 3),
    (lambda x: np.add.at(np.zeros_like(x), [0, 2, 2, 1, 2], x[[0, 1, 2, 0, 1]]), 20, 0),
    (lambda x: np.where(x > 0, x, 0).max(-1), 0, 0), (lambda x: np.arange(3) * 2, 0, 0)])
def test_exponentials_are_counted_apart(function, flops, exp):
    assert numbers.count(function, x=np.ones((3, 4))) == dict(flops=flops, exp=exp)


def test_counting_starts_anew():
    first, second = (numbers.count(lambda x: x + x, x=np.ones(n)) for n in (2, 3))
    assert (first["flops"], second["flops"]) == (2, 3)


# Complex step, casting, conditioning

def test_complex_step_is_the_derivative():
    x = dict(x=np.linspace(-2, 2, 9), c=3.0, mask=np.arange(9) > 2, sink=-np.inf)
    got = numbers.complex_step(lambda x, c, mask, sink: dict(
        y=np.where(mask, np.tanh(c * x) * np.exp(x), 0), z=x ** 3, s=np.exp(x + sink)), x, dict(x=np.full(9, 2.0)))
    t = np.tanh(3 * x["x"])
    assert np.allclose(got["y"], 2 * np.where(x["mask"], (3 * (1 - t * t) + t) * np.exp(x["x"]), 0), rtol=1e-14, atol=0)
    assert np.allclose(got["z"], 6 * x["x"] ** 2, rtol=1e-15, atol=0) and (got["s"] == 0).all()


@pytest.mark.parametrize("system", [*numbers.SYSTEMS, "bfloat16"])
def test_cast_changes_floating_arrays_only(system):
    given = dict(x=np.ones((2, 3)), mask=np.ones((2, 2), bool), lengths=np.array([1, 2]), scale=0.5, softcap=None,
                 heads=3, anchor="top-left")
    made = numbers.cast(given, system)
    expected = dict(balls=object, noisy=np.float64, bfloat16=np.float32).get(system) or np.dtype(system)
    assert list(made) == list(given) and made["x"].dtype == expected
    assert all(made[name] is given[name] for name in ("scale", "softcap", "heads", "anchor"))
    for name in ("mask", "lengths"):
        assert made[name].dtype == given[name].dtype and np.array_equal(made[name], given[name])
    for name in ("x", "mask", "lengths"):
        assert not np.shares_memory(made[name], given[name]), "who writes into it must not spoil the case"


@pytest.mark.parametrize("system", [*numbers.SYSTEMS, "bfloat16"])
def test_cast_keeps_the_memory_order(system):
    x = dict(x=np.ones((2, 3, 4, 5)).swapaxes(1, 2), mask=np.ones((3, 2), bool).T)
    made = numbers.cast(x, system)
    for name in x:
        assert cases.memory_axes(made[name]) == cases.memory_axes(x[name])


def test_conditioning_is_deterministic_and_short():
    case = load_cases("sdpa", "basic")[0]
    forms = list(cases.forms(case.module).values())[:1]
    first, second = (numbers.conditioning(forms, case.inputs, runs=4) for _ in range(2))
    other = numbers.conditioning(forms, case.inputs, runs=4, seed=1)
    for name, k in first.items():
        assert np.array_equal(k, second[name]) and not np.array_equal(k, other[name])
        assert k.shape == case.outputs[name].shape and np.array_equal(numbers.round_to(k, "bfloat16"), k)


def test_conditioning_grows_with_cancellation():
    """exp(x) - exp(y) of size e errs by 2e u at most, however small the difference is."""
    def difference(x, y):
        return dict(d=np.exp(x) - np.exp(y))
    y = 1 - np.array([2.0 ** -n for n in (1, 4, 8, 16)])
    k = numbers.conditioning([difference], dict(x=np.ones(4), y=y))["d"]
    relative = k / difference(np.ones(4), y)["d"]
    assert (k > 1).all() and (k < 2.1 * np.e).all()
    assert (relative[1:] / relative[:-1] > 4).all()


def test_conditioning_is_blind_to_what_is_not_finite():
    k = numbers.conditioning([lambda x: dict(y=x * 2)], dict(x=np.array([1.0, -np.inf, np.nan, 0.0])))["y"]
    assert k[0] > 0 and k[1:].tolist() == [0, 0, 0]
