"""DPO: Direct Preference Optimization (arXiv 2305.18290) on {prompt, chosen, rejected} rows, and IPO (2310.12036).

    python -m areno.recipes.dpo --config-name=quickstart_dpo

    h    = sum over the answer's tokens of log(policy / ref)
    loss = mean over pairs of -log sigmoid(beta (h_chosen - h_rejected))        (2305.18290 eq. 7; IPO: loss_type=ipo)

The reference scores every pair once, before training. With ref.path=null the reference is the actor as it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn, PreferenceExperimentConfig
from areno.config.models import ModelConfig
from areno.launch import run_recipe
from areno.schema.fields import forbid, setting

if TYPE_CHECKING:
    from areno.trainers.dpo import DPOTrainer


@dataclass(kw_only=True)
class DPOActorConfig(ModelConfig):
    """The actor of DPO, with the settings of its loss."""

    beta: float = setting(
        0.1,
        help="Beta of DPO, the factor of the difference between the log-ratios (policy to reference model) of the "
        "chosen and the rejected answer. A larger beta keeps the policy closer to the reference model. With "
        "loss_type=ipo, this is the parameter tau of IPO",
        gt=0,
        flag="--dpo-beta",
    )
    loss_type: Literal["sigmoid", "ipo"] = setting(
        "sigmoid",
        help="sigmoid: the loss of DPO (arXiv 2305.18290, eq. 7). ipo: the loss of IPO (arXiv 2310.12036, eq. 17), "
        "with log-probabilities averaged over the tokens of an answer",
    )
    label_smoothing: float = setting(
        0.0,
        help="Assumed probability that chosen and rejected answer are swapped in the data (conservative DPO). Used "
        "with loss_type=sigmoid",
        ge=0,
        lt=0.5,
    )

    @forbid("label_smoothing", "is {self.label_smoothing}, but loss_type={self.loss_type} does not use it; set it to 0")
    def unused_smoothing(self) -> bool:
        """Return whether label_smoothing is set although the chosen loss_type does not use it."""
        return self.label_smoothing > 0 and self.loss_type != "sigmoid"


@dataclass(kw_only=True)
class DPOConfig(PreferenceExperimentConfig):
    """Direct Preference Optimization, on pairs of answers."""

    actor: DPOActorConfig = setting(help="The model that is trained")

    def loss_fn(self) -> LossFn:
        """Return the loss function of the algorithm, with the settings of the actor as its keyword arguments."""
        from areno.loss_fns import dpo_loss_fn

        actor = self.actor
        return partial(dpo_loss_fn, beta=actor.beta, label_smoothing=actor.label_smoothing, loss_type=actor.loss_type)


def loop() -> type[DPOTrainer]:
    """Return the training loop. It is imported only here, because the import would delay `--help`."""
    from areno.trainers.dpo import DPOTrainer

    return DPOTrainer


ALGORITHM = Algorithm(name="dpo", config=DPOConfig, loop=loop, default="quickstart_dpo")

if __name__ == "__main__":
    run_recipe("areno.recipes.dpo")
