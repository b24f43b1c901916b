"""A variant takes the same steps in any micro-batches, with shared prefixes, exact kernels, adapters and ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from areno.files.paths import find_file
from tests.helpers.recipe_runs import without_times
from tests.helpers.variant_runs import Variant, close, player
from tests.kill_runs import Run

# Each with what makes it act in the runs below.
SOLVED = ["train_dataset.loader=examples/quickstart/dataset_loader.py:with_responses"]
VARIANTS = {
    "rlsd": SOLVED,
    "sdar": SOLVED,
    "clip_cov": ["actor.clip_cov.share=0.1", "actor.clip_cov.low=0.1"],
    "kl_cov": ["actor.kl_cov.share=0.2"],
    "top_entropy": [],
    "entropy_bonus": ["actor.entropy_bonus.coef=3.0"],
    "fipo": [],
    "real": [],
    "otb": [],
    "gmpo": ["actor.gmpo.log_clip=0.01"],
    "vespo": [],
    "dppo_tv": ["actor.dppo_tv.threshold=0.02"],
    "dppo_kl": ["actor.dppo_kl.threshold=0.001"],
    "dppo_topk_tv": ["actor.dppo_topk_tv.threshold=0.05", "actor.dppo_topk_tv.top_k=4"],
    "dppo_topk_kl": ["actor.dppo_topk_kl.threshold=0.01", "actor.dppo_topk_kl.top_k=1"],
    "prime_ipo": ["actor.prime_ipo.threshold=0.02"],
    "sao_mask": ["actor.sao.eps_low=0.1", "actor.sao.eps_high=0.1"],
}
# These differ in ways that most of the others have, too, so they run less often.
ALSO: dict[str, list[str]] = {
    "adaptive_entropy": ["actor.entropy_bonus.coef=3.0", "actor.entropy_bonus.target=9.0"],
    "cispo": ["actor.eps_clip_higher=0.01"],
    "dapo": ["rollout.dynamic_sampling=false", "actor.eps_clip=0.02", "actor.eps_clip_higher=0.05"],
    "decoupled": [],
    "dr_grpo": [],
    "gdpo": ["reward.fn=[math,examples/quickstart/reward.py]", "reward.workers=1"],
    "gspo_token": ["actor.eps_clip=0.02"],
    "icepop": [],
    "iw_opd": ["teacher.path=OTHER", "actor.optimizer.lr=1e-3"],
    "kpop": [],
    "luspo": ["actor.eps_clip=0.02"],
    "m2po": [],
    "maxrl": ["actor.reward_bias=10.0"],
    "reinforce_pp": ["actor.kl_ctl=0.1"],
    "rloo": [],
    "sao": ["critic.warmup_steps=0", "gconfig.n_samples=1", "train_dataset.batch_size=16", "actor.sao.eps_low=0.1"],
    "sapo": [],
    "sdpg": SOLVED,
    "tis": [],
}
RECIPES = {"sao": "ppo", "iw_opd": "distill"}
# One update before the one that is compared: rounding errors of many would decide which tokens are masked.
MOVED = ["actor.ppo_n_minibatches=2", "actor.optimizer.lr=1e-2", "total_train_steps=1"]
WITHOUT_STALENESS = ["rollout.max_head_offpolicyness=0", "rollout.prompts_ahead=null", "rollout.dynamic_sampling=false"]
WITHOUT_STALENESS += ["actor.use_decoupled_loss=false"]
# Statistics of which each variant has one, above 0.
OWN = {
    f"train/{name}" for name in ("clip_frac", "masked_frac", "selected_frac", "vespo_weight", "fipo_weight", "entropy")
}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks(name: str, tmp_path: Path) -> None:
    small = ["train_dataset.batch_size=7", "total_train_steps=2", "actor.dtype=float32", "actor.optimizer.lr=3e-3"]
    small += ["actor.ppo_n_minibatches=2", f"variant={name}", *WITHOUT_STALENESS]
    small += [] if VARIANTS[name] is SOLVED else VARIANTS[name]
    found = []
    for layout in (["engine.world_size=1"], ["engine.world_size=2"], ["engine.world_size=2", "engine.tp_size=2"]):
        run = Run("grpo", tmp_path / "-".join(layout), [*small, *layout])
        run.prepare()
        rows = [json.loads(line) for line in (run.folder / "rows.jsonl").read_text().splitlines()]
        solved = ({**row, "solved": f"{row['prompt']}{row['solutions']} {row['prompt']}"} for row in rows)
        (run.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solved))
        run.finish()
        found.append(without_times(run.result))
    for other in found[1:]:
        for step, expected in found[0].items():
            for metric in {"train/loss", "train/grad_norm", *OWN} & expected.keys():
                assert other[step][metric] == pytest.approx(expected[metric], rel=1e-3, abs=1e-4), (step, metric)
