"""SFT: supervised fine-tuning on {prompt, response} or {messages} rows.

    python -m areno.recipes.sft --config-name=quickstart_base actor.path=<model folder>

The loss is the negative log-likelihood of response tokens (of assistant turns), mean over all of them in the step.
"""

from __future__ import annotations

from areno.api.algorithms import Algorithm
from areno.config.experiments import SFTConfig

ALGORITHM = Algorithm(name="sft", config=SFTConfig, loop="sft", default="quickstart_base")

if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.sft")
