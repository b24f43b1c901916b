"""One dataclass for each algorithm: everything a run of it can be told. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.fields import Section, check, knob, settings
from areno.config.model_roles import (
    CriticConfig,
    ModelConfig,
    NormConfig,
    PolicyConfig,
    RefConfig,
    ScoringRefConfig,
    TokenPolicyConfig,
)
from areno.config.run import (
    ClusterConfig,
    DatasetConfig,
    EngineConfig,
    EvaluatorConfig,
    GenerationConfig,
    RewardConfig,
    RolloutConfig,
    SaverConfig,
    StatsLoggerConfig,
    ValidDatasetConfig,
)
from areno.errors import Problem


@dataclass(kw_only=True)
class ExperimentConfig(Section):
    """What every run has."""

    experiment_name: str = knob(help="names the run's folder")
    trial_name: str | None = knob(None, help="names the run's folder within the experiment; null = the time it started")
    seed: int = knob(1, help="of data order, sampling and random weights", ge=0)
    total_train_epochs: int = knob(10, help="passes over the training data", gt=0, flag="--epochs")
    total_train_steps: int | None = knob(None, help="stop after so many steps", gt=0, flag="--max-steps")
    total_train_n_seqs: int | None = knob(None, help="stop after so many training rows", gt=0)
    tokenizer_path: str | None = knob(None, help="tokenizer folder or hub id; null = actor.path")
    engine: EngineConfig = knob(factory=EngineConfig, help="devices and processes")
    train_dataset: DatasetConfig = knob(factory=DatasetConfig, help="training data", needed=True)
    valid_dataset: ValidDatasetConfig | None = knob(None, help="evaluation data; null = no evaluation")
    saver: SaverConfig = knob(factory=SaverConfig, help="checkpoints")
    evaluator: EvaluatorConfig = knob(factory=EvaluatorConfig, help="evaluation")
    stats_logger: StatsLoggerConfig = knob(factory=StatsLoggerConfig, help="metrics")
    cluster: ClusterConfig = knob(factory=ClusterConfig, help="output folder")

    @check
    def experiment_name_is_a_folder_name(self) -> Iterator[Problem]:
        yield from _folder_name("experiment_name", self.experiment_name)

    @check
    def trial_name_is_a_folder_name(self) -> Iterator[Problem]:
        if self.trial_name is not None:
            yield from _folder_name("trial_name", self.trial_name)


def _folder_name(key: str, value: str) -> Iterator[Problem]:
    if not value.strip() or "/" in value or "\0" in value or value in (".", ".."):
        yield Problem(key, f"is {value!r}; a folder name without '/' is needed")


@dataclass(kw_only=True)
class SFTConfig(ExperimentConfig):
    """Supervised fine-tuning."""

    actor: ModelConfig = knob(help="the trained model")


@dataclass(kw_only=True)
class DPOActorConfig(ModelConfig):
    """The actor of DPO, with the settings of its loss."""

    beta: float = knob(
        0.1, help="how dear it is to move away from ref: factor on the margin (ipo: tau)", gt=0, flag="--dpo-beta"
    )
    loss_type: Literal["sigmoid", "ipo"] = knob(
        "sigmoid", help="DPO (2305.18290 eq. 7), or IPO (2310.12036 eq. 17, log-probabilities averaged over tokens)"
    )
    label_smoothing: float = knob(
        0.0, help="probability that chosen and rejected are swapped (conservative DPO); sigmoid only", ge=0, lt=0.5
    )

    @check
    def smoothing_has_a_loss(self) -> Iterator[Problem]:
        if self.label_smoothing and self.loss_type != "sigmoid":
            yield Problem(
                "label_smoothing",
                f"is {self.label_smoothing}, which loss_type={self.loss_type} has no use for; set it to 0",
            )


@dataclass(kw_only=True)
class DPOConfig(ExperimentConfig):
    """Direct Preference Optimization, on pairs of answers."""

    actor: DPOActorConfig = knob(help="the trained model")
    ref: ScoringRefConfig = knob(
        factory=ScoringRefConfig, help="frozen reference: it scores every pair once, before training"
    )


@dataclass(kw_only=True)
class PolicyExperimentConfig(ExperimentConfig):
    """What GRPO, GSPO and their relatives share: sample a group, score it, update the policy."""

    actor: PolicyConfig = knob(help="the policy")
    ref: RefConfig | None = knob(None, help="frozen reference for the KL loss; null = none")
    gconfig: GenerationConfig = knob(factory=GenerationConfig, help="sampling in training")
    eval_gconfig: GenerationConfig | None = knob(None, help="sampling in evaluation; null = gconfig")
    rollout: RolloutConfig = knob(factory=RolloutConfig, help="decoder")
    reward: RewardConfig = knob(factory=RewardConfig, help="reward function and reward model", needed=True)
    dynamic_bs: bool = knob(
        False, help="train on fewer prompts where rollout.dynamic_sampling drops some, instead of sampling others"
    )

    @check
    def groups_are_groups(self) -> Iterator[Problem]:
        norms = [norm for norm in (self.actor.adv_norm, self.actor.reward_norm) if norm is not None]
        if self.gconfig.n_samples < 2 and any("group" in (norm.mean_level, norm.std_level) for norm in norms):
            yield Problem(
                "gconfig.n_samples", f"is {self.gconfig.n_samples}; a group advantage needs at least 2 samples a prompt"
            )

    @check
    def samples_can_differ(self) -> Iterator[Problem]:
        if self.rollout.dynamic_sampling and self.gconfig.n_samples < 2:
            yield Problem(
                "rollout.dynamic_sampling", "drops groups without a difference; with gconfig.n_samples=1 that is all"
            )

    @check
    def greedy_samples_are_not_repeated(self) -> Iterator[Problem]:
        if self.gconfig.greedy and self.gconfig.n_samples > 1:
            yield Problem(
                "gconfig.greedy",
                f"is true, so the {self.gconfig.n_samples} samples of a prompt (gconfig.n_samples) are the same; "
                "set it to false (eval_gconfig has its own)",
            )

    @check
    def rounds_are_sampled(self) -> Iterator[Problem]:
        rounds = self.rollout.max_sampling_rounds
        if self.dynamic_bs and rounds != settings(RolloutConfig)["max_sampling_rounds"].default():
            yield Problem("rollout.max_sampling_rounds", f"is {rounds}, but with dynamic_bs=true there is one")

    @check
    def smaller_batches_have_a_cause(self) -> Iterator[Problem]:
        if self.dynamic_bs and not self.rollout.dynamic_sampling:
            yield Problem("dynamic_bs", "is true, but nothing is dropped; set rollout.dynamic_sampling=true too")

    @check
    def overlong_zone_fits(self) -> Iterator[Problem]:
        tokens, longest = self.actor.overlong_tokens, self.gconfig.max_new_tokens
        if tokens is not None and tokens > longest:
            yield Problem("actor.overlong_tokens", f"is {tokens}, more than gconfig.max_new_tokens={longest}; lower it")

    @check
    def minibatches_divide_the_batch(self) -> Iterator[Problem]:
        rows = self.train_dataset.batch_size * self.gconfig.n_samples
        if rows % self.actor.ppo_n_minibatches:
            yield Problem(
                "actor.ppo_n_minibatches",
                f"is {self.actor.ppo_n_minibatches}, which does not divide the {rows} rows of a step "
                "(train_dataset.batch_size * gconfig.n_samples)",
            )


@dataclass(kw_only=True)
class KLExperimentConfig(PolicyExperimentConfig):
    """Policy experiments whose only use of a reference is the KL to it."""

    @check
    def kl_has_a_reference(self) -> Iterator[Problem]:
        if self.actor.kl_ctl > 0 and self.ref is None:
            yield Problem("actor.kl_ctl", f"is {self.actor.kl_ctl}, but there is no reference model; add ref=default")

    @check
    def reference_is_used(self) -> Iterator[Problem]:
        if self.ref is not None and self.actor.kl_ctl == 0:
            yield Problem("ref", "is loaded but not used, since actor.kl_ctl is 0; set actor.kl_ctl or ref=null")


@dataclass(kw_only=True)
class GSPOActorConfig(PolicyConfig):
    """The actor of GSPO (2507.18071): the ratio is that of the whole sequence, so its clip is far smaller."""

    eps_clip: float = knob(3e-4, help="sequence-ratio clip: 1 - eps_clip .. 1 + eps_clip", gt=0, flag="--gspo-clip-eps")

    @check
    def rows_have_one_proximal_policy(self) -> Iterator[Problem]:
        if self.prox_logp_method == "loglinear":
            yield Problem(
                "prox_logp_method", "is loglinear, which is for token ratios; use recompute, or the grpo recipe"
            )


@dataclass(kw_only=True)
class GRPOConfig(KLExperimentConfig):
    """Group Relative Policy Optimization, token ratios."""

    actor: TokenPolicyConfig = knob(help="the policy")


@dataclass(kw_only=True)
class GSPOConfig(KLExperimentConfig):
    """Group Sequence Policy Optimization, sequence ratios."""

    actor: GSPOActorConfig = knob(help="the policy")


@dataclass(kw_only=True)
class PPOActorConfig(TokenPolicyConfig):
    """The actor of PPO (1707.06347). Advantages come from the critic by GAE (1506.02438)."""

    c_clip: float | None = knob(
        3.0, help="dual clip (1912.09729): bound on the loss of negative advantages, > 1", gt=1, flag="--clip-ratio-c"
    )
    reduction: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"] = knob(
        "token_mean", help="how token losses become one number: GRPO paper, DAPO, or Dr.GRPO (sum / max_new_tokens)"
    )
    kl_ctl: float = knob(0.001, help="coefficient of the KL to ref; 0 = off", ge=0, flag="--kl-loss-coef")
    adv_norm: NormConfig | None = knob(
        factory=lambda: NormConfig(mean_level="batch", std_level="batch"),
        help="of the advantages of response tokens (whitening); null = leave them",
    )
    discount: float = knob(1.0, help="of later rewards, for each token", gt=0, le=1, flag="--gamma")
    gae_lambda: float = knob(0.95, help="GAE: 0 trusts the critic, 1 the rewards", ge=0, le=1, flag="--lam")

    @check
    def leave_one_out_is_for_samples(self) -> Iterator[Problem]:
        if self.adv_norm is not None and self.adv_norm.mean_leave1out:
            yield Problem("adv_norm.mean_leave1out", "is for samples; the advantages of PPO are those of tokens")

    @check
    def dual_clip_has_a_clip(self) -> Iterator[Problem]:
        if self.c_clip != settings(PPOActorConfig)["c_clip"].default():  # the default is nobody's wish
            yield from TokenPolicyConfig.dual_clip_has_a_clip(self)


@dataclass(kw_only=True)
class PPOConfig(KLExperimentConfig):
    """Proximal Policy Optimization, with a critic."""

    actor: PPOActorConfig = knob(help="the policy")
    ref: RefConfig | None = knob(
        factory=RefConfig, help="frozen reference for the KL; null = none, with actor.kl_ctl=0"
    )
    critic: CriticConfig = knob(factory=CriticConfig, help="the value function")

    @check
    def critic_minibatches_divide_the_batch(self) -> Iterator[Problem]:
        rows = self.train_dataset.batch_size * self.gconfig.n_samples
        if rows % self.critic.ppo_n_minibatches:
            yield Problem(
                "critic.ppo_n_minibatches",
                f"is {self.critic.ppo_n_minibatches}, which does not divide the {rows} rows of a step "
                "(train_dataset.batch_size * gconfig.n_samples)",
            )
