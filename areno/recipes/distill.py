"""Distillation: a student learns the next-token distribution of a teacher, a stronger model of the same vocabulary.

    python -m areno.recipes.distill --config-name=quickstart_distill teacher.path=<model folder>

    on-policy    the student answers, and the teacher judges each token of the answers    (GKD, arXiv 2306.13649)
    off-policy   the answers are those of the dataset, as in supervised fine-tuning
    loss = mean over trained tokens of D(student, teacher)        (teacher.loss_type chooses D)

The sampled reverse KL (the default) reads only the teacher's log-probabilities of the sampled tokens, so it needs
answers of the student. on_policy_share sets the share of each batch that the student answers. A reward function is
optional: its rewards are logged and evaluated, and do not train.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import ClassVar, Literal

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn
from areno.config.models import PolicyConfig
from areno.config.policy_experiments import DistillExperimentConfig
from areno.config.teacher import SAMPLED, TeacherConfig
from areno.errors import Problem
from areno.launch import run_recipe
from areno.schema.fields import build_check, require, setting


@dataclass(kw_only=True)
class DistillActorConfig(PolicyConfig):
    """The student. Settings of rewards and advantages are fixed, because they do not enter the loss."""

    reward_bias: ClassVar[float] = 0.0  # type: ignore[misc]
    reward_scaling: ClassVar[float] = 1.0  # type: ignore[misc]
    reward_clip: ClassVar[float | None] = None  # type: ignore[misc]
    reward_norm: ClassVar[None] = None  # type: ignore[misc]
    adv_norm: ClassVar[None] = None  # type: ignore[misc]
    overlong_reward_penalty: ClassVar[bool] = False  # type: ignore[misc]
    overlong_tokens: ClassVar[int | None] = None  # type: ignore[misc]
    overlong_penalty_factor: ClassVar[float | None] = None  # type: ignore[misc]


@dataclass(kw_only=True)
class DistillTeacherConfig(TeacherConfig):
    """The teacher. The loss of distillation is the only loss, so the weights of both losses are fixed."""

    rl_loss_weight: ClassVar[float] = 0.0  # type: ignore[misc]
    distill_loss_weight: ClassVar[float] = 1.0  # type: ignore[misc]


@dataclass(kw_only=True)
class DistillConfig(DistillExperimentConfig):
    """Distillation, on answers of the student, of the dataset, or of both."""

    actor: DistillActorConfig = setting(help="The student")
    teacher: DistillTeacherConfig = setting(factory=DistillTeacherConfig, help="The teacher")

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import distillation_loss_fn

        return partial(distillation_loss_fn, **self.teacher.loss_settings())

    def objective(self) -> tuple[str, Literal["max", "min"]]:
        if self.valid_dataset is None:
            return "train/distill_loss of the last step", "min"
        return super().objective()

    @require(
        "teacher.loss_type",
        "is sampled_reverse_kl, which needs answers of the student, but on_policy_share={self.on_policy_share} takes "
        "answers of the dataset, too; set it to reverse_kl, forward_kl or jsd, or on_policy_share=1",
    )
    def sampled_loss_has_student_answers(self) -> bool:
        return self.on_policy_share >= 1 or self.teacher.loss_type != SAMPLED

    @require("on_policy_share", "is {self.on_policy_share}, but agents (agent.fn) have no given answers; set it to 1")
    def agents_sample_all_answers(self) -> bool:
        return self.on_policy_share >= 1 or self.agent.fn is None

    @require(
        "on_policy_share",
        "is {self.on_policy_share}, but with rollout.max_head_offpolicyness or rollout.prompts_ahead a step samples "
        "other prompts than those of its batch; set it to 1",
    )
    def given_answers_match_batch(self) -> bool:
        return self.on_policy_share >= 1 or self.prompts_ahead <= 0

    @build_check
    def check_teacher_differs(self) -> Iterator[Problem]:
        """Report a teacher that is the same model as the student before training, and reads the same prompt."""
        teacher = self.teacher
        if teacher.prompt_key is not None or self.actor.init_lora_from:
            return
        if teacher.paths and set(teacher.paths.values()) <= {None, self.actor.path}:
            text = "names no other model than the student, which can learn nothing from itself; set it to a teacher, "
            text += "or set teacher.prompt_key to a field with another prompt"
            yield Problem(teacher.path_key(next(iter(teacher.paths))), text)

    @require(
        "rollout.dynamic_sampling",
        "is true, but rewards do not train a student, so no prompts are replaced; set it to false",
    )
    def prompts_stay(self) -> bool:
        return not self.rollout.dynamic_sampling


ALGORITHM = Algorithm(
    name="distill",
    config=DistillConfig,
    loop=partial(resolve_name, "areno.trainers.distill:DistillTrainer"),
    default="quickstart_distill",
)

if __name__ == "__main__":
    run_recipe("areno.recipes.distill")
