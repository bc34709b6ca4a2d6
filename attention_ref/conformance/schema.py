"""What golden/schema.json demands of the index of a variant, as far as no library is needed to see it."""
import json
from pathlib import Path

SCHEMA = Path(__file__).parent.parent / "golden" / "schema.json"
TYPES = dict(object=dict, array=list, string=str, integer=int)


def validated(index, where):
    """The index, a dict, whose fields and whose cases' fields are those of the schema, of the types it states.

    Raises one ValueError that names the place, what was expected and what came. Texts inside of fields are left to a
    JSON Schema library.
    """
    schema = json.loads(SCHEMA.read_text())
    version = schema["properties"]["format"]["const"]
    if not isinstance(index, dict) or index.get("format") != version:
        came = repr(index.get("format")) if isinstance(index, dict) else f"a {type(index).__name__}"
        raise ValueError(f"golden data: {where}: expected format {version!r}, got {came}")
    _check_fields(index, schema, schema["definitions"], where)
    for number, case in enumerate(index["cases"]):
        _check_fields(case, schema["definitions"]["case"], schema["definitions"], f"{where}, case {number}")
    return index


def _check_fields(found, schema, definitions, where):
    if not isinstance(found, dict):
        raise ValueError(f"golden data: {where}: expected an object, got a {type(found).__name__}")
    wrong = [f"{name} is missing" for name in schema["required"] if name not in found]
    for name, value in found.items():
        known = schema["properties"].get(name)
        if known is None:
            wrong.append(f"{name} is not known")
        elif not isinstance(value, TYPES.get(_type(known, definitions), object)):
            wrong.append(f"{name}: expected {_type(known, definitions)}, got {type(value).__name__}")
    if wrong:
        raise ValueError(f"golden data: {where}: {'; '.join(wrong)}")


def _type(known, definitions):
    """The JSON type of a field, "" if the schema states none."""
    name = known.get("$ref", "").rpartition("/")[2]
    return (definitions[name] if name else known).get("type", "")
