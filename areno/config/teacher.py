"""Settings of the teacher of distillation. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from areno.config.resuming import SPEED
from areno.errors import Problem
from areno.schema.fields import Needs, Section, check, require, setting

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd", "tv"]
SAMPLED = "sampled_reverse_kl"
ROLE = "teacher"
"""Role of a single teacher. With several teachers, each role is this word, a dot and the name of the teacher."""


def is_teacher(role: str) -> bool:
    """Return whether a role, such as "teacher" or "teacher.math", is that of a teacher."""
    return role.partition(".")[0] == ROLE


@dataclass(frozen=True)
class Divergence:
    """A divergence between the trained model and a teacher. Training passes compute it together with log-probabilities.

    Attributes:
        kind: "forward_kl", "reverse_kl", "jsd" or "tv", see areno/kernels/logprobs/divergence.py.
        beta: For "jsd", the weight of the teacher in the mixture of teacher and trained model, between 0 and 1.
        role: Role of the teacher for rows that do not set `TrainSequence.teacher`. Ignored for rows that list the
            teacher's log-probabilities (`TrainSequence.teacher_top`).

    Raises:
        ValueError: The kind is unknown, or beta is no float between 0 and 1.
    """

    kind: DivergenceKind
    beta: float = 0.5
    role: str = "teacher"

    def __post_init__(self) -> None:
        if self.kind not in get_args(DivergenceKind):
            raise ValueError(f"kind is {self.kind!r}; expected forward_kl, reverse_kl, jsd or tv")
        if self.kind == "jsd" and not (isinstance(self.beta, float) and 0.0 < self.beta < 1.0):
            raise ValueError(f"beta is {self.beta!r}; a float between 0 and 1 is expected")


@dataclass(kw_only=True)
class TeacherConfig(Section):
    """The teacher of a policy, and the loss by which the policy learns from it.

    The formulas of the losses are in `areno.loss_fns.distillation`.
    """

    heading = "Train"
    path: str | None = setting(
        None,
        help="Model folder or hub id of the teacher, with the actor's token ids. null: the initial weights of the "
        "actor, kept as a second copy unless actor.use_lora",
    )
    models: dict[str, str | None] | None = setting(
        None, help="Several teachers: name -> model folder or hub id, as in path. null: one teacher, that of path"
    )
    by: str | None = setting(
        None, help="Field of a dataset row with the name of its teacher in `models`", only_with=Needs("models")
    )
    offload: bool = setting(
        False,
        help="Keep the teacher in host memory while unused (CUDA). Of several teachers, at most one is on the device",
        on_resume=SPEED,
    )
    loss_type: Literal["sampled_reverse_kl", "reverse_kl", "forward_kl", "jsd"] = setting(
        "sampled_reverse_kl",
        help="sampled_reverse_kl: policy gradient with the advantage log(teacher / student) of each sampled token. "
        "The others compare distributions over the vocabulary. reverse_kl: KL(student | teacher). forward_kl: "
        "KL(teacher | student). jsd: generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649)",
    )
    jsd_beta: float = setting(
        0.5,
        help="Weight of the teacher in the mixture: near 0, jsd is like forward_kl, near 1 like reverse_kl. The loss "
        "tends to 0 at both, so raise the learning rate or distill_loss_weight",
        gt=0,
        lt=1,
        only_with=Needs("loss_type", "jsd"),
    )
    kl_discount: float = setting(
        0.0,
        help="Discount per token of later tokens' log(teacher / student) in a token's advantage. 0: each counts for "
        "itself. 1: the gradient of the KL divergence of whole answers, with more variance",
        ge=0,
        le=1,
        only_with=Needs("loss_type", SAMPLED),
    )

    prefix_weight: float = setting(
        0.0,
        help="gamma of IW-OPD (arXiv 2606.22600, which uses 0.5): a token's loss is multiplied by 1 + gamma (1 - the "
        "share of earlier tokens in the row's sum of |log(teacher / student)|)",
        ge=0,
        only_with=Needs("loss_type", SAMPLED),
    )

    follows_actor: bool = setting(
        False,
        help="The teacher is the actor itself, with its current weights and the prompt of prompt_key "
        "(self-distillation). false: the model of path",
        only_with=Needs("prompt_key", so="the teacher would be equal to the actor"),
    )
    prompt_key: str | None = setting(
        None,
        help="Field of a dataset row with the prompt that the teacher reads instead, such as one with the solution, "
        "to judge the same response. null: the same prompt",
    )
    rl_loss_weight: float = setting(
        1.0, help="Factor on the loss of the algorithm. 0: the actor learns from the teacher alone", ge=0
    )
    distill_loss_weight: float = setting(
        0.005,
        help="Factor on the loss of distillation, a mean over all trained tokens. 0: only with actor.teacher_signal",
        ge=0,
    )

    @property
    def role(self) -> str:
        """Role of the teacher. With several teachers, the role of the first one."""
        return "actor" if self.follows_actor else next(iter(self.paths))

    @property
    def paths(self) -> dict[str, str | None]:
        """Paths of the teachers by role. Empty if the actor is the teacher."""
        if self.follows_actor:
            return {}
        return (
            {ROLE: self.path} if self.models is None else {self.role_of(name): at for name, at in self.models.items()}
        )

    @staticmethod
    def role_of(name: str) -> str:
        """Return the role of a teacher, such as "teacher.math". `name` is its key in the setting `models`."""
        return f"{ROLE}.{name}"

    def path_key(self, role: str) -> str:
        """Return the name of the setting that holds the path of the teacher with this role."""
        return f"{ROLE}.path" if self.models is None else f"{ROLE}.models.{role.partition('.')[2]}"

    @require("prefix_weight", "is {self.prefix_weight}, but kl_discount adds later tokens to each; set one to 0")
    def prefix_weight_is_of_single_tokens(self) -> bool:
        return not self.prefix_weight or not self.kl_discount

    @check
    def check_model_names(self) -> Iterator[Problem]:
        """Report missing or unusable names of teachers, empty paths of teachers, and a missing setting `by`."""
        if self.models is None:
            return
        if not self.models:
            yield Problem("models", "is empty; name at least one teacher, or set path instead")
        for name, path in self.models.items():
            if path is not None and not path.strip():
                yield Problem(f"models.{name}", "is {!r}; a model folder or hub id is expected, or null", path)
            if not name.isascii() or not name.replace("-", "_").isidentifier():
                text = "has the name {!r}; a letter and then letters, digits, '-' and '_' are expected"
                yield Problem("models", text, name)
        if self.by is None:
            text = "is null, but models names teachers; set it to the field of a dataset row with the teacher's name"
            yield Problem("by", text)

    @require("path", "is {self.path}, but models names the teachers; leave one of them out")
    def only_path_or_models(self) -> bool:
        return self.models is None or self.path is None

    @require("models", "is set, but follows_actor is true, so the actor is the teacher; leave one of them out")
    def only_models_or_actor(self) -> bool:
        return self.models is None or not self.follows_actor

    @require("path", "is {self.path}, but follows_actor is true, so the actor is the teacher; leave one of them out")
    def only_path_or_actor(self) -> bool:
        return not self.follows_actor or self.path is None

    @require("offload", "is true, but follows_actor is true, and the actor stays on the device; leave it out")
    def actor_stays_on_device(self) -> bool:
        return not self.follows_actor or not self.offload

    @property
    def divergence(self) -> Divergence | None:
        """The divergence that training passes compute. None for the sampled form."""
        return None if self.loss_type == SAMPLED else Divergence(self.loss_type, self.jsd_beta, self.role)

    def loss_settings(self, prox_logp_method: Literal["recompute", "loglinear"] = "recompute") -> dict[str, Any]:
        """Return the settings as keyword arguments of `distillation_loss_fn`.

        Args:
            prox_logp_method: The argument of `distillation_loss_fn`.
        """
        return {
            "rl_loss_weight": self.rl_loss_weight,
            "distill_loss_weight": self.distill_loss_weight,
            "sampled": self.loss_type == SAMPLED,
            "kl_discount": self.kl_discount,
            "prefix_weight": self.prefix_weight,
            "prox_logp_method": prox_logp_method,
        }
