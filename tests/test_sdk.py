"""The Trainer as a script uses it: the worked examples of its reference, sessions, roles, metrics, checkpoints."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from sdk_script import LR, MODEL, SAMPLING, loss, made, plain_rows, rows_of, sampled, session, tokens_of

from areno import ArenoConfig, ModelRole, SamplingParams, Trainer, TrainSequence
from areno.errors import EngineError


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One for all tests that leave it as usable as it was."""
    with made() as trainer:
        yield trainer


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
                assert found[parameter.name].default == parameter.default
    extra = [p for name, p in ours.items() if name not in expected]
    assert all(p.default is not inspect.Parameter.empty for p in extra)


def test_construction_loads_nothing() -> None:
    code = (
        "import sys, areno; t = areno.Trainer(2, 'Qwen/Qwen3.5-4B', areno.Areno, areno.ArenoConfig(tp_size=2)); "
        "t.close(); print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_runtime_keys_are_those_of_recipes() -> None:
    from areno.api.inputs.backend import RuntimeConfig
    from areno.config.models import MicroBatchSpec, ModelConfig, PolicyConfig
    from areno.config.run import EngineConfig, RolloutConfig

    theirs: dict[str, Any] = {}
    for section in (EngineConfig, ModelConfig, PolicyConfig, MicroBatchSpec, RolloutConfig):
        theirs |= get_type_hints(section)
    own = {"seed", "tokenizer_path"}
    for name, hint in get_type_hints(RuntimeConfig).items():
        assert name in own or theirs[name] == hint, name


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


def test_a_few_steps_teach_something(tmp_path: Path) -> None:
    from areno.loss_fns import gspo_loss_fn

    with made(optimizer={**LR, "lr": 1e-3}) as trainer:
        means = []
        for _ in range(12):
            results = sampled(trainer, ["17+25=", "38+44="], 32)
            rows = rows_of(results)
            for row, sequence in zip(rows, (s for r in results for s in r.sequences), strict=True):
                row.reward = float(sequence.resp_tokens[0] == 8)  # the digit 4
                row.advantages = [row.reward - 0.5] * len(row.tokens or [])
            means.append(sum(row.reward for row in rows) / len(rows))
            trainer.train(rows, partial(gspo_loss_fn, clip_eps=0.2))
        assert means[-1] > means[0] + 0.2, means


def test_training_is_at_the_temperature_of_the_last_rollout(trainer: Trainer) -> None:
    from areno.loss_fns import grpo_loss_fn

    hot = SamplingParams(max_new_tokens=6, temperature=0.5)
    rows = rows_of(sampled(trainer, params=hot))
    stats = trainer.train(rows, grpo_loss_fn)
    assert stats["logp_abs_diff_max"] < 1e-4
    rows = rows_of(sampled(trainer, params=hot))
    assert trainer.train(rows, grpo_loss_fn, temperature=1.0)["logp_abs_diff_max"] > 1e-2
    rows = rows_of(sampled(trainer, params=hot))
    scored = trainer.score_logprobs("actor", [row.tokens or [] for row in rows])
    for row, logprobs in zip(rows, scored, strict=True):
        n_prompt = sum(row.prompt_mask or [])
        assert logprobs[n_prompt:] == pytest.approx((row.logprobs or [])[n_prompt:], abs=1e-4)


class Scaled:
    """A loss that is an object."""

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(self, pack: Any, logprobs: Any) -> Any:
        value, stats = loss(pack, logprobs)
        return value * self.scale, stats


def scaled(pack: Any, logprobs: Any, *, scale: float) -> Any:
    return Scaled(scale)(pack, logprobs)


@pytest.mark.parametrize("workers", ["inline", "spawn"])
def test_every_form_of_a_custom_loss(workers: str) -> None:
    """All double the same loss."""
    scale = 2.0

    def closure(pack: Any, logprobs: Any) -> Any:
        return -scale * pack.token_mean(pack.trained(logprobs)), {"own": pack.trained(logprobs)}

    with made(optimizer={**LR, "lr": 1e-9}, runtime={"workers": workers}) as trainer:
        expected = 2 * trainer.train(plain_rows(), loss)["loss"]
        forms = [
            closure,
            lambda pack, lp: (scale * loss(pack, lp)[0], {}),
            partial(scaled, scale=scale),
            partial(lambda pack, lp, factor: (factor * loss(pack, lp)[0], {}), factor=scale),
            Scaled(scale),
        ]
        for form in forms:
            assert trainer.train(plain_rows(), form)["loss"] == pytest.approx(expected, abs=1e-4)
        assert {"own_mean", "own_std", "own_max"} <= set(trainer.train(plain_rows(), closure))


def test_metrics_of_a_script(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from areno.loss_fns import gspo_loss_fn

    with made(metrics_log_dir=str(tmp_path)) as trainer:
        trainer.ensure_roles({"critic": ModelRole("critic", MODEL, True, 1e-3)})
        for _ in range(2):
            [batch] = trainer.load_prompt_batches(
                [{"prompt": "8+7="}, {"prompt": "1" * 50}], batch_size=1, max_prompt_tokens=9
            )
            rows = rows_of(sampled(trainer, [item.prompt for item in batch.items]))
            for row in rows:
                row.values = row.returns = [0.5] * len(row.tokens or [])
            trainer.score_logprobs("actor", [row.tokens or [] for row in rows])
            trainer.train_values("critic", rows)
            stats = trainer.train(rows, gspo_loss_fn)
    assert stats["step_e2e_time_s"] >= stats["step_rollout_time_s"] + stats["step_train_time_s"] > 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in stats} <= names
    assert {"time/rollout", "time/score", "time/train", "time/train_critic", "time/step"} <= names
    assert {"train/critic_loss", "train/critic_value_loss", "train/critic_lr"} <= names
    for name, value in [
        ("rewards_mean", 0.5), ("rewards_std", 0.5), ("rewards_max", 1.0), ("rewards_min", 0.0), ("accuracy", 0.5),
        ("advantages_mean", 0.0), ("advantages_std", 1.0), ("prompt_len_mean", 4.0), ("num_sequences", 2.0),
        ("skipped_long", 1.0),
    ]:  # fmt: skip
        assert [event.value for event in events.Scalars(f"rollout/{name}")] == [value, value]
    assert {"rollout/logprobs_mean", "rollout/seq_len_mean", "rollout/response_len_mean"} <= names
    assert [event.value for event in events.Scalars("rollout/total_skipped_long")] == [1.0, 2.0]
    for name in ("train/loss", "train/critic_loss", "rollout/accuracy"):
        assert [event.step for event in events.Scalars(name)] == [1, 2]


def test_what_a_role_name_stands_for(trainer: Trainer, tmp_path: Path) -> None:
    from areno.api.inputs.roles import script_roles

    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))
    roles = [
        ModelRole("ref", MODEL, False),
        ModelRole("critic", MODEL, True, 3e-5),
        ModelRole("reward", str(judge), False),
        ModelRole("teacher", MODEL, False),
        ModelRole("judge", str(judge), False),
        ModelRole("value", MODEL, True),
    ]
    specs = script_roles({role.name: role for role in roles}, trainer.engine.spec)
    assert {name: (spec.head, spec.needs_head) for name, spec in specs.items()} == {
        "ref": ("lm", False),
        "critic": ("value", False),
        "reward": ("value", True),
        "teacher": ("lm", False),
        "judge": ("value", False),
        "value": ("value", False),
    }
    rates = {name: spec.optimizer and spec.optimizer.lr for name, spec in specs.items()}
    assert rates == {"ref": None, "critic": 3e-5, "reward": None, "teacher": None, "judge": None, "value": LR["lr"]}
    assert specs["critic"].optimizer == replace(specs["value"].optimizer, lr=3e-5)


def test_reference_and_critic_of_one_step(tmp_path: Path) -> None:
    from areno.loss_fns import grpo_loss_fn

    with made() as trainer:
        trainer.ensure_roles(
            {"ref": ModelRole("ref", MODEL, False), "critic": ModelRole("critic", MODEL, True, optimizer_lr=1e-2)}
        )
        rows = rows_of(sampled(trainer, n_samples=4))
        tokens = [row.tokens or [] for row in rows]
        before = trainer.score_logprobs("ref", tokens)
        assert before == trainer.score_logprobs("actor", tokens)  # a copy of the actor as it starts
        for row, ref, values in zip(rows, before, trainer.score_values("critic", tokens), strict=True):
            assert values == [0.0] * len(values)
            row.ref_logprobs, row.values, row.returns = ref, values, [1.0] * len(values)
        losses = [trainer.train_values("critic", rows, 4, cliprange_value=9.0)["value_loss"] for _ in range(6)]
        assert losses[0] == pytest.approx(1.0)
        assert losses[-1] < 0.5 * losses[0]
        assert trainer.train(rows, partial(grpo_loss_fn, kl_coef=0.1))["kl_loss"] == pytest.approx(0.0, abs=1e-6)
        assert trainer.score_logprobs("ref", tokens) == before != trainer.score_logprobs("actor", tokens)
        trainer.write_checkpoint(tmp_path / "critic", role="critic")
        with pytest.raises(EngineError, match="role 'critic' is loaded already"):
            trainer.ensure_roles({"critic": ModelRole("critic", MODEL, True, optimizer_lr=1e-3)})
        trainer.ensure_roles({"critic": ModelRole("critic", MODEL, True, optimizer_lr=1e-2)})  # what it is already
        trainer.ensure_roles({"reward": ModelRole("reward", str(tmp_path / "critic"), False)})
        rewards = trainer.score_rewards("reward", tokens)
        assert len(rewards) == len(tokens)
        assert min(rewards) > 0.1
        with pytest.raises(EngineError, match="reward"):
            trainer.train_values("reward", rows)
        with pytest.raises(EngineError, match="ref"):
            trainer.score_values("ref", tokens)
        trainer.release_role("ref")
        with pytest.raises(EngineError, match="ref"):
            trainer.score_logprobs("ref", tokens)


def test_a_checkpoint_is_a_model_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with made() as trainer:
        for _ in range(2):  # the second replaces the first
            trainer.train(plain_rows(), loss)
            path = trainer.save_checkpoint(str(tmp_path / "runs" / "last"))
        assert path == str(tmp_path / "runs" / "last")
        scored = trainer.score_logprobs("actor", [[4, 5, 6, 1]], 1.0)
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["last"]
    import torch

    tokens = torch.tensor([[4, 5, 6, 1]])
    logits = AutoModelForCausalLM.from_pretrained(path)(tokens).logits[0].log_softmax(-1)
    assert scored[0][1:] == pytest.approx(logits[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist(), abs=1e-4)
    with Trainer(1, path, custom_config=ArenoConfig(runtime={"device": "cpu"})) as again:
        again.init()
        assert again.score_logprobs("actor", [[4, 5, 6, 1]], 1.0)[0] == pytest.approx(scored[0], abs=1e-6)


def test_weights_from_another_folder(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(MODEL) / "config.json").read_bytes())
    config = {"model_path": tmp_path, "dummy_load": True}
    drawn = []
    for seed in (1, 1, 2):
        with made(**config, runtime={"seed": seed}) as random:
            assert random.get_tokenizer().get_vocab() == trainer.get_tokenizer().get_vocab()
            drawn.append(random.score_logprobs("actor", [[4, 5, 6]], 1.0))
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != trainer.score_logprobs("actor", [[4, 5, 6]], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_two_ranks_are_as_one(tp_size: int, tmp_path: Path) -> None:
    from areno.loss_fns import gspo_loss_fn

    def two_steps(world_size: int, tp_size: int) -> list[Any]:
        seen: list[Any] = []
        with made(world_size, tp_size=tp_size, dp_size=world_size // tp_size, optimizer={**LR, "lr": 1e-3}) as trainer:
            trainer.ensure_roles(
                {"critic": ModelRole("critic", MODEL, True, 1e-2), "ref": ModelRole("ref", MODEL, False)}
            )
            for step in range(2):
                results = sampled(trainer, ["12+19=", "8+7=", "55+6="], 4, seed=step)
                seen.append(tokens_of(results))
                rows = rows_of(results)
                tokens = [row.tokens or [] for row in rows]
                for row, values in zip(rows, trainer.score_values("critic", tokens), strict=True):
                    row.values, row.returns = values, [row.reward] * len(values)
                seen.append(trainer.train_values("critic", rows, 2)["value_loss"])
                seen.append(trainer.train(rows, gspo_loss_fn, mini_bs=2)["loss"])
                seen.append(trainer.score_logprobs("ref", tokens, 1.0)[0][1])
            with pytest.raises(EngineError, match="has no gradient"):
                trainer.train(rows, lambda pack, lp: (lp.detach().sum(), {}))
            trainer.save_checkpoint(tmp_path / f"{world_size}-{tp_size}")
        return seen

    for one, two in zip(two_steps(1, 1), two_steps(2, tp_size), strict=True):
        assert one == (two if isinstance(two, list) else pytest.approx(two, abs=1e-4))
