"""A trainer of the SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areno import Trainer
from tests.helpers.sdk_script import made


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One CPU trainer for all tests of a module that leave it as usable as it was."""
    with made() as trainer:
        yield trainer
