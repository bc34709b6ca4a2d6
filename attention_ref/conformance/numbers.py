"""The number systems a formula runs in, and what each is for.

    float16 float32 float64      behaviour and values
    complex128                   derivatives, by a complex step of 1e-200
    balls (python-flint)         certified digits: outputs correctly rounded to float64
    noisy                        conditioning: how far rounding errors of size u move each output
    counted                      cost: how many operations a formula performs
    bfloat16                     storage only: inputs are on its grid, outputs are rounded to it

`cast` moves a whole case into one system; a call never mixes two.
"""
import numpy as np

UNIT = dict(float64=2.0 ** -53, float32=2.0 ** -24, float16=2.0 ** -11, bfloat16=2.0 ** -8)
TINY = dict(float64=2.0 ** -1074, float32=2.0 ** -149, float16=2.0 ** -24, bfloat16=2.0 ** -133)
SYSTEMS = "float16", "float32", "float64", "complex128", "balls", "noisy"
ARITHMETIC = dict(bfloat16="float32")                    # what NumPy computes in for a type that only stores


def cast(arguments, system):
    """Copies of arguments (name -> value), the floating arrays in the given number system, all else as it is."""
    make = dict(balls=balls, noisy=noisy).get(system, lambda x: x.astype(ARITHMETIC.get(system, system), order="K"))
    return {name: x if not isinstance(x, np.ndarray) else make(x) if x.dtype.kind == "f" else x.copy("K")
            for name, x in arguments.items()}


class Numbers(np.ndarray):
    """An array whose arithmetic is not the machine's: `finish` sees every result a ufunc or NumPy function gives."""

    def __array_ufunc__(self, ufunc, method, *xs, out=None, **options):
        xs = [np.asarray(x) if isinstance(x, Numbers) else x for x in xs]
        y = self.compute(ufunc, method, xs, options)
        if out is None:
            return self.finish(y)
        out[0][...] = y
        return out[0]

    def __array_function__(self, function, types, arguments, options):
        y = super().__array_function__(function, types, arguments, options)
        return tuple(map(self.finish, y)) if isinstance(y, tuple) else self.finish(y)

    def compute(self, ufunc, method, xs, options):
        """The result of a ufunc on plain arrays."""
        return getattr(ufunc, method)(*xs, **options)

    def finish(self, y):
        """A result with its class back, a sum over everything included."""
        floats = isinstance(y, (np.ndarray, np.floating)) and y.dtype.kind == "f"
        return np.asarray(y).view(type(self)) if floats else y


class Balls(Numbers):
    """Object array of `flint.arb` balls at the current working precision."""
    METHODS = {"exp", "log", "tanh", "sqrt", "sin", "cos", "log1p", "expm1"}

    def compute(self, ufunc, method, xs, options):
        if ufunc.__name__ in self.METHODS:
            return np.frompyfunc(lambda x: getattr(to_ball(x), ufunc.__name__)(), 1, 1)(*xs)
        return super().compute(ufunc, method, xs, options)

    def finish(self, y):
        if not isinstance(y, np.ndarray):
            return y
        return every_to_ball(y).view(Balls) if y.dtype.kind in "fO" else y


def to_ball(x):
    """x as a ball; numbers are exact, None (an array not yet filled) stays."""
    from flint import arb
    return x if x is None or isinstance(x, arb) else arb(float(x))


def every_to_ball(x):
    """An object array of balls, shaped like x."""
    return np.asarray(np.frompyfunc(to_ball, 1, 1)(np.asarray(x)), dtype=object)


def balls(x):
    """A float array as an array of exact balls."""
    return np.reshape(every_to_ball(x), np.shape(x)).view(Balls)


def certified(function, arguments, bits=128):
    """The float64 values nearest to the exact outputs of function(**arguments), with the bits it took and the radius.

    function returns a dict of arrays. Both ends of every ball must round to the same float64, else the precision is
    doubled. Returns (outputs, bits, radius), radius the largest of the balls. ArithmeticError beyond 2^14 bits.
    """
    from flint import ctx
    given = cast(arguments, "balls")
    while bits <= 2 ** 14:
        with ctx.workprec(bits):
            outputs = {name: every_to_ball(y) for name, y in function(**given).items()}
            low, high = ({name: _round(y, end) for name, y in outputs.items()} for end in ("lower", "upper"))
        found = [x for y in outputs.values() for x in y.flat]
        known = all(x.rad().is_finite() for x in found)                     # a NaN of radius 0 is a NaN, else a failure
        if known and all(np.array_equal(low[name], high[name], equal_nan=True) for name in outputs):
            return low, bits, max((float(x.rad()) for x in found if x.is_finite()), default=0.0)
        bits *= 2
    raise ArithmeticError("an output cannot be certified: its ball holds a rounding boundary at 2^14 bits")


def _round(y, end):
    return np.array([nearest(getattr(x, end)()) for x in y.flat], np.float64).reshape(y.shape)


def nearest(x):
    """The float64 nearest to an exact ball, ties to even; zero is +0, and what is too large for a float an infinity."""
    if not x.is_finite():
        return float(x)
    mantissa, exponent = map(int, x.man_exp())
    if mantissa.bit_length() + exponent < -1074:                            # below half of the smallest float
        return 0.0
    try:
        return float(mantissa << min(exponent, 1024)) if exponent >= 0 else mantissa / (1 << -exponent) + 0.0
    except OverflowError:
        return np.inf if mantissa > 0 else -np.inf


class Noisy(Numbers):
    """float64 array in which every operation errs by a random relative u, a sum of n terms by u sqrt(n) of its size."""
    u = 2.0 ** -24
    random = np.random.default_rng(0)
    EXACT = {"maximum", "minimum", "negative", "positive", "absolute", "isnan", "isfinite"}

    def compute(self, ufunc, method, xs, options):
        if ufunc is np.add and method == "at":
            return self.add_at(*xs)
        y = super().compute(ufunc, method, xs, options)
        if np.asarray(y).dtype.kind != "f" or ufunc.__name__ in self.EXACT:
            return y
        return y + self.error(self.size(ufunc, method, xs, options, y))

    def error(self, size):
        """A random error of at most u in units of size, none where that is not finite."""
        with np.errstate(invalid="ignore"):
            error = self.u * self.random.uniform(-1, 1, np.shape(size)) * size
        return np.where(np.isfinite(error), error, 0)

    def add_at(self, y, places, x):
        """np.add.at, in place: every place of y errs as the sum of what came to it."""
        total, terms = np.abs(y), np.zeros(y.shape)
        np.add.at(total, places, np.abs(x))
        np.add.at(terms, places, 1)
        np.add.at(y, places, x)
        y += self.error(total * np.sqrt(terms))

    def size(self, ufunc, method, xs, options, y):
        if ufunc is np.matmul:
            return np.abs(xs[0]) @ np.abs(xs[1]) * np.sqrt(xs[0].shape[-1])
        if ufunc is np.add and method in ("reduce", "accumulate"):
            total = getattr(ufunc, method)(np.abs(xs[0]), **options)
            terms = np.size(xs[0]) / max(1, np.size(total)) if method == "reduce" else xs[0].shape[options["axis"]]
            return total * np.sqrt(max(1, terms))
        return np.abs(y)


def noisy(x):
    """A float array in noisy arithmetic."""
    return np.array(x, np.float64).view(Noisy)


class Counted(Numbers):
    """float64 array that counts operations: a product-sum of n terms is 2n flops, an exponential is kept apart."""
    total = dict(flops=0, exp=0)
    APART = {"exp", "log", "tanh", "sqrt"}
    FREE = {"maximum", "minimum"}

    def compute(self, ufunc, method, xs, options):
        y = super().compute(ufunc, method, xs, options)
        y, terms = (xs[0], xs[-1]) if method == "at" else (y, y if method == "__call__" else xs[0])
        if np.asarray(y).dtype.kind == "f" and ufunc.__name__ not in self.FREE:
            work = np.size(terms)
            work *= 2 * xs[0].shape[-1] if ufunc is np.matmul else 1
            self.total["exp" if ufunc.__name__ in self.APART else "flops"] += work
        return y


def count(function, **arguments):
    """dict(flops, exp): the operations that NumPy performs on arrays in function(**arguments)."""
    Counted.total = dict(flops=0, exp=0)
    function(**{name: x.view(Counted) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
                for name, x in arguments.items()})
    return Counted.total


def conditioning(functions, arguments, runs=32, seed=0):
    """Name -> K, shaped like the output: the largest deviation of a noisy run from the plain one, in units of u.

    functions are forms of one formula, each returning a dict of arrays. K is rounded up to a bfloat16, so that the
    last digits of a machine's arithmetic do not show in it.
    """
    Noisy.random = np.random.default_rng(seed)
    worst = {}
    for function in functions:
        plain, given = function(**arguments), cast(arguments, "noisy")
        for _ in range(runs):
            for name, y in function(**given).items():
                with np.errstate(invalid="ignore"):
                    d = np.abs(np.asarray(y) - plain[name]) / Noisy.u
                worst[name] = np.fmax(worst.get(name, 0), np.where(np.isfinite(d), d, 0))
    return {name: _round_up(k) for name, k in worst.items()}


def _round_up(k):
    mantissa, exponent = np.frexp(k)
    return np.where(k > 0, np.maximum(np.ldexp(np.ceil(mantissa * 256) / 256, exponent), 2.0 ** -126), 0)


def round_to(x, dtype):
    """float64 x rounded once to dtype and given back as float64 (float32 for bfloat16 rounds to odd first)."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float64).astype(dtype).astype(np.float64)
    return _bfloat16(np.asarray(x, np.float64))


def _bfloat16(x):
    with np.errstate(over="ignore", under="ignore"):
        single = x.astype(np.float32)
    toward_zero = np.where(np.abs(single) > np.abs(x), np.nextafter(single, np.float32(0)), single)
    bits = toward_zero.view(np.uint32)
    bits = np.where(np.isfinite(single) & (toward_zero != x), bits | 1, bits)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isfinite(single), rounded.astype(np.uint32).view(np.float32), single).astype(np.float64)


def complex_step(function, arguments, direction, step=1e-200):
    """Derivative of every output of function(**arguments) along direction (name -> array), exact to rounding."""
    with np.errstate(under="ignore"):
        moved = {name: x + 1j * step * direction[name] if name in direction else x for name, x in arguments.items()}
        moved = {name: x.astype(np.complex128) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
                 for name, x in moved.items()}
        return {name: np.imag(y) / step for name, y in function(**moved).items()}
