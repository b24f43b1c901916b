"""Roles beside the actor: loaded, scored, trained, saved, released; inline, in a spawned process, on two ranks."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areno.config.models import MicroBatchSpec
from areno.engine.engine import Engine
from areno.errors import CheckpointError, ConfigError, EngineError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.models import weights
from areno.models.registry import build_model, load_config
from areno.specs.role import RoleSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.critics import OPTIMIZER, ROWS, critic, critic_rows, reference
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import ROLLOUT, VOCAB, model_folder, rollout, scored, spec, train_rows, values

FORMS = {"inline": {}, "spawned": {}, "tp": {"devices": 2, "tp_size": 2}, "dp": {"devices": 2}}


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("reward"))


def classifier(path: Path, **changes: Any) -> Path:
    values = json.loads((model_folder(path) / "config.json").read_text())
    torch.manual_seed(1)
    config = transformers.Qwen3Config(**{**values, "num_labels": 1, **changes})
    transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def reward_model(path: Path, **changes: Any) -> RoleSpec:
    return RoleSpec(**{"path": str(path), "head": "value", "key": "reward.path", "needs_head": True, **changes})


def engine_of(form: str, folder: Path, **settings: Any) -> Engine:
    options = {"random_init": False, **FORMS[form], **settings}
    return Engine(spec(folder, **options), "inline" if form == "inline" else "spawn")


@pytest.fixture(scope="module", params=FORMS)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    """Tests leave it without roles and without having trained the actor."""
    with engine_of(request.param, folder) as built:
        yield built


def close(rows: list[list[float]], expected: list[list[float]], within: float = 1e-4) -> bool:
    return [len(row) for row in rows] == [len(row) for row in expected] and all(
        row == pytest.approx(other, abs=within) for row, other in zip(rows, expected, strict=True)
    )


def test_value_roles_score_and_train_as_on_one_rank(
    engine: Engine, folder: Path, reward_folder: Path, tmp_path: Path
) -> None:
    """And as transformers says of the reward model and of the saved critic."""
    roles = {"critic": critic(folder), "reward": reward_model(reward_folder)}
    updates = [UpdateSpec(MicroBatchSpec(max_tokens_per_mb=40), n_minibatches=2, seed=seed) for seed in range(3)]
    results = []
    with engine_of("inline", folder) as one:
        for each, name in ((one, "one"), (engine, "other")):
            each.ensure_roles(roles)
            start = values(each, "critic", ROWS)
            rewards = each.rewards("reward", ROWS)
            stats = [each.train(critic_rows(), value_loss_fn, update, "critic") for update in updates]
            after = values(each, "critic", ROWS)
            actor = scored(each, "actor", ROWS)
            each.save(str(tmp_path / name), "critic")
            results.append((start, rewards, stats, after, actor, each.rewards("critic", ROWS)))
    for name in roles:
        engine.release_role(name)
    (start, rewards, stats, after, actor, _), other = results
    assert start == other[0] == [[0.0] * len(row) for row in ROWS]
    assert other[1] == pytest.approx(rewards, abs=1e-4)
    for mine, theirs in zip(stats, other[2], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"memory_gib", "step_train_time_s"}:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-4), name
    assert stats[0]["grad_norm"] > 0
    assert stats[-1]["loss"] < stats[0]["loss"]
    assert close(other[3], after, 1e-3)
    assert max(abs(value) for row in after for value in row) > 0.1
    assert close(other[4], actor)  # the actor has not moved
    for folder_of, scores in ((reward_folder, other[1]), (tmp_path / "other", other[5])):
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder_of, dtype=torch.float32)
        with torch.no_grad():
            expected = [theirs(torch.tensor([row])).logits.item() for row in ROWS]
        assert scores == pytest.approx(expected, abs=1e-4)


def test_a_trained_role_goes_on_where_it_was_saved(engine: Engine, folder: Path, tmp_path: Path) -> None:
    engine.ensure_roles({"critic": critic(folder)})
    engine.train(critic_rows(), value_loss_fn, role="critic")
    engine.save(str(tmp_path / "critic"), "critic")
    learned = values(engine, "critic", ROWS)
    engine.release_role("critic")
    engine.ensure_roles({"critic": critic(tmp_path / "critic", needs_head=True)})
    assert close(values(engine, "critic", ROWS), learned)
    engine.release_role("critic")


def test_a_reference_is_the_starting_actor_and_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy as long as the actor has not been trained, from disk afterwards."""
    with engine_of("inline", folder) as engine:
        read: list[str] = []
        original = weights.load_weights
        monkeypatch.setattr(
            "areno.engine.roles.load_weights", lambda model, path: read.append(path) or original(model, path)
        )
        start = scored(engine, "actor", ROWS)
        engine.ensure_roles({"ref": reference(folder), "critic": critic(folder)})
        assert read == []
        assert scored(engine, "ref", ROWS) == start
        engine.train(train_rows(rollout(engine)), partial(grpo_loss_fn, clip_eps=0.2))
        assert scored(engine, "ref", ROWS) == start
        assert not close(scored(engine, "actor", ROWS), start, 1e-3)
        engine.ensure_roles({"late": reference(folder), "late critic": critic(folder)})
        assert read == [str(folder)] * 2
        assert scored(engine, "late", ROWS) == start
        for name in ("critic", "late critic"):
            engine.train(critic_rows(), value_loss_fn, role=name)
        assert values(engine, "critic", ROWS) == values(engine, "late critic", ROWS)


def test_a_reference_of_a_random_actor_can_be_had_at_any_time(tmp_path: Path) -> None:
    """There are no weight files, but the actor's first weights are a function of the seed."""
    shape = model_folder(tmp_path)
    with Engine(spec(shape, seed=5), "inline") as engine:
        start = scored(engine, "actor", ROWS)
        engine.ensure_roles({"ref": reference(shape)})
        engine.train(train_rows(rollout(engine)), partial(grpo_loss_fn, clip_eps=0.2))
        engine.ensure_roles({"late": reference(shape / "../" / shape.name), "critic": critic(shape)})
        assert scored(engine, "ref", ROWS) == scored(engine, "late", ROWS) == start
        assert scored(engine, "actor", ROWS) != start
        assert values(engine, "critic", ROWS) == [[0.0] * len(row) for row in ROWS]


def test_random_weights_of_the_actor_or_of_every_model(folder: Path, tmp_path: Path) -> None:
    """random_init is about the actor, whose folder needs no weights then; dummy_load is about all models."""
    shape, other = model_folder(tmp_path / "shape"), model_folder(tmp_path / "other")
    with Engine(spec(shape, random_init=True), "inline") as engine:
        with pytest.raises(CheckpointError, match="other has no weights"):
            engine.ensure_roles({"ref": reference(other)})
        engine.ensure_roles({"ref": reference(folder)})  # read from its folder
        assert scored(engine, "ref", ROWS) != scored(engine, "actor", ROWS)
    with engine_of("inline", folder) as trained:
        expected = scored(trained, "actor", ROWS)
    with Engine(spec(shape, random_init=False, dummy_load=True), "inline") as engine:
        engine.ensure_roles({"ref": reference(other), "read": reference(folder), "critic": critic(other)})
        assert scored(engine, "read", ROWS) != expected  # the weights that are there are not read
        assert values(engine, "critic", ROWS) == [[0.0] * len(row) for row in ROWS]


def test_a_language_model_beside_the_actor_can_be_trained(folder: Path) -> None:
    rows = [TrainSequence([True, False, False], [3, 4, 5])] * 2
    with engine_of("inline", folder) as engine:
        engine.ensure_roles({"student": reference(folder, optimizer=OPTIMIZER, gradient_checkpointing=False)})
        start = scored(engine, "actor", ROWS)
        engine.train(rows, sft_loss_fn, role="student")
        assert scored(engine, "actor", ROWS) == start != scored(engine, "student", ROWS)
        expected = scored(engine, "student", ROWS)
        engine.train(rows, sft_loss_fn)
        assert close(scored(engine, "actor", ROWS), expected)


def test_roles_are_loaded_once(engine: Engine, folder: Path, tmp_path: Path) -> None:
    wanted = critic(folder)
    engine.ensure_roles({"critic": wanted})
    engine.train(critic_rows(), value_loss_fn, role="critic")
    learned = values(engine, "critic", ROWS)
    engine.ensure_roles({"critic": critic(folder)})  # an equal one: it keeps what it has learned
    assert values(engine, "critic", ROWS) == learned
    wanted.offload = True  # what was handed over is not what is loaded
    with pytest.raises(
        EngineError, match=r"'critic' is loaded already.*offload=True \(loaded with False\).*release_role"
    ):
        engine.ensure_roles({"new": reference(folder), "critic": wanted})
    with pytest.raises(EngineError, match="no role 'new'"):
        scored(engine, "new", ROWS)
    with pytest.raises(EngineError, match=r"'actor' is loaded already.*what the engine was built for"):
        engine.ensure_roles({"actor": reference(tmp_path)})
    engine.ensure_roles({"actor": engine.spec.actor})
    engine.release_role("critic")
    engine.ensure_roles({"critic": wanted})  # offload: nothing to do on a CPU, and nothing changes
    engine.train(critic_rows(), value_loss_fn, role="critic")
    assert close(values(engine, "critic", ROWS), learned)
    engine.release_role("critic")


def test_what_a_role_cannot_do(engine: Engine, folder: Path, reward_folder: Path) -> None:
    engine.ensure_roles({"ref": reference(folder), "reward": reward_model(reward_folder)})
    rows = critic_rows()
    unknown = r"no role 'critic'; loaded are: actor, ref, reward; call ensure_roles for 'critic' first"
    calls = [
        (unknown, lambda: values(engine, "critic", ROWS)),
        (unknown, lambda: engine.train(rows, value_loss_fn, role="critic")),
        (unknown, lambda: engine.save("nowhere", "critic")),
        (unknown, lambda: engine.release_role("critic")),
        (r"'ref' .* is a language model.*no values.*head='value'", lambda: values(engine, "ref", ROWS)),
        (r"'actor' .* is a language model.*no values", lambda: engine.rewards("actor", ROWS)),
        (r"'reward' .* has a value head.*no log-probabilities", lambda: scored(engine, "reward", ROWS)),
        (r"'ref' was loaded without an optimizer", lambda: engine.train(rows, sft_loss_fn, role="ref")),
        (r"'reward' was loaded without an optimizer", lambda: engine.train(rows, value_loss_fn, role="reward")),
        (r"the actor cannot be released", lambda: engine.release_role("actor")),
    ]
    for message, call in calls:
        with pytest.raises(EngineError, match=message):
            call()
    engine.begin_rollout(ROLLOUT)
    with pytest.raises(EngineError, match="'critic' cannot be loaded inside a rollout phase"):
        engine.ensure_roles({"ref": reference(folder), "critic": critic(folder)})
    engine.ensure_roles({"ref": reference(folder)})
    with pytest.raises(EngineError, match="train was called inside a rollout phase"):
        engine.train(rows, value_loss_fn)
    engine.end_rollout()
    assert scored(engine, "ref", ROWS) == scored(engine, "actor", ROWS)
    for name in ("ref", "reward"):
        engine.release_role(name)


def test_a_role_that_cannot_be_loaded_is_absent(
    engine: Engine, folder: Path, reward_folder: Path, tmp_path: Path
) -> None:
    expected = scored(engine, "actor", ROWS)
    no_weights = model_folder(tmp_path / "shape")
    other = model_folder(tmp_path / "vocab", vocab_size=VOCAB + 1)
    labels = classifier(tmp_path / "labels", num_labels=3)
    cases = [
        (CheckpointError, r"nowhere does not exist.*critic\.path", critic(tmp_path / "nowhere")),
        (CheckpointError, r"^ref\.path: .*shape has no weights", reference(no_weights)),
        (CheckpointError, r"ForCausalLM.*no trained value head.*reward\.path", reward_model(folder)),
        (CheckpointError, r"ForSequenceClassification.*no next token.*ref\.path", reference(reward_folder)),
        (CheckpointError, r"has 3 labels .*expected 1.*reward\.path", reward_model(labels)),
        (EngineError, r"ref\.path has a vocabulary of 65 tokens, the actor one of 64", reference(other)),
    ]
    for kind, message, wanted in cases:
        with pytest.raises(kind, match=message):
            engine.ensure_roles({"role": wanted})
        with pytest.raises(EngineError, match="no role 'role'; loaded are: actor;"):
            engine.release_role("role")
    engine.ensure_roles({"role": reference(folder)})
    assert scored(engine, "role", ROWS) == scored(engine, "actor", ROWS) == expected
    engine.release_role("role")


@pytest.mark.parametrize("form", ["tp", pytest.param("dp", marks=pytest.mark.slow)])
def test_a_role_that_one_rank_cannot_load_is_absent_on_all(form: str, folder: Path, tmp_path: Path) -> None:
    """The one that could load it does not keep it either."""
    first = model_folder(tmp_path / "first")
    model = build_model(load_config(first), dtype=torch.float32, device="cpu")
    model.init_weights(2)
    save_weights(model, first)
    fails_once = partial(_fails_on_rank_1, str(first))
    with engine_of(form, folder) as engine:
        engine.train([TrainSequence([True, False], [3, 4])] * 2, fails_once)
        with pytest.raises(EngineError, match="only here"):
            engine.ensure_roles({"ref": reference(first)})
        with pytest.raises(EngineError, match="no role 'ref'"):
            scored(engine, "ref", ROWS)
        engine.train([TrainSequence([True, False], [3, 4])] * 2, _only_the_actor_is_there)
        engine.ensure_roles({"ref": reference(folder)})
        assert len(scored(engine, "ref", ROWS)) == len(ROWS)


def _only_the_actor_is_there(pack: Any, logprobs_N: torch.Tensor) -> Any:
    from areno.models.transformer import Transformer

    gc.collect()
    assert sum(isinstance(thing, Transformer) for thing in gc.get_objects()) == 1
    return sft_loss_fn(pack, logprobs_N)


def _fails_on_rank_1(path: str, pack: Any, logprobs_N: torch.Tensor) -> Any:
    """A loss function that, on the way, breaks the loading of `path` in the process of rank 1."""
    import torch.distributed as dist

    from areno.engine import roles

    if dist.get_rank() == 1:
        original = roles.load_weights

        def load_weights(model: Any, folder: str) -> None:
            if folder == path:
                raise EngineError("only here")
            original(model, folder)

        roles.load_weights = load_weights
    return sft_loss_fn(pack, logprobs_N)


def test_every_role_is_divided_as_the_actor_is(folder: Path, tmp_path: Path) -> None:
    odd = classifier(tmp_path, num_attention_heads=3, num_key_value_heads=3)
    with engine_of("tp", folder) as engine:
        message = r"engine\.tp_size: is 2, which does not divide the model of reward\.path's 3 \(attention heads\)"
        with pytest.raises(ConfigError, match=message):
            engine.ensure_roles({"reward": reward_model(odd)})
        assert len(scored(engine, "actor", ROWS)) == len(ROWS)


def test_out_of_memory_in_a_role_names_its_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with engine_of("inline", folder) as engine:
        engine.ensure_roles({"critic": critic(folder)})
        with monkeypatch.context() as patch:
            patch.setattr("areno.engine.roles.build_model", exhausted)
            with pytest.raises(
                EngineError, match=r"loading the model of ref\.path.*engine\.tp_size.*dtype=bfloat16 or .*\(ref\.path\)"
            ):
                engine.ensure_roles({"ref": reference(folder)})
        monkeypatch.setattr("areno.models.transformer.Transformer.forward", exhausted)
        with pytest.raises(EngineError, match=r"critic\.mb_spec\.max_tokens_per_mb=.*critic\.gradient_checkpointing"):
            engine.train(critic_rows(), value_loss_fn, role="critic")


def test_models_have_no_memory_before_they_move_to_their_buffer(
    folder: Path, reward_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they would be there twice while they load."""
    placed = []

    def build(*args: Any, **settings: Any) -> Any:
        placed.append(settings["placed"])
        return build_model(*args, **settings)

    monkeypatch.setattr("areno.engine.roles.build_model", build)
    with Engine(spec(folder)) as engine:
        engine.ensure_roles(
            {"ref": reference(folder), "critic": critic(folder), "reward": reference(reward_folder, head="value")}
        )
    assert placed == [False] * 4
