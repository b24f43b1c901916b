"""Numbers that are not finite: no setting of a request makes them, and one request that has some fails alone."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from openai import OpenAI

from areno import SamplingParams
from areno.agents.proxy import SessionProxy
from areno.config.rollout import MIN_TEMPERATURE, GenerationConfig
from areno.engine.decoder.sampler import PendingTokens
from areno.errors import ConfigError, EngineError
from tests.helpers.agent_model import EOS, made
from tests.helpers.processes import worker_of
from tests.helpers.tiny_decoder import MIXED, assert_same, make_decoder, mixed_outputs, model, request, run

POISON = 70


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probability of a sample whose prompt has the token POISON is NaN."""
    wait = PendingTokens.wait_for_tokens

    def poisoned(self: PendingTokens) -> Any:
        tokens_B, logprobs_B = wait(self)
        return tokens_B, np.where([POISON in each.request.prompt for each in self.sequences], np.nan, logprobs_B)

    monkeypatch.setattr(PendingTokens, "wait_for_tokens", poisoned)


def ask(proxy: SessionProxy, **fields: Any) -> httpx2.Response:
    body = json.dumps({"model": "policy", "prompt": "hello", "max_tokens": 4, "seed": 1, **fields})
    return httpx2.post(
        f"{proxy.base_url}/completions", content=body, headers={"Authorization": f"Bearer {proxy.api_key}"}
    )


# Settings of a request


@pytest.mark.parametrize("temperature", ["1e-6", "1e-39", "1e-45", "1e-320"])
def test_a_tiny_temperature_counts_as_0(proxy: SessionProxy, temperature: str) -> None:
    how: Any = {"logprobs": 2, "echo": True, "top_k": 4}
    expected = ask(proxy, temperature=0, **how).json()["choices"]
    assert ask(proxy, temperature=float(temperature), **how).json()["choices"] == expected


def test_the_least_temperature_has_its_own_log_probabilities(proxy: SessionProxy) -> None:
    greedy, cold = (
        ask(proxy, temperature=temperature).json()["areno"]["choices"][0] for temperature in (0, MIN_TEMPERATURE)
    )
    assert cold["token_ids"] == greedy["token_ids"]
    assert cold["logprobs"] == [0.0] * 4
    assert max(greedy["logprobs"]) < -0.1


TINY, LARGEST = 1e-320, 1.7e308
BIAS = {str(token): -100 if token % 2 else 100 for token in range(389)}


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": TINY},
        {"top_p": 1e-46, "top_k": 2**31 - 1, "temperature": 2},
        {"min_p": TINY, "temperature": MIN_TEMPERATURE},
        {"min_p": 1, "logit_bias": {str(EOS): 100}, "min_tokens": 3, "temperature": 1},
        {"logit_bias": BIAS, "temperature": MIN_TEMPERATURE},
        {"logit_bias": {"5": -100}, "top_p": TINY, "frequency_penalty": -2, "presence_penalty": 2},
        {"frequency_penalty": TINY, "presence_penalty": -TINY, "temperature": MIN_TEMPERATURE},
        {"min_tokens": 4, "stop_token_ids": list(range(64)), "temperature": MIN_TEMPERATURE, "top_k": 1},
        {"seed": -(2**63)},
        {"max_tokens": 2**31 - 1, "stop_token_ids": list(range(0, 389, 7)), "min_tokens": 20},
    ],
)
def test_extreme_settings_have_finite_log_probabilities(proxy: SessionProxy, fields: Any) -> None:
    answer = ask(proxy, logprobs=3, **fields)
    assert answer.status_code == 200, answer.text
    [told] = answer.json()["areno"]["choices"]
    assert len(told["logprobs"]) >= min(fields.get("min_tokens", 1), 4)
    assert all(math.isfinite(number) and number <= 0 for number in told["logprobs"])


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [LARGEST, -LARGEST, math.inf, math.nan, -3, 10**400])
def test_numbers_out_of_range_are_refused(proxy: SessionProxy, field: str, value: Any) -> None:
    answer = ask(proxy, **{field: value})
    assert answer.status_code == 400, answer.text
    is_json = isinstance(value, int) or math.isfinite(value)
    assert answer.json()["error"]["param"] == (field if is_json else None), "JSON has no such numbers"
    assert ask(proxy, logit_bias={"5": value}).status_code == (400 if value != -3 else 200)


def test_min_p_compares_with_the_likeliest_token_that_is_not_banned(proxy: SessionProxy) -> None:
    """Else all tokens but the banned one would be dropped."""
    how: Any = {"temperature": 1, "logit_bias": {str(EOS): 100}, "min_tokens": 4}
    found = ask(proxy, **how, min_p=1).json()["areno"]["choices"][0]["token_ids"]
    assert found == ask(proxy, **{**how, "temperature": 0}).json()["areno"]["choices"][0]["token_ids"]


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_script_and_a_configuration_have_the_same_rule(temperature: float) -> None:
    with made() as trainer:
        with trainer.rollout_session(sampling_params=SamplingParams(), proxy=False):
            cold, greedy = (
                trainer.rollout_token_batch([[65, 66]], 1, SamplingParams(temperature=given), seed=1)[0].sequences[0]
                for given in (temperature, 0)
            )
        assert cold == greedy
        assert trainer.sampling.logprob_temperature == 1.0
        for wrong in (temperature, 1e6, math.nan, True):
            with pytest.raises(ConfigError, match=r"temperature: is .*; a number from 1e-05 to 100000 is expected"):
                trainer.score_logprobs("actor", [[65, 66]], wrong)
    with pytest.raises(ConfigError, match=f"temperature: is {temperature}; it must be at least 1e-05"):
        GenerationConfig(temperature=temperature)
    with pytest.raises(ConfigError, match=r"temperature: is 1e[+]300; it must be at most 100000"):
        GenerationConfig(temperature=1e300)


# One request among others


def test_a_request_without_finite_numbers_fails_alone_and_leaves_nothing_in_the_cache() -> None:
    """Keys and values that are NaN would reach others whose blocks they are later, since 0 * NaN is NaN."""
    expected = mixed_outputs()
    bad = request(90, 13, n_samples=2)

    def damage(module: torch.nn.Module, given: Any, hidden: torch.Tensor) -> None:
        rows = given[0].unfold(0, 13, 1) if len(given[0]) >= 13 else given[0].new_zeros(0, 13)
        for start in (rows == torch.tensor(bad.prompt)).all(-1).nonzero().flatten().tolist():
            hidden[start + 6] = torch.nan

    hook = model().embed.register_forward_hook(damage)
    try:
        decoder = make_decoder(n_blocks=24)
        for _ in range(2):  # each block belongs to several requests
            for one in (bad, *MIXED):
                decoder.submit(one)
            outputs = run(decoder)
            for sample in range(2):
                failed = outputs.pop((90, sample))
                assert (failed.finish_reason, failed.tokens) == ("error", [])
            assert_same(outputs, expected)
    finally:
        hook.remove()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("poison")
def test_the_client_is_told_and_others_are_served(client: OpenAI, proxy: SessionProxy, stream: bool) -> None:
    for prompt in ([65, POISON], [[65], [65, POISON]]):
        with pytest.raises(openai.APIError, match="the model produced non-finite logits for this request") as caught:
            list(client.completions.create(model="policy", prompt=prompt, stream=stream))
        if isinstance(caught.value, openai.APIStatusError):
            assert caught.value.status_code == 500
    assert ask(proxy).status_code == 200
    assert proxy.server.sampler.n_samples == 0


@pytest.mark.usefixtures("poison")
def test_a_rollout_of_the_run_itself_ends_with_it() -> None:
    """Its settings are valid, so it can only be the model."""
    with (
        made() as trainer,
        trainer.rollout_session(sampling_params=SamplingParams(), proxy=False),
        pytest.raises(EngineError, match=r"the model produced non-finite logits; .*actor\.path is damaged"),
    ):
        trainer.rollout_token_batch([[65], [POISON]], 1, SamplingParams())


def test_a_model_whose_weights_are_not_finite_ends_the_server() -> None:
    with made() as broken:
        weight = worker_of(broken.engine).actor.lm_head.weight
        with broken.rollout_session(sampling_params=SamplingParams()) as session:
            with torch.no_grad():
                weight[5, 0] = torch.nan
            answer = ask(session.proxy)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the server has stopped sampling; its log says why"
            with pytest.raises(EngineError, match="the model produced non-finite logits"):
                broken.engine.poll(0.0)
