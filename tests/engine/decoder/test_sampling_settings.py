"""Every sampling setting changes what is sampled. A setting without an effect, or without a case here, fails."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from areno.config.reward import RewardConfig
from areno.config.rollout import GenerationConfig, SamplingConfig
from areno.engine.requests import RequestRefused
from areno.plan.plan import sampling_params
from areno.schema.fields import settings
from areno.trainers.reward_sources import Scorer
from areno.types import GenerationOutput, GenerationRequest, PromptItem, SamplingParams
from tests.helpers.tiny_decoder import EOS, VOCAB, make_decoder, prompt, run

# A value other than the default, and the settings that it needs beside it.
CHANGES: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_new_tokens": {"min_new_tokens": 39},
    "temperature": {"temperature": 0.3},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "min_p": {"min_p": 0.5},
    "stop": {"stop": ["token7 "]},
    "stop_token_ids": {"stop_token_ids": [5, 6, 7]},
    "ignore_eos": {"ignore_eos": True},
    "max_context_len": {"max_context_len": 20},
}
REFUSED = {"max_prompt_len": 5}  # of a prompt of 9 tokens
# test_skip_special_tokens_is_of_texts, tests/engine/decoder/test_logit_edits.py
NOT_OF_DRAWS = {"skip_special_tokens", "top_logprobs"}


def sampled(**changes: Any) -> list[list[int]]:
    """Return 8 completions of a prompt, always from the same random numbers."""
    decoder = make_decoder(detokenize=lambda tokens: "".join(f"token{token} " for token in tokens))
    params = SamplingParams(**{"max_new_tokens": 40, **changes})
    decoder.submit(GenerationRequest(request_id=0, prompt=prompt(1, 9), n_samples=8, seed=3, params=params))
    return [output.tokens for _, output in sorted(run(decoder).items())]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    found = sampled()
    assert any(tokens[-1] == EOS for tokens in found), "otherwise a setting of the end has nothing to change"
    return found


@pytest.mark.parametrize("name", settings(SamplingParams))
def test_every_setting_changes_what_is_sampled(name: str, plain: list[list[int]]) -> None:
    if name in REFUSED:
        params = SamplingParams(**{name: REFUSED[name]})
        with pytest.raises(RequestRefused, match=name):
            make_decoder().limits.max_new(GenerationRequest(request_id=0, prompt=prompt(1, 9), params=params))
    elif name not in NOT_OF_DRAWS:
        assert name in CHANGES, f"give {name} a value in CHANGES that changes draws, or ends or extends completions"
        assert sampled(**CHANGES[name]) != plain


@pytest.mark.parametrize("name", [name for name in CHANGES if name in settings(SamplingConfig)])
def test_every_setting_of_a_configuration_arrives(name: str) -> None:
    params = sampling_params(GenerationConfig(**{"max_new_tokens": 40, **CHANGES[name]}))
    assert asdict(params)[name] == CHANGES[name][name]


@pytest.mark.slow
def test_skip_special_tokens_is_of_texts(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of("qwen3")
    tokens = [*tokenizer.encode("seven", add_special_tokens=False), tokenizer.eos_token_id]
    texts: list[str] = []
    scoring = SimpleNamespace(add=lambda records: texts.extend(record.completion for record in records.values()))
    rewards = SimpleNamespace(scoring=lambda: scoring, scores=lambda source: True)
    setup: Any = SimpleNamespace(
        config=SimpleNamespace(reward=RewardConfig()),
        judge=None,
        tokenizer=tokenizer,
        rewards=rewards,
        run=SimpleNamespace(step=0, progress=SimpleNamespace(epoch=0)),
    )
    output = GenerationOutput(
        request_id=0,
        sample=0,
        tokens=tokens,
        logprobs=[-1.0] * len(tokens),
        versions=[0] * len(tokens),
        finish_reason="stop",
    )
    for skips in (True, False):
        gconfig = GenerationConfig(n_samples=1, skip_special_tokens=skips)
        Scorer(setup, [PromptItem(prompt="a", text="a", tokens=[5])], gconfig, 0).score_outputs([output])
    assert texts == ["seven", f"seven{tokenizer.eos_token}"]


def test_settings_that_the_kernel_does_not_compute_are_found() -> None:
    assert not SamplingParams(temperature=0.5, top_k=3, top_p=0.5, frequency_penalty=1.0).edits_logits
    edits = {name for name, values in CHANGES.items() if SamplingParams(**values).edits_logits}
    assert edits >= {"presence_penalty", "min_p"}
    assert GenerationRequest(request_id=0, prompt=[1], logit_bias={VOCAB - 1: 1.0}).edits_logits
