"""A trainer, the server of its session, and a client of the server. Modules override what they need otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from areno import SamplingParams, Trainer
from areno.agents.proxy import SessionProxy
from tests.helpers.agent_model import made


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with made() as trainer:
        yield trainer


@pytest.fixture(scope="module")
def proxy(trainer: Trainer) -> Iterator[SessionProxy]:
    with trainer.rollout_session(sampling_params=SamplingParams(max_new_tokens=24), max_running_prompts=16) as session:
        yield session.proxy


@pytest.fixture
def client(proxy: SessionProxy) -> OpenAI:
    return OpenAI(base_url=proxy.base_url, api_key=proxy.api_key, max_retries=0)
