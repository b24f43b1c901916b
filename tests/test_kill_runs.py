"""Ten of the runs that `python tests/kill_runs.py` kills: at random moments, inside of saves, and twice in a row."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLAN = [
    ("gspo", ["driver at state"], "inline"),
    ("gspo", ["worker at 0.6"], "spawn"),
    ("gspo", ["group at 0.9", "driver at checkpoint"], "spawn"),
    ("ppo", ["group at state"], "spawn"),
    ("ppo", ["driver at 0.7"], "inline"),
    ("ppo", ["worker at state", "worker at 0.8"], "spawn"),
    ("dpo", ["driver at 0.8"], "inline"),
    ("dpo", ["group at checkpoint"], "spawn"),
    ("sft", ["worker at state"], "spawn"),
    ("sft", ["driver at 0.1", "driver at state"], "inline"),
]
