"""RolloutSession.prepare: what it accepts, and when."""

from __future__ import annotations

from typing import Any

import pytest
from sdk_script import made

from areno import SamplingParams
from areno.errors import ConfigError, EngineError


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
