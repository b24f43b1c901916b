"""The gsm8k task with a random Qwen3: every metric, line and file that the reference names."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers

from areno.tracking import console
from areno.tracking.reader import RunReader
from areno.trainers import rollout
from tests.helpers.recipe_runs import TINY, graded_reward, metrics, rollouts, train


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
        patch.setattr(rollout, "RolloutProgress", functools.partial(console.RolloutProgress, interval_s=0.0))
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
    r"predicted / measured: rollout \S+ / \S+ s, peak \S+ / \S+ GiB",
    r"predicted / measured: step \S+ / \S+ s, peak \S+ / \S+ GiB",
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
        assert all(scalars[f"memory/{phase}"] > 0.1 for phase in ("rollout", "train"))
    assert "eval/accuracy" in steps[3]

    events = EventAccumulator(str(gsm8k_run / "tensorboard"))
    events.Reload()
    for step, scalars in steps.items():
        for name in scalars.keys() - {"time"}:
            found = {event.step: event.value for event in events.Scalars(name)}
            assert found[step] == pytest.approx(scalars[name], rel=1e-6, abs=1e-12), name


def test_predictions_are_compared_with_the_recorded_scalars(gsm8k_run):
    found = RunReader(gsm8k_run)
    recorded = {name: series.values for name, series in found.metrics().items()}
    sampling, train, step = found.forecast()
    assert [sampling["name"], train["name"], step["name"]] == ["rollout", "train actor", "step"]
    for phase, name in ((sampling, "rollout"), (train, "train")):
        assert phase["seconds"][1] == statistics.median(recorded[f"time/{name}"])
        assert phase["gib"][1] == max(recorded[f"memory/{name}"])
    assert step["seconds"][1] == statistics.median(recorded["time/step"])
    assert 0.3 < step["gib"][0] < 1.5 * step["gib"][1]  # the process of the tests holds more than the model


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
