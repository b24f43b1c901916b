"""A script that asks for something that cannot be: the error names the argument and says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas
import pytest
from sdk_script import MODEL, SAMPLING, loss, made, plain_rows, sampled, session

from areno import ArenoConfig, ModelRole, SamplingParams, Trainer
from areno.errors import ArenoError, CheckpointError, ConfigError, DataError, EngineError, Key, keys_renamed


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One for all tests that leave it as usable as it was."""
    with made() as trainer:
        yield trainer


def test_all_that_is_wrong_is_said_at_once() -> None:
    config = ArenoConfig(tp_size=0, optimizer={"learning_rate": 1.0}, runtime={"atn_backend": "native", "seed": -1})
    with pytest.raises(ConfigError) as caught:
        Trainer("two", "", backend_type=dict, custom_config=config)  # type: ignore[arg-type]
    keys = [problem.key for problem in caught.value.problems]
    assert sorted(keys) == [
        "backend_type",
        "custom_config.optimizer.learning_rate",
        "custom_config.runtime.atn_backend",
        "custom_config.runtime.seed",
        "custom_config.tp_size",
        "model_path",
        "world_size",
    ]
    assert "did you mean custom_config.runtime.attn_backend" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size: is 0; it must be more than 0"),
        (
            {"custom_config": ArenoConfig(tp_size=2)},
            "custom_config.tp_size: is 2, which does not divide the number of devices, 1",
        ),
        ({"custom_config": ArenoConfig(dp_size=2)}, "custom_config.dp_size: is 2, but world_size // tp_size is 1"),
        ({"custom_config": ArenoConfig(devices=[0, 1])}, "give one id for each rank"),
        ({"custom_config": ArenoConfig(devices=[-1])}, "ids of different CUDA devices"),
        ({"custom_config": ArenoConfig(max_running_prompts=0)}, "custom_config.max_running_prompts: is 0"),
        ({"custom_config": ArenoConfig(optimizer={"lr": "fast"})}, "custom_config.optimizer.lr: is 'fast'"),
        ({"custom_config": ArenoConfig(optimizer=3)}, "custom_config.optimizer: is 3; a section is expected"),  # type: ignore[arg-type]
        ({"custom_config": {"tp_size": 1}}, "custom_config: is a dict; an areno.ArenoConfig is expected"),
        ({"backend_type": "areno"}, "backend_type: is 'areno'; areno.Areno is the one there is"),
        ({"metrics_log_dir": 3.5}, "metrics_log_dir: is 3.5"),
        (
            {"world_size": 2, "custom_config": ArenoConfig(runtime={"workers": "inline"})},
            "custom_config.runtime.workers: is inline, which holds one rank",
        ),
    ],
)
def test_arguments_are_checked_before_anything_starts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(**{"world_size": 1, "model_path": MODEL, **arguments})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (MODEL, ArenoConfig(devices=[0]), "custom_config.devices: is [0], but torch sees no CUDA device; leave it out"),
        (MODEL, ArenoConfig(runtime={"attn_backend": "flash"}), "custom_config.runtime.attn_backend: is flash, but"),
        (MODEL, ArenoConfig(runtime={"device": "cuda"}), "custom_config.runtime.device: is cuda, but torch sees no"),
        (
            "/no/such/model",
            None,
            "/no/such/model does not exist; expected a local model folder or a hub id `owner/name`",
        ),
        (MODEL, ArenoConfig(runtime={"tokenizer_path": "/none"}), "custom_config.runtime.tokenizer_path"),
    ],
)
def test_what_only_the_machine_can_tell_is_said_by_init(model: str, config: ArenoConfig | None, message: str) -> None:
    with Trainer(1, model, custom_config=config) as trainer:
        with pytest.raises(ArenoError) as caught:
            trainer.init()
        assert message in str(caught.value)
        assert "actor.path" not in str(caught.value)
        with pytest.raises(EngineError, match=r"call init\(\) first"):
            trainer.get_tokenizer()


def test_devices_are_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from areno.api.inputs.devices import find_devices
    from areno.config.run import EngineConfig

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_devices(EngineConfig(world_size=2), [3, 1]) == ["cuda:3", "cuda:1"]
    assert find_devices(EngineConfig(world_size=2)) == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="devices: has 4, but 4 CUDA devices are visible; those are 0 to 3"):
        find_devices(EngineConfig(world_size=2), [0, 4])
    with pytest.raises(ConfigError, match=r"devices: .* engine.device is cpu; leave it out"):
        find_devices(EngineConfig(world_size=1, device="cpu"), [0])
    with pytest.raises(ConfigError, match=r"engine\.world_size: is 5000; .* at most \d+ worker processes"):
        find_devices(EngineConfig(world_size=5000, device="cpu"))


def test_a_model_that_does_not_divide_names_the_argument() -> None:
    trainer = Trainer(3, MODEL, custom_config=ArenoConfig(tp_size=3, runtime={"device": "cpu"}))
    with pytest.raises(ConfigError, match=r"custom_config.tp_size: is 3, which does not divide the model's 4"):
        trainer.init()


def test_settings_in_messages_become_arguments() -> None:
    from areno.api.inputs.backend import argument_of

    settings = [
        "rollout.mem_fraction",
        "gconfig.max_new_tokens",
        "critic.gradient_checkpointing",
        "actor.mb_spec.max_tokens_per_mb",
        "actor.optimizer.lr",
        "saver.path",
        "engine.tp_size",
        "critic.path",
    ]
    with pytest.raises(EngineError) as caught, keys_renamed(argument_of):
        raise EngineError("lower {}; see /tmp/actor.path/config.json" + " {}" * 7, *map(Key, settings))
    assert str(caught.value) == (
        "lower custom_config.runtime.mem_fraction; see /tmp/actor.path/config.json SamplingParams.max_new_tokens "
        "custom_config.runtime.gradient_checkpointing custom_config.runtime.max_tokens_per_mb "
        "custom_config.optimizer.lr path custom_config.tp_size critic.path"
    )


USES: dict[str, Callable[[Trainer], Any]] = {
    "get_tokenizer": lambda t: t.get_tokenizer(),
    "rollout_session": session,
    "rollout_batch": lambda t: t.rollout_batch(["1+1="], 1, SAMPLING),
    "rollout_token_batch": lambda t: t.rollout_token_batch([[4]], 1, SAMPLING),
    "train": lambda t: t.train(plain_rows(), loss),
    "train_values": lambda t: t.train_values("critic", plain_rows()),
    "ensure_roles": lambda t: t.ensure_roles({}),
    "release_role": lambda t: t.release_role("ref"),
    "score_logprobs": lambda t: t.score_logprobs("actor", [[4, 5]]),
    "score_values": lambda t: t.score_values("critic", [[4, 5]]),
    "score_rewards": lambda t: t.score_rewards("reward", [[4, 5]]),
    "save_checkpoint": lambda t: t.save_checkpoint("/nowhere/at/all"),
}


@pytest.mark.parametrize("name", USES)
def test_nothing_works_before_init_or_after_close(name: str) -> None:
    trainer = Trainer(1, MODEL)
    with pytest.raises(EngineError, match=r"call init\(\) first"):
        USES[name](trainer)
    trainer.close()
    trainer.close()
    with pytest.raises(EngineError, match="this Trainer is closed"):
        USES[name](trainer)
    with pytest.raises(EngineError, match="this Trainer is closed"):
        trainer.init()


def test_init_is_called_once(trainer: Trainer) -> None:
    with pytest.raises(EngineError, match=r"init\(\) was called before"):
        trainer.init()
    assert sampled(trainer)


@pytest.mark.parametrize("name", ["rollout_batch", "rollout_token_batch"])
def test_rollout_needs_a_session(trainer: Trainer, name: str) -> None:
    with pytest.raises(EngineError, match=f"{name} was called outside a rollout session; wrap it in `async with"):
        USES[name](trainer)


@pytest.mark.parametrize(
    "name", ["train", "train_values", "ensure_roles", "release_role", "score_logprobs", "score_values", "score_rewards"]
)
def test_only_rollout_has_a_place_in_a_session(trainer: Trainer, name: str) -> None:
    with session(trainer), pytest.raises(EngineError, match=f"{name} was called inside a rollout session"):
        USES[name](trainer)
    assert sampled(trainer)


def test_no_saving_in_a_session(trainer: Trainer, tmp_path: Path) -> None:
    with session(trainer), pytest.raises(EngineError, match="save_checkpoint was called inside a rollout session"):
        trainer.save_checkpoint(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_sessions_do_not_nest(trainer: Trainer) -> None:
    async def nested() -> None:
        async with session(trainer), session(trainer):
            pass

    with pytest.raises(EngineError, match="a rollout session is already open"):
        asyncio.run(nested())
    assert sampled(trainer)


def test_the_arguments_of_the_proxy_are_checked(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="timeout_s: is 0"):
        trainer.rollout_session(sampling_params=SAMPLING, timeout_s=0)
    with pytest.raises(EngineError, match="this rollout session serves nothing"):
        session(trainer).get_base_url()
    with pytest.raises(ArenoError, match="loss_mask_policy is for the trajectories of agents"):
        session(trainer, loss_mask_policy=object())


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
        (lambda t: t.rollout_token_batch([[4] * 9], 1, SamplingParams(max_prompt_len=8)), "more than max_prompt_len=8"),
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
        ({"temperature": 0}, "temperature: is 0; a number above 0"),
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
            {"critic": ModelRole("critic", MODEL, True, 0.0)},
            r"roles\['critic'\].optimizer_lr: is 0.0; a number above 0",
        ),
        (
            {"critic": ModelRole("critic", MODEL, True, float("inf"))},
            r"roles\['critic'\].optimizer_lr: is inf; a number above 0",
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
    with pytest.raises(ConfigError, match="temperature: is 0; a number above 0"):
        trainer.score_logprobs("actor", [[4]], 0)
    with pytest.raises(EngineError, match="there is no role \\['ref'\\]"):
        trainer.score_logprobs(["ref"], [[4]])  # type: ignore[arg-type]
    assert trainer.score_logprobs("actor", []) == []


def test_what_is_no_checkpoint_is_not_replaced(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "site").mkdir()  # of another program, which calls its settings as models do
    (tmp_path / "site" / "config.json").write_text("{}")
    (tmp_path / "site" / "index.html").write_text("years of work")
    for name in ("thesis", "file", "site"):
        with pytest.raises(CheckpointError, match="is there and is no checkpoint"):
            trainer.save_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"^path: .* cannot hold the checkpoint"):
        trainer.save_checkpoint(tmp_path / "file" / "out")
    for path in (None, " ", "~nobody-has-this-name/x"):
        with pytest.raises(ConfigError, match=r"path: is .*; the name of a folder"):
            trainer.save_checkpoint(path)  # type: ignore[arg-type]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "site", "thesis"]
    assert (tmp_path / "site" / "index.html").exists()


@pytest.mark.parametrize("target", ["model", "not there yet"])
def test_a_checkpoint_behind_a_link_is_replaced_there(trainer: Trainer, tmp_path: Path, target: str) -> None:
    trainer.save_checkpoint(tmp_path / "model")
    (tmp_path / "link").symlink_to(target)
    assert trainer.save_checkpoint(tmp_path / "link") == str(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / target / "config.json").is_file()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    (tmp_path / "other").symlink_to("thesis")
    with pytest.raises(CheckpointError, match="is there and is no checkpoint"):
        trainer.save_checkpoint(tmp_path / "other")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match=r"^path: .* cannot hold the checkpoint"):
        trainer.save_checkpoint(tmp_path / "loop")


def test_the_critic_has_its_own_call(trainer: Trainer) -> None:
    rows = plain_rows(values=[0.0] * 4, returns=[1.0] * 4)[1:]
    with pytest.raises(EngineError, match="the actor is trained by train"):
        trainer.train_values("actor", rows)
    for name in ("cliprange_value", "value_loss_coef"):
        with pytest.raises(ConfigError, match=f"{name}: is -1; a number above 0"):
            trainer.train_values("critic", rows, **{name: -1})  # type: ignore[arg-type]


def test_a_failed_save_leaves_the_old_checkpoint(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.save_checkpoint(tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def fail(folder: str, *_: Any) -> None:
        (Path(folder) / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.engine, "save", fail)
    with pytest.raises(CheckpointError, match=r"^path: .*No space left on device"):
        trainer.save_checkpoint(tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_a_second_thread_is_refused_while_one_works(trainer: Trainer) -> None:
    with ThreadPoolExecutor(1) as other:
        with trainer.clock.phase("train"):
            refused = other.submit(trainer.score_logprobs, "actor", [[4, 5]])
            with pytest.raises(EngineError, match="another thread is in the phase 'train'"):
                refused.result()
        assert other.submit(trainer.score_logprobs, "actor", [[4, 5]]).result()
