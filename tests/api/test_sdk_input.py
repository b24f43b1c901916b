"""What a Trainer refuses: arguments, calls at the wrong time, folders that are no checkpoints."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areno import ArenoConfig, Trainer
from areno.config.experiments import ExperimentConfig
from areno.config.models import ModelConfig
from areno.config.run import EngineConfig
from areno.engine.decoder.grammar import find_ids_with_text
from areno.errors import ArenoError, CheckpointError, ConfigError, EngineError, Key, keys_renamed
from areno.plan.plan import plan_of_actor
from tests.helpers.sdk_script import MODEL, SAMPLING, loss, plain_rows, sampled, session


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
        ({"metrics_log_dir": " "}, "metrics_log_dir: is ' '; a text that is not empty is expected, or null"),
        ({"model_path": "model\0"}, r"model_path: is 'model\x00'; text without null characters is expected"),
        (
            {"custom_config": ArenoConfig(model_path="\ud800")},
            r"custom_config.model_path: holds '\ud800' at character 0",
        ),
        (
            {"custom_config": ArenoConfig(runtime={"tokenizer_path": ""})},
            "custom_config.runtime.tokenizer_path: is ''; a",
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
        (
            *(MODEL, ArenoConfig(runtime={"fp8_config": {"exclude_modules": ["o_pro"]}})),
            "custom_config.runtime.fp8_config.exclude_modules: has o_pro, which is no whole part",
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

    from areno.plan.devices import find_devices

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


def test_ids_of_the_embedding_without_a_token_are_known_to_the_decoder(tmp_path: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), tmp_path / "model"
    n = len(tokenizer)
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": n + 200}))
    plan = plan_of_actor(ExperimentConfig(experiment_name="e", actor=ModelConfig(path=str(model))), lambda: ["cpu"])
    assert plan.spec.texts == ((0, n),)
    assert find_ids_with_text(tokenizer, [n + 5, 0]) == ((0, n), (n + 5, n + 6))  # an end token may have no text


def test_settings_in_messages_become_arguments() -> None:
    from areno.plan.sdk_arguments import argument_of

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
    with session(trainer), pytest.raises(EngineError, match="write_checkpoint was called inside a rollout session"):
        trainer.write_checkpoint(tmp_path / "out")
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
