"""The worked examples of the Trainer's reference run, and its arguments are those documented."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from areno import ArenoConfig, ModelRole, SamplingParams, Trainer, TrainSequence
from tests.helpers.sdk_script import MODEL

TYPICAL_FLOW = """
import asyncio
import areno
from areno import Trainer

async def main():
    # Near-instant: constructs the Python wrapper only.
    trainer = Trainer(
        world_size=1,
        model_path="Qwen/Qwen3.5-4B",
        backend_type=areno.Areno,
        custom_config=areno.ArenoConfig(tp_size=1),
    )

    # Takes a moment: loads tokenizer, starts workers, loads checkpoint.
    trainer.init()

    # Rollout calls must run inside an explicit rollout session. The
    # session owns actor onload/offload and rollout-state cleanup.
    sampling = areno.SamplingParams(max_new_tokens=128)
    async with trainer.rollout_session(sampling_params=sampling, proxy=False):
        rollout = trainer.rollout_batch(["Solve 12 * 13."], n_samples=1, sampling_params=sampling)

    # Build TrainSequence rows and a loss function for your algorithm,
    # then run one backend optimizer step.
    # stats = trainer.train(batch_data, loss_fn, mini_bs=1)

    # Release metric writers and local resources.
    trainer.close()

asyncio.run(main())
"""

ONE_STEP = """
import asyncio
from functools import partial

from datasets import load_dataset

import areno
from areno import SamplingParams, TrainSequence, Trainer
from areno.loss_fns import gspo_loss_fn


def normalize_rewards(rewards):
    mean = sum(rewards) / len(rewards)
    var = sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards), 1)
    std = max(var ** 0.5, 1e-6)
    return [(reward - mean) / std for reward in rewards]


async def main():
    trainer = Trainer(
        world_size=1,
        model_path="Qwen/Qwen3.5-4B",
        backend_type=areno.Areno,
        custom_config=areno.ArenoConfig(tp_size=1),
    )
    trainer.init()

    row = load_dataset("gsm8k", "main", split="train[0:1]")[0]
    target = str(row["answer"]).rsplit("####", 1)[-1].strip()
    prompt = (
        "Solve the problem and put the final answer in \\\\boxed{}.\\n\\n"
        f"Problem: {row['question']}\\nSolution:"
    )
    prompt_tokens = trainer.get_tokenizer().encode(prompt)
    sampling = SamplingParams(max_new_tokens=128, temperature=1.0)

    async with trainer.rollout_session(sampling_params=sampling, proxy=False):
        rollout = trainer.rollout_token_batch([prompt_tokens], n_samples=4, sampling_params=sampling)[0]

    completions = [trainer.get_tokenizer().decode(seq.resp_tokens) for seq in rollout.sequences]
    rewards = [1.0 if target in completion else 0.0 for completion in completions]
    advantages = normalize_rewards(rewards)

    batch = []
    for seq, reward, advantage in zip(rollout.sequences, rewards, advantages, strict=True):
        response_len = len(seq.resp_tokens)
        batch.append(
            TrainSequence(
                prompt_mask=[True] * len(prompt_tokens) + [False] * response_len,
                tokens=prompt_tokens + seq.resp_tokens,
                logprobs=[0.0] * len(prompt_tokens) + seq.resp_logprobs,
                advantages=[0.0] * len(prompt_tokens) + [advantage] * response_len,
                reward=reward,
                eos_token_id=trainer.get_tokenizer().eos_token_id,
            )
        )

    stats = trainer.train(batch, partial(gspo_loss_fn, clip_eps=3.0e-4), mini_bs=4)
    print(stats)
    trainer.close()

asyncio.run(main())
"""


def run_example(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text.replace("Qwen/Qwen3.5-4B", MODEL), "example", "exec"), names)
    return names


def test_the_typical_flow_runs() -> None:
    run_example(TYPICAL_FLOW)


def test_one_gspo_step_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import datasets

    asked: list[Any] = []

    def local_rows(*what: str, split: str) -> list[dict[str, str]]:
        asked.append((*what, split))
        return [{"question": "27+35=", "answer": "A carry. #### 1"}]

    monkeypatch.setattr(datasets, "load_dataset", local_rows)
    run_example(ONE_STEP)
    assert asked == [("gsm8k", "main", "train[0:1]")]
    stats = eval(capsys.readouterr().out.splitlines()[-1])
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["logp_abs_diff_max"] < 1e-4
    assert stats["skipped_steps"] == 0


DOCUMENTED: dict[Any, str] = {
    Trainer: "world_size, model_path, backend_type=None, custom_config=None, metrics_log_dir=None",
    Trainer.init: "self",
    Trainer.get_tokenizer: "self",
    Trainer.load_prompt_batches: "self, dataset, *, batch_size, max_prompt_tokens, prompt_key='prompt', "
    "solutions_key='solutions'",
    Trainer.rollout_batch: "self, prompts, n_samples, sampling_params",
    Trainer.rollout_token_batch: "self, prompt_tokens, n_samples, sampling_params",
    Trainer.rollout_session: "self, *, sampling_params, loss_mask_policy=None, max_running_prompts=None, "
    "timeout_s=300.0, proxy=True",
    Trainer.train: "self, batch_data, loss_fn, mini_bs=8, gradient_accumulation_steps=None",
    Trainer.ensure_roles: "self, roles",
    Trainer.score_logprobs: "self, role, token_rows",
    Trainer.score_values: "self, role, token_rows",
    Trainer.score_rewards: "self, role, token_rows",
    Trainer.train_values: "self, role, batch_data, mini_bs, gradient_accumulation_steps=None, *, "
    "cliprange_value=0.5, value_loss_coef=0.5",
    Trainer.save_checkpoint: "self, path",
    Trainer.close: "self",
    SamplingParams: "greedy=False, top_p=1.0, top_k=-1, max_new_tokens=16, max_context_len=None, temperature=1.0, "
    "stop=None, stop_token_ids=None, ignore_eos=False, skip_special_tokens=True, max_prompt_len=None",
    TrainSequence: "prompt_mask=None, tokens=None, logprobs=None, advantages=None, returns=None, values=None, "
    "ref_logprobs=None, reward=0.0, eos_token_id=0",
    ModelRole: "name, path, trainable, optimizer_lr=None",
    ArenoConfig: "model_path=None, tp_size=1, dp_size=None, devices=None, dummy_load=False, optimizer=None, "
    "runtime=None, max_running_prompts=None, decode_progress_interval_s=10.0",
}


OWN_DEFAULTS: dict[Any, dict[str, Any]] = {Trainer.train: {"mini_bs": None}}
"""Defaults that differ: without a number of rows, the engine chooses a number of tokens, which is faster."""


@pytest.mark.parametrize("thing", DOCUMENTED, ids=lambda thing: thing.__qualname__)
def test_arguments_are_those_documented(thing: Any) -> None:
    """In this order and with these defaults; what we have beyond them is optional and comes after."""
    names: dict[str, Any] = {}
    exec(f"def documented({DOCUMENTED[thing]}): ...", names)
    expected = inspect.signature(names["documented"]).parameters
    ours = inspect.signature(thing).parameters
    for kinds in ({inspect.Parameter.POSITIONAL_OR_KEYWORD}, {inspect.Parameter.KEYWORD_ONLY}):
        wanted = [p for p in expected.values() if p.kind in kinds]
        present = [p for p in ours.values() if p.kind in kinds]
        if inspect.Parameter.POSITIONAL_OR_KEYWORD in kinds:
            present = present[: len(wanted)]
        found = {p.name: p for p in present}
        assert [p.name for p in wanted] == [name for name in found if name in expected]
        for parameter in wanted:
            if parameter.default is not inspect.Parameter.empty:
                own = OWN_DEFAULTS.get(thing, {}).get(parameter.name, parameter.default)
                assert found[parameter.name].default == own
    extra = [p for name, p in ours.items() if name not in expected]
    assert all(p.default is not inspect.Parameter.empty for p in extra)


def test_runtime_keys_are_those_of_recipes() -> None:
    from areno.config.experiments import ExperimentConfig
    from areno.config.models import MicroBatchSpec, ModelConfig, PolicyConfig
    from areno.config.rollout import RolloutConfig
    from areno.config.run import EngineConfig
    from areno.plan.sdk_arguments import RuntimeConfig

    theirs: dict[str, Any] = {}
    for section in (ExperimentConfig, EngineConfig, ModelConfig, PolicyConfig, MicroBatchSpec, RolloutConfig):
        theirs |= get_type_hints(section)
    own = {"seed", "tokenizer_path"}
    for name, hint in get_type_hints(RuntimeConfig).items():
        assert name in own or theirs[name] == hint, name
