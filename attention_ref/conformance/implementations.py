"""Run somebody's function on golden cases."""
import importlib
import sys
from dataclasses import replace

import numpy as np

from .adapters import Call
from .cases import sentences
from .diagnosis import diagnose_all
from .numbers import ARITHMETIC
from .report import sentence
from .verify import Comparison, Result, check


def load(text, option="impl"):
    """The function that module:function names, the current folder included; ValueError if there is none.

    Importing the module runs it: whatever it raises, an exit included, is named in the ValueError.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{option}: expected module:function, got {text!r}")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        function = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{option}: cannot import {module}: {type(error).__name__}: {error}") from None
    try:
        for part in name.split("."):
            function = getattr(function, part)
    except AttributeError:
        raise ValueError(f"{option}: module {module} has no {name}") from None
    if not callable(function):
        raise ValueError(f"{option}: expected a function, {text} is a {type(function).__name__}")
    return function


def run(function, case, dtype, accumulate=None):
    """The Result of function, or of a `Call` of it, on one case; what it raises is part of the result.

    An argument that function does not take is left out where the case leaves it neutral; elsewhere it is unsupported.
    A function with parameters named like cotangents (do, dlse) gets them: it is a backward, and returns gradients.
    Cases without gradients do not ask it.
    """
    call = function if isinstance(function, Call) else Call(function)
    try:
        result = check(case, call(case, dtype), dtype, accumulate)
        numbers = {name: y for name, y in result.outputs.items() if y.dtype.kind in "fV"}
        result = replace(result, outputs=numbers)        # what is no number has no distance from a mistake
        return keeps_type(result, ARITHMETIC.get(dtype, dtype))
    except NotImplementedError as error:
        return Result(case, dtype, unsupported=str(error).partition("\n")[0] or "not implemented")
    except (Exception, SystemExit) as error:
        return Result(case, dtype, error=f"the implementation raised {type(error).__name__}: {error}")


def examine(call, case, dtype, accumulate=None):
    """The Result of a `Call` on one case; one that passes must pass on every view, and repeat its bits.

    What is wrong only then is no known mistake: the result says what differs and has no outputs to diagnose.
    """
    result = run(call, case, dtype, accumulate)
    if not result.passed:
        return result
    for view in call.library.views if call.strides else ():
        other = run(replace(call, view=view), case, dtype, accumulate)
        if not other.passed and not other.unsupported:
            return only_here(other, f"on {view} arrays only")
    for number in range(2, call.repeat + 1):
        other = run(call, case, dtype, accumulate)
        changed = [c for name in result.outputs for c in changes(result, other, name, number)]
        if changed or not other.passed:
            return replace(other, comparisons=changed or other.comparisons, outputs={})
    return result


def only_here(result, where):
    """A failed result with its failures in words that say where it failed."""
    failed = [c for c in result.comparisons if c.score > result.case.limit]
    said = [Comparison(c.name, c.score, problem=f"{where}: {sentence(c, result.case, first=False)}") for c in failed]
    error = result.error and f"{where}: {result.error}"
    return replace(result, comparisons=said, outputs={}, error=error)


def changes(first, other, name, number):
    """A Comparison in a list if the bits of an output differ between two runs, else nothing."""
    if name not in other.outputs or other.outputs[name].shape != first.outputs[name].shape:
        return []
    x, y = (np.ascontiguousarray(r.outputs[name]) for r in (first, other))
    unlike = x.view(f"u{x.itemsize}") != y.view(f"u{y.itemsize}")
    if not unlike.any():
        return []
    place = tuple(map(int, np.argwhere(unlike)[0]))
    where = Comparison(name, np.inf, place).where(first.case) or "its only entry"
    return [Comparison(name, np.inf, problem=f"run {number} differs from run 1 in {unlike.sum()} of {unlike.size} "
                       f"numbers, first at {where}: {float(x[place])!r}, then {float(y[place])!r}")]


def keeps_type(result, dtype):
    """The result, failing if its first output came in a wider or narrower type than the inputs; lse may be wider."""
    first = result.comparisons[0]
    came = result.outputs.get(first.name)
    if first.problem or came is None or came.dtype in (dtype, "bfloat16"):
        return result
    problem = replace(first, score=np.inf, problem=f"expected dtype {dtype}, that of the inputs, got {came.dtype}")
    return replace(result, comparisons=[problem, *result.comparisons[1:]])


def judge(function, cases, dtype, accumulate=None, progress=lambda text: None):
    """Results of function, or of a `Call` of it, on all cases, and the Diagnosis of what failed.

    Mistakes that give the same numbers in this type are told apart by running the function in wider types as well.
    """
    results, call = [], function if isinstance(function, Call) else Call(function)
    call.check_names(cases[0])
    with np.errstate(all="ignore"):
        for case in cases:
            progress(case.id)
            results.append(examine(call, case, dtype, accumulate))
        diagnosis = diagnose_all(results, accumulate)
        for wider in ("float32", "float64"):
            if any(f.same for f in diagnosis.findings) and wider != dtype:
                diagnosis = diagnosis.narrowed(diagnose_all([run(call, case, wider) for case in cases]),
                                               sentences(cases[0].module))
    return results, diagnosis
