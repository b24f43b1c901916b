"""What a Trainer refuses: prompts, rows, losses, metrics, roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest

from areno import ModelRole, SamplingParams, Trainer
from areno.errors import ArenoError, CheckpointError, ConfigError, DataError, EngineError
from tests.helpers.sdk_script import MODEL, SAMPLING, loss, plain_rows, sampled, session


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.rollout_batch("1+1=", 1, SAMPLING), "prompts is a str; .*write \\[prompt\\]"),
        (lambda t: t.rollout_batch([], 1, SAMPLING), "prompts is empty"),
        (lambda t: t.rollout_batch(["1", ""], 1, SAMPLING), "prompts\\[1\\] is an empty string"),
        (lambda t: t.rollout_batch(["1", 5], 1, SAMPLING), "prompts\\[1\\] is a int; a string"),
        (lambda t: t.rollout_batch([[4, 5]], 1, SAMPLING), "give these to rollout_token_batch"),
        (lambda t: t.rollout_batch([[{"role": "user", "content": "1"}]], 1, SAMPLING), "need a tokenizer with a chat"),
        (lambda t: t.rollout_token_batch("1+1=", 1, SAMPLING), "prompt_tokens is a str"),
        (lambda t: t.rollout_token_batch([], 1, SAMPLING), "prompt_tokens is empty"),
        (lambda t: t.rollout_token_batch([4, 5], 1, SAMPLING), "prompt_tokens\\[0\\] is the number 4"),
        (lambda t: t.rollout_token_batch(["1+1="], 1, SAMPLING), "prompt_tokens\\[0\\] is a string"),
        (lambda t: t.rollout_token_batch([[4], []], 1, SAMPLING), "prompt_tokens\\[1\\] is empty"),
        (
            lambda t: t.rollout_token_batch([[4, 5.5]], 1, SAMPLING),
            "prompt_tokens\\[0\\] holds 5.5; token ids are ints",
        ),
        (lambda t: t.rollout_token_batch([[4], [16]], 1, SAMPLING), "prompt_tokens\\[1\\] holds 16; .* 0 to 15"),
        (lambda t: t.rollout_token_batch([[[4]]], 1, SAMPLING), "has 2 dimensions"),
        (lambda t: t.rollout_token_batch([[4]], 0, SAMPLING), "n_samples: is 0"),
        (lambda t: t.rollout_token_batch([[4]], 1.0, SAMPLING), "n_samples: is 1.0"),
        (lambda t: t.rollout_token_batch([[4]], 1, {"top_k": 1}), "sampling_params is a dict"),
        (
            lambda t: t.rollout_token_batch([[4]], 1, SamplingParams(stop="\n")),  # type: ignore[arg-type]
            "SamplingParams.stop: is '\\\\n'; a list",
        ),
        (
            lambda t: t.rollout_token_batch([[4]], 1, SamplingParams(temperature="1")),  # type: ignore[arg-type]
            "SamplingParams.temperature: is '1'",
        ),
        (
            lambda t: t.rollout_token_batch([[4]], 1, SamplingParams(greedy="no")),  # type: ignore[arg-type]
            "SamplingParams.greedy: is 'no'; true or false",
        ),
        (lambda t: t.rollout_token_batch([[4]], 1, SAMPLING, seed=1.5), "seed: is 1.5; a whole number is expected"),
        (
            lambda t: t.rollout_token_batch([[4]], 1, SamplingParams(top_p=2.0)),
            "SamplingParams.top_p: is 2.0; it must be at most 1",
        ),
        (
            lambda t: t.rollout_token_batch([[4]], 1, SamplingParams(max_new_tokens=0)),
            "SamplingParams.max_new_tokens: is 0; it must be more than 0",
        ),
        (lambda t: t.rollout_token_batch([[4] * 128], 1, SAMPLING), "no room for a completion in a context of 128"),
        (
            lambda t: t.rollout_token_batch([[4] * 9], 1, SamplingParams(max_prompt_len=8)),
            "at most 8 may be; shorten it or raise max_prompt_len",
        ),
    ],
)
def test_rollout_says_what_is_wrong_with_its_input(trainer: Trainer, call: Any, message: str) -> None:
    with session(trainer):
        with pytest.raises(ArenoError, match=message):
            call(trainer)
        assert trainer.rollout_token_batch([[4]], 1, SAMPLING)  # in the same session


@pytest.mark.parametrize(
    ("dataset", "how", "message"),
    [
        ([], {}, "dataset has no rows"),
        ("rows.jsonl", {}, "dataset is str 'rows.jsonl'; a list of dictionaries"),
        (iter([1]), {}, "a list of dictionaries, or a dataset, is expected"),
        (pandas.DataFrame([{"prompt": "1"}]), {}, r"dataset is a pandas DataFrame; .* write .to_dict\(.records.\)"),
        ([{"prompt": "1"}], {"batch_size": 0}, "batch_size: is 0"),
        ([{"prompt": "1"}, {"question": "2"}], {}, "row 1: field prompt is missing"),
        ([{"prompt": "1"}, "2"], {}, "row 1: is str '2', not a dictionary"),
        ([{"q": "1"}, {"q": 2}], {"prompt_key": "q"}, "row 1: field q is int 2, not text or messages"),
        ([{"prompt": "1" * 11}], {}, "more than 10 tokens \\(max_prompt_tokens\\), the shortest 11"),
    ],
)
def test_prompt_batches_say_which_row_is_wrong(trainer: Trainer, dataset: Any, how: Any, message: str) -> None:
    with pytest.raises(ArenoError, match=message):
        list(trainer.load_prompt_batches(dataset, **{"batch_size": 2, "max_prompt_tokens": 10, **how}))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "batch_data is empty"),
        (plain_rows()[0], "batch_data is a TrainSequence; a list"),
        ([{"tokens": [4]}], "batch_data\\[0\\] is a dict; an areno.TrainSequence"),
        (plain_rows(tokens=None), r"batch_data\[1\]: tokens is empty"),
        (plain_rows(tokens=[]), r"batch_data\[1\]: tokens is empty"),
        (plain_rows(tokens=[4, 5, 6, 99]), r"batch_data\[1\]: tokens holds 99"),
        (
            plain_rows(tokens=[4] * 129),
            r"batch_data\[1\]: tokens has 129 tokens, more than the model's context of 128",
        ),
        (plain_rows(tokens=["4", "5", "6", "1"]), r"batch_data\[1\]: tokens holds '4'; token ids are ints"),
        (plain_rows(advantages=1.0), r"batch_data\[1\]: advantages is 1.0; a list"),
        (plain_rows(reward=None), r"batch_data\[1\]: reward is None; a number"),
        (plain_rows(prompt_mask=None), r"batch_data\[1\]: prompt_mask is missing"),
        (plain_rows(prompt_mask=[True, False]), r"batch_data\[1\]: prompt_mask has 2 entries, tokens has 4"),
        (plain_rows(logprobs=[0.0] * 5), r"batch_data\[1\]: logprobs has 5 entries, tokens has 4"),
        (plain_rows(advantages=None), r"batch_data\[1\]: advantages is missing, but batch_data\[0\] has it"),
        (plain_rows(advantages=[0.0, 0.0, float("nan"), 0.0]), r"batch_data\[1\]: advantages is nan at token 2"),
        (plain_rows(advantages=["1"] * 3 + ["a"]), r"batch_data\[1\]: advantages holds something that is no number"),
        (plain_rows(advantages=[[1.0]] * 4), r"batch_data\[1\]: advantages has 2 dimensions"),
        (
            plain_rows(prompt_mask=["True", "True", "False", "False"]),
            r"batch_data\[1\]: prompt_mask holds something else than",
        ),
        (plain_rows(prompt_mask=[True, None, False, False]), r"batch_data\[1\]: prompt_mask holds something else than"),
        (
            plain_rows(prompt_mask=[[True], [True], [False], [False, False]]),
            r"batch_data\[1\]: prompt_mask holds something else",
        ),
        (plain_rows(staleness=-1), r"batch_data\[1\]: staleness is -1; a whole number of at least 0"),
    ],
)
def test_rows_of_the_wrong_form(trainer: Trainer, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        trainer.train(rows, loss)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mini_bs": 0}, "mini_bs: is 0; it must be more than 0"),
        ({"n_minibatches": 0}, "n_minibatches: is 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: is 0"),
        ({"n_minibatches": 2, "gradient_accumulation_steps": 1}, "both cut the rows into steps"),
        ({"loss_fn": "gspo"}, "loss_fn: is a str; a function is expected"),
        ({"temperature": 0}, "temperature: is 0; a number from 1e-05 to 100000"),
        ({"seed": -1}, "seed: is -1; a whole number of at least 0"),
        ({"rows_per_unit": 1.5}, "rows_per_unit: is 1.5; a whole number of at least 1"),
        ({"mb_spec": 4}, "mb_spec: is a int; a MicroBatchSpec is expected"),
    ],
)
def test_arguments_of_train(trainer: Trainer, how: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer.train(plain_rows(), **{"loss_fn": loss, **how})


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda pack, lp: None, r"loss_fn returned None; \(loss, stats\) is expected"),
        (lambda pack, lp: lp.sum(), r"loss_fn returned a tensor of shape \(\) and type float32; \(loss, stats\)"),
        (lambda pack, lp: (lp.sum(), 1.0), r"loss_fn returned \(Tensor, float\)"),
        (lambda pack, lp: (1.0, {}), "the loss of loss_fn is a float; a float tensor with no dimensions"),
        (lambda pack, lp: (lp, {}), r"the loss of loss_fn is a tensor of shape \(8,\)"),
        (lambda pack, lp: (lp.detach().sum(), {}), "the loss of loss_fn has no gradient"),
        (lambda pack, lp: (lp.sum(), {"x": 1.0}), r"stats\['x'\] of loss_fn is a float; a tensor is expected"),
        (lambda pack, lp: (lp.sum(), {"x": lp.view(2, 4)}), r"stats\['x'\] of loss_fn is a tensor of shape \(2, 4\)"),
    ],
)
def test_a_loss_function_that_returns_something_else(trainer: Trainer, loss_fn: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        trainer.train(plain_rows(), loss_fn)
    assert trainer.train(plain_rows(), loss)["skipped_steps"] == 0


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = Trainer(1, MODEL, metrics_log_dir=str(tmp_path / "file" / "tb"))
    with pytest.raises(ArenoError, match=r"^metrics_log_dir: .* cannot be written"):
        trainer.init()


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([], "roles: is a list; a dictionary of role names"),
        ({"ref": MODEL}, r"roles\['ref'\]: is a str; an areno.ModelRole is expected"),
        ({"ref": ModelRole("reference", MODEL, False)}, r"roles\['ref'\].name: is 'reference'; it must be the key"),
        ({"actor": ModelRole("actor", MODEL, True)}, r"roles\['actor'\]: the actor is the policy"),
        ({"ref": ModelRole("ref", MODEL, False, 1e-5)}, r"roles\['ref'\].optimizer_lr: is 1e-05, but the role is not"),
        ({"ref": ModelRole("ref", MODEL, True)}, r"roles\['ref'\].trainable: is True, but a role named 'ref' is only"),
        (
            {"critic": ModelRole("critic", MODEL, True, -1.0)},
            r"roles\['critic'\].optimizer_lr: is -1.0; a number of at least 0",
        ),
        (
            {"critic": ModelRole("critic", MODEL, True, float("inf"))},
            r"roles\['critic'\].optimizer_lr: is inf; a number of at least 0",
        ),
        ({5: ModelRole(5, MODEL, False)}, r"roles\[5\]: is named by no string"),  # type: ignore[arg-type]
        ({"critic": ModelRole("critic", "", True)}, r"roles\['critic'\].path: is ''; a model folder or hub id"),
    ],
)
def test_roles_that_make_no_sense(trainer: Trainer, roles: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer.ensure_roles(roles)


def test_a_reward_model_needs_a_trained_head(trainer: Trainer) -> None:
    with pytest.raises(CheckpointError, match="no trained value head"):
        trainer.ensure_roles({"reward": ModelRole("reward", MODEL, False)})
    with pytest.raises(CheckpointError, match=r"/none does not exist; .* \(roles\['critic'\]\.path\)"):
        trainer.ensure_roles({"critic": ModelRole("critic", "/none", True)})
    assert sampled(trainer)


def test_unknown_roles_and_wrong_rows_to_score(trainer: Trainer) -> None:
    for call in (trainer.score_logprobs, trainer.score_values, trainer.score_rewards):
        with pytest.raises(EngineError, match="critics"):
            call("critics", [[4, 5]])
    with pytest.raises(EngineError, match="critics"):
        trainer.train_values("critics", plain_rows())
    with pytest.raises(DataError, match="token_rows\\[1\\] holds 99"):
        trainer.score_logprobs("actor", [[4, 5], [99]])
    with pytest.raises(DataError, match="token_rows\\[0\\] has 129 tokens, more than the model's context of 128"):
        trainer.score_logprobs("actor", [[4] * 129])
    with pytest.raises(ConfigError, match="temperature: is 0; a number from 1e-05 to 100000"):
        trainer.score_logprobs("actor", [[4]], 0)
    with pytest.raises(EngineError, match="there is no role \\['ref'\\]"):
        trainer.score_logprobs(["ref"], [[4]])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="prompt_masks is 3; a list with a mask for each row is expected"):
        trainer.score_logprobs("actor", [[4], [5]], prompt_masks=3)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="prompt_masks of 1 rows, and 2 rows of tokens"):
        trainer.score_logprobs("actor", [[4], [5]], prompt_masks=[[True]])
    with pytest.raises(DataError, match="prompt_masks\\[1\\] has 2 entries, token_rows\\[1\\] has 1 tokens"):
        trainer.score_logprobs("actor", [[4], [5]], prompt_masks=[[True], [True, False]])
    with pytest.raises(DataError, match="prompt_masks\\[0\\] holds something else than True and False"):
        trainer.score_logprobs("actor", [[4]], prompt_masks=[[2]])
    for rows in ([5, 6], [None, [4]]):
        with pytest.raises(DataError, match="token_rows\\[0\\]"):
            trainer.score_logprobs("actor", rows, prompt_masks=[[True], [True]])  # type: ignore[arg-type]
    assert trainer.score_logprobs("actor", []) == []


def test_wrong_rows_to_complete(trainer: Trainer) -> None:
    how = SamplingParams(max_new_tokens=2)
    for row, message in (([4, 5.5], "token_rows\\[1\\]"), (5, "token_rows\\[1\\]"), ([], "token_rows\\[1\\] is empty")):
        with pytest.raises(DataError, match=message):
            trainer.complete("actor", [[4], row], how)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="grammar: is 5; the text of a grammar or None is expected"):
        trainer.complete("actor", [[4]], how, grammar=5)  # type: ignore[arg-type]
    assert len(trainer.complete("actor", [[4], [5, 6]], how)) == 2
