"""The recipes on two processes against one: the same metrics of every step, as far as rounding in fp32 explains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.recipe_runs import without_times
from tests.helpers.row_runs import RATED, STEP_LABELLED
from tests.kill_runs import Run

# Two copies of the model divide neither the rows of a step nor, in PPO, the samples of a step or the rows of an update.
SMALL = ["train_dataset.batch_size=7", "total_train_steps=4", "actor.dtype=float32"]
OF_SAMPLES = ["gconfig.n_samples=3", "critic.ppo_n_minibatches=3"]
LAYOUTS = {"one": ["engine.world_size=1"], "two copies": ["engine.world_size=2"]}
LAYOUTS["one copy on two ranks"] = ["engine.world_size=2", "engine.tp_size=2"]


EVALUATED = {
    "ppo": {"eval/rewards_mean"},
    "online_dpo": {"eval/rewards_mean", "rollout/pairs"},
    "dpo": {"eval/loss", "eval/accuracy", "eval/margin"},
    "kto": {"eval/loss", "eval/kl"},
    "rw": {"eval/loss", "eval/margin"},
    "prm": {"eval/loss"},
    "sft": set(),
}
# Rows of several answers or steps.
VALID_ROWS = {"rw": RATED, "prm": STEP_LABELLED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more", "seen"),
    [
        (
            "ppo",
            OF_SAMPLES,
            {"loss", "grad_norm", "kl_loss", "critic_loss", "critic_grad_norm", "explained_variance"},
        ),
        (
            "ppo",
            [*OF_SAMPLES, "critic.freeze_attention=true", "critic.epochs=2", "engine.zero_stage=2"],
            {"critic_loss", "critic_grad_norm"},
        ),
        ("online_dpo", [], {"loss", "grad_norm"}),
        ("dpo", [], {"loss", "grad_norm", "margin"}),
        ("sft", [], {"loss", "grad_norm"}),
        ("kto", ["actor.optimizer.lr=1e-3"], {"loss", "kl", "margin", "accuracy"}),
        ("rw", [], {"loss", "grad_norm", "margin"}),
        # The body has no gradient before the first step. Adam with a smaller eps would multiply the rounding errors.
        ("prm", ["actor.optimizer.eps=1e-4"], {"loss", "grad_norm", "margin", "first_error_accuracy"}),
    ],
)
def test_two_ranks_train_as_one_does(
    recipe: str, more: list[str], seen: set[str], tmp_path: Path, models: dict[str, Path]
) -> None:
    if recipe == "ppo":
        more = [*more, f"reward.path={models['reward']}", f"critic.path={models['critic']}"]
        more += [f"ref.path={models['lm']}", "actor.kl_ctl=0.1"]
    found = {}
    for name, layout in LAYOUTS.items():
        run = Run(recipe, tmp_path / name.replace(" ", "-"), [*SMALL, *more, *layout])
        run.prepare()
        if recipe in VALID_ROWS:
            (run.folder / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in VALID_ROWS[recipe]))
        run.finish()
        found[name] = without_times(run.result)
    expected = found.pop("one")
    seen = {f"train/{name}" for name in seen} | EVALUATED[recipe]
    assert seen <= {metric for scalars in expected.values() for metric in scalars}
    assert all(scalars["train/grad_norm"] > 0.1 for step, scalars in expected.items() if step >= 3)
    for name, steps in found.items():
        assert steps.keys() == expected.keys()
        for step, scalars in expected.items():
            assert steps[step].keys() == scalars.keys(), (name, step)
            for metric, value in scalars.items():
                if recipe == "online_dpo" and metric.endswith(("computed_tokens", "row_tokens")):
                    continue  # a step with a single pair trains it in both copies
                if metric.endswith("computed_tokens"):
                    # A group divided over two copies of the model computes its prompt in both.
                    rows = scalars[metric.replace("computed_tokens", "row_tokens")]
                    assert value <= steps[step][metric] <= rows, (name, step, metric)
                    continue
                if recipe in ("dpo", "online_dpo") and step < 2 and metric.endswith("/accuracy"):
                    continue  # the policy is the reference before the first update, so rounding decides
                # Log-probabilities of several units are rounded at 5e-7. Differences between two log-probabilities
                # (ratios, and DPO's rewards and margins) have the same error however small they are.
                of_differences = ("logp", "ratio", "rewards_chosen", "rewards_rejected", "margin")
                absolute = 1e-5 if any(part in metric for part in of_differences) else 1e-6
                if recipe == "kto":  # its larger learning rate multiplies the rounding errors
                    absolute = 1e-4
                relative = 1e-5 if metric.endswith(("loss", "grad_norm")) else 1e-4
                close = pytest.approx(value, rel=relative, abs=absolute)
                assert steps[step][metric] == close, (name, step, metric)
