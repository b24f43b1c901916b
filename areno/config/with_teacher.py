"""What a teacher needs from the other settings of a run, for the configuration of policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from areno.config.agent import AgentConfig
from areno.config.models import PolicyConfig
from areno.config.run import EngineConfig
from areno.config.teacher import Divergence, TeacherConfig
from areno.errors import Problem
from areno.schema.fields import check, require


class WithTeacher:
    """Adds to PolicyExperimentConfig the checks of its teacher."""

    if TYPE_CHECKING:
        actor: PolicyConfig
        agent: AgentConfig
        engine: EngineConfig
        teacher: TeacherConfig | None

    @require(
        "teacher.offload",
        "is true, but with actor.use_lora the teacher is the actor without its adapters, which stays on the device; "
        "leave it out",
    )
    def teacher_is_offloadable(self) -> bool:
        teacher = self.teacher
        if teacher is None or teacher.follows_actor:
            return True
        return not teacher.offload or set(teacher.paths.values()) != {None} or not self.actor.use_lora

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from a teacher, or from the policy that sampled, that training passes compute."""
        if self.teacher is not None:
            return self.teacher.divergence
        kind = self.actor.mask_divergence
        return None if kind is None else Divergence(kind)

    @property
    def uses_actor_as_teacher(self) -> bool:
        """Whether training passes use the actor as the teacher, with another prompt or without its adapters."""
        teacher = self.teacher
        if teacher is None or teacher.divergence is None:
            return False
        of_actor = any(path in (None, self.actor.path) for path in teacher.paths.values())
        return teacher.follows_actor or (self.actor.use_lora and of_actor)

    @check
    def check_teacher_is_not_random(self) -> Iterator[Problem]:
        """Report a teacher whose path is the folder of the actor, although the actor starts with random weights."""
        for role, path in ({} if self.teacher is None else self.teacher.paths).items():
            if path is not None and path == self.actor.path and self.actor.init_from_scratch:
                assert self.teacher is not None
                text = "is the folder of the actor, which starts with random weights (actor.init_from_scratch), and so "
                text += "would the teacher; copy the teacher to another folder"
                yield Problem(self.teacher.path_key(role), text)

    @require(
        "teacher.prompt_key",
        "is {self.teacher.prompt_key!r}, but a later row of an agent (agent.fn) begins with other turns, which the "
        "prompt would replace; leave it out",
    )
    def teacher_prompt_keeps_agent_turns(self) -> bool:
        return self.teacher is None or self.teacher.prompt_key is None or self.agent.fn is None

    @require(
        "engine.cp_size",
        "is {self.engine.cp_size}, but a teacher with a prompt of its own (teacher.prompt_key) and a loss over the "
        "whole vocabulary (teacher.loss_type={self.teacher.loss_type}) does not support context parallelism; set it "
        "to 1, or teacher.loss_type=sampled_reverse_kl",
    )
    def teacher_prompts_are_on_one_rank(self) -> bool:
        teacher = self.teacher
        prompts = teacher is not None and teacher.prompt_key is not None and teacher.divergence is not None
        return not prompts or self.engine.cp_size <= 1

    @require(
        "actor.entropy_bonus",
        "is set, but passes that compare with a teacher have no gradient of the entropy; set teacher=null, or leave it "
        "out",
    )
    def entropy_has_gradient(self) -> bool:
        return self.teacher is None or not self.actor.differentiates_entropy

    @check
    def check_mask_has_distributions(self) -> Iterator[Problem]:
        """Report what does not go together with a mask that compares the distributions of policy and rollout."""
        if not self.actor.n_recorded_tokens:
            return
        text = "is {}, which compares the policy with the rollout's most likely tokens, but {}; set it to dppo_tv or "
        text, mask = text + "dppo_kl, or {}", vars(self.actor)["mask"]
        if self.teacher is not None:
            yield Problem(
                "actor.mask", text, mask, "the teacher's divergence takes its place in passes", "teacher=null"
            )
        if self.actor.differentiates_entropy:
            yield Problem(
                "actor.mask", text, mask, "its passes give the entropy no gradient", "drop actor.entropy_bonus"
            )
        if self.agent.fn is not None:
            yield Problem("actor.mask", text, mask, "the turns of agents do not bring these tokens", "drop agent.fn")

    @require(
        "actor.teacher_signal",
        "is set, but it needs a teacher's log-probabilities of sampled tokens; set teacher.path or teacher.prompt_key, "
        "with teacher.loss_type=sampled_reverse_kl",
    )
    def signal_has_teacher(self) -> bool:
        sampled = self.teacher is not None and self.teacher.divergence is None
        return sampled or not self.actor.uses_teacher_logprobs

    @require("teacher.rl_loss_weight", "is 0, but actor.teacher_signal is a part of the loss of rewards; raise it")
    def signal_has_weight(self) -> bool:
        return self.teacher is None or self.teacher.rl_loss_weight > 0 or not self.actor.uses_teacher_logprobs

    @require(
        "teacher.distill_loss_weight",
        "is 0, and nothing else learns from the teacher; raise it, or set actor.teacher_signal",
    )
    def teacher_is_used(self) -> bool:
        return self.teacher is None or self.teacher.distill_loss_weight > 0 or self.actor.uses_teacher_logprobs
