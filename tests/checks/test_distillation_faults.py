"""Faults of distillation and of discounts, each found by its name; nothing is red in the clean twin."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from areno.checks.inputs.small_model import have_same_weights
from areno.checks.steps import two_steps
from areno.config.teacher import Divergence, TeacherConfig
from areno.types import TrainSequence
from tests.helpers.checked import data_file, failed, findings, red

STUDENT = Path("examples/quickstart/model")


def other_model(folder: Path) -> Path:
    """A copy of the small model with other weights."""
    model = Path(shutil.copytree(STUDENT, folder / "teacher"))
    for file in model.glob("*.safetensors"):
        save_file({name: 1.1 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return model


def distill(teacher: Path, *settings: str, only: str = "gradient,algorithm") -> list[Any]:
    return findings("distill quickstart_distill", f"teacher.path={teacher}", *settings, only=only)


def line_of(found: list[Any], name: str) -> str:
    return next(each.line for each in found if each.name == name)


JSD = ("teacher.loss_type=jsd", "teacher.jsd_beta=0.1")


@pytest.mark.slow
def test_distillation_with_exchanged_weights_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = other_model(tmp_path)
    twin = distill(teacher, *JSD)
    assert not red(twin)
    assert not failed(twin)
    monkeypatch.setattr(two_steps, "_draw", lambda *given: [])  # for sampled-tokens alone
    exchanged = property(lambda self: Divergence(self.loss_type, 1 - self.jsd_beta, self.role))
    monkeypatch.setattr(TeacherConfig, "divergence", exchanged)
    found = distill(teacher, *JSD)
    assert "loss-formula" in red(found)
    assert "1 - teacher.jsd_beta" in line_of(found, "loss-formula")
    twice = property(lambda self: Divergence("forward_kl", role=self.role))
    monkeypatch.setattr(TeacherConfig, "divergence", twice)
    assert "the divergence is forward_kl and not jsd" in line_of(distill(teacher, *JSD), "loss-formula")


@pytest.mark.slow
def test_a_teacher_that_reads_the_prompt_of_the_student_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [(a, b) for a in range(10, 18) for b in range(10, 18)]
    rows = [{"prompt": f"{a}+{b}=", "hint": f"{a}+{b}={a + b}+{a}+{b}="} for a, b in sums]
    given = [f"train_dataset.path={data_file(tmp_path / 'rows.jsonl', rows)}", "train_dataset.loader=null"]
    given += ["valid_dataset=null", "teacher.prompt_key=hint", "teacher.loss_type=sampled_reverse_kl"]
    teacher = other_model(tmp_path)
    twin = distill(teacher, *given)
    assert not red(twin)
    assert not failed(twin)
    assert "equal those of transformers" in line_of(twin, "teacher-logprobs")
    monkeypatch.setattr(TrainSequence, "for_teacher", lambda row: (row.tokens, 0))
    assert "after the prompt of the student" in line_of(distill(teacher, *given), "teacher-logprobs")


@pytest.mark.slow
def test_a_teacher_that_is_the_student_is_found(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(STUDENT, tmp_path / "copy"))
    found = distill(copied)
    assert red(found) == {"teacher-weights"}
    assert "has the weights of actor.path" in line_of(found, "teacher-weights")


def test_equal_weights_are_known(tmp_path: Path) -> None:
    teacher = other_model(tmp_path)
    assert have_same_weights(STUDENT, Path(shutil.copytree(STUDENT, tmp_path / "copy")))
    assert not have_same_weights(STUDENT, teacher)
    assert not have_same_weights(STUDENT, tmp_path)


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        ("{a}+{b}={c}+{a}+{b}=", ""),
        ("{a}+{b}=", "64 of 64 rows, the teacher reads the prompt of the student"),
        ("{a}+{b}={d}+{a}+{b}=", "prompts of the teacher lack the answer of their row"),
    ],
)
def test_a_teacher_that_reads_no_answer_is_found(hint: str, said: str, tmp_path: Path) -> None:
    sums = [(a, b) for a in range(40, 48) for b in range(40, 48)]
    wrong = [a + b + 1 if a > 45 else a + b for a, b in sums]  # of some rows: all would be another kind of hint
    rows = [
        {"prompt": f"{a}+{b}=", "solutions": str(a + b), "hint": hint.format(a=a, b=b, c=a + b, d=d)}
        for (a, b), d in zip(sums, wrong, strict=True)
    ]
    given = [f"train_dataset.path={data_file(tmp_path / 'rows.jsonl', rows)}", "train_dataset.loader=null"]
    given += ["valid_dataset=null", "teacher.prompt_key=hint", "teacher.path=null", "teacher.follows_actor=true"]
    found = findings("distill quickstart_distill", *given, "teacher.loss_type=sampled_reverse_kl")
    assert ("teacher-prompts" in red(found)) == bool(said), found
    assert said in line_of(found, "teacher-prompts")
