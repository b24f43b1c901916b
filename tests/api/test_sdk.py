"""The Trainer as a script uses it: rollouts in sessions, seeds, the cache, what ends a rollout early."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from areno import SamplingParams, Trainer
from areno.errors import EngineError
from tests.helpers.sdk_script import SAMPLING, made, sampled, session, tokens_of


def test_an_error_or_ctrl_c_in_a_session_leaves_the_trainer_usable(trainer: Trainer) -> None:
    expected = tokens_of(sampled(trainer, seed=3))
    for error in (ValueError, KeyboardInterrupt):

        def fail(*_: object, error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            sampled(trainer, n_samples=8, on_progress=fail)  # with samples under way
        assert tokens_of(sampled(trainer, seed=3)) == expected
    with pytest.raises(KeyboardInterrupt):
        sampled(trainer, n_samples=8, on_progress=fail)
    assert trainer.score_logprobs("actor", [[4, 5]])


def test_a_cancelled_task_ends_its_rollout(trainer: Trainer) -> None:
    expected, calls = tokens_of(sampled(trainer, seed=3)), []

    def cancel(*_: object) -> None:
        calls.append(1)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def cancelled() -> None:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        async with session(trainer, max_running_prompts=1):
            trainer.rollout_batch(["1+1="] * 20, 1, params, on_progress=cancel)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    if sys.version_info >= (3, 11):
        assert len(calls) == 1
    assert tokens_of(sampled(trainer, seed=3)) == expected


def test_cancellation_is_told_when_a_session_begins(trainer: Trainer) -> None:
    """A loop without any other await could not be stopped by Ctrl-C under asyncio.run."""

    async def loop() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        async with session(trainer):
            raise AssertionError("the session began")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(loop())


def test_large_seeds_are_seeds_of_their_own(trainer: Trainer) -> None:
    """Of those, too, that differ in bits of which a request's 64 have no room."""
    draws = [str(tokens_of(sampled(trainer, n_samples=16, seed=seed))) for seed in (3, 3 + (1 << 32), 3 + (1 << 40))]
    assert len(set(draws)) == 3


def test_rollouts_differ_and_a_script_repeats_itself() -> None:
    drawn = []
    for seed in (1, 1, 2):
        with made(runtime={"seed": seed}) as trainer:
            first, second = tokens_of(sampled(trainer, n_samples=8)), tokens_of(sampled(trainer, n_samples=8))
            assert first != second
            assert tokens_of(sampled(trainer, n_samples=8, seed=5)) == tokens_of(sampled(trainer, n_samples=8, seed=5))
            drawn.append((first, second))
    assert drawn[0] == drawn[1] != drawn[2]


def test_text_is_encoded_as_in_recipes(trainer: Trainer) -> None:
    text, tokenizer = "12+19=", trainer.get_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}?"
    try:
        [result] = sampled(trainer, [text], 1)
        [as_messages] = sampled(trainer, [[{"role": "user", "content": text}]], 1)
    finally:
        tokenizer.chat_template = None
    assert result.prompt_tokens == as_messages.prompt_tokens == tokenizer.encode(f"{text}?")
    [plain] = sampled(trainer, [text], 1)
    assert plain.prompt_tokens == tokenizer.encode(text)


def test_the_cache_is_made_for_the_prompts_and_kept(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(max_running_prompts=5) as trainer:
        specs, begin = [], trainer.engine.begin_rollout
        monkeypatch.setattr(trainer.engine, "begin_rollout", lambda spec: (specs.append(spec), begin(spec)))
        trainer.engine.info.context_len = 4096  # of the driver's picture: lengths below it count
        with session(trainer):
            trainer.rollout_token_batch([[4]], 1, SAMPLING)
            trainer.rollout_token_batch([[4] * 20], 1, SAMPLING)
            with pytest.raises(EngineError):
                trainer.rollout_token_batch([[4] * 200], 1, SAMPLING)
        with session(trainer, max_running_prompts=2):
            trainer.rollout_token_batch([[4]], 1, SAMPLING)
    assert [(spec.max_running, spec.max_len) for spec in specs] == [(5, 128), (5, 256), (2, 256)]


def test_by_default_all_samples_of_a_rollout_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rollouts of no more samples share one decoder, whose CUDA graphs would be lost with it."""
    one = SamplingParams(max_new_tokens=1)
    with made() as trainer:
        specs, begin = [], trainer.engine.begin_rollout
        monkeypatch.setattr(trainer.engine, "begin_rollout", lambda spec: (specs.append(spec), begin(spec)))
        for n_samples in (3, 100, 80, 65):
            with session(trainer):
                trainer.rollout_token_batch([[4], [5]], n_samples, one)
        with session(trainer, max_running_prompts=7):
            trainer.rollout_token_batch([[4]], 100, one)
    assert [spec.max_running for spec in specs] == [64, 256, 256, 256, 7]


def test_drop_rollout_state_and_cache_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(runtime={"drop_rollout_state": True, "max_kv_tokens": 999, "max_prefill_tokens": 77}) as trainer:
        dropped, end = [], trainer.engine.end_rollout
        specs, begin = [], trainer.engine.begin_rollout
        monkeypatch.setattr(trainer.engine, "end_rollout", lambda drop=False: (dropped.append(drop), end(drop)))
        monkeypatch.setattr(trainer.engine, "begin_rollout", lambda spec: (specs.append(spec), begin(spec)))
        sampled(trainer)
    assert dropped == [True]
    assert (specs[0].decoder.max_kv_tokens, specs[0].decoder.max_prefill_tokens) == (999, 77)


def test_a_long_rollout_is_followed_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("areno"), "propagate", True)
    with made(decode_progress_interval_s=1e-6) as trainer, caplog.at_level(logging.INFO, logger="areno"):
        sampled(trainer)
    assert "rollout decode progress: dp=0/1 active=" in caplog.text


def test_prompt_batches(trainer: Trainer) -> None:
    rows = [{"prompt": "1+1=", "solutions": "2"}, {"prompt": "1" * 20}, {"prompt": "2+2=", "solutions": "4"}]
    batches = list(trainer.load_prompt_batches([*rows, *rows], batch_size=3, max_prompt_tokens=10))
    assert [[item.prompt for item in batch.items] for batch in batches] == [["1+1=", "2+2=", "1+1="], ["2+2="]]
    assert [batch.items[0].solutions for batch in batches] == ["2", "4"]
    assert [(batch.skipped_long, batch.total_skipped_long) for batch in batches] == [(1, 1), (1, 2)]
    renamed = [{"q": row["prompt"], "a": row.get("solutions")} for row in rows]
    found = trainer.load_prompt_batches(renamed, batch_size=8, max_prompt_tokens=10, prompt_key="q", solutions_key="a")
    assert [(item.prompt, item.solutions, item.record) for item in next(found).items] == [
        ("1+1=", "2", renamed[0]),
        ("2+2=", "4", renamed[2]),
    ]
    assert trainer.get_tokenizer().decode(batches[0].items[0].tokens) == "1+1="
