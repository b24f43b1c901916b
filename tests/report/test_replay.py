"""areno replay: a recorded sample under a checkpoint has the numbers of training."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.api import get_algorithm
from areno.api.trainer import Trainer
from areno.cli.__main__ import main
from areno.errors import ArenoError
from areno.launch import command
from areno.loss_fns import grpo_loss_fn, gspo_loss_fn
from areno.plan.sdk_arguments import ArenoConfig
from areno.report.recorded_sample import RecordedTurn, check_sample, recorded_row, recorded_turns
from areno.report.replayed_tokens import attribute_loss, choose_checkpoint
from areno.tracking.reader import RunReader
from areno.trainers.update import measure_loss
from areno.types import SamplingParams, TrainSequence

CLIP = 0.2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GRPO run of two steps with a checkpoint after each, and samples of step 2 as its weights draw them."""
    folder = tmp_path_factory.mktemp("replay")
    words = "total_train_steps=2 saver.freq_steps=1 valid_dataset=null rollout.dump_to_file=true trial_name=a"
    words += f" train_dataset.batch_size=8 gconfig.n_samples=4 cluster.fileroot={folder} actor.eps_clip={CLIP}"
    assert command.run(get_algorithm("grpo"), "grpo", words.split()) == 0
    found = folder / "quickstart" / "a"
    lines = sampled_lines(found / "checkpoints/step-000001")
    (found / "rollouts" / "000002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def sampled_lines(checkpoint: Path) -> list[dict[str, Any]]:
    config = ArenoConfig(runtime={"device": "cpu"})
    params = SamplingParams(max_new_tokens=16)
    with Trainer(1, str(checkpoint), custom_config=config) as trainer:
        trainer.init()
        tokenizer = trainer.get_tokenizer()
        with trainer.rollout_session(sampling_params=params, proxy=False):
            results = trainer.rollout_batch(["57+36=", "15+27="], 2, params, seed=3)
    return [
        {
            "row": group,
            "group": group,
            "prompt": "57+36=" if group == 0 else "15+27=",
            "completion": tokenizer.decode(one.resp_tokens, skip_special_tokens=True),
            "reward": float(number),
            "status": "ok",
            "prompt_tokens": len(result.prompt_tokens),
            "response_tokens": len(one.resp_tokens),
            "finish_reason": one.finish_reason,
            "prompt_token_ids": result.prompt_tokens,
            "token_ids": one.resp_tokens,
            "logprobs": one.resp_logprobs,
            "advantage": 2.0 * number - 1.0,
            "versions": [1] * len(one.resp_tokens),
        }
        for group, result in enumerate(results)
        for number, one in enumerate(result.sequences)
    ]


def replayed(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> dict[str, Any]:
    assert main(["replay", str(run), *words, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_under_the_weights_that_sampled_it_nothing_has_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, run, "--step", "2", "--sample", "1")
    assert (found["checkpoint_step"], found["versions"], found["missing"]) == (1, [1, 1], [])
    trained = [token for token in found["tokens"] if token["trained"]]
    assert len(trained) == found["sample"]["response_tokens"]
    for token in trained:
        assert token["now"] == pytest.approx(token["then"], abs=1e-5)
        assert token["advantage"] == 1.0
        # GRPO with a ratio of 1: each of T tokens adds -A / T, and its gradient is the same.
        assert token["loss"] == pytest.approx(-1.0 / len(trained), rel=1e-4)
        assert token["gradient"] == pytest.approx(-1.0 / len(trained), rel=1e-4)
    assert found["loss"] == pytest.approx(-1.0, rel=1e-4)


def test_rounding_of_the_rollout_is_no_ratio(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The weights before the update are at hand, so the ratio is 1 whatever the rollout's log-probabilities."""
    shutil.copytree(run, tmp_path / "t", symlinks=True)
    file = tmp_path / "t" / "rollouts" / "000002.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["logprobs"] = [value - 0.5 for value in line["logprobs"]]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replayed(capsys, tmp_path / "t", "--step", "2", "--sample", "1")
    assert found["loss"] == pytest.approx(-1.0, rel=1e-4)
    assert all(token["gradient"] < 0 for token in found["tokens"] if token["trained"])


def test_under_a_later_checkpoint_it_has_the_numbers_of_transformers_and_of_the_formula(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    found = replayed(capsys, run, "--step", "2", "--sample", "2", "--checkpoint", "2")
    assert found["checkpoint_step"] == 2
    model = AutoModelForCausalLM.from_pretrained(found["checkpoint"], dtype=torch.float32)
    ids = torch.tensor([[token["token"] for token in found["tokens"]]])
    with torch.no_grad():
        expected = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    now = [token["now"] for token in found["tokens"][1:]]
    assert now == pytest.approx(expected.tolist(), abs=1e-4)
    trained = [token for token in found["tokens"] if token["trained"]]
    moved = [abs(token["now"] - token["then"]) for token in trained]
    assert max(moved) > 1e-4
    for token in trained:
        ratio, advantage = math.exp(token["now"] - token["then"]), token["advantage"]
        clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
        assert token["loss"] == pytest.approx(-min(ratio * advantage, clipped * advantage) / len(trained), rel=1e-4)
    assert found["loss"] == pytest.approx(sum(token["loss"] for token in trained), rel=1e-4)


def test_a_name_that_suits_no_folder_is_no_hindrance(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shutil.copytree(run, tmp_path / "t", symlinks=True)
    settings = (run / "config.yaml").read_text().replace("trial_name: a\n", "trial_name: <b>/x\n")
    (tmp_path / "t/config.yaml").write_text(settings)
    assert "<b>/x" in settings
    assert replayed(capsys, tmp_path / "t", "--step", "2", "--sample", "0")["missing"] == []


def test_a_sample_without_token_values_says_what_is_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """rollouts/000001.jsonl is as the run wrote it."""
    line = RunReader(run).samples(1)[3]
    for name in ("token_ids", "prompt_token_ids", "tokens", "logprobs", "advantage", "token_advantages", "versions"):
        line.pop(name, None)
    path = run / "rollouts" / "000001.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    kept = [{name: value for name, value in one.items() if name in line} for one in lines]
    path.write_text("".join(json.dumps(one) + "\n" for one in kept))
    assert main(["replay", str(run), "--step", "1", "--sample", "3", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "the tokens are made of the text again" in told
    assert "the log-probabilities of the rollout, and so the loss" in told
    assert "it is computed from the 32 rewards of the step that were kept" in told
    assert "examples/quickstart/model (after step 0)" in told
    found = replayed(capsys, run, "--step", "1", "--sample", "3")
    trained = [token for token in found["tokens"] if token["trained"]]
    assert len(trained) == line["response_tokens"]
    rewards = [one["reward"] for one in lines if one["row"] == line["row"]]
    advantage = (line["reward"] - np.mean(rewards)) / (np.std(rewards) + 1e-6)
    assert [token["advantage"] for token in trained] == pytest.approx([advantage] * len(trained))
    assert all(token["then"] is None and token["now"] < 0 for token in trained)


def test_the_table_is_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "2", "--sample", "0", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "prompt       57+36=" in told
    assert f"\ncompletion   {RunReader(run).samples(2)[0]['completion']}\n" in told
    assert "sampled      by weights of 1 updates" in told
    assert "not known" not in told
    assert "'<eos>'" in told
    assert "'5'" not in told  # of the prompt
    assert main(["replay", str(run), "--step", "2", "--sample", "0", "--prompt", "--device", "cpu"]) == 0
    assert "'5'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--step 7 --sample 0", 1, "has no samples of step 7"),
        ("--step 2 --sample 4", 2, "--sample: is 4; step 2 has 4 samples, counted from 0"),
        ("--step 2 --sample 0 --checkpoint 9", 2, "--checkpoint: there is no 9; checkpoints are of the steps 1, 2"),
        ("--step 2 --sample 0 --row 1", 1, "the sample has one row, and row 1 is asked for"),
    ],
)
def test_what_is_not_there_is_told(
    run: Path, words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), *words.split(), "--device", "cpu"]) == code
    assert message in capsys.readouterr().err


def test_the_nearest_checkpoint_is_taken(run: Path) -> None:
    reader = RunReader(run)
    assert [choose_checkpoint(reader, step, None)[1] for step in (1, 2, 3, 9)] == [0, 1, 2, 2]
    assert choose_checkpoint(reader, 1, "latest") == (run / "checkpoints/step-000002", 2)
    assert choose_checkpoint(reader, 1, str(run)) == (run, None)


# -- the tokens of a line


class Characters:
    """A tokenizer: a token for each character."""

    chat_template, eos_token_id = None, 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]


LINE: dict[str, Any] = {
    "prompt": "ab",
    "completion": "cd",
    "prompt_tokens": 3,
    "response_tokens": 3,
    "finish_reason": "stop",
}


def test_text_becomes_tokens_again() -> None:
    row = recorded_row(LINE, Characters())
    assert row.tokens == [1, ord("a"), ord("b"), ord("c"), ord("d"), 0]
    assert row.trained.tolist() == [False] * 3 + [True] * 3
    assert row.missing == ["token ids: the tokens are made of the text again"]
    row = recorded_row({**LINE, "response_tokens": 9, "prompt_tokens": 2}, Characters())
    assert row.missing[0] == "the prompt as it was: its text makes 3 tokens, and it had 2"
    assert row.missing[2] == "the completion as it was: its text makes 2 tokens, and it had 9"


def test_values_stand_at_their_tokens() -> None:
    given = {"prompt_token_ids": [5], "token_ids": [6, 7], "logprobs": [-0.5, None], "token_advantages": [1.0, 2.0]}
    row = recorded_row({**LINE, **given, "loss_mask": [True, False], "versions": [[3, 1], [4, 1]]}, Characters())
    assert row.tokens == [5, 6, 7]
    assert row.trained.tolist() == [False, True, False]
    assert row.logprobs[1] == -0.5
    assert np.isnan(row.logprobs[[0, 2]]).all()
    assert row.advantages[1:].tolist() == [1.0, 2.0]
    assert row.versions == (3, 4)
    row = recorded_row({**LINE, **given, "logprobs": [-0.5]}, Characters())
    assert row.missing == ["logprobs: there are 1 for 2 tokens"]


def test_a_row_of_an_agent_has_values_where_it_was_sampled() -> None:
    """USER, SAMPLED, TOOL, SAMPLED."""
    one = {
        "tokens": [1, 2, 3, 4, 5],
        "sources": [[2, 1], [4, 1], [3, 2], [4, 1]],
        "trained": [[0, 1], [1, 1], [0, 2], [1, 1]],
        "logprobs": [-0.1, -0.2],
        "versions": [[7, 1], [8, 1]],
    }
    row = recorded_row({"trajectory": {"rows": [one]}, "advantage": 0.5}, Characters())
    assert row.logprobs[[1, 4]].tolist() == [-0.1, -0.2]
    assert np.isnan(row.logprobs[[0, 2, 3]]).all()
    assert row.advantages[row.trained].tolist() == [0.5, 0.5]
    assert (row.versions, row.missing) == ((7, 8), [])
    assert recorded_turns({}, row) == []
    turns = {"turns": [{"turn": 0, "reward": 0.25}, {"turn": 300, "reward": -1.0}, {"turn": 300}]}
    one |= {"turns": [[0, 2], [300, 3]], "advantages": [[1.5, 1], [-2.0, 1]]}
    sample = {"trajectory": {"rows": [one], **turns}, "advantage": -0.25, "reward": 2.0}
    check_sample(sample, 0)
    row = recorded_row(sample, Characters())
    assert row.advantages[row.trained].tolist() == [1.5, -2.0]
    assert recorded_turns(sample, row) == [
        RecordedTurn(turn=0, reward=0.25, advantage=1.5, trained=1),
        RecordedTurn(turn=300, reward=1.75, advantage=-2.0, trained=1),
    ]
    for name, value, message in (
        ("turns", [[0, 2]], "turns are for 2 tokens, and it has 5"),
        ("advantages", [[0.5, 2**30]], "advantages are for 1073741824 tokens, and it has 2"),
        ("advantages", [0.5], r"advantages is \[0.5\]; a list of \[number, how many tokens\] is expected"),
    ):
        with pytest.raises(ArenoError, match=message):
            check_sample({"trajectory": {"rows": [{**one, name: value}]}}, 0)
    for wrong in ([5], 5, [{"turn": -1}], [{"reward": "1"}]):
        with pytest.raises(ArenoError, match="is expected"):
            check_sample({"trajectory": {"rows": [one], "turns": wrong}}, 0)
    with pytest.raises(ArenoError, match="has 1 rows, and row 1"):
        recorded_row({"trajectory": {"rows": [one]}}, Characters(), 1)


# -- the parts of a loss


def row_and_logprobs() -> tuple[TrainSequence, list[float]]:
    mask = [True, True, False, False, True, False]
    row = TrainSequence(
        prompt_mask=mask,
        tokens=[1, 2, 3, 4, 5, 6],
        old_logprobs=[0.0, 0.0, -1.0, -0.5, 0.0, -2.0],
        advantages=[0.0, 0.0, 1.5, 1.5, 0.0, 1.5],
    )
    return row, [0.0, -0.3, -0.9, -0.1, -0.4, -2.2]


@pytest.mark.parametrize(
    "loss_fn",
    [
        partial(grpo_loss_fn, reduction="seq_mean_token_mean"),
        partial(grpo_loss_fn, reduction="token_mean", surrogate="cispo"),
        partial(grpo_loss_fn, reduction="seq_mean_token_sum_norm", norm_length=10),
        partial(gspo_loss_fn, clip_eps=0.3),
    ],
)
def test_parts_add_up_and_the_gradient_is_that_of_finite_differences(loss_fn: Any) -> None:
    row, logprobs = row_and_logprobs()
    loss, parts, gradient = attribute_loss(loss_fn, row, logprobs)
    assert loss == pytest.approx(measure_loss(loss_fn, [row], [logprobs])["loss"])
    assert parts is not None
    assert parts.sum() == pytest.approx(loss, rel=1e-5)
    assert parts[[0, 1, 4]].tolist() == gradient[[0, 1, 4]].tolist() == [0.0, 0.0, 0.0]
    if getattr(loss_fn, "keywords", {}).get("surrogate") == "cispo":
        return  # its ratio has no gradient, but a value
    for place in range(6):
        moved = [[*logprobs], [*logprobs]]
        moved[0][place] += 1e-3
        moved[1][place] -= 1e-3
        up, down = (measure_loss(loss_fn, [row], [one])["loss"] for one in moved)
        assert gradient[place] == pytest.approx((up - down) / 2e-3, abs=2e-3)


def test_a_loss_that_weighs_no_tokens_has_no_parts() -> None:
    def loss_fn(pack: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -pack.token_mean(pack.trained(logprobs)), {}

    row, logprobs = row_and_logprobs()
    loss, parts, gradient = attribute_loss(loss_fn, row, logprobs)
    assert parts is None
    assert loss == pytest.approx((0.9 + 0.1 + 2.2) / 3)
    assert gradient.tolist() == pytest.approx([0, 0, -1 / 3, -1 / 3, 0, -1 / 3])
