"""JSON that a model wrote, and the schemas of the tools that it was offered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]
MOST_REFERENCES = 10  # that are followed

# Tools made from Python signatures often have its types in the place of JSON's, even as "int, optional".
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


def load_json(text: str) -> Any:
    """The value of a JSON text. ValueError if it is none, for whatever reason."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dump_json(value: Any) -> str:
    """A value as JSON. ValueError for what JSON does not have, such as infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError("not expressible in JSON") from error
    return text


def _refuse(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def schemas_of(tools: Sequence[Any] | None) -> dict[str, Schema] | None:
    """Name -> parameters of each tool, in the form {"type": "function", "function": {...}} or the function alone.

    None where it is not known which tools there are. What is no tool is left out.
    """
    if tools is None:
        return None
    schemas: dict[str, Schema] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            schemas[name] = parameters if isinstance(parameters, dict) else {}
    return schemas


def properties_of(schema: Schema) -> dict[str, Schema]:
    """The schemas of an object's properties. Some tools give the properties themselves in the place of the object."""
    is_bare = "properties" not in schema and not isinstance(schema.get("type"), str)
    properties = schema if is_bare else schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: each if isinstance(each, dict) else {} for name, each in properties.items()}


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema that a `$ref` into the root points to; the schema itself if it has none."""
    for _ in range(MOST_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        schema = target
    return schema


def json_type(name: str) -> str:
    """The JSON name of a type."""
    word = name.partition(",")[0].strip()
    return _ALIASES.get(word, word)


def types_of(schema: Schema) -> set[str]:
    """The JSON types that a schema allows, as far as it says; empty if it does not."""
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    types = {json_type(each) for each in listed if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            types |= types_of(branch) if isinstance(branch, dict) else set()
    return types
