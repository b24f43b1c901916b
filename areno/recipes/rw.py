"""Reward models: a score for each answer, learned from ranked answers (Bradley-Terry; arXiv 2203.02155).

    python -m areno.recipes.rw --config-name=quickstart_rw

    r    = output of the score head at the last token of prompt and answer
    loss = mean over comparisons of -log sigmoid(r_1 - r_2 - margin_coef m) + center_coef (r_1 + r_2)^2

r_1 is the score of the better answer, r_2 that of the other, and m the margin, if the rows have margins. A checkpoint
is a ...ForSequenceClassification model with one label, which transformers loads, and which reward.path reads in GRPO,
GSPO and PPO. If actor.path is a language model, training starts from its transformer, with a score head of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn, RewardModelExperimentConfig
from areno.config.models import ModelConfig
from areno.launch import run_recipe
from areno.schema.fields import require, setting


@dataclass(kw_only=True)
class RewardModelActorConfig(ModelConfig):
    """The reward model, with the settings of its loss."""

    margin_coef: float = setting(
        1.0,
        help="Factor on the margins of comparisons (arXiv 2307.09288, eq. 2): the field margin of a pair, or the "
        "difference of two ratings. 0: margins are ignored",
        ge=0,
    )
    center_coef: float = setting(
        0.0,
        help="Coefficient of the squared sum of a comparison's scores, which keeps them around 0 (arXiv 2312.09244). "
        "0.01 is usual",
        ge=0,
    )

    @require(
        "use_lora",
        "is true, but adapters leave the score head as it is, which a reward model must learn; set it to false",
    )
    def head_is_trainable(self) -> bool:
        return not self.use_lora


@dataclass(kw_only=True)
class RewardModelConfig(RewardModelExperimentConfig):
    """Training of a reward model, on ranked answers."""

    actor: RewardModelActorConfig = setting(help="The reward model that is trained")

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import reward_model_loss_fn

        return partial(reward_model_loss_fn, margin_coef=self.actor.margin_coef, center_coef=self.actor.center_coef)


ALGORITHM = Algorithm(
    name="rw",
    config=RewardModelConfig,
    loop=partial(resolve_name, "areno.trainers.reward_model:RewardModelTrainer"),
    default="quickstart_rw",
)

if __name__ == "__main__":
    run_recipe("areno.recipes.rw")
