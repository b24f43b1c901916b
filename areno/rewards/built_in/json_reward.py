"""The built-in reward `json`: 1.0 if the answer is JSON that fits the schema of its row, else 0.0.

The answer is the last fenced block behind </think> or, without one, all text there. The part `parses` tells whether it
is JSON at all. The schema is the row's field `schema`, an object or its text, else that of reward.json.schema; without
either, any JSON fits.
"""

from __future__ import annotations

import json
from typing import Any

from areno.rewards.built_in.answers import block


def reward_fn(record: Any, schema: Any = None) -> dict[str, float]:
    """Score one RewardRecord. Raises what jsonschema raises for a wrong schema."""
    of_row = record.record.get("schema")
    schema = schema if of_row is None else json.loads(of_row) if isinstance(of_row, str) else of_row
    try:
        value = json.loads(block(record.completion, "json"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "parses": 0.0}
    return {"reward": float(schema is None or _fits(value, schema)), "parses": 1.0}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _fits(value: Any, schema: Any) -> bool:
    from jsonschema.validators import validator_for

    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema).is_valid(value)
