"""Recipes from the command line to the checkpoint: the quickstart, real weights, supervised fine-tuning."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from areno.api import get_algorithm
from areno.engine.engine import Engine
from areno.launch.compose import load
from areno.trainers.policy_only import PolicyOnlyTrainer
from tests.helpers.recipe_runs import ROOT, command, graded_reward, metrics, rollouts, series, train, without_times

DATA = ROOT.parent / "shared/data"
STORIES = DATA / "models/stories260K-hf"
MINIMIND = DATA / "tokenizers/minimind"
CONVERSATIONS = DATA / "preference/dpo_en_demo.messages.jsonl"

# A short run of the stories task, 16 samples a step.
STORIES_RUN = [
    "--config-name=grpo-stories-stories260k-cpu",
    f"actor.path={STORIES}",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=24",
    "reward.workers=1",
]

needs = {
    path: pytest.mark.skipif(not path.exists(), reason=f"{path} is not there")
    for path in (STORIES, MINIMIND, CONVERSATIONS)
}


# The quickstart ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quickstart_starts_anywhere(tmp_path):
    said, _ = command("gspo", tmp_path, "total_train_steps=2", "trial_name=t")
    run_dir = tmp_path / "outputs/quickstart/t"
    assert "step=2/2 reward_mean=" in said
    assert said.count("metric=eval_accuracy value=") == 2
    assert 0.2 < metrics(run_dir)[1]["rollout/rewards_mean"] <= 0.5
    assert (run_dir / "checkpoints/latest/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "seed"), [("gspo", 1), ("grpo", 3)])
def test_quickstart_learns_to_carry(recipe, seed, tmp_path):
    said, seconds = command(recipe, tmp_path, "--config-name=quickstart", f"seed={seed}", "trial_name=t")
    run_dir = tmp_path / "outputs/quickstart/t"
    rewards, (before, after) = series(run_dir, "rollout/rewards_mean"), series(run_dir, "eval/accuracy")
    last = sum(rewards[-5:]) / 5
    print(
        f"{recipe} seed {seed}: {seconds:.1f} s, {rewards[0]:.3f} -> {last:.3f}, held out {before:.3f} -> {after:.3f}"
    )
    assert rewards[0] <= 0.5
    assert last >= 0.9
    assert before < 0.3
    assert after >= 0.9
    assert f"metric=eval_accuracy value={after:.6f}" in said


# Real weights --------------------------------------------------------------------------------------------------------


@needs[STORIES]
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_agrees_with_training(temperature, tmp_path):
    settings = ["total_train_steps=3", f"gconfig.temperature={temperature}", graded_reward(tmp_path)]
    run_dir = train("gspo", tmp_path, *STORIES_RUN, *settings)
    largest = series(run_dir, "train/logp_abs_diff_max")
    assert len(largest) == 3
    assert 0 < max(largest) <= 1e-4
    # The reference is the policy as it starts.
    kl = series(run_dir, "train/kl_loss")
    assert abs(kl[0]) < 1e-9
    assert kl[2] > 1e-6


@pytest.mark.slow
@needs[STORIES]
def test_several_updates_of_a_batch_move_the_ratio(tmp_path):
    short = [*STORIES_RUN, "total_train_steps=1", graded_reward(tmp_path)]
    one = train("grpo", tmp_path / "one", *short)
    two = train("grpo", tmp_path / "two", *short, "actor.ppo_n_minibatches=2")
    assert series(one, "train/ratio_std")[0] < 1e-5
    assert series(two, "train/ratio_std")[0] > 1e-4
    # The rollout's log-probabilities stay the denominator, so the second update sees the first.
    assert series(one, "train/logp_abs_diff_max")[0] < 1e-4
    assert series(two, "train/logp_abs_diff_max")[0] < 1e-4  # rollout against training before any update


@pytest.mark.slow
@needs[STORIES]
def test_sweep_and_determinism(tmp_path):
    short = [*STORIES_RUN, "total_train_steps=2", graded_reward(tmp_path)]
    swept = train("grpo", tmp_path / "sweep", *short, "-m", "seed=1,2")
    told = json.loads((swept / "sweep.json").read_text())
    assert told["objective"] == "rollout/rewards_mean, mean of the last 5 steps"
    objectives = {run["overrides"]["seed"]: run["objective"] for run in told["runs"]}
    again = train("grpo", tmp_path / "again", *short, "seed=1")
    assert without_times(swept / "0") == without_times(again)
    assert without_times(swept / "0") != without_times(swept / "1")
    assert series(swept / "0", "rollout/prompt_len_mean") != series(swept / "1", "rollout/prompt_len_mean")
    for number, seed in enumerate([1, 2]):
        rewards = series(swept / str(number), "rollout/rewards_mean")
        assert objectives[str(seed)] == pytest.approx(sum(rewards) / 2, rel=1e-5)


@needs[STORIES]
@pytest.mark.slow
def test_spawned_worker_gives_the_same(tmp_path):
    short = [*STORIES_RUN, "total_train_steps=3", graded_reward(tmp_path)]
    inline = train("grpo", tmp_path / "inline", *short, "engine.workers=inline")
    spawned = train("grpo", tmp_path / "spawned", *short, "engine.workers=spawn")
    assert without_times(inline) == without_times(spawned)


@needs[STORIES]
@pytest.mark.slow
@pytest.mark.parametrize("seed", [2])
def test_stories_mention_a_dog(seed, tmp_path):
    _, seconds = command(
        "grpo",
        tmp_path,
        "--config-name=grpo-stories-stories260k-cpu",
        f"actor.path={STORIES}",
        f"seed={seed}",
        "trial_name=t",
        "total_train_steps=16",  # of 40: the recipe says that it is above 0.9 after 11
        "rollout.dump_to_file=true",
    )
    run_dir = tmp_path / "outputs/stories/t"
    rewards = series(run_dir, "rollout/rewards_mean")
    last = sum(rewards[-5:]) / 5
    print(f"seed {seed}: {seconds:.1f} s, {rewards[0]:.3f} -> {last:.3f}")
    assert last - rewards[0] >= 0.3
    assert last >= 0.8
    # Still stories: most of the words are not "dog".
    words = " ".join(sample["completion"] for sample in rollouts(run_dir, len(rewards))).lower().split()
    assert sum("dog" in word for word in words) < 0.2 * len(words)


# Supervised fine-tuning ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs[MINIMIND]
@needs[CONVERSATIONS]
def test_sft_on_conversations(tmp_path):
    """Three real conversations of several turns, in the form of a chat template, as training and as evaluation data."""
    model = tmp_path / "model"
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=6400,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ).save_pretrained(model)
    loader = tmp_path / "loader.py"
    loader.write_text(
        "from areno.data.sources import read_rows\n"
        "def load_dataset(path, split):\n"
        "    rows = [row['prompt'] + row['chosen'] for row in read_rows(path) if len(row['prompt']) > 2]\n"
        "    return [{'messages': row} for row in rows if sum(len(m['content']) for m in row) < 2000][:3]\n",
        encoding="utf-8",
    )
    (tmp_path / "chat.yaml").write_text(
        f"""
defaults: [recipe, valid_dataset: default, _self_]
experiment_name: chat
tokenizer_path: {MINIMIND}
total_train_epochs: 6
actor:
  path: {model}
  init_from_scratch: true
  optimizer: {{lr: 5e-3, lr_scheduler_type: constant}}
  mb_spec: {{max_tokens_per_mb: 4096}}
train_dataset: {{path: {CONVERSATIONS}, loader: {loader}, batch_size: 3, max_length: 1500}}
valid_dataset: {{path: {CONVERSATIONS}, loader: {loader}, max_length: 1500}}
evaluator: {{freq_steps: 3, eval_before_train: true}}
""",
        encoding="utf-8",
    )
    run_dir = train("sft", tmp_path, f"--config-dir={tmp_path}", "--config-name=chat")
    losses, evaluated = series(run_dir, "train/loss"), series(run_dir, "eval/loss")
    assert losses[0] == pytest.approx(math.log(6400), abs=0.1)
    assert losses[-1] < losses[0] - 0.5
    # Evaluation after none and after three steps sees what the first and the fourth step see.
    assert evaluated[:2] == pytest.approx([losses[0], losses[3]], rel=1e-5)
    assert len(evaluated) == 3
    assert evaluated[2] < evaluated[1] < evaluated[0] - 0.5


# Checkpoints ---------------------------------------------------------------------------------------------------------


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def quickstart_run(folder: Path, *arguments: str, recipe: str = "gspo") -> Path:
    small = ["train_dataset.batch_size=8", "gconfig.n_samples=4", "reward.workers=1"]
    return train(recipe, folder, "--config-name=quickstart", *small, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["saver.freq_steps=2", "total_train_steps=5"], ["step-000002", "step-000004", "step-000005"]),
        (["saver=epoch", "total_train_steps=4"], ["step-000003", "step-000004"]),
    ],
    ids=["steps", "epochs"],
)
def test_saver_frequency(arguments: Sequence[str], expected, tmp_path):
    rows = tmp_path / "rows.jsonl"  # three steps in an epoch
    rows.write_text("".join(f'{{"prompt": "{a}+9=", "solutions": "{a + 9}"}}\n' for a in range(1, 25)))
    of_rows = [f"train_dataset.path={rows}", "train_dataset.loader=null", "valid_dataset=null"]
    run_dir = quickstart_run(tmp_path, *arguments, *of_rows)
    assert checkpoints(run_dir) == expected
    assert (run_dir / "checkpoints/latest").resolve().name == expected[-1]


def test_evaluation_decodes_by_its_own_settings(tmp_path):
    file = tmp_path / "ended.py"
    file.write_text("def reward_fn(record):\n    return float('<eos>' in record.completion)\n", encoding="utf-8")
    settings = ["total_train_steps=1", f"reward.fn={file}", "eval_gconfig.skip_special_tokens=false"]
    run_dir = quickstart_run(tmp_path, *settings, "valid_dataset.max_rows=60")
    assert series(run_dir, "rollout/rewards_mean") == [0.0]
    assert series(run_dir, "eval/accuracy")[0] > 0.9


def test_checkpoint_continues(tmp_path):
    few = "valid_dataset.max_rows=60"
    first = quickstart_run(tmp_path / "first", few, "total_train_steps=4", "actor.optimizer.lr=1e-3")
    saved = first / "checkpoints/latest"
    second = quickstart_run(tmp_path / "second", few, "total_train_steps=1", f"actor.path={saved}")
    before, after = series(first, "eval/accuracy")
    assert after != before
    assert series(second, "eval/accuracy")[0] == after


def test_garbage_collections_of_a_run_leave_out_what_was_there_before_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []  # conftest.py keeps what is frozen
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    make = Engine.__init__

    def noted(*args: Any, **how: Any) -> None:
        calls.append("models")
        make(*args, **how)

    monkeypatch.setattr(Engine, "__init__", noted)
    config = load(get_algorithm("grpo").config, "quickstart", ["engine.device=cpu", "valid_dataset=null"])
    with PolicyOnlyTrainer(config, run_dir=tmp_path / "run"):
        assert calls == ["freeze", "models"]
    assert calls == ["freeze", "models", "unfreeze"]
