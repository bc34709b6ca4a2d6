"""Golden cases: drawn from a variant file, certified, written, and read back.

A variant's golden data is `golden/<variant>.json` (what each case is and why it exists) and
`golden/<variant>.safetensors` (its tensors, named case/name). `golden/index.json` holds the sha256 of every file.
"""
import hashlib
import json
import re
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from .. import variants
from ..names import INERT, NAMES, draw_cotangent
from ..shapes import parse, size_of
from . import numbers, tensors
from .schema import validated

FORMAT = "attention_ref-golden-1"
GOLDEN = Path(__file__).parent.parent / "golden"


def own(x):
    """A copy of x, and of the arrays in it, each in its order in memory."""
    if isinstance(x, dict):
        return {name: own(y) for name, y in x.items()}
    return x.copy(order="K") if isinstance(x, np.ndarray) else copy(x)


@dataclass
class Case:
    """One golden case. Arrays are float64, bool or int as the schema says; scalars and options are Python values."""
    variant: str
    name: str
    why: str
    sizes: dict
    conventions: dict
    inputs: dict
    outputs: dict = field(default_factory=dict)
    steps: dict = field(default_factory=dict)
    cotangents: dict = field(default_factory=dict)
    gradients: dict = field(default_factory=dict)
    conditioning: dict = field(default_factory=dict)      # name -> K, for outputs, steps and gradients
    bits: int = 0
    radius: float = 0.0
    catches: list = field(default_factory=list)
    limit: float = 1.0                                    # the largest score that passes: see `verify.TIERS`

    @property
    def id(self):
        return f"{self.variant}/{self.name}"

    @property
    def module(self):
        return variants()[self.variant]

    @property
    def expected(self):
        """Everything that can be compared: outputs, steps and gradients."""
        return self.steps | self.outputs | self.gradients

    def copy(self):
        """A case with dicts, lists and arrays of its own: what a caller changes in them stays with the caller."""
        return Case(**{f.name: own(getattr(self, f.name)) for f in fields(self)})

    def is_neutral(self, name):
        """Whether the case leaves an argument at the value that changes nothing."""
        if name in INERT:
            return True
        if name not in self.module.NEUTRAL:
            return False
        value = self.module.NEUTRAL[name]
        value = value(SimpleNamespace(**self.sizes)) if callable(value) else value
        return bool(np.all(self.inputs[name] == value))

    def in_dtype(self, dtype):
        """The inputs in a number type; they lie on the bfloat16 grid, so all types hold the same numbers."""
        return numbers.cast(self.inputs, dtype)


def by_name(names, y):
    """What a form or a mistake returns, a tuple or one array, as a dict (names in order)."""
    return dict(zip(names, y if isinstance(y, tuple) else (y,)))


def named(function, names):
    """function with its outputs as a dict (names in order)."""
    return lambda **arguments: by_name(names, function(**arguments))


def forms(module):
    """Name -> form of a variant, its outputs as a dict."""
    return {form.__name__: named(form, module.OUTPUTS) for form in module.FORMS}


def draw_case(module, name):
    """The case with its inputs and cotangents, nothing computed yet."""
    recipe = module.CASES[name]
    n = SimpleNamespace(**recipe["sizes"])
    x = {}
    for argument, text in module.INPUTS.items():
        value = recipe[argument] if argument in recipe else module.NEUTRAL.get(argument)
        if argument not in recipe and argument not in module.NEUTRAL:
            value = NAMES[argument].draw(shape_of(text, recipe["sizes"]))
        x[argument] = value(n) if callable(value) else value
    if "change" in recipe:
        x |= recipe["change"](x)
    has_vjp = hasattr(module, "vjp") and not recipe.get("light")
    cotangents = {"d" + o: draw_cotangent(shape_of(text, recipe["sizes"]), i)
                  for i, (o, text) in enumerate(module.OUTPUTS.items()) if has_vjp}
    conventions = module.CONVENTIONS | recipe.get("conventions", {})
    return Case(variant_name(module), name, recipe["why"], recipe["sizes"], conventions, x, cotangents=cotangents)


def shape_of(text, sizes):
    """The sizes of a schema string's axes."""
    return tuple(size_of(axis, sizes) for axis in parse(text).axes)


def title(module):
    """What a variant is, in a few words: the head of its docstring."""
    return re.split(r"[.:,](?: |$)", module.__doc__.splitlines()[0])[0]


def sentences(module):
    """Mistake -> what is wrong, in one sentence, for every mistake of a variant."""
    return {slug: text for bugs in (module.BUGS, getattr(module, "VJP_BUGS", {})) for slug, (text, _) in bugs.items()}


def variant_name(module):
    """The last part of a module's name."""
    return module.__name__.rsplit(".", 1)[1]


def needs(function, arguments):
    """The arguments that function takes."""
    return {name: arguments[name] for name in signature(function).parameters if name in arguments}


def compute(case):
    """Fill in certified outputs, steps and gradients, and their conditioning; returns the case."""
    module = case.module
    dense = module.FORMS[0]
    parts = dict(outputs=(named(dense, module.OUTPUTS), case.inputs))
    light = module.CASES[case.name].get("light", False)
    if hasattr(module, "steps") and not light:
        parts["steps"] = named(module.steps, module.STEPS), needs(module.steps, case.inputs)
    if hasattr(module, "vjp") and not light:
        parts["gradients"] = module.vjp, case.cotangents | case.inputs
    for part, (function, arguments) in parts.items():
        exact, bits, radius = numbers.certified(function, arguments)
        exact = without_repeats(exact) if part == "steps" else exact
        setattr(case, part, exact)
        case.bits, case.radius = max(case.bits, bits), max(case.radius, radius)
        same = list(forms(module).values()) if part == "outputs" else [function]
        K = numbers.conditioning(same, arguments)
        case.conditioning |= {name: K[name] for name in exact}
    return case


def without_repeats(steps):
    """The steps without those that equal the one before: scores without a cap, capped scores without a bias."""
    pairs = zip([None, *steps.values()], steps.items())
    return {name: x for before, (name, x) in pairs if not np.array_equal(before, x, equal_nan=True)}


def index_of(cases, module):
    """The JSON index of a variant: everything but the tensors."""
    return dict(
        format=FORMAT, variant=variant_name(module), source=module.__doc__.splitlines()[0], inputs=module.INPUTS,
        outputs=module.OUTPUTS, steps=getattr(module, "STEPS", {}), conventions=module.CONVENTIONS,
        mistakes=sentences(module), cases=[record(case) for case in cases])


def record(case):
    """What the index says of a case."""
    arrays = {name: x for name, x in case.inputs.items() if isinstance(x, np.ndarray)}
    order = {name: memory_axes(x) for name, x in arrays.items() if not x.flags.c_contiguous}
    own = {name: text for name, text in case.conventions.items() if text != case.module.CONVENTIONS.get(name)}
    return dict(
        name=case.name, why=case.why, sizes=case.sizes, conventions=own, inputs=sorted(arrays),
        options={name: x for name, x in case.inputs.items() if name not in arrays}, memory_order=order,
        outputs=list(case.outputs), steps=list(case.steps), cotangents=list(case.cotangents),
        gradients=list(case.gradients), bits=case.bits, radius=f"{case.radius:.0e}", catches=case.catches)


def memory_axes(x):
    """The axes of x from the slowest to the fastest in memory."""
    return [int(i) for i in np.argsort([-s for s in x.strides], kind="stable")]


def tensors_of(cases):
    """case/name -> array for every tensor of a variant; K.name is the conditioning of name.

    Inputs and cotangents are exact in float32; what is expected is float64.
    """
    found = {}
    for case in cases:
        arrays = {name: x for name, x in case.inputs.items() if isinstance(x, np.ndarray)} | case.cotangents
        arrays = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in arrays.items()}
        arrays |= case.expected
        arrays |= {f"K.{name}": k for name, k in case.conditioning.items()}
        found |= {f"{case.name}/{name}": x for name, x in arrays.items()}
    return found


def write(module, cases, folder=GOLDEN):
    """Write the two files of a variant, each whole or not at all; `write_index` enters them in the index."""
    name = variant_name(module)
    text = layout(index_of(cases, module), 3) + "\n"
    tensors.write_whole(folder / f"{name}.json", text.encode())
    arrays = tensors_of(cases)
    short = {key for key in arrays if "/K." in key}
    tensors.write_whole(folder / f"{name}.safetensors", tensors.pack(arrays, bfloat16=short))


def layout(x, depth, indent="\n "):
    """x as JSON with a line for every entry down to a depth, and what lies deeper on the line of its entry."""
    if not x or not depth or not isinstance(x, (dict, list)):
        return json.dumps(x)
    names = [f"{json.dumps(name)}: " for name in x] if isinstance(x, dict) else [""] * len(x)
    values = x.values() if isinstance(x, dict) else x
    lines = [indent + name + layout(value, depth - 1, indent + " ") for name, value in zip(names, values)]
    left, right = "{}" if isinstance(x, dict) else "[]"
    return left + ",".join(lines) + indent[:-1] + right


def write_index(folder=GOLDEN):
    """sha256 and size of every golden file, in golden/index.json."""
    files = sorted(p for name in variants() for p in folder.glob(f"{name}.*"))
    entries = {p.name: dict(sha256=hashlib.sha256(p.read_bytes()).hexdigest(), bytes=p.stat().st_size) for p in files}
    text = layout(dict(format=FORMAT, files=entries), 2) + "\n"
    tensors.write_whole(folder / "index.json", text.encode())


def read(path):
    """Bytes of a golden file; ValueError if it is missing, not in the index, or not what the index says."""
    try:
        listed = json.loads((path.parent / "index.json").read_bytes())
        expected, data = listed["files"][path.name]["sha256"], path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"golden data: cannot read {path.name} in {path.parent}: {error!r}") from None
    if listed.get("format") != FORMAT:
        raise ValueError(f"golden data: expected format {FORMAT!r}, got {listed.get('format')!r}")
    if hashlib.sha256(data).hexdigest() != expected:
        raise ValueError(f"golden data: {path.name} was changed: its sha256 is not the one in index.json")
    return data


def load_cases(variant, case=None, folder=GOLDEN):
    """The golden cases of a variant, as a list; with case, only those whose name contains it, or whose id it is.

    Raises ValueError for an unknown variant, a case that does not exist, and data that is missing or was changed.
    """
    if variant not in variants():
        raise ValueError(f"variant: expected one of {', '.join(variants())}, got {variant!r}")
    found = [c.copy() for c in _load(variant, Path(folder)) if case is None or case in c.name or case == c.id]
    if not found:
        names = ", ".join(c.name for c in _load(variant, Path(folder)))
        raise ValueError(f"case: expected (part of) one of {names}, got {case!r}")
    return found


@cache
def _load(variant, folder):
    try:
        index = validated(json.loads(read(folder / f"{variant}.json")), f"{variant}.json")
    except json.JSONDecodeError as error:
        raise ValueError(f"golden data: {variant}.json: expected JSON, got {error}") from None
    stored = tensors.unpack(read(folder / f"{variant}.safetensors"))
    shared = index["conventions"]
    try:
        return [_case(variant, e | dict(conventions=shared | e["conventions"]), stored) for e in index["cases"]]
    except KeyError as error:
        raise ValueError(f"golden data: {variant}: {variant}.json names {error}, which is not there") from None


def _case(variant, entry, stored):
    def take(names, prefix=""):
        found = {name: stored[f"{entry['name']}/{prefix}{name}"] for name in names}
        return {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in found.items()}
    inputs = take(entry["inputs"]) | entry["options"]
    for name, axes in entry["memory_order"].items():
        inputs[name] = np.ascontiguousarray(inputs[name].transpose(axes)).transpose(np.argsort(axes))
    expected = entry["outputs"] + entry["steps"] + entry["gradients"]
    order = variants()[variant].INPUTS
    return Case(variant, entry["name"], entry["why"], entry["sizes"], entry["conventions"],
                {name: inputs[name] for name in order}, take(entry["outputs"]), take(entry["steps"]),
                take(entry["cotangents"]), take(entry["gradients"]), take(expected, "K."),
                entry["bits"], float(entry["radius"]), entry["catches"])
