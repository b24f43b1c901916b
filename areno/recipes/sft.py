"""SFT: supervised fine-tuning on {prompt, response} or {messages} rows.

    python -m areno.recipes.sft --config-name=quickstart_base actor.path=<model folder>

The loss is the negative log-likelihood of response tokens (of assistant turns), mean over all of them in the step.
"""

from __future__ import annotations

from pathlib import Path

from areno.config.experiments import SFTConfig

CONFIG = SFTConfig
DEFAULT = "quickstart_base"


def main(config: SFTConfig, run_dir: Path) -> float:
    """Run one experiment; the loss on valid_dataset or, without one, the training loss of the last step."""
    from areno.api.trainers.sft import SFTTrainer

    with SFTTrainer(config, run_dir) as trainer:
        return trainer.fit()


if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.sft")
