"""A teacher beside the actor: the divergence that updates compute, against transformers, and over all layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence
from areno.engine.engine import Engine
from areno.errors import DataError, EngineError
from areno.loss_fns.distillation import distillation_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.specs.role import RoleSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.lora_models import lora
from tests.helpers.moe_models import moe_folder
from tests.helpers.shared_rows import group, train_rows
from tests.helpers.teachers import SGD, by_transformers, of_transformers
from tests.helpers.tiny_engine import folder_with, saved_tensors, spec

VOCAB, PROMPT = 65, 20
SAMPLING = SamplingConfig(temperature=0.8)
KINDS = [Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.3)]


def teacher_role(path: Path, **how: Any) -> RoleSpec:
    return RoleSpec(path=str(path), key="teacher.path", in_training=True, **how)


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def larger(path: Path) -> Path:
    """Another size of the same vocabulary."""
    return folder_with(path, hidden_size=48, num_hidden_layers=3, **HEADS)


def rows_of_groups(n_groups: int = 3) -> list[TrainSequence]:
    tokens = [row for seed in range(n_groups) for row in group(PROMPT, [9, 3, 14], VOCAB, seed)]
    return train_rows(tokens, prompt=PROMPT, staleness=1)


def update(divergence: Divergence, tokens: int = 2000, **how: Any) -> UpdateSpec:
    return UpdateSpec(MicroBatchSpec(max_tokens_per_mb=tokens), sampling=SAMPLING, divergence=divergence, **how)


def with_prompts(rows: list[TrainSequence]) -> list[TrainSequence]:
    """The teacher reads other beginnings, of several lengths. One row has none of its own."""
    for number, row in enumerate(rows[1:]):
        row.teacher_prompt = [(7 * number + at) % VOCAB for at in range(5 + 6 * (number % 5))]
    return rows


@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
@pytest.mark.parametrize("form", ["same prompts", "own prompts"])
def test_one_update_is_that_of_transformers(divergence: Divergence, form: str, tmp_path: Path) -> None:
    folder, rows = folder_with(tmp_path / "student"), rows_of_groups(2)
    if form == "own prompts":
        rows = with_prompts(rows)
    with Engine(spec(folder, optimizer=SGD), "inline") as engine:
        engine.ensure_roles({"teacher": teacher_role(larger(tmp_path / "teacher"), random_init=True)})
        for role in ("actor", "teacher"):
            engine.save(str(tmp_path / f"saved {role}"), role)
        stats = engine.train(rows, distillation_loss_fn, update(divergence, tokens=120))
        engine.save(str(tmp_path / "after"))
    student, teacher = (of_transformers(tmp_path / f"saved {role}") for role in ("actor", "teacher"))
    loss = by_transformers(student, teacher, rows, divergence, SAMPLING)
    assert stats["distill_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert loss.item() > 0.01
    loss.backward()
    after = saved_tensors(tmp_path / "after")
    for name, parameter in student.named_parameters():
        if name not in after:
            continue
        moved = parameter.detach() - after[name].double()
        largest = parameter.grad.abs().max().item()
        torch.testing.assert_close(moved, parameter.grad, atol=2e-3 * largest + 1e-6, rtol=0)


def saved_teacher(path: Path, vocab_size: int) -> Path:
    """A teacher of another vocabulary, with random weights in its folder."""
    folder = folder_with(path, vocab_size=vocab_size, hidden_size=48, num_hidden_layers=3, **HEADS)
    with Engine(spec(folder, seed=7), "inline") as engine:
        engine.save(str(path / "saved"))
    return path / "saved"


COMMON = [(70, ((0, 61),)), (62, ((0, 61),)), (70, ((0, 20), (23, 65)))]


@pytest.mark.parametrize(("size", "common"), COMMON, ids=str)
def test_teacher_of_another_vocabulary_is_compared_over_common_tokens(
    size: int, common: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    folder, theirs = folder_with(tmp_path / "student"), saved_teacher(tmp_path / "teacher", size)
    rows, divergence = rows_of_groups(2), KINDS[2]
    for row in rows:
        row.tokens = [int(token) % 60 for token in row.tokens]
    with Engine(spec(folder, optimizer=SGD), "inline") as engine:
        with pytest.raises(EngineError, match=rf"teacher\.path has a vocabulary of {size} tokens, the actor one of 65"):
            engine.ensure_roles({"teacher": teacher_role(theirs)})
        engine.ensure_roles({"teacher": teacher_role(theirs, common_ids=common)})
        engine.save(str(tmp_path / "before"))
        tokens = [np.asarray(row.tokens) for row in rows]
        scores = engine.logprobs("teacher", tokens, SAMPLING)
        stats = engine.train(rows, distillation_loss_fn, update(divergence, tokens=120))
        engine.save(str(tmp_path / "after"))
    student, teacher = of_transformers(tmp_path / "before"), of_transformers(theirs)
    ids = [token for first, end in common for token in range(first, end)]
    loss = by_transformers(student, teacher, rows, divergence, SAMPLING, ids)
    assert stats["distill_loss"] == pytest.approx(loss.item(), abs=1e-5)
    loss.backward()
    after = saved_tensors(tmp_path / "after")
    moved = student.model.embed_tokens.weight.detach() - after["model.embed_tokens.weight"].double()
    gradient = student.model.embed_tokens.weight.grad
    torch.testing.assert_close(moved, gradient, atol=2e-3 * gradient.abs().max().item() + 1e-6, rtol=0)
    with torch.no_grad():  # scores are over the rows of the teacher, up to those of the student
        logits = teacher(torch.tensor(tokens[0])[None]).logits[0, :-1, :VOCAB] / SAMPLING.temperature
    expected = torch.log_softmax(logits, -1)[torch.arange(len(tokens[0]) - 1), torch.tensor(tokens[0][1:])]
    np.testing.assert_allclose(scores[0][1:], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [62, 70])
def test_ranks_with_another_vocabulary_do_not_matter(size: int, tmp_path: Path) -> None:
    folder, theirs = folder_with(tmp_path / "student", **HEADS), saved_teacher(tmp_path / "teacher", size)
    rows, teacher = rows_of_groups(), teacher_role(theirs, common_ids=((0, 20), (23, 61)))
    one = updates(folder, teacher, rows, 3000, share_prefixes="off")
    several = updates(folder, teacher, rows, 120, share_prefixes="on", devices=2, tp_size=2)
    for found, expected in zip(several, one, strict=True):
        for name in ("loss", "distill_loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-5), name


@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
def test_teacher_equal_to_the_student_moves_nothing(divergence: Divergence, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "student")
    with Engine(spec(folder, optimizer=SGD, exact=True), "inline") as engine:
        engine.ensure_roles({"teacher": teacher_role(folder)})
        engine.save(str(tmp_path / "before"))
        rows = rows_of_groups()
        for row in rows:
            row.logprobs = None
        stats = engine.train(rows, distillation_loss_fn, update(divergence, tokens=120))
        assert stats["loss"] == stats["grad_norm"] == 0.0
        engine.save(str(tmp_path / "after"))
    for name, tensor in saved_tensors(tmp_path / "after").items():
        assert torch.equal(tensor, saved_tensors(tmp_path / "before")[name]), name


def test_sampled_form_of_an_equal_teacher_moves_nothing(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "student")
    with Engine(spec(folder, optimizer=SGD, exact=True), "inline") as engine:
        engine.ensure_roles({"teacher": teacher_role(folder)})
        rows = rows_of_groups()
        tokens = [np.asarray(row.tokens) for row in rows]
        for row, theirs in zip(rows, engine.logprobs("teacher", tokens, SAMPLING), strict=True):
            row.teacher_logprobs = theirs
            row.logprobs = theirs.copy()
        how = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=120), sampling=SAMPLING)

        def loss_fn(pack: Any, logprobs: Any) -> Any:
            return distillation_loss_fn(pack, logprobs, sampled=True, kl_discount=0.5)

        stats = engine.train(rows, loss_fn, how)
        assert stats["loss"] == stats["grad_norm"] == stats["teacher_kl"] == 0.0


MATRIX: dict[str, dict[str, Any]] = {
    "shared prefixes": {"share_prefixes": "on"},
    "shared prefixes, tp 2": {"share_prefixes": "on", "devices": 2, "tp_size": 2},
    "tp 2, cp 2": {"share_prefixes": "on", "devices": 4, "tp_size": 2, "cp_size": 2},
    "two copies, zero 2": {"share_prefixes": "on", "devices": 2, "zero_stage": 2},
    "recompute": {"gradient_checkpointing": True},
}


def joint_loss(pack: Any, logprobs: Any) -> Any:
    return distillation_loss_fn(pack, logprobs, policy_loss_fn=gspo_loss_fn, rl_loss_weight=0.5)


def updates(
    folder: Path, teacher: RoleSpec, rows: list[TrainSequence], tokens: int, **settings: Any
) -> list[dict[str, float]]:
    """The statistics of two calls with two steps each."""
    adapters = lora(folder) if settings.pop("adapters", False) else None
    workers = "spawn" if settings.get("devices", 1) > 1 else "inline"
    with Engine(spec(folder, lora=adapters, **settings), workers) as engine:
        engine.ensure_roles({"teacher": teacher})
        found = []
        for divergence in KINDS[1:]:
            for row in rows:
                row.old_logprobs = None
            found.append(engine.train(rows, joint_loss, update(divergence, tokens, n_minibatches=2, seed=3)))
        return found


# Each kind meets shared prefixes on one rank and a layout of several ranks, and each layout a kind.
CASES = [(kind, "shared prefixes") for kind in ("dense", "adapters", "experts", "own prompts", "offload")]
CASES += [(kind, "shared prefixes, tp 2") for kind in ("adapters", "own prompts", "offload")]
CASES += [("dense", "recompute"), ("dense", "tp 2, cp 2"), ("experts", "tp 2, cp 2")]
CASES += [("adapters", "two copies, zero 2"), ("experts", "two copies, zero 2")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_layouts_do_not_matter(kind: str, layout: str, tmp_path: Path) -> None:
    settings = MATRIX[layout]
    make = moe_folder if kind == "experts" else folder_with
    folder = make(tmp_path / "student", vocab_size=VOCAB, **HEADS)
    rows, how = rows_of_groups(), {"adapters": kind == "adapters"}
    if kind == "own prompts":
        rows = with_prompts(rows)
    # With adapters, the teacher is the actor without its adapters.
    teacher = teacher_role(folder) if kind == "adapters" else teacher_role(larger(tmp_path / "t"), random_init=True)
    teacher.offload = kind == "offload"
    one = updates(folder, teacher, rows, 3000, share_prefixes="off", **how)
    several = updates(folder, teacher, rows, 120, **settings, **how)
    for found, expected in zip(several, one, strict=True):
        assert expected["distill_loss"] > (0 if kind == "adapters" else 1e-3)
        for name in ("loss", "distill_loss", "rl_loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-5), name
    if settings.get("share_prefixes") == "on" and kind != "own prompts" and settings.get("devices", 1) == 1:
        assert several[0]["computed_tokens"] < 0.8 * several[0]["row_tokens"]


def test_teacher_that_lists_its_most_likely_tokens(tmp_path: Path) -> None:
    """All tokens listed: the divergence over the whole vocabulary. Few: a smaller one. Sharing changes nothing."""
    folder, rows = folder_with(tmp_path / "student"), rows_of_groups()
    found: dict[tuple[int, str], float] = {}
    with Engine(spec(folder, optimizer=SGD), "inline") as engine:
        engine.ensure_roles({"teacher": teacher_role(larger(tmp_path / "teacher"), random_init=True)})
        engine.save(str(tmp_path / "theirs"), "teacher")
    teacher = of_transformers(tmp_path / "theirs")
    for n_listed in (VOCAB, 4):
        for row in rows:
            tokens = torch.tensor(np.asarray(row.tokens))
            with torch.no_grad():
                logits = teacher(tokens[None]).logits[0] / SAMPLING.temperature
            best = torch.log_softmax(logits, -1).topk(n_listed)
            before = [torch.roll(each, 1, 0).numpy() for each in (best.indices, best.values)]  # of the token before
            row.teacher_top = (before[0], before[1])
        for share in ("on", "off"):
            with Engine(spec(folder, optimizer=SGD, share_prefixes=share), "inline") as engine:
                stats = engine.train(rows, distillation_loss_fn, update(KINDS[0], tokens=120))
                found[n_listed, share] = stats["distill_loss"]
    for row in rows:
        row.teacher_top = None
    with Engine(spec(folder, optimizer=SGD), "inline") as engine:
        engine.ensure_roles({"teacher": teacher_role(larger(tmp_path / "teacher"), random_init=True)})
        whole = engine.train(rows, distillation_loss_fn, update(KINDS[0]))["distill_loss"]
    assert found[VOCAB, "on"] == pytest.approx(whole, abs=1e-4)
    assert found[4, "on"] == pytest.approx(found[4, "off"], abs=1e-5)
    assert 0 < found[4, "on"] < whole


@pytest.mark.parametrize("tokens", [20, 400])
def test_rows_that_begin_alike_keep_lists_of_their_own(tmp_path: Path, tokens: int) -> None:
    """Two equal rows with different lists, as of samples by different weights: sharing changes nothing."""
    folder, rows = folder_with(tmp_path / "student"), rows_of_groups(1)
    rows = [replace(rows[number // 2]) for number in range(4)]
    for number, row in enumerate(rows):
        listed = np.tile([2, 3 + number, -1], (len(row.tokens), 1))  # type: ignore[arg-type]
        row.teacher_top = (listed, np.full(listed.shape, -1.0 - number))
    found = []
    for share in ("on", "off"):
        with Engine(spec(folder, optimizer=SGD, share_prefixes=share), "inline") as engine:
            found.append(engine.train(rows, distillation_loss_fn, update(KINDS[0], tokens=tokens)))
    for name in ("distill_loss", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
    if tokens == 400:
        assert found[0]["computed_tokens"] < found[1]["computed_tokens"]


def test_what_a_teacher_needs(tmp_path: Path) -> None:
    folder, rows = folder_with(tmp_path / "student"), rows_of_groups(1)
    with Engine(spec(folder), "inline") as engine:
        with pytest.raises(EngineError, match="there is no role 'teacher'"):
            engine.train(rows, distillation_loss_fn, update(KINDS[0]))
        with pytest.raises(EngineError, match="vocabulary of 66 tokens, the actor one of 65"):
            engine.ensure_roles({"teacher": teacher_role(folder_with(tmp_path / "t", 66), random_init=True)})
        engine.ensure_roles({"teacher": teacher_role(folder)})
        rows[1].teacher_prompt = [VOCAB]
        with pytest.raises(DataError, match=r"row 1: teacher_prompt holds 65"):
            engine.train(rows, distillation_loss_fn, update(KINDS[0]))
        rows[1].teacher_prompt = [3] * 510
        with pytest.raises(DataError, match=r"row 1: teacher_prompt with its response has \d+ tokens, more than"):
            engine.train(rows, distillation_loss_fn, update(KINDS[0]))
        rows[1].teacher_prompt, n = None, len(rows[0].tokens)  # type: ignore[arg-type]
        good = (np.tile([2, 3], (n, 1)), np.full((n, 2), -1.0))
        for wrong, words in (
            ([good], "is list"),
            ((good[0][:3], good[1]), r"has token ids of shape \(3, 2\)"),
            ((good[0], good[1][:, :1]), "log-probabilities"),
            ((good[0] + VOCAB, good[1]), "outside of the vocabulary"),
            (([[2], [3, 4]], good[1]), "lists of different lengths"),
            ((good[0], [["a"]]), "no numbers"),
            ((np.full((n, 2), 4), good[1]), "names a token twice"),
            ((good[0], good[1] + 1), "their sum exceeds 1"),
        ):
            rows[0].teacher_top = wrong  # type: ignore[assignment]
            with pytest.raises(DataError, match=f"row 0: teacher_top .*{words}"):
                engine.train(rows, distillation_loss_fn, update(KINDS[0]))
        rows[0].teacher_top = good
        with pytest.raises(DataError, match="row 1: teacher_top is NoneType"):
            engine.train(rows, distillation_loss_fn, update(KINDS[0]))
        n = len(rows[1].tokens)  # type: ignore[arg-type]
        rows[1].teacher_top = (np.tile([2, 3, 4], (n, 1)), np.full((n, 3), -2.0))
        with pytest.raises(DataError, match="row 1: teacher_top has 3 tokens for each position, the first row 2"):
            engine.train(rows, distillation_loss_fn, update(KINDS[0]))
