"""Whether an installation is whole: versions, golden data, and one case that is judged right and one wrong."""
import json
import platform
import re
from importlib import metadata
from typing import NamedTuple

from .. import __version__, sdpa, variants
from . import cases
from .diagnosis import wrong_outputs
from .report import number
from .schema import SCHEMA, validated
from .verify import check

NAME = "attention_ref"
REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra == ['\"](\w+)['\"])?")


class Finding(NamedTuple):
    """One line of the examination: the part, what was found, and whether that is as it should be."""
    part: str
    found: str
    healthy: bool


def examine(folder=cases.GOLDEN):
    """The list of all Findings on this installation, its golden data in folder."""
    return [*software(), *(data(name, folder) for name in file_names()), trial(folder)]


def software():
    """Findings on Python, the package and everything it can use; what is optional may be missing."""
    yield Finding(NAME, __version__, True)
    try:
        bounds, python = metadata.requires(NAME), metadata.metadata(NAME)["Requires-Python"]
    except metadata.PackageNotFoundError:
        yield Finding("Python", f"{platform.python_version()}; {NAME} is not installed, its bounds are unknown", True)
        return
    yield version("Python", platform.python_version(), python.removeprefix(">="))
    wanted = {}
    for name, bound, extra in (REQUIREMENT.match(line).groups() for line in bounds):
        wanted.setdefault(name, (bound or "0", extra))   # an extra may ask for what another has asked for
    for name, (bound, extra) in wanted.items():
        yield package(name, bound, extra)


def package(name, bound, extra):
    """The Finding on one requirement; extra names the optional part that asks for it, None if all do."""
    try:
        return version(name, metadata.version(name), bound)
    except metadata.PackageNotFoundError:
        optional = f"not installed: pip install '{NAME}[{extra}]'"
        return Finding(name, optional if extra else "missing", bool(extra))


def version(name, found, bound):
    """The Finding that a version is not below its bound."""
    def numbers(text):
        return [int(digits) for digits in re.findall(r"\d+", text)[:3]]
    healthy = numbers(found) >= numbers(bound)
    return Finding(name, found if healthy else f"{found}, which is older than {bound}", healthy)


def file_names():
    """The names of all golden files that there must be."""
    return [f"{variant}.{kind}" for variant in variants() for kind in ("json", "safetensors")]


def data(name, folder):
    """The Finding on a golden file: its sha256, and of an index whether it follows the schema."""
    try:
        content = cases.read(folder / name)
        found = f"{len(content)} bytes, sha256 as listed"
        if name.endswith(".json"):
            found += f", {schema_of(validated(json.loads(content), name))}"
        return Finding(name, found, True)
    except ValueError as error:
        return Finding(name, str(error), False)


def schema_of(index):
    """How far an index was held to the schema; ValueError if it does not follow it."""
    try:
        import fastjsonschema
    except ImportError:
        return "fields as in the schema (fastjsonschema, which sees more, is not installed)"
    try:
        fastjsonschema.compile(json.loads(SCHEMA.read_text()))(index)
    except fastjsonschema.JsonSchemaException as error:
        raise ValueError(f"golden data: {error}") from None
    return "schema as stated"


def trial(folder):
    """The Finding that on one case a right result is called right, and a wrong one wrong."""
    try:
        case, = (c for c in cases.load_cases("sdpa", folder=folder) if c.name == "basic")
        right = check(case, sdpa.dense(**case.in_dtype("float32")))
        wrong = check(case, wrong_outputs(case, "scale_missing", "float32"), "float32")
    except ValueError as error:
        return Finding("sdpa/basic", str(error), False)
    found = f"float32 has {number(right.score)} of its budget, {number(wrong.score)} without scale"
    return Finding("sdpa/basic", found, right.passed and not wrong.passed)
