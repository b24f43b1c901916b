from __future__ import annotations

from pathlib import Path

from areno.config.experiments import GSPOConfig

CONFIG = GSPOConfig
DEFAULT = "quickstart"


def main(config: GSPOConfig, run_dir: Path) -> float:
    raise NotImplementedError


if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.gspo")
