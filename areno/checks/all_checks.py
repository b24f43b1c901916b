"""The checks of a run, by group, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areno.checks import rows
from areno.checks.findings import Check

CHECKS: Mapping[str, Sequence[Check]] = {
    "data": (rows.forms_of_rows, rows.dropped_rows),
}
