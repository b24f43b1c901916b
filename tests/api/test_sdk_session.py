"""RolloutSession.prepare: what it accepts, and when."""

from __future__ import annotations

from typing import Any

import pytest

from areno import SamplingParams
from areno.errors import ConfigError, EngineError
from tests.helpers.sdk_script import made


def test_prepare_is_refused_outside_its_session_and_for_what_is_no_length() -> None:
    with made() as trainer:
        session = trainer.rollout_session(sampling_params=SamplingParams(max_new_tokens=4), proxy=False)
        with pytest.raises(EngineError, match="outside the `with` block"):
            session.prepare(64)
        with session:
            wrong: list[Any] = [0, -1, "a", 1.5]
            for length in wrong:
                with pytest.raises(ConfigError, match="n_tokens: is"):
                    session.prepare(length)
            session.prepare(10**7)
            assert trainer._sessions.longest <= max(128, trainer.engine.info.context_len)
        with pytest.raises(EngineError, match="outside the `with` block"):
            session.prepare(64)


def test_more_samples_wait_their_turn_while_a_stream_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger batch would need another cache, with which the stream would end; longer samples cannot wait."""
    one = SamplingParams(max_new_tokens=1)
    with made() as trainer:
        specs, begin = [], trainer.engine.begin_rollout
        monkeypatch.setattr(trainer.engine, "begin_rollout", lambda spec: (specs.append(spec), begin(spec)))
        trainer.engine.info.context_len = 4096  # of the driver's picture
        with trainer.rollout_session(sampling_params=one, proxy=False) as session:
            session.prepare(64)
            monkeypatch.setattr(type(trainer.engine), "is_streaming", True)
            [result] = trainer.rollout_token_batch([[4]], 100, one)
            assert len(result.sequences) == 100
            assert len(specs) == 1
            with pytest.raises(EngineError, match="larger cache"):
                session.prepare(500)
