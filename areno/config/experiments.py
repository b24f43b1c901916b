"""One dataclass for each algorithm: everything a run of it can be told. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.fields import Section, check, knob
from areno.config.model_roles import ModelConfig, PolicyConfig, RefConfig
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
    train_dataset: DatasetConfig = knob(help="training data")
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
class PolicyExperimentConfig(ExperimentConfig):
    """What GRPO, GSPO and their relatives share: sample a group, score it, update the policy."""

    actor: PolicyConfig = knob(help="the policy")
    ref: RefConfig | None = knob(None, help="frozen reference for the KL loss; null = none")
    gconfig: GenerationConfig = knob(factory=GenerationConfig, help="sampling in training")
    eval_gconfig: GenerationConfig | None = knob(None, help="sampling in evaluation; null = gconfig")
    rollout: RolloutConfig = knob(factory=RolloutConfig, help="decoder")
    reward: RewardConfig = knob(help="reward function")

    @check
    def groups_are_groups(self) -> Iterator[Problem]:
        if self.gconfig.n_samples < 2 and "group" in (self.actor.adv_norm.mean_level, self.actor.adv_norm.std_level):
            yield Problem(
                "gconfig.n_samples", f"is {self.gconfig.n_samples}; a group advantage needs at least 2 samples a prompt"
            )

    @check
    def kl_has_a_reference(self) -> Iterator[Problem]:
        if self.actor.kl_ctl > 0 and self.ref is None:
            yield Problem("actor.kl_ctl", f"is {self.actor.kl_ctl}, but there is no reference model; add ref=default")

    @check
    def reference_is_used(self) -> Iterator[Problem]:
        if self.ref is not None and self.actor.kl_ctl == 0:
            yield Problem("ref", "is loaded but not used, since actor.kl_ctl is 0; set actor.kl_ctl or ref=null")

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
class GRPOActorConfig(PolicyConfig):
    """The actor of GRPO (2402.03300)."""

    reduction: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"] = knob(
        "seq_mean_token_mean",
        help="how token losses become one number: GRPO paper, DAPO, or Dr.GRPO (sum / max_new_tokens)",
    )


@dataclass(kw_only=True)
class GSPOActorConfig(PolicyConfig):
    """The actor of GSPO (2507.18071): the ratio is that of the whole sequence, so its clip is far smaller."""

    eps_clip: float = knob(3e-4, help="sequence-ratio clip: 1 - eps_clip .. 1 + eps_clip", gt=0, flag="--gspo-clip-eps")


@dataclass(kw_only=True)
class GRPOConfig(PolicyExperimentConfig):
    """Group Relative Policy Optimization, token ratios."""

    actor: GRPOActorConfig = knob(help="the policy")


@dataclass(kw_only=True)
class GSPOConfig(PolicyExperimentConfig):
    """Group Sequence Policy Optimization, sequence ratios."""

    actor: GSPOActorConfig = knob(help="the policy")
