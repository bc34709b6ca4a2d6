"""environment.yml asks for what pyproject.toml asks for, bound by bound, and the citation names its version."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = {"fastjsonschema": "python-fastjsonschema"}  # the names that differ on conda-forge


def test_environment_equals_pyproject():
    extras = PROJECT["optional-dependencies"]
    wanted = {"python" + PROJECT["requires-python"], *PROJECT["dependencies"], *extras["test"], *extras["notebooks"]}
    wanted = [re.sub(r"^[\w-]+", lambda name: CONDA.get(name[0], name[0]), line) for line in wanted]
    listed = (ROOT / "environment.yml").read_text().partition("dependencies:\n")[2]
    assert re.findall(r"- (.+)", listed)[-3:] == ["pip", "pip:", "-e ."]
    assert sorted(re.findall(r"- (.+)", listed)[:-3]) == sorted(wanted)


def test_extras_agree_on_bounds():
    lines = {line for extra in PROJECT["optional-dependencies"].values() for line in extra if ">" in line}
    names = [line.split(">")[0] for line in lines]
    assert len(names) == len(set(names))


def test_citation_names_the_version():
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
