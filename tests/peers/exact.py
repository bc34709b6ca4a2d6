"""Cases that the golden data does not hold, made from those it does: exact outputs, steps and gradients with their conditioning."""
from dataclasses import replace

from attention_ref.conformance.cases import named, needs
from attention_ref.conformance.numbers import certified, conditioning


def changed(case, **changes):
    """The case with some of its inputs or cotangents replaced, and everything that follows computed anew."""
    inputs = case.inputs | {name: changes[name] for name in case.inputs if name in changes}
    cotangents = case.cotangents | {name: changes[name] for name in case.cotangents if name in changes}
    if set(changes) - set(inputs | cotangents):
        raise ValueError(f"{case.id} has no {', '.join(set(changes) - set(inputs | cotangents))}")
    module, found, K = case.module, {}, {}
    parts = dict(outputs=(named(module.FORMS[0], module.OUTPUTS), inputs))
    if case.steps:
        parts["steps"] = named(module.steps, module.STEPS), needs(module.steps, inputs)
    if cotangents:
        parts["gradients"] = module.vjp, cotangents | inputs
    for part, (function, arguments) in parts.items():
        found[part] = certified(function, arguments)[0]
        K |= conditioning([function], arguments)
    return replace(case, inputs=inputs, cotangents=cotangents, conditioning=K, **found)


def without_lse(case):
    """The case as an implementation without lse has it: no lse among the outputs, its cotangent zero."""
    case = changed(case, dlse=0 * case.cotangents["dlse"]) if case.cotangents else case
    return replace(case, outputs={name: y for name, y in case.outputs.items() if name != "lse"})
