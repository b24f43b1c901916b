"""A variant takes the same steps in any micro-batches, with shared prefixes, exact kernels and adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from areno.files.paths import find_file
from tests.helpers.variant_runs import ALSO, MOVED, OWN, RECIPES, VARIANTS, Variant, close, player


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "how",
    [
        ["actor.mb_spec.mini_bs=1"],
        ["actor.mb_spec.max_tokens_per_mb=40"],
        pytest.param(["actor.share_prefixes=on"], marks=pytest.mark.slow),
        pytest.param(["engine.exact=true"], marks=pytest.mark.slow),
    ],
)
def test_a_step_does_not_depend_on_how_it_is_computed(grpo: Variant, name: str, how: list[str]) -> None:
    settings = [f"variant={name}", *MOVED, *VARIANTS[name]]
    whole, other = grpo(*settings), grpo(*settings, *how)
    own = OWN & whole.names()
    assert own
    assert all(whole.series(metric)[0] > 0 for metric in own)
    for metric in {"train/loss", "train/grad_norm", "train/ratio_std", *own}:
        assert other.series(metric) == close(whole.series(metric), 2e-4), metric


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO)
def test_other_variants(name: str, tmp_path: Path, models: dict[str, Path]) -> None:
    recipe = RECIPES.get(name, "grpo")
    task = f"quickstart_{recipe}" if name in RECIPES else "quickstart"
    run = partial(player(recipe, tmp_path, models["reward"]), task=task)
    settings = [f"variant={name}", *MOVED, *ALSO[name]]
    settings = [text.replace("OTHER", str(models["lm"])) for text in settings]
    whole = run(*settings)
    assert whole.series("train/grad_norm")[0] > 0
    other = run(*settings, "actor.mb_spec.mini_bs=1", "actor.share_prefixes=on", "engine.exact=true")
    for metric in {"train/loss", "train/grad_norm", "train/ratio_std", *OWN} & whole.names():
        assert other.series(metric) == close(whole.series(metric), 2e-4), metric
    adapted = run(*settings, "actor.use_lora=true", "actor.optimizer.lr=3e-2")
    assert adapted.series("train/grad_norm")[0] > 0


def test_every_variant_is_here() -> None:
    assert {path.stem for path in find_file("conf/variant").glob("*.yaml")} == VARIANTS.keys() | ALSO.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_adapters(grpo: Variant, name: str) -> None:
    run = grpo(f"variant={name}", *MOVED, *VARIANTS[name], "actor.use_lora=true", "actor.optimizer.lr=3e-2")
    assert all(run.series(metric)[0] > 0 for metric in OWN & run.names())
    assert run.series("train/ratio_std")[0] > 1e-3
