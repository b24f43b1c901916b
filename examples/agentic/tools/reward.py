"""1 for a call with the direction that the prompt names, 0 for one with another, -1 without a call."""

import json


def reward_fn(record):
    if not record.tool_calls:
        return -1.0
    arguments = json.loads(record.tool_calls[0]["function"]["arguments"])
    return float(arguments.get("direction") == record.solutions)
