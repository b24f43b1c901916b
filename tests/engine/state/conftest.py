"""Writers of run states that wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from areno.engine.state import storage


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    event = threading.Event()
    write = storage.StateFileWriter._write
    monkeypatch.setattr(storage.StateFileWriter, "_write", lambda self, file: event.wait(60) and write(self, file))
    yield event
    event.set()
