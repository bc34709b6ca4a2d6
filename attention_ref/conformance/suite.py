"""The package against its own golden data: every form right, every mistake caught and named."""
from dataclasses import dataclass

from .. import variants
from . import cases
from .diagnosis import diagnose_run, golden_cases, mistakes, port_outputs
from .numbers import cast
from .verify import Result, check

COMPILED = "float64", "float32"
NUMPY = "float64", "float32", "float16"


@dataclass
class Summary:
    """One line of the table: what was run, the worst error as a multiple of its budget, and the mistakes."""
    variant: str
    forms: int
    cases: int
    worst: Result
    caught: int
    named: int
    total: int

    @property
    def passed(self):
        return self.worst.passed and self.caught == self.named == self.total


def types_of(form):
    """The number types a form is verified in: a scalar loop that adds term by term is not meant for float16."""
    return COMPILED if hasattr(form, "__wrapped__") else NUMPY


def run_forms(variant):
    """Results of every form, of its steps and its VJP, on every case in every type, one by one."""
    module = variants()[variant]
    by_name = {form.__name__: form for form in module.FORMS}
    for case in cases.load_cases(variant):
        for name, form in cases.forms(module).items():
            for dtype in types_of(by_name[name]):
                yield check(case, form(**case.in_dtype(dtype)), dtype)
        for dtype in NUMPY:
            if case.steps:
                steps = cases.named(module.steps, module.STEPS)
                yield check(case, steps(**cases.needs(module.steps, case.in_dtype(dtype))), dtype)
            if case.gradients:
                yield check(case, module.vjp(**cast(case.cotangents | case.inputs, dtype)), dtype)


def run_mistake(variant, slug, dtype):
    """Results of a port with a mistake on every case that holds something it touches."""
    pairs = ((case, port_outputs(case, slug, dtype)) for case in golden_cases(variant).values())
    return [check(case, outputs, dtype) for case, outputs in pairs if outputs]


def name_mistake(variant, slug):
    """(caught, named): whether a port with a mistake fails, and whether it is given this name and no other.

    float16 comes last: there fewer mistakes can be told apart, but some show nowhere else.
    """
    caught = False
    for dtype in ("float32", "float64", "float16"):
        results = run_mistake(variant, slug, dtype)
        caught |= any(r.failed for r in results)
        diagnosis = diagnose_run(results, lambda other: run_mistake(variant, slug, other))
        if diagnosis.mistakes == [slug] and not diagnosis.unexplained:
            return True, True
    return caught, False


def summary(variant):
    """Verify one variant of the package: its forms on its cases, its mistakes one by one."""
    module = variants()[variant]
    worst = max(run_forms(variant), key=lambda r: (not r.passed, r.score))
    caught, named = (sum(column) for column in zip(*(name_mistake(variant, slug) for slug in mistakes(module))))
    return Summary(variant, len(module.FORMS), len(module.CASES), worst, caught, named, len(mistakes(module)))
