"""A teacher in a script: the role, the divergence of a training call, and rows that list what a teacher says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno import ModelRole
from areno.config.teacher import Divergence
from areno.errors import ConfigError, DataError, EngineError
from areno.loss_fns import distillation_loss_fn
from tests.helpers.policy_runs import other_actor
from tests.helpers.sdk_script import LR, made, rows_of, sampled


@pytest.mark.slow
def test_a_student_follows_a_teacher(tmp_path: Path) -> None:
    teacher = other_actor(tmp_path / "teacher", 0.2)
    with made(optimizer={**LR, "lr": 2e-4}) as trainer:
        rows = rows_of(sampled(trainer, ["17+25=", "38+44="], 8))
        with pytest.raises(EngineError, match="there is no role 'teacher'"):
            trainer.train(rows, distillation_loss_fn, divergence=Divergence("forward_kl"))
        with pytest.raises(ConfigError, match=r"trainable: is True, but a role named 'teacher' is only scored"):
            trainer.ensure_roles({"teacher": ModelRole("teacher", str(teacher), trainable=True)})
        trainer.ensure_roles({"teacher": ModelRole("teacher", str(teacher), trainable=False)})
        with pytest.raises(DataError, match="needs the divergence from a teacher"):
            trainer.train(rows, distillation_loss_fn)
        with pytest.raises(ConfigError, match="divergence: is a str"):
            trainer.train(rows, distillation_loss_fn, divergence="jsd")  # type: ignore[arg-type]
        for divergence in (Divergence("forward_kl"), Divergence("jsd", 0.2)):
            losses = [trainer.train(rows, distillation_loss_fn, divergence=divergence)["loss"] for _ in range(6)]
            assert losses[-1] < losses[0]

        def own_loss(pack: Any, logprobs: Any) -> Any:
            return pack.token_mean(pack.trained(pack.divergence) ** 2), {}

        assert trainer.train(rows, own_loss, divergence=Divergence("reverse_kl"))["loss"] > 0


def test_the_sampled_form_and_lists_of_tokens(tmp_path: Path) -> None:
    teacher = other_actor(tmp_path / "teacher", 0.2)
    with made(optimizer={**LR, "lr": 2e-4}) as trainer:
        rows = rows_of(sampled(trainer, ["17+25=", "38+44="], 8))
        trainer.ensure_roles({"teacher": ModelRole("teacher", str(teacher), trainable=False)})
        scored = trainer.score_logprobs("teacher", [row.tokens or [] for row in rows])
        for row, logprobs in zip(rows, scored, strict=True):
            row.teacher_logprobs = logprobs
        first = trainer.train(rows, partial(distillation_loss_fn, sampled=True))
        assert first["loss"] == pytest.approx(first["teacher_kl"], abs=1e-5)  # ratios of 1
        trainer.release_role("teacher")
        for row, logprobs in zip(rows, scored, strict=True):  # the teacher elsewhere lists the sampled token alone
            row.teacher_top = (np.asarray(row.tokens)[:, None], np.asarray(logprobs)[:, None])
        losses = [
            trainer.train(rows, distillation_loss_fn, divergence=Divergence("forward_kl"))["loss"] for _ in range(6)
        ]
        assert 0 <= losses[-1] < losses[0]
