"""Whole runs on real inputs, started as users start them: what they learn, what they leave behind, what they say."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
import warm_python

from areno.api.rollout import collect
from areno.launch.command import run
from areno.tracking.display import progress
from areno.tracking.reader import RunReader

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared/data"
STORIES = DATA / "models/stories260K-hf"
TINY = Path(__file__).parent / "tokenizers/tiny"
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


def train(recipe: str, folder: Path, *arguments: str) -> Path:
    """Run a recipe in this process, as `python -m areno.recipes.<recipe>` would; the folder of the run."""
    module = import_module(f"areno.recipes.{recipe}")
    fixed = [f"cluster.fileroot={folder}", "experiment_name=e", "trial_name=t", "engine.device=cpu"]
    code = run(module.ALGORITHM, f"python -m {module.__name__}", [*arguments, *fixed])
    assert code == 0
    return folder / "e" / "t"


def graded_reward(folder: Path) -> str:
    """A setting of reward.fn under which nearly any two completions differ, so that every group has a gradient."""
    file = folder / "graded.py"
    file.write_text(
        "def reward_fn(record):\n"
        "    return sum(c in 'aeiou' for c in record.completion) / max(len(record.completion), 1)\n",
        encoding="utf-8",
    )
    return f"reward.fn={file}"


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> scalars."""
    return RunReader(run_dir).steps()


def series(run_dir: Path, name: str) -> list[float]:
    """The values of one scalar, by step."""
    return [scalars[name] for _, scalars in sorted(metrics(run_dir).items()) if name in scalars]


def without_times(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics that have to be the same whenever the same run is made again."""
    clock = re.compile(r"time|tokens_per_second|memory")
    return {
        step: {name: value for name, value in scalars.items() if not clock.search(name)}
        for step, scalars in metrics(run_dir).items()
    }


def rollouts(run_dir: Path, step: int) -> list[dict]:
    """The samples of a step, as rollout.dump_to_file wrote them."""
    return RunReader(run_dir).samples(step)


def command(recipe: str, cwd: Path, *arguments: str) -> tuple[str, float]:
    """`python -m areno.recipes.<recipe>` from another folder: what it says, and the seconds it took."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    done = warm_python.commands().run(["-m", f"areno.recipes.{recipe}", *arguments], cwd, environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr, time.perf_counter() - started


# The quickstart ------------------------------------------------------------------------------------------------------


def test_quickstart_starts_anywhere(tmp_path):
    said, _ = command("gspo", tmp_path, "total_train_steps=2", "trial_name=t")
    run_dir = tmp_path / "outputs/quickstart/t"
    assert "step=2/2 reward_mean=" in said
    assert said.count("metric=eval_accuracy value=") == 2
    assert 0.2 < metrics(run_dir)[1]["rollout/rewards_mean"] <= 0.5
    assert (run_dir / "checkpoints/latest/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("recipe", "seed"), [("gspo", 1), ("gspo", 2), ("grpo", 3)])
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


# GSM8K with a random Qwen3 -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory) -> Path:
    """The shape of a Qwen3; weights and tokenizer come from elsewhere."""
    folder = tmp_path_factory.mktemp("qwen3")
    transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(folder)
    return folder


def gsm8k_rows(n: int) -> list[dict[str, str]]:
    return [
        {"question": f" Tom has {a} apples and finds 7 more. How many are there?", "answer": f"{a}+7\n#### {a + 7}"}
        for a in range(n)
    ]


@pytest.fixture(scope="module", params=["gspo", "grpo"])
def gsm8k_run(request, qwen3_folder, tmp_path_factory) -> Path:
    """Three steps on rows in the form of GSM8K, everything written that can be.

    GSPO has the reward of the task, which random weights never earn; GRPO one that gives them something to learn.
    """
    folder = tmp_path_factory.mktemp(request.param)
    valid = folder / "test.jsonl"
    valid.write_text("\n".join(map(json.dumps, gsm8k_rows(8))), encoding="utf-8")
    train_rows = folder / "train.jsonl"
    train_rows.write_text("\n".join(map(json.dumps, gsm8k_rows(40))), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # Rollouts this short are over before progress is due; ask for it all the time.
        patch.setattr(collect, "RolloutProgress", functools.partial(progress.RolloutProgress, interval_s=0.0))
        patch.setenv("ARENO_LOG_COMPLETIONS", "1")
        return train(
            request.param,
            folder,
            "--config-name=gsm8k",
            f"actor.path={qwen3_folder}",
            f"tokenizer_path={TINY}",
            "actor.init_from_scratch=true",
            "actor.optimizer.lr=1e-3",
            f"train_dataset.path={train_rows}",
            f"valid_dataset.path={valid}",
            "train_dataset.batch_size=2",
            "gconfig.n_samples=4",
            "gconfig.max_new_tokens=12",
            "total_train_steps=3",
            "reward.workers=1",
            "rollout.dump_to_file=true",
            *([graded_reward(folder)] if request.param == "grpo" else []),
        )


# Of the observability reference, what a policy without a critic has.
ROLLOUT = (
    "rewards_mean rewards_std rewards_max rewards_min accuracy advantages_mean advantages_std logprobs_mean "
    "seq_len_mean prompt_len_mean response_len_mean num_sequences skipped_long total_skipped_long tokens_per_second"
)
TRAIN = (
    "loss policy_loss total_loss ratio_mean ratio_std grad_norm lr rollout_logprobs_mean train_logprobs_mean "
    "advantage_mean response_len logp_diff_mean logp_abs_diff_mean logp_abs_diff_max grad_zero_frac entropy "
    "step_rollout_time_s step_train_time_s step_e2e_time_s tokens_per_second memory_gib"
)
TIME = "rollout reward advantage train"
NAMES = [
    f"{space}/{name}"
    for space, names in (("rollout", ROLLOUT), ("train", TRAIN), ("time", TIME))
    for name in names.split()
]

NUMBER = r"-?\d+\.\d{6}"
LINES = [
    r"epoch=0 stage=epoch_start",
    r"epoch=0 stage=epoch_end",
    r"role=policy stage=rollout_start",
    r"role=policy stage=rollout_end",
    rf"metric=reward_mean value={NUMBER}",
    rf"metric=rollout_logprob_mean value={NUMBER}",
    r"role=policy stage=train_start",
    r"role=policy stage=train_end",
    r"train_stats=\{'loss': .*\}",
    rf"time rollout={NUMBER} train={NUMBER} total={NUMBER}",
    r"rollout decode progress: dp=0/1 active=\d+ cuda_graph=False tokens_per_second=\d+\.\d",
    r"rollout progress: prompts=\d/2 tokens_per_second=\d+\.\d",
    r"completion step=3 sample=0 reward=\S+ finish_reason=\w+ tokens=\d+",
    rf"metric=eval_accuracy value={NUMBER}",
]


def test_gsm8k_metrics(gsm8k_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = metrics(gsm8k_run)
    assert sorted(steps) == [1, 2, 3]
    for scalars in steps.values():
        assert set(NAMES) <= set(scalars)
        assert all(math.isfinite(value) for value in scalars.values())
        assert scalars["rollout/num_sequences"] == 8
        assert scalars["rollout/reward_timeouts"] == scalars["rollout/reward_errors"] == 0
        assert scalars["rollout/seq_len_mean"] == pytest.approx(
            scalars["rollout/prompt_len_mean"] + scalars["rollout/response_len_mean"]
        )
        assert scalars["train/logp_abs_diff_max"] <= 1e-4
        learning = "grpo" in str(gsm8k_run)
        assert (scalars["train/grad_norm"] > 0) == learning
        assert (scalars["rollout/rewards_std"] > 0) == learning
    assert "eval/accuracy" in steps[3]

    events = EventAccumulator(str(gsm8k_run / "tensorboard"))
    events.Reload()
    for step, scalars in steps.items():
        for name in scalars.keys() - {"time"}:
            found = {event.step: event.value for event in events.Scalars(name)}
            assert found[step] == pytest.approx(scalars[name], rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("line", LINES)
def test_gsm8k_console_line(gsm8k_run, line):
    log = (gsm8k_run / "logs/run.log").read_text(encoding="utf-8")
    assert re.search(rf"^\d\d:\d\d:\d\d {line}$", log, re.MULTILINE)


def test_gsm8k_rollouts(gsm8k_run):
    questions = [row["question"] for row in gsm8k_rows(40)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    seen = []
    for step in (1, 2, 3):
        samples = rollouts(gsm8k_run, step)
        assert len(samples) == 8
        for sample in samples:
            question = questions[sample["row"]].strip()
            # enable_thinking is off in conf/gsm8k.yaml, which the template says by an empty block.
            expected = (
                f"<|im_start|>user\n{question}\n\nSolve the problem step by step and put the final answer in "
                "\\boxed{}.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            )
            assert sample["prompt"] == expected
            assert sample["prompt_tokens"] == len(tokenizer.encode(expected))
            assert sample["status"] == "ok"
            assert 1 <= sample["response_tokens"] <= 12
        assert len({sample["completion"] for sample in samples}) == 8
        seen += [sample["row"] for sample in samples[::4]]
    assert len(set(seen)) == 6


def test_gsm8k_folder(gsm8k_run):
    assert RunReader(gsm8k_run).config["rollout"]["enable_thinking"] is False
    assert f"tokenizer_path={TINY}" in (gsm8k_run / "overrides.yaml").read_text(encoding="utf-8")
    assert RunReader(gsm8k_run).versions["torch"] == version("torch")
    saved = gsm8k_run / "checkpoints/latest"
    assert saved.resolve().name == "step-000003"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "2+2?"}], add_generation_prompt=True)
    tokens = torch.tensor([prompt["input_ids"]])
    assert torch.isfinite(model(tokens).logits).all()


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


@needs[STORIES]
def test_several_updates_of_a_batch_move_the_ratio(tmp_path):
    short = [*STORIES_RUN, "total_train_steps=1", graded_reward(tmp_path)]
    one = train("grpo", tmp_path / "one", *short)
    two = train("grpo", tmp_path / "two", *short, "actor.ppo_n_minibatches=2")
    assert series(one, "train/ratio_std")[0] < 1e-5
    assert series(two, "train/ratio_std")[0] > 1e-4
    # The rollout's log-probabilities stay the denominator, so the second update sees the first.
    assert series(one, "train/logp_abs_diff_max")[0] < 1e-4
    assert series(two, "train/logp_abs_diff_max")[0] > 1e-3


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
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stories_mention_a_dog(seed, tmp_path):
    _, seconds = command(
        "grpo", tmp_path, "--config-name=grpo-stories-stories260k-cpu", f"actor.path={STORIES}", f"seed={seed}",
        "trial_name=t", "rollout.dump_to_file=true",
    )  # fmt: skip
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
        "    return [{'messages': row} for row in rows if sum(len(m['content']) for m in row) < 4000][:3]\n",
        encoding="utf-8",
    )
    (tmp_path / "chat.yaml").write_text(
        f"""
defaults: [recipe, valid_dataset: default, _self_]
experiment_name: chat
tokenizer_path: {MINIMIND}
total_train_epochs: 8
actor:
  path: {model}
  init_from_scratch: true
  optimizer: {{lr: 5e-3, lr_scheduler_type: constant}}
  mb_spec: {{max_tokens_per_mb: 4096}}
train_dataset: {{path: {CONVERSATIONS}, loader: {loader}, batch_size: 3, max_length: 1500}}
valid_dataset: {{path: {CONVERSATIONS}, loader: {loader}, max_length: 1500}}
evaluator: {{freq_steps: 4, eval_before_train: true}}
""",
        encoding="utf-8",
    )
    run_dir = train("sft", tmp_path, f"--config-dir={tmp_path}", "--config-name=chat")
    losses, evaluated = series(run_dir, "train/loss"), series(run_dir, "eval/loss")
    assert losses[0] == pytest.approx(math.log(6400), abs=0.1)
    assert losses[-1] < losses[0] - 0.5
    # Evaluation after none and after four steps sees what the first and the fifth step see.
    assert evaluated[:2] == pytest.approx([losses[0], losses[4]], rel=1e-5)
    assert len(evaluated) == 3
    assert evaluated[2] < evaluated[1] < evaluated[0] - 0.5


# Checkpoints ---------------------------------------------------------------------------------------------------------


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def quickstart_run(folder: Path, *arguments: str, recipe: str = "gspo") -> Path:
    small = ["train_dataset.batch_size=8", "gconfig.n_samples=4", "reward.workers=1"]
    return train(recipe, folder, "--config-name=quickstart", *small, *arguments)


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
    run_dir = quickstart_run(tmp_path, *settings)
    assert series(run_dir, "rollout/rewards_mean") == [0.0]
    assert series(run_dir, "eval/accuracy")[0] > 0.9


def test_checkpoint_continues(tmp_path):
    first = quickstart_run(tmp_path / "first", "total_train_steps=4", "actor.optimizer.lr=1e-3")
    saved = first / "checkpoints/latest"
    second = quickstart_run(tmp_path / "second", "total_train_steps=1", f"actor.path={saved}")
    before, after = series(first, "eval/accuracy")
    assert after != before
    assert series(second, "eval/accuracy")[0] == after
