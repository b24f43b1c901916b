"""Several teachers in one update: each row learns from its own, in every layout, and beside a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence
from areno.engine.engine import Engine
from areno.engine.train.teacher import Teachers
from areno.errors import DataError, EngineError
from areno.loss_fns.distillation import distillation_loss_fn
from areno.specs.role import RoleSpec
from areno.specs.shared_models import roles_to_load
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.lora_models import engine_of, lora, train
from tests.helpers.shared_rows import group, train_rows
from tests.helpers.teachers import SGD, by_transformers, of_transformers
from tests.helpers.tiny_engine import folder_with, saved_tensors, spec

VOCAB, PROMPT = 65, 20
SAMPLING = SamplingConfig(temperature=0.8)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
NAMES = ("teacher.a", "teacher.b")
JSD = Divergence("jsd", 0.3, NAMES[0])
"""Rows that name no teacher have the first one."""


def roles_of(path: Path, **how: Any) -> dict[str, RoleSpec]:
    """Two teachers of other sizes than the student, with random weights."""
    shapes = [{"hidden_size": 48, "num_hidden_layers": 3}, {"hidden_size": 96, "num_hidden_layers": 1}]
    found = {}
    for name, shape in zip(NAMES, shapes, strict=True):
        folder = folder_with(path / name, **shape, **HEADS)
        found[name] = RoleSpec(
            path=str(folder), key=f"teacher.models.{name[-1]}", in_training=True, random_init=True, **how
        )
    return found


def rows_of(n_groups: int = 4, named: Sequence[str | None] = (None, NAMES[1])) -> list[TrainSequence]:
    """Groups of rows with a common prompt, each with one of the teachers in turn. The last two groups are equal."""
    seeds = [*range(n_groups - 1), n_groups - 2]
    rows = train_rows(
        [row for seed in seeds for row in group(PROMPT, [9, 3, 14], VOCAB, seed)], prompt=PROMPT, staleness=1
    )
    for number, row in enumerate(rows):
        row.teacher = named[number // 3 % len(named)]
    return rows


def update(tokens: int = 120, **how: Any) -> UpdateSpec:
    return UpdateSpec(MicroBatchSpec(max_tokens_per_mb=tokens), sampling=SAMPLING, **{"divergence": JSD, **how})


def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models rest in other memory than that in which they compute, as on a GPU."""
    monkeypatch.setattr("areno.engine.roles.has_separate_memory", lambda device: True)


@pytest.mark.parametrize("form", ["apart", "shared prefixes", "own prompts", "offload"])
def test_an_update_is_that_of_transformers(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rows = folder_with(tmp_path / "student", **HEADS), rows_of()
    if form == "own prompts":
        for number, row in enumerate(rows[1:]):
            row.teacher_prompt = [(7 * number + at) % VOCAB for at in range(5 + 6 * (number % 5))]
    if form == "offload":
        away(monkeypatch)
    how = {"share_prefixes": "off" if form == "apart" else "on"}
    with Engine(spec(folder, optimizer=SGD, **how), "inline") as engine:
        engine.ensure_roles(roles_of(tmp_path, offload=form == "offload"))
        for role in ("actor", *NAMES):
            engine.save(str(tmp_path / f"saved {role}"), role)
        stats = engine.train(rows, distillation_loss_fn, update())
        engine.save(str(tmp_path / "after"))
    if form in ("shared prefixes", "offload"):
        assert stats["computed_tokens"] < 0.8 * stats["row_tokens"]
    student, *teachers = (of_transformers(tmp_path / f"saved {role}") for role in ("actor", *NAMES))
    loss = torch.zeros((), dtype=torch.float64)
    n_all = sum(int(np.sum(~np.asarray(row.prompt_mask))) for row in rows)
    for name, teacher in zip((None, NAMES[1]), teachers, strict=True):
        theirs = [row for row in rows if row.teacher == name]
        n_tokens = sum(int(np.sum(~np.asarray(row.prompt_mask))) for row in theirs)
        loss = loss + by_transformers(student, teacher, theirs, JSD, SAMPLING) * n_tokens / n_all
    assert stats["distill_loss"] == pytest.approx(loss.item(), abs=1e-5)
    loss.backward()
    after = saved_tensors(tmp_path / "after")
    for name, parameter in student.named_parameters():
        if name in after:
            moved = parameter.detach() - after[name].double()
            largest = parameter.grad.abs().max().item()
            torch.testing.assert_close(moved, parameter.grad, atol=2e-3 * largest + 1e-6, rtol=0)


def test_one_of_two_teachers_is_that_teacher_alone(tmp_path: Path) -> None:
    """Bit for bit, with several optimizer steps and shared prefixes."""
    folder, roles, found = folder_with(tmp_path / "student", **HEADS), roles_of(tmp_path), []
    for named, loaded in ((NAMES[1], roles), (None, {"teacher": roles[NAMES[1]]})):
        with Engine(spec(folder, share_prefixes="on"), "inline") as engine:
            engine.ensure_roles(loaded)
            divergence = JSD if named else replace(JSD, role="teacher")
            how = update(n_minibatches=2, divergence=divergence)
            found.append([engine.train(rows_of(named=(named,)), distillation_loss_fn, how) for _ in range(2)])
    for one, other in zip(*found, strict=True):
        assert {**one, "memory_gib": 0} == {**other, "memory_gib": 0}


LAYOUTS: dict[str, dict[str, Any]] = {
    "shared prefixes": {"share_prefixes": "on"},
    "shared prefixes, tp 2": {"share_prefixes": "on", "devices": 2, "tp_size": 2},
    "shared prefixes, tp 2, cp 2": {"share_prefixes": "on", "devices": 4, "tp_size": 2, "cp_size": 2},
    "two copies, zero 2": {"share_prefixes": "on", "devices": 2, "zero_stage": 2},
}


def classifier(path: Path) -> Path:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder_with(path / "shape", **HEADS), num_labels=1, pad_token_id=0)
    torch.manual_seed(5)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(path / "reward")
    return path / "reward"


def together(
    folder: Path, roles: dict[str, RoleSpec], tokens: int, adapters: bool, settings: dict[str, Any]
) -> tuple[list[float], list[dict[str, float]]]:
    """The rewards of rows, and the statistics of two updates, after each of which the rows are rewarded again."""
    how = dict(settings)
    workers = "spawn" if how.get("devices", 1) > 1 else "inline"
    rewards, stats = [], []
    with Engine(spec(folder, lora=lora(folder) if adapters else None, **how), workers) as engine:
        engine.ensure_roles(roles)
        for _ in range(2):
            rows = rows_of()
            rewards += engine.rewards(
                "reward", [np.asarray(row.tokens).tolist() for row in rows], MicroBatchSpec(mini_bs=4)
            )
            stats.append(engine.train(rows, distillation_loss_fn, update(tokens, n_minibatches=2, seed=3)))
    return rewards, stats


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_teachers_and_a_reward_model_in_all_layouts(
    layout: str, adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With offload, where the workers are in this process; a GPU test of offload is in test_offload.py."""
    folder = folder_with(tmp_path / "student", **HEADS)
    roles = {
        **roles_of(tmp_path),
        "reward": RoleSpec(path=str(classifier(tmp_path)), head="value", key="reward.path", needs_head=True),
    }
    if adapters:  # the second teacher is the actor without its adapters
        roles[NAMES[1]] = RoleSpec(path=str(folder), key="teacher.models.b", in_training=True)
    rewards, stats = together(folder, roles, 3000, adapters, {"share_prefixes": "off"})
    assert len(set(rewards)) > 6
    away(monkeypatch)
    moved = {name: replace(role, offload=True) for name, role in roles.items()}
    theirs, found = together(folder, moved, 120, adapters, LAYOUTS[layout])
    np.testing.assert_allclose(theirs, rewards, atol=1e-4)
    for one, other in zip(found, stats, strict=True):
        assert other["distill_loss"] > 1e-3
        for name in ("loss", "distill_loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-5), name


@pytest.mark.parametrize("offload", [False, True])
def test_adapters_of_one_base_share_it(offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role computes what it computes alone, in any order, and the base is there once."""
    base = folder_with(tmp_path / "base", **HEADS)
    with Engine(spec(base), "inline") as engine:
        engine.save(str(tmp_path / "saved"))
    base, roles = tmp_path / "saved", {}
    for name, times in zip(NAMES, (1, 2), strict=True):
        with engine_of(base, lora(base, rank=4)) as engine:
            train(engine, times)
            engine.save(str(tmp_path / name))
        adapters = lora(base, rank=4, init_from=str(tmp_path / name))
        roles[name] = RoleSpec(path=str(base), key=f"teacher.models.{name[-1]}", lora=adapters, in_training=True)
    rows = [np.asarray(row.tokens).tolist() for row in rows_of()]
    alone = {}
    for name, role in roles.items():
        with Engine(spec(base, random_init=False), "inline") as engine:
            engine.ensure_roles({name: role})
            alone[name] = engine.logprobs(name, rows, SAMPLING)
    if offload:
        away(monkeypatch)
    with Engine(spec(base, random_init=False), "inline") as engine:
        engine.ensure_roles({name: replace(role, offload=offload) for name, role in roles.items()})
        assert list(roles_to_load({"actor": engine.spec.actor, **roles}, engine.spec.actor)) == ["actor", NAMES[0]]
        for name in (*NAMES, *reversed(NAMES)):
            for one, other in zip(engine.logprobs(name, rows, SAMPLING), alone[name], strict=True):
                np.testing.assert_array_equal(one, other)
        stats = engine.train(rows_of(), distillation_loss_fn, update())
        assert stats["distill_loss"] > 1e-5
    assert max(np.abs(a - b).max() for a, b in zip(*alone.values(), strict=True)) > 1e-3


def test_a_step_begins_again_after_a_teacher_did_not_fit() -> None:
    """The teacher that left the device for another one comes back, although the other one never arrived."""
    held: list[str] = []

    @contextmanager
    def hold(role: str) -> Iterator[Any]:
        if role == "teacher.b" and held.count("a") == 1:
            raise torch.OutOfMemoryError
        held.append(role[-1])
        yield SimpleNamespace(run=lambda packed: role, end=lambda: None)
        held.append(f"no {role[-1]}")

    packs: list[Any] = [SimpleNamespace(teacher=name) for name in ("", "teacher.b")]
    with Teachers(hold, "teacher.a") as teachers:
        teachers.run(packs[0])
        with pytest.raises(torch.OutOfMemoryError):
            teachers.run(packs[1])
        assert [teachers.run(pack) for pack in packs] == ["teacher.a", "teacher.b"]
    assert held == ["a", "no a", "a", "no a", "b", "no b"]


def test_what_several_teachers_need(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "student", **HEADS)
    with Engine(spec(folder), "inline") as engine:
        engine.ensure_roles(roles_of(tmp_path))
        with pytest.raises(EngineError, match=r"teacher\.c"):
            engine.train(rows_of(named=("teacher.c",)), distillation_loss_fn, update())
        with pytest.raises(DataError, match="row 0: teacher is 3; the name of a role is expected"):
            engine.train(rows_of(named=(3,)), distillation_loss_fn, update())  # type: ignore[arg-type]
        rows = rows_of()[2:4]
        with pytest.raises(DataError, match="2 adjacent rows belong together, but have different teachers"):
            engine.train(rows, distillation_loss_fn, update(rows_per_unit=2))
