"""SFT: supervised fine-tuning on {prompt, response} or {messages} rows.

python -m areno.recipes.sft --config-name=quickstart_base actor.path=<model folder>

loss = mean over all response tokens of the step of -log p        (of the assistant's turns, for {messages})
"""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn, SupervisedExperimentConfig
from areno.launch import run_recipe


class SFTConfig(SupervisedExperimentConfig):
    """Supervised fine-tuning."""

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import sft_loss_fn

        return sft_loss_fn


ALGORITHM = Algorithm(
    name="sft", config=SFTConfig, loop=partial(resolve_name, "areno.trainers.sft:SFTTrainer"), default="quickstart_base"
)

if __name__ == "__main__":
    run_recipe("areno.recipes.sft")
