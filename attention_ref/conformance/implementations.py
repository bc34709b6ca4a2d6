"""Run somebody's function on golden cases."""
import importlib
import sys
from dataclasses import replace
from inspect import signature

import numpy as np

from .diagnosis import diagnose_all, mistakes
from .numbers import ARITHMETIC, cast
from .verify import Result, check


def load(text):
    """The function that module:function names, the current folder included; ValueError if there is none.

    Importing the module runs it: whatever it raises, an exit included, is named in the ValueError.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"impl: expected module:function, got {text!r}")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        function = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"impl: cannot import {module}: {type(error).__name__}: {error}") from None
    try:
        for part in name.split("."):
            function = getattr(function, part)
    except AttributeError:
        raise ValueError(f"impl: module {module} has no {name}") from None
    if not callable(function):
        raise ValueError(f"impl: expected a function, {text} is a {type(function).__name__}")
    return function


def run(function, case, dtype, accumulate=None):
    """The Result of function on one case: arguments by the names of INPUTS; what it raises is part of the result.

    An argument that function does not take is left out where the case leaves it neutral; elsewhere it is unsupported.
    A function with parameters named like cotangents (do, dlse) gets them: it is a backward, and returns a dict of
    gradients (dq, dk, ...). Cases without gradients do not ask it.
    """
    given = case.in_dtype(dtype)
    absent = untaken(function, given)
    needed = [name for name in absent if not case.is_neutral(name)]
    if needed:
        return Result(case, dtype, unsupported=f"takes no {', '.join(needed)}")
    backward = taken(function, ["d" + name for name in case.outputs])
    if backward and not case.gradients:
        return Result(case, dtype, unsupported="has no gradients")
    given |= cast({name: case.cotangents[name] for name in backward}, dtype)
    try:
        outputs = function(**{name: x for name, x in given.items() if name not in absent})
        result = check(case, outputs, dtype, accumulate)
        if not result.comparisons:                       # names that another case has, or nothing at all
            kind = NotImplementedError if isinstance(outputs, dict) and outputs else ValueError
            raise kind(f"outputs: expected some of {', '.join(case.expected)}, got none of them")
        numbers = {name: y for name, y in result.outputs.items() if y.dtype.kind in "fV"}
        result = replace(result, outputs=numbers)        # what is no number has no distance from a mistake
        return keeps_type(result, ARITHMETIC.get(dtype, dtype))
    except NotImplementedError as error:
        return Result(case, dtype, unsupported=str(error).partition("\n")[0] or "not implemented")
    except (Exception, SystemExit) as error:
        return Result(case, dtype, error=f"{type(error).__name__}: {error}")


def keeps_type(result, dtype):
    """The result, failing if its first output came in a wider or narrower type than the inputs; lse may be wider."""
    first = result.comparisons[0]
    came = result.outputs.get(first.name)
    if first.problem or came is None or came.dtype in (dtype, "bfloat16"):
        return result
    problem = replace(first, score=np.inf, problem=f"expected dtype {dtype}, that of the inputs, got {came.dtype}")
    return replace(result, comparisons=[problem, *result.comparisons[1:]])


def parameters_of(function):
    """The names of its parameters, and whether it takes any name: what has no readable signature does."""
    try:
        found = signature(function).parameters
    except (TypeError, ValueError):
        return set(), True
    return set(found), any(p.kind is p.VAR_KEYWORD for p in found.values())


def taken(function, names):
    """The names that function has a parameter for."""
    found, _ = parameters_of(function)
    return [name for name in names if name in found]


def untaken(function, names):
    """The names that function cannot be given."""
    found, any_name = parameters_of(function)
    return [] if any_name else [name for name in names if name not in found]


def judge(function, cases, dtype, accumulate=None, progress=lambda text: None):
    """Results on all cases, and the Diagnosis of what failed.

    Mistakes that give the same numbers in this type are told apart by running the function in wider types as well.
    """
    results = []
    with np.errstate(all="ignore"):
        for case in cases:
            progress(case.id)
            results.append(run(function, case, dtype, accumulate))
        diagnosis = diagnose_all(results, accumulate)
        sentences = {slug: text for slug, (text, _) in mistakes(cases[0].module).items()}
        for wider in ("float32", "float64"):
            if any(f.same for f in diagnosis.findings) and wider != dtype:
                diagnosis = diagnosis.narrowed(diagnose_all([run(function, case, wider) for case in cases]), sentences)
    return results, diagnosis
