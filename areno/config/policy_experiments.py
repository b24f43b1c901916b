"""Settings of a run of reinforcement learning or distillation. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from areno.config import models
from areno.config.agent import COMPLETION, AgentConfig, TurnCredit
from areno.config.environments import with_environment
from areno.config.experiments import EVALUATION, ExperimentConfig, pass_at_k_values
from areno.config.resuming import FROM_HERE, NEVER, NEW_RUNS, RUN_LENGTH
from areno.config.reward import RewardConfig
from areno.config.rollout import GenerationConfig, RolloutConfig, TuneConfig
from areno.config.sources import PromptDatasetConfig, source_key
from areno.config.teacher import TeacherConfig
from areno.config.with_agents import WithAgents
from areno.config.with_teacher import WithTeacher
from areno.errors import ConfigError, Key, Problem
from areno.schema.fields import MissingSetting, Needs, UnusedSetting, check, require, setting, source_check


@dataclass(kw_only=True)
class PolicyExperimentConfig(WithAgents, WithTeacher, ExperimentConfig):
    """Settings of reinforcement learning: sample a group of completions per prompt, score it, update the policy."""

    actor: models.PolicyConfig = setting(help="The policy")
    ref: models.RefConfig | None = setting(
        None, help="Frozen reference model for the KL loss. null: no reference model"
    )
    teacher: TeacherConfig | None = setting(
        None, help="Teacher from which the policy learns besides its rewards (distillation). null: no teacher"
    )
    train_dataset: PromptDatasetConfig = setting(
        factory=PromptDatasetConfig, help="Training data", required_in_build=True, on_resume=NEVER, read_by_rollout=True
    )
    gconfig: GenerationConfig = setting(factory=GenerationConfig, help="Sampling during training", read_by_rollout=True)
    eval_gconfig: GenerationConfig | None = setting(
        None,
        help="Sampling during evaluation. null: as in gconfig",
        flags={},
        only_with=EVALUATION,
        on_resume=FROM_HERE,
    )
    rollout: RolloutConfig = setting(
        factory=RolloutConfig, help="Decoding of completions, and how a step selects samples", read_by_rollout=True
    )
    agent: AgentConfig = setting(
        factory=AgentConfig,
        help="Agents: your code that calls the model, in place of one completion per sample",
        renamed_from="rollout.agent",
        read_by_rollout=True,
    )
    reward: RewardConfig = setting(
        factory=RewardConfig, help="Reward function and reward model", required_in_build=True, read_by_rollout=True
    )
    tune: TuneConfig = setting(
        factory=TuneConfig, help="Settings of memory and speed, chosen by a trial before the run", on_resume=NEW_RUNS
    )
    total_train_n_tokens: int | None = setting(
        None,
        help="End after the step in which the run has sampled this many tokens of completions, also of dropped "
        "prompts. null: no limit",
        gt=0,
        on_resume=RUN_LENGTH,
    )
    dynamic_bs: bool = setting(
        False,
        help="With rollout.dynamic_sampling: train on the prompts that were not dropped, so batches may be smaller. "
        "false: sample more prompts until the batch is full",
        only_with=Needs("rollout.dynamic_sampling", so="no prompts are dropped"),
        read_by_rollout=True,
    )

    needs_rewards: ClassVar[bool] = True
    """Whether the run trains on rewards. If not, they are optional."""
    other_credits: ClassVar[str] = ""
    """What to do for another agent.turn_credit than `turn_credits`, after a semicolon."""

    @property
    def turn_credits(self) -> Sequence[TurnCredit]:
        """The values of agent.turn_credit that `advantages` computes."""
        return ["outcome"]

    @check
    def check_adv_estimator(self) -> Iterator[Problem]:
        """Report settings that the estimator of advantages (actor.adv_estimator) cannot honour."""
        estimator = self.actor.chosen_adv_estimator
        if estimator is None:
            return
        key, text = Key("actor.adv_estimator"), "is {}, but {} takes one reward for a sample; {}"
        if self.agent.turn_credit != "outcome":
            yield Problem("agent.turn_credit", text, self.agent.turn_credit, key, "set it to outcome")
        if self.actor.kl_reward_coef:
            yield Problem("actor.use_kl_in_reward", text, "true", key, "set it to false, for a KL in the loss")
        yield from estimator.problems(self)

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Let environments that train_dataset.path, a source or agent.fn name give rows, agent and reward.

        A source with an agent makes the run one of agents, in which other sources have single completions.
        """
        return with_environment(values, cls.needs_rewards)

    @source_check
    def check_has_reward(self) -> Iterator[Problem]:
        """Report a run or a source without reward function, reward model or agent."""
        sources = self.train_dataset.sources
        if not self.needs_rewards or (sources and (self.reward.fn is not None or self.reward.has_model)):
            return
        if not sources:
            yield from self.reward.missing_reward_problems(self.agent.fn is not None)
        for name, source in (sources or {}).items():
            if not source.reward and self.agent_of(name).fn in (None, COMPLETION):
                yield MissingSetting(f"{source_key(name)}.reward", "missing, since reward.fn is null; set one of both")

    def eval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that an evaluation measures. The first is the default of evaluator.metric."""
        n_samples = (self.eval_gconfig or self.gconfig).n_samples
        of_groups = [*(f"pass@{k}" for k in pass_at_k_values(n_samples)), f"avg@{n_samples}"] if n_samples > 1 else []
        right = [] if self.reward.has_model else ["accuracy"]  # no score of a model is that of a right answer
        names = ("rewards_mean", *right, "response_len_mean", "truncated", "num_sequences")
        return (*names, *of_groups) if right else names

    def objective(self) -> tuple[str, Literal["max", "min"]]:
        """Return the metric by which a sweep compares runs, as (text, "max" or "min")."""
        measured = "eval/rewards_mean" if self.reward.has_model else "eval/accuracy"
        return self._objective(measured, "rollout/rewards_mean, mean of the last 5 steps", "max")

    @check
    def check_eval_gconfig(self) -> Iterator[Problem]:
        """Report that eval_gconfig sets a temperature although evaluation is greedy and does not use a temperature."""
        if self.eval_gconfig is not None:
            yield from self.eval_gconfig.greedy_evaluation_problems("eval_gconfig")

    def advantages(self, rows: Any, groups: Any) -> Any:
        """Compute the advantages that the settings describe. A recipe overrides this method.

        Args:
            rows: The TrainSequences of the step.
            groups: Index of the group of each row. The samples of one prompt are a group.

        Returns:
            A list with an array for each row, which has one advantage per trained token. For an algorithm with a
            critic, a tuple of two such lists: (advantages, returns).

        Raises:
            ConfigError: The class defines no advantages.
        """
        raise ConfigError(f"{type(self).__name__} describes no advantages; give the trainer an advantage_fn")

    @require(
        "ref.offload",
        "is true, but with actor.use_lora the reference is the actor without its adapters, which stays on the device; "
        "leave it out",
    )
    def reference_is_offloadable(self) -> bool:
        return self.ref is None or not self.ref.offload or self.ref.path is not None or not self.actor.use_lora

    @require("gconfig.n_samples", "is {self.gconfig.n_samples}; a group advantage needs at least 2 samples per prompt")
    def groups_have_several_samples(self) -> bool:
        return self.gconfig.n_samples >= 2 or not self.group_norm_keys()

    def group_norm_keys(self) -> list[str]:
        """Return the settings of the actor that compare the samples of a prompt."""
        return self.actor.group_norm_keys

    @require(
        "actor.routing_replay",
        "is true, but the turns of agents (agent.fn) do not bring the experts of their tokens; set it to false",
    )
    def routes_are_recorded(self) -> bool:
        return not self.actor.routing_replay or self.agent.fn is None

    @require(
        "engine.deterministic",
        "is true, but agents ask for samples when their own code does, so that two runs differ; set it to false. With "
        "engine.exact=true, what each of their requests draws does not depend on the others",
    )
    def request_order_is_fixed(self) -> bool:
        return not self.engine.deterministic or self.agent.fn is None

    @require(
        "reward.judge.compare",
        "is true, but the {self.single_sample_phase} has one sample of a prompt, which is compared with nothing; "
        "sample several",
    )
    def judge_has_samples_to_compare(self) -> bool:
        return not self.reward.judge.compare or self.single_sample_phase == ""

    @property
    def single_sample_phase(self) -> str:
        """The part of the run (rollout or evaluation) that draws one sample per prompt, in words. "" if none does."""
        evaluates = self.valid_dataset is not None
        if self.gconfig.n_samples == 1:
            return "rollout (gconfig.n_samples)"
        alone = evaluates and self.eval_gconfig is not None and self.eval_gconfig.n_samples == 1
        return "evaluation (eval_gconfig.n_samples)" if alone else ""

    @require(
        "rollout.dynamic_sampling",
        "drops groups whose rewards are all equal; with gconfig.n_samples=1 it drops every group",
    )
    def rewards_can_differ_in_group(self) -> bool:
        return not self.rollout.dynamic_sampling or self.gconfig.n_samples >= 2

    @check
    def check_greedy_samples(self) -> Iterator[Problem]:
        """Report greedy sampling that makes all samples of a prompt equal."""
        has_agent = self.agent.fn is not None
        if not self.gconfig.greedy or self.gconfig.n_samples < 2 or has_agent:
            return
        text = "is true, so the {} samples of a prompt ({}) would be equal, and only agents ({}) make them differ; "
        text += "set it to false ({} has a setting of its own), or {}=1"
        if norms := self.group_norm_keys():
            text += " with " + " and ".join(f"actor.{name}=null" for name in norms)
        keys = [Key(name) for name in ("gconfig.n_samples", "agent.fn", "eval_gconfig", "gconfig.n_samples")]
        yield Problem("gconfig.greedy", text, self.gconfig.n_samples, *keys)

    @require(
        "actor.overlong_tokens",
        "is {self.actor.overlong_tokens}, more than gconfig.max_new_tokens={self.gconfig.max_new_tokens}; lower it",
    )
    def overlong_tokens_fit_completion(self) -> bool:
        return (self.actor.overlong_tokens or 0) <= self.gconfig.max_new_tokens

    @require(
        "tune.max_samples",
        "is {self.tune.max_samples}, less than the gconfig.n_samples={self.gconfig.n_samples} samples of one prompt; "
        "raise it",
    )
    def tuning_has_room_for_group(self) -> bool:
        return not self.tune.enabled or self.tune.max_samples >= self.gconfig.n_samples

    @require(
        "tune.enabled",
        "is true, but scheduler.type=ray runs on other machines, and candidates are tried on this machine alone; set "
        "it to false",
    )
    def tuning_is_local(self) -> bool:
        return not self.tune.enabled or self.scheduler.type != "ray"

    @property
    def prompts_ahead(self) -> int:
        """Number of prompts that a step samples beyond its batch. 0 if a step waits for all its samples."""
        if self.rollout.prompts_ahead is not None or not self.rollout.max_head_offpolicyness:
            return self.rollout.prompts_ahead or 0
        prompts_at_once = self.train_dataset.batch_size
        if (at_once := self.rollout.max_concurrent_rollouts) is not None:
            prompts_at_once = min(prompts_at_once, -(-at_once // self.gconfig.n_samples))
        return -(-prompts_at_once // 4)

    @property
    def replaces_prompts(self) -> bool:
        """Whether dynamic sampling replaces the prompts that it drops by other prompts."""
        rollout = self.rollout
        return rollout.dynamic_sampling and rollout.max_sampling_rounds > 1 and not self.dynamic_bs

    @property
    def replaces_in_flight(self) -> bool:
        """Whether prompts are replaced during a rollout that does not wait for its longest samples."""
        return self.replaces_prompts and self.rollout.max_head_offpolicyness > 0

    @require(
        "rollout.dynamic_sampling",
        "is true, but with prompts_ahead and max_head_offpolicyness=0 a step does not replace prompts; set "
        "max_head_offpolicyness above 0, or dynamic_bs=true to replace none",
    )
    def replacements_are_within_step(self) -> bool:
        return not self.replaces_prompts or self.prompts_ahead == 0 or self.rollout.max_head_offpolicyness > 0

    @require(
        "rollout.dynamic_sampling",
        "is true, but with max_head_offpolicyness above 0 prompts are replaced during the rollout, when rewards of "
        "agents (agent.fn), of reward.path and of reward.judge are not known yet; set dynamic_bs=true to replace none, "
        "or max_head_offpolicyness=0",
    )
    def rewards_precede_replacements(self) -> bool:
        return not self.replaces_in_flight or (self.agent.fn is None and not self.reward.has_model)

    @require(
        "rollout.prompts_ahead",
        "is {self.rollout.prompts_ahead}, more than the prompts that the next steps train (train_dataset.batch_size, "
        "times max_head_offpolicyness if that is above 0); lower it",
    )
    def prompts_ahead_are_trained_in_time(self) -> bool:
        most = max(1, self.rollout.max_head_offpolicyness) * self.train_dataset.batch_size
        return (self.rollout.prompts_ahead or 0) <= most

    @require(
        "rollout.prompts_ahead",
        "is {self.prompts_ahead} with max_head_offpolicyness=0, which throws samples away and repeats them later. What "
        "agents (agent.fn) have done cannot be taken back; leave it out, or set max_head_offpolicyness above 0",
    )
    def agents_are_never_restarted(self) -> bool:
        return self.prompts_ahead == 0 or self.rollout.max_head_offpolicyness > 0 or self.agent.fn is None

    @require(
        "rollout.drop_rollout_state",
        "is true, but with max_head_offpolicyness above 0 the rollout of agents (agent.fn) does not end before the "
        "run, so the KV cache stays; set it to false",
    )
    def kv_cache_stays_for_agents(self) -> bool:
        return not self.rollout.drop_rollout_state or self.rollout.max_head_offpolicyness == 0 or self.agent.fn is None

    @property
    def rows_per_step(self) -> int:
        """Number of training rows in a full batch: prompts per step times samples per prompt."""
        return self.train_dataset.batch_size * self.gconfig.n_samples

    @property
    def max_concurrent_samples(self) -> int:
        """Largest number of samples that decode at the same time in training, over all devices."""
        return self.rollout.max_concurrent_rollouts or self.rows_per_step

    @property
    def trained_samples_per_prompt(self) -> int:
        """Largest number of samples of a prompt that are trained. The others only get rewards."""
        return self.gconfig.n_samples

    @property
    def items_per_step(self) -> int:
        """Largest number of units in a step. A unit is the `rows_per_item` rows that stay together, such as a pair."""
        return self.train_dataset.batch_size * self.trained_samples_per_prompt // self.rows_per_item()

    @require(
        "actor.ppo_n_minibatches",
        "is {self.actor.ppo_n_minibatches}, which does not divide the {self.rows_per_step} rows of a step "
        "(train_dataset.batch_size * gconfig.n_samples)",
    )
    def minibatches_are_even(self) -> bool:
        return self.rows_per_step % self.actor.ppo_n_minibatches == 0


@dataclass(kw_only=True)
class DistillExperimentConfig(PolicyExperimentConfig):
    """Settings of distillation, which trains on a teacher and not on rewards."""

    trains_conversations: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = False
    ref: ClassVar[None] = None  # type: ignore[misc]
    teacher: TeacherConfig = setting(factory=TeacherConfig, help="The teacher")
    on_policy_share: float = setting(
        1.0,
        help="Share of a batch's dataset rows that the student answers, gconfig.n_samples times each. Others train "
        "on the dataset's response. 1: on-policy. 0: off-policy",
        ge=0,
        le=1,
    )

    @source_check
    def check_evaluation_rewards(self) -> Iterator[Problem]:
        """Report an evaluation without rewards."""
        if self.valid_dataset is not None and not (self.reward.fn or self.reward.has_model) and self.agent.fn is None:
            yield Problem(
                "valid_dataset",
                "is set, but there is no reward to evaluate; set reward.fn, reward.path or reward.judge.path",
            )


@dataclass(kw_only=True)
class PairedPolicyExperimentConfig(PolicyExperimentConfig):
    """Settings of a policy algorithm that trains on pairs of its own samples, such as online DPO."""

    teacher: ClassVar[None] = None  # type: ignore[misc]
    pairs_per_prompt: int = setting(
        1,
        help="Most pairs of samples that a prompt gives: best and worst by reward, second best and second worst, and "
        "so on. Two samples with equal rewards are no pair",
        gt=0,
    )

    def rows_per_item(self) -> int:
        """Return 2: a pair has a chosen and a rejected sample."""
        return 2

    @property
    def trained_samples_per_prompt(self) -> int:
        """Largest number of samples of a prompt that are trained: those of its pairs."""
        return 2 * self.pairs_per_prompt

    @require(
        "pairs_per_prompt",
        "is {self.pairs_per_prompt}, which needs {self.trained_samples_per_prompt} samples of a prompt, two for each "
        "pair, but gconfig.n_samples={self.gconfig.n_samples}; raise gconfig.n_samples, or lower pairs_per_prompt",
    )
    def samples_suffice_for_pairs(self) -> bool:
        return self.trained_samples_per_prompt <= self.gconfig.n_samples

    @require(
        "agent.export_style",
        "is {self.agent.export_style!r}, but pairs are made of samples that are one row; leave it out, or set concat",
    )
    def sample_of_pair_is_one_row(self) -> bool:
        return self.agent.export_style != "individual"

    @require(
        "actor.ppo_n_minibatches",
        "is {self.actor.ppo_n_minibatches}, which does not divide the {self.items_per_step} pairs of a step "
        "(train_dataset.batch_size * pairs_per_prompt)",
    )
    def minibatches_are_even(self) -> bool:
        return self.items_per_step % self.actor.ppo_n_minibatches == 0


@dataclass(kw_only=True)
class KLExperimentConfig(PolicyExperimentConfig):
    """Settings of a policy algorithm that uses the reference model only for a KL penalty."""

    actor: models.KLConfig = setting(help="The policy")

    @require("actor.kl_ctl", "is {self.actor.kl_ctl}, but there is no reference model; add ref=default")
    def kl_has_reference(self) -> bool:
        return self.actor.kl_ctl == 0 or self.ref is not None

    @check
    def reference_is_used(self) -> Iterator[Problem]:
        """Report a reference model without a KL penalty."""
        if self.ref is not None and self.actor.kl_ctl == 0:
            text, key = "is loaded but not used, since {} is 0; set {} or ref=null", Key("actor.kl_ctl")
            yield UnusedSetting("ref", text, key, key)


@dataclass(kw_only=True)
class CriticExperimentConfig(KLExperimentConfig):
    """Settings of a policy algorithm with a critic."""

    critic: models.CriticConfig = setting(factory=models.CriticConfig, help="The value function")

    def trained_models(self) -> dict[str, Any]:
        """Return role -> section of the actor and the critic."""
        return {"actor": self.actor, "critic": self.critic}

    @require(
        "critic.ppo_n_minibatches",
        "is {self.critic.ppo_n_minibatches}, which does not divide the {self.rows_per_step} rows of a step "
        "(train_dataset.batch_size * gconfig.n_samples)",
    )
    def critic_minibatches_are_even(self) -> bool:
        return self.rows_per_step % self.critic.ppo_n_minibatches == 0
