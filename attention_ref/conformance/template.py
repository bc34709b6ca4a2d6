"""The text of adapter.py, which a person fills: a function of the arguments of a variant, for what no option covers."""
from ..names import NAMES
from .cases import title

TEMPLATE = '''"""Your implementation of {variant} as attention_ref calls it: {title}

    attention-ref verify {variant} --impl adapter:run --dtype float32{backward_option}

With --backend torch, jax or cupy the arrays are of that library. A parameter that you do not need may go; one named
like a size ({sizes}) gets it. Where yours cannot do what is asked, raise
NotImplementedError("why"): the case counts as unsupported. This file runs as it is, with the NumPy reference in place
of yours.

Conventions:
{conventions}
"""
from attention_ref import {variant} as yours              # your module


def run({inputs}):
    """Returns {outputs},
    as a tuple in this order, or the first only.

{arguments}

    An axis with ? may be 1, and leading ones may be missing.
    """
    return yours.dense({passed})
'''
BACKWARD = '''

def backward({cotangents}, {inputs}):
    """Returns a dict of the gradients {gradients}; {cotangents} are shaped like the outputs."""
    return yours.vjp({cotangents}, {passed})
'''


def template(case):
    """The text of adapter.py: a function of the arguments of the variant of a golden case, to be filled."""
    module = case.module
    words = dict(
        variant=case.variant, title=title(module),
        sizes=", ".join(case.sizes),
        conventions="\n".join(f"    {name}: {text}" for name, text in module.CONVENTIONS.items()),
        inputs=", ".join(module.INPUTS), passed=", ".join(f"{name}={name}" for name in module.INPUTS),
        outputs=", ".join(f"{name} ({text.replace(' ', ', ')})" for name, text in module.OUTPUTS.items()),
        arguments="\n".join(f"    {name:16}{_described(name, text)}" for name, text in module.INPUTS.items()),
        cotangents=", ".join("d" + name for name in module.OUTPUTS), gradients=", ".join(case.gradients),
        backward_option=" --vjp adapter:backward" if case.gradients else "")
    return (TEMPLATE + BACKWARD * bool(case.gradients)).format(**words)


def _described(name, text):
    """Shape or kind of an argument, and what it is."""
    return f"{text or 'number':28}{NAMES[name].meaning}"
