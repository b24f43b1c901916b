"""DPO: Direct Preference Optimization (arXiv 2305.18290) on {prompt, chosen, rejected} rows, and losses like it.

    python -m areno.recipes.dpo --config-name=quickstart_dpo

    h    = sum over the answer's tokens of log(policy / ref)
    loss = mean over pairs of -log sigmoid(beta (h_chosen - h_rejected))        (2305.18290 eq. 7)

actor.loss_type chooses another loss: robust DPO, IPO, SimPO or ORPO (areno/loss_fns/preferences.py). The reference
scores every pair once, before training. With ref.path=null the reference is the actor as it starts. SimPO and ORPO have
no reference, and none is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn, PreferenceExperimentConfig
from areno.config.models import ModelConfig
from areno.launch import run_recipe
from areno.loss_fns.preferences import PreferenceLossConfig
from areno.schema.fields import require, setting


@dataclass(kw_only=True)
class DPOActorConfig(PreferenceLossConfig, ModelConfig):
    """The actor of DPO, with the choice of its loss and the settings of all losses."""


@dataclass(kw_only=True)
class DPOConfig(PreferenceExperimentConfig):
    """Direct Preference Optimization, on pairs of answers."""

    actor: DPOActorConfig = setting(help="The model that is trained")

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import dpo_loss_fn

        return partial(dpo_loss_fn, **self.actor.loss_settings())

    def needs_reference(self) -> bool:
        return self.actor.needs_reference

    @require("ref.path", "is set, but actor.loss_type={self.actor.loss_type} uses no reference model; leave it out")
    def reference_is_used(self) -> bool:
        return self.ref.path is None or self.actor.needs_reference


ALGORITHM = Algorithm(
    name="dpo", config=DPOConfig, loop=partial(resolve_name, "areno.trainers.dpo:DPOTrainer"), default="quickstart_dpo"
)

if __name__ == "__main__":
    run_recipe("areno.recipes.dpo")
