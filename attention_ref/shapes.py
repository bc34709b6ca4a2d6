"""The schema language of `INPUTS` and `OUTPUTS`: name -> kind and symbolic shape, as one string.

    "B H Tq dk"              floating array; equal letters are equal sizes everywhere in a call
    "bool B? H? Tq? Tk?"     boolean array; an axis with ? may be 1, and leading ones may be missing (broadcasting)
    "int B"                  integer array
    "D H*dk+1"               an axis whose size is a product, or a sum of such
    ""                       a number
    "int" "int =H" "int >=1" an integer; an integer equal to the size H; one that is not below 1
    "optional >0"            a finite number above 0, or None
    "int B >=0 <=Tk"         integers from 0 to the size Tk, which an earlier argument has
    "int E >=0 <N"           integers from 0 on, below the size N, which an earlier argument has
    "str a|b"                one of the words a and b
    "optional", "optional str", "optional H"     None is allowed
"""
import functools
import re
from math import prod
from typing import NamedTuple

import numpy as np

GRID = "B", "H", "Hq", "Hkv"                             # the axes over which a loop is lifted
GROUPED = dict(Hkv="Hq", G="H")                          # head h of H reads group h // (H / G)
KINDS = {"bool": "b", "int": "iu", "float": "fcVO", "str": "U"}              # V is bfloat16, O are balls


class Spec(NamedTuple):
    """One schema string, taken apart."""
    kind: str           # bool, int, float or str
    axes: tuple         # symbols, without the question mark
    open: tuple         # True where the axis may be 1
    equals: str         # the size that an integer must equal, or ""
    least: float        # the smallest value that is allowed
    above: float        # what every value must exceed
    most: str           # the size that no value may exceed, or ""
    below: str          # the size that every value must stay below, or ""
    choices: tuple      # the words that are allowed, () if any
    optional: bool


@functools.cache
def parse(text):
    """The Spec of one schema string."""
    words = text.split()
    optional = "optional" in words
    words = [w for w in words if w != "optional"]
    kind = words.pop(0) if words and words[0] in KINDS else "float"
    equals = words.pop()[1:] if words and words[0].startswith("=") else ""
    most = words.pop()[2:] if words and words[-1].startswith("<=") else ""
    below = words.pop()[1:] if words and words[-1].startswith("<") else ""
    least = float(words.pop()[2:]) if words and words[-1].startswith(">=") else 1.0 if equals else -np.inf
    above = float(words.pop()[1:]) if words and words[-1].startswith(">") else -np.inf
    choices = tuple(words.pop().split("|")) if kind == "str" and words else ()
    axes, may_be_1 = tuple(w.rstrip("?") for w in words), tuple(w.endswith("?") for w in words)
    return Spec(kind, axes, may_be_1, equals, least, above, most, below, choices, optional)


def sizes(schema, arguments):
    """Check arguments (name -> value) against a schema and return {symbol: size}.

    Raises ValueError that names the argument, what was expected and what came.
    """
    found = {}
    specs = [(name, parse(text)) for name, text in schema.items()]
    for name, spec in sorted(specs, key=lambda s: (not s[1].equals, any(s[1].open))):
        value = arguments[name]
        if value is None and spec.optional:
            continue
        _check_kind(name, spec, value)
        _bind(name, spec, np.shape(value), found)
        _check_domain(name, spec, value, found)
        if spec.equals:
            found[spec.equals] = int(value)
    _check_groups(found)
    return found


def cotangents(outputs):
    """The schema of the cotangents that a vjp takes: that of output o is do, and has its shape."""
    return {"d" + name: text for name, text in outputs.items()}


def _check_kind(name, spec, value):
    may_be_a_number = all(spec.open) and (value is None or np.isscalar(value))
    if not may_be_a_number and not hasattr(value, "dtype"):
        wanted = f"an array of shape ({', '.join(spec.axes)})" if spec.axes else f"one {spec.kind}"
        raise ValueError(f"{name}: expected {wanted}, got {type(value).__name__}")
    kind = np.asarray(value).dtype.kind
    wanted = KINDS[spec.kind] + ("iu" if spec.kind == "float" and not spec.axes else "")
    is_ball = isinstance(value, np.ndarray) and type(value) is not np.ndarray
    if kind not in wanted or kind == "O" and not is_ball:
        hint = {"mask": " (True = may attend; additive terms are called bias)"}.get(name, "")
        came = "None" if value is None else f"dtype {np.asarray(value).dtype}"
        raise ValueError(f"{name}: expected {spec.kind}{hint}, got {came}")


def _check_domain(name, spec, value, found):
    if spec.choices and value not in spec.choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, spec.choices))}, got {value!r}")
    if spec.least > -np.inf and np.size(value) and np.min(value) < spec.least:
        raise ValueError(f"{name}: expected numbers >= {spec.least:g}, got {np.min(value)}")
    if spec.above > -np.inf and not spec.above < value < np.inf:
        raise ValueError(f"{name}: expected a finite number > {spec.above:g}, got {value}")
    if spec.most and np.size(value) and np.max(value) > found[spec.most]:
        raise ValueError(f"{name}: expected numbers <= {spec.most} = {found[spec.most]}, got {np.max(value)}")
    if spec.below and np.size(value) and np.max(value) >= found[spec.below]:
        raise ValueError(f"{name}: expected numbers < {spec.below} = {found[spec.below]}, got {np.max(value)}")


def _bind(name, spec, shape, found):
    missing = len(spec.axes) - len(shape)
    if missing < 0 or not all(spec.open[:missing]):
        raise ValueError(f"{name}: expected shape ({', '.join(spec.axes)}), got {shape}")
    for axis, may_be_1, size in zip(spec.axes[missing:], spec.open[missing:], shape):
        if may_be_1 and size == 1:
            continue
        if size != _solve(axis, size, found):
            known = ", ".join(f"{a} = {found[a]}" for a in dict.fromkeys(symbols(axis)) if a in found)
            raise ValueError(f"{name}: expected shape ({', '.join(spec.axes)}) with {known}, got {shape}")


def _check_groups(found):
    for (few, many), (name, what) in zip(GROUPED.items(), (("q", "kv heads"), ("x", "groups"))):
        groups, heads = found.get(few), found.get(many)
        if None not in (groups, heads) and heads != groups * (heads // max(1, groups)):
            wanted = f"a number of heads that is a multiple of the {groups} {what}"
            raise ValueError(f"{name}: expected {wanted}, got {heads}")


def _solve(axis, size, found):
    """The size axis must have; a symbol seen for the first time takes what makes the axis fit. None if nothing does."""
    rest, known, free = size, 1, None
    for term in axis.split("+"):
        unknown = [s for s in symbols(term) if s not in found]
        factor = size_of("*".join(s for s in term.split("*") if s not in unknown) or "1", found)
        if unknown:
            known, free = factor, unknown[-1]
        else:
            rest -= factor
    if free and known and rest >= 0 and rest % known == 0:
        found[free] = rest // known
        return size
    return None if free else size - rest


def symbols(axis):
    """The symbols of an axis, in order: H and dk of "H*dk+1"."""
    return re.findall("[A-Za-z]+", axis)


def size_of(axis, n):
    """The size of an axis for sizes n of its symbols."""
    return sum(prod(n[s] if s in n else int(s) for s in term.split("*")) for term in axis.split("+"))


def expand(text, x, n, grid):
    """x with the missing and size-1 axes of its schema, other than those of the grid, broadcast to their sizes n."""
    spec = parse(text)
    if not any(spec.open):
        return x
    x = np.asarray(x) if not isinstance(x, np.ndarray) else x
    x = x.reshape((1,) * (len(spec.axes) - x.ndim) + x.shape)
    return np.broadcast_to(x, [size if a in grid else n.get(a, size) for a, size in zip(spec.axes, x.shape)])


def head(text, x, place, n, dtype):
    """What one place of the grid (axis -> index) sees of x: no B and head axes, floats in the number system dtype."""
    axes = parse(text).axes
    place = place | {few: place[many] * n.get(few, 1) // n[many] for few, many in GROUPED.items() if many in place}
    if axes and x is not None:
        x = x[tuple(min(place[a], size - 1) if a in place else slice(None) for a, size in zip(axes, x.shape))]
    is_number = isinstance(x, (float, np.ndarray, np.generic)) and np.asarray(x).dtype.kind in "fc"
    return np.asarray(x).astype(dtype, copy=False)[()] if is_number and dtype.kind != "O" else x
