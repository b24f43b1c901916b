"""DPO: Direct Preference Optimization (arXiv 2305.18290) on {prompt, chosen, rejected} rows, and IPO as a setting.

    python -m areno.recipes.dpo --config-name=quickstart_dpo

The reference scores every pair once, before training; with ref.path=null it is the actor as it starts. The loss raises
the log-probability of the chosen answer against that of the rejected one, both relative to the reference; actor.beta
says how dear it is to move away from it.
"""

from __future__ import annotations

from areno.api.algorithms import Algorithm
from areno.config.experiments import DPOConfig

ALGORITHM = Algorithm(name="dpo", config=DPOConfig, loop="dpo", default="quickstart_dpo")

if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.dpo")
