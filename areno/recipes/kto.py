"""KTO: Kahneman-Tversky Optimization (arXiv 2402.01306) on single answers, each labelled desirable or undesirable.

    python -m areno.recipes.kto --config-name=quickstart_kto

    h    = sum over the answer's tokens of log(policy / ref)
    z0   = max(0, mean of h over prompts of the step, each with the answer to another prompt)
    loss = mean over rows of w (1 - sigmoid(beta (h - z0))), with z0 - h for undesirable answers        (sec. 4.1)

w is actor.desirable_weight or actor.undesirable_weight. The reference scores all rows before training. With
ref.path=null the reference is the actor as it starts. z0 is estimated once for each step, before its update, so it does
not depend on micro-batches or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn, UnpairedExperimentConfig
from areno.config.models import ModelConfig
from areno.launch import run_recipe
from areno.schema.fields import require, setting


@dataclass(kw_only=True)
class KTOActorConfig(ModelConfig):
    """The actor of KTO, with the settings of its loss."""

    beta: float = setting(
        0.1,
        help="Factor on the log-ratio of policy to reference. Larger keeps the policy closer to the reference",
        gt=0,
    )
    desirable_weight: float = setting(
        1.0,
        help="Weight of desirable answers (lambda_D). Both kinds should count about the same: with three times as "
        "many undesirable answers, 3",
        gt=0,
    )
    undesirable_weight: float = setting(1.0, help="Weight of undesirable answers in the loss (lambda_U)", gt=0)


@dataclass(kw_only=True)
class KTOConfig(UnpairedExperimentConfig):
    """Kahneman-Tversky Optimization, on labelled answers."""

    actor: KTOActorConfig = setting(help="The model that is trained")

    def loss_fn(self) -> LossFn:
        """Return the loss without the reference point, which the loop adds in each step."""
        from areno.loss_fns import kto_loss_fn

        actor = self.actor
        weights = {"desirable_weight": actor.desirable_weight, "undesirable_weight": actor.undesirable_weight}
        return partial(kto_loss_fn, beta=actor.beta, **weights)

    @require(
        "train_dataset.batch_size", "is 1, but the reference point of KTO needs answers to other prompts; raise it"
    )
    def batch_has_other_prompts(self) -> bool:
        return self.train_dataset.batch_size >= 2


ALGORITHM = Algorithm(
    name="kto", config=KTOConfig, loop=partial(resolve_name, "areno.trainers.kto:KTOTrainer"), default="quickstart_kto"
)

if __name__ == "__main__":
    run_recipe("areno.recipes.kto")
