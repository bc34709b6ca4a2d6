"""attention_ref: what attention, in every form, is supposed to compute.

Every variant is a module with agreed names in it (`INPUTS`, `OUTPUTS`, `FORMS`, `vjp`, `BUGS`, `CASES`):
`attention_ref.sdpa`, `attention_ref.gqa`, ... `load_cases` gives golden cases, `check` and `diagnose` judge the outputs
of an implementation.
"""
import importlib
import pkgutil
from functools import cache
from pathlib import Path

__version__ = "0.1.0"

FAMILIES = ("dense", "position", "sparse", "compressed", "recurrent")
_FAMILY_OF = {module.name: family for family in FAMILIES
              for module in pkgutil.iter_modules([str(Path(__file__).parent / family)])}

__all__ = ["variants", "load_cases", "check", "diagnose", *_FAMILY_OF]


@cache
def variants():
    """Name -> module of every variant, in the order of the families."""
    return {name: importlib.import_module(f"{__name__}.{family}.{name}") for name, family in _FAMILY_OF.items()}


def __getattr__(name):
    if name in ("load_cases", "check", "diagnose"):
        from .conformance import cases, diagnosis, verify
        return dict(load_cases=cases.load_cases, check=verify.check, diagnose=diagnosis.diagnose)[name]
    if name in variants():
        return variants()[name]
    raise AttributeError(f"attention_ref has no attribute {name!r}; the variants are {', '.join(variants())}")


def __dir__():
    return sorted(__all__)
