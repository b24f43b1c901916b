from __future__ import annotations

from pathlib import Path

from areno.config.experiments import SFTConfig

CONFIG = SFTConfig
DEFAULT = "quickstart_base"


def main(config: SFTConfig, run_dir: Path) -> float:
    raise NotImplementedError


if __name__ == "__main__":
    from areno.config.command import run_recipe

    run_recipe("areno.recipes.sft")
