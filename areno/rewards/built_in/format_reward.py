"""The built-in reward `format`: 1.0 if the whole completion matches reward.format.pattern, else 0.0."""

from __future__ import annotations

import re
from typing import Any


def reward_fn(record: Any, pattern: str) -> float:
    """Score one RewardRecord."""
    return float(re.fullmatch(pattern, record.completion, re.S) is not None)
