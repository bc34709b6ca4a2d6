"""Run somebody's function on golden cases."""
import importlib
import sys
from dataclasses import dataclass, field, replace

import numpy as np

from .blackbox import Callee, aliases
from .call import Call
from .diagnosis import diagnose_run
from .isolation import NoAnswer, NotAsked, Worker, plain
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


# Isolation

def loaded(impl, vjp=None, **choices):
    """The `Call` of a function, and of a backward, that module:function names."""
    return Call(load(impl), vjp=load(vjp, "vjp") if vjp else None, **choices)


def callee(impl, backend):
    """The `Callee` of a function that module:function names."""
    return Callee(load(impl), backend)


class Answers:
    """A `Call` as a `Worker` has it: functions come by name, and what is answered can be pickled."""

    def __init__(self, impl, vjp, choices):
        self.call = loaded(impl, vjp, **choices)

    def check_names(self, case):
        self.call.check_names(case)

    def views(self):
        return self.call.views

    def parameters(self):
        return self.call.parameters

    def used(self, case, outputs):
        return self.call.used(case, outputs)

    def outputs(self, case, dtype, view):
        with np.errstate(all="ignore"):
            found = replace(self.call, view=view)(case, dtype)
        return {name: plain(found[name]) for name in case.expected if name in found}


@dataclass
class Isolated:
    """What a `Call` is to those who judge, while the function lives in a `Worker` of `Answers`."""
    worker: Worker
    rename: dict = field(default_factory=dict)
    repeat: int = 1
    view: str = ""

    def __post_init__(self):
        self.views, self.parameters = self.worker.ask("views"), self.worker.ask("parameters")

    def check_names(self, case):
        self.worker.ask("check_names", case)

    def used(self, case, outputs):
        return self.worker.ask("used", case, outputs)

    def __call__(self, case, dtype):
        return self.worker.ask("outputs", case, dtype, self.view)


# Judgement

def as_call(function):
    """A `Call`, isolated or not, as it is; one of function otherwise."""
    return function if isinstance(function, (Call, Isolated)) else Call(function)


def run(function, case, dtype, accumulate=None):
    """The Result of function, or of a `Call` of it, on one case; what it raises is part of the result.

    An argument that function does not take is left out where the case leaves it neutral; elsewhere it is unsupported.
    A function with parameters named like cotangents (do, dlse) gets them: it is a backward, and returns gradients.
    Cases without gradients do not ask it.
    """
    call = as_call(function)
    try:
        result = check(case, call(case, dtype), dtype, accumulate)
        # what is no number has no distance from a mistake
        numbers = {name: y for name, y in result.outputs.items() if y.dtype.kind in "fV"}
        used = call.used(case, list(numbers)) if set(numbers) & set(case.gradients) else ()
        result = replace(result, outputs=numbers, used=used)
        return keeps_type(result, ARITHMETIC.get(dtype, dtype))
    except NotImplementedError as error:
        return Result(case, dtype, unsupported=str(error).partition("\n")[0] or "not implemented")
    except NotAsked as reason:
        return Result(case, dtype, not_asked=str(reason))
    except NoAnswer as error:
        return Result(case, dtype, error=str(error))
    except (Exception, SystemExit) as error:
        return Result(case, dtype, error=f"the implementation raised {type(error).__name__}: {error}")


def examine(call, case, dtype, accumulate=None):
    """The Result of a `Call` on one case; one that passes must pass on every view, and repeat its bits.

    What is wrong only then is no known mistake: the result says what differs and has no outputs to diagnose.
    """
    result = run(call, case, dtype, accumulate)
    if not result.passed:
        return result
    for view in call.views:
        other = run(replace(call, view=view), case, dtype, accumulate)
        if other.failed:
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


def results_of(function, cases, dtype, accumulate=None):
    """The Results of function, or of a `Call` of it, on all cases, each as soon as it is there."""
    call = as_call(function)
    call.check_names(cases[0])
    for case in cases:
        with np.errstate(all="ignore"):
            result = examine(call, case, dtype, accumulate)
        yield result


def diagnosis_of(function, results, accumulate=None):
    """The Diagnosis of what failed; where one type cannot tell, the function is run in wider types as well."""
    call = as_call(function)
    with np.errstate(all="ignore"):
        return diagnose_run(results, lambda dtype: [run(call, r.case, dtype) for r in results], accumulate)


def judge(function, cases, dtype, accumulate=None):
    """The Results of function, or of a `Call` of it, on all cases, and the Diagnosis of what failed."""
    results = list(results_of(function, cases, dtype, accumulate))
    return results, diagnosis_of(function, results, accumulate)


def joining(call, case):
    """How the parameters of a function and the arguments of a case meet, in words; "" if they do or nobody knows."""
    theirs = call.parameters
    cotangents = ["d" + name for name in case.outputs]
    ours = {call.rename.get(name, name): name for name in [*case.inputs, *case.sizes, *cotangents]}
    odd = [name for name in theirs or () if name not in ours]
    missing = [name for name in case.inputs if name not in map(ours.get, theirs or ()) and not case.is_neutral(name)]
    if not theirs or not odd + missing:
        return ""
    known = aliases()
    pairs = {known[name]: name for name in odd if known.get(name) in case.inputs and known[name] not in theirs}
    names = ",".join(f"{name}={other}" for name, other in (call.rename | pairs).items())
    return "\n".join([f"your function takes {', '.join(theirs)}", f"{case.variant} has {', '.join(case.inputs)}",
                      *[f"the same under other names: --rename {names}"] * bool(pairs),
                      f"for anything else, `attention-ref adapter {case.variant}` writes a function to fill"])
