"""RolloutSession.prepare: what it accepts, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
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


@pytest.mark.parametrize("most", [3, 1000])
def test_a_rollout_lists_its_most_likely_tokens(most: int) -> None:
    """K tokens in the place of each token, and itself, with the log-probability of the sample."""
    params = SamplingParams(max_new_tokens=6, temperature=20.0, top_logprobs=most)
    with made() as trainer:
        with trainer.rollout_session(sampling_params=params, proxy=False):
            results = trainer.rollout_batch(["17+25=", "38+44="], 4, params, seed=1)
        n_listed = min(most, trainer.engine.info.vocab_size)
    found = [sequence for result in results for sequence in result.sequences]
    n_outside = 0
    for sequence in found:
        assert sequence.top_tokens is not None
        assert sequence.top_logprobs is not None
        assert sequence.top_tokens.shape == sequence.top_logprobs.shape == (sequence.n_tokens, n_listed + 1)
        for token, logprob, ids, listed in zip(
            sequence.resp_tokens, sequence.resp_logprobs, sequence.top_tokens, sequence.top_logprobs, strict=True
        ):
            assert (np.diff(listed[:-1]) <= 0).all()
            assert len({*ids.tolist()}) == n_listed + 1
            [at] = np.flatnonzero(ids == token)
            assert listed[at] == pytest.approx(logprob, abs=1e-5)
            assert (ids[-1] == -1) == (at < n_listed)
            n_outside += at == n_listed
            total = np.exp(listed[ids >= 0].astype(np.float64)).sum()
            assert total == pytest.approx(1.0, abs=1e-5) if most > 100 else total < 1
    assert (n_outside > 0) == (most < 100)
