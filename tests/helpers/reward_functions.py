"""Reward functions of tests. This module imports little, because each reward process imports it anew."""

from __future__ import annotations

import time
from typing import Any


def odd_length(record: Any) -> float:
    return float(len(record.completion) % 2)


def slow_odd_length(record: Any) -> float:
    time.sleep(0.05 * (len(record.completion) % 3))
    return odd_length(record)


def always_one(record: Any) -> float:
    return 1.0


def length(record: Any) -> float:
    return float(len(record.completion))


def odd_first_digit(record: Any) -> float:
    return float(record.completion[:1] in "13579")


def slow_length(record: Any) -> float:
    time.sleep(0.02)
    return float(len(record.completion) % 3)


def slow_length_or_none(record: Any) -> float | None:
    return None if record.completion.startswith("1") else slow_length(record)
