"""What notebooks and learners call: each function prints one result and raises AssertionError if a claim is false."""
import numpy as np

from .. import variants
from . import cases, report
from .implementations import judge
from .numbers import UNIT, cast, certified, complex_step
from .suite import types_of
from .verify import check


def agree(claim, got, expected, limit=1e-12):
    """Print `claim: max error 3e-16 (limit 1e-12)`; got and expected broadcast, infinities and NaN must stand alike."""
    got, expected = np.broadcast_arrays(np.asarray(got) + 0, np.asarray(expected) + 0)
    with np.errstate(invalid="ignore"):
        error = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0, np.abs(got - expected))
    worst = float(np.max(error, initial=0))
    print(f"{claim}: max error {worst:.0e} (limit {limit:.0e})")
    confirm(worst <= limit, f"not true: {claim}")


def confirm(true, otherwise):
    """Raise AssertionError with the text `otherwise` unless true; unlike assert, also where Python optimises."""
    if not true:
        raise AssertionError(otherwise)


def forms_table(variant, case):
    """Print the largest error of every form of a variant on a golden case, number system by number system.

    float16, float32, float64 and complex128 are compared with the certified value; balls is the radius of the largest
    ball. Raises AssertionError where a form is out of its budget.
    """
    golden = cases.load_cases(variant, case)[0]
    module, rows = variants()[variant], []
    for form in module.FORMS:
        call, errors = cases.forms(module)[form.__name__], []
        for dtype in ("float16", "float32", "float64", "complex128"):
            y = {name: np.real(x) for name, x in call(**golden.in_dtype(dtype)).items()}
            errors.append(f"{max(largest_error(y[name], golden.outputs[name]) for name in y):.0e}")
            if dtype in types_of(form):
                confirm(check(golden, y, dtype).passed, f"{form.__name__} in {dtype} is out of its budget")
        rows.append((form.__name__, *errors, f"{certified(call, golden.inputs)[2]:.0e}"))
    print(report.table(rows, ("form", "float16", "float32", "float64", "complex128", "balls")))


def largest_error(got, exact):
    """Largest absolute difference where exact is finite."""
    finite = np.isfinite(exact)
    return float(np.max(np.abs(got.astype(np.float64)[finite] - exact[finite]), initial=0))


def gradient_table(variant, case, limit=1e-12):
    """Print, input by input, how far the VJP of a variant is from a complex step through its definition."""
    golden = cases.load_cases(variant, case)[0]
    rows = [(name, f"{error:.0e}") for name, error in gradient_errors(golden).items()]
    print(report.table(rows, ("input", "vjp against complex step")))
    confirm(max(gradient_errors(golden).values()) <= limit, "the VJP and the complex step disagree")


def gradient_errors(case):
    """Input -> relative difference between <vjp, direction> and the complex-step derivative along a fixed direction."""
    if not case.cotangents:
        raise ValueError(f"case: expected one with gradients, {case.id} is light: it has outputs only")
    module, errors = case.module, {}
    dense = cases.forms(module)[module.FORMS[0].__name__]
    gradients = module.vjp(**case.cotangents | case.inputs)
    for name in (g[1:] for g in gradients):
        x = case.inputs[name]
        direction = np.random.default_rng(0).normal(size=x.shape)
        direction = np.where(np.isfinite(x), direction, 0)
        outputs = complex_step(dense, case.inputs, {name: direction})
        terms = [case.cotangents["d" + o] * np.where(np.isfinite(case.outputs[o]), y, 0) for o, y in outputs.items()]
        expected, size = sum(t.sum() for t in terms), sum(np.abs(t).sum() for t in terms)
        got = (gradients["d" + name] * direction).sum()
        size += np.abs(gradients["d" + name] * direction).sum()
        errors[name] = float(abs(got - expected) / (size + UNIT["float64"]))
    return errors


def check_exercise(variant, function, case=None):
    """Run your own function on the golden cases of a variant and say what is wrong with it, if anything.

    function takes the arguments of INPUTS by name, or some of them: cases that need the others are left out. It returns
    the outputs in the order of OUTPUTS, or the first of them. Returns True if every case that applies is right.
    """
    golden = cases.load_cases(variant, case)
    results, diagnosis = judge(function, golden, "float64")
    asked = [r for r in results if not r.unsupported]
    failed = [r for r in asked if not r.passed]
    reasons = dict.fromkeys(r.unsupported for r in results if r.unsupported)
    more = f", {len(results) - len(asked)} left out: {'; '.join(reasons)}" if reasons else ""
    print(f"{variant}: {len(asked) - len(failed)} of {len(asked)} cases right{more}")
    if failed:
        print(report.explain(failed[0]))
        print("\n".join(f"hint: {line}" for line in str(diagnosis).splitlines()) if diagnosis.failing
              else "hint: make it run first")
    return bool(asked) and not failed


def in_system(variant, case, system):
    """The inputs of a golden case in a number system (float16 ... complex128, balls, noisy)."""
    return cast(cases.load_cases(variant, case)[0].inputs, system)
