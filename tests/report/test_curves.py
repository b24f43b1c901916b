"""The charts of a report: what they show, and their units."""

from __future__ import annotations

from areno.report.curves import charts_by_heading, is_count, unit_of


def test_a_chart_for_every_scalar():
    names = {"time/step", "time/rollout", "time/train", "train/kl_loss", "train/never_heard_of", "eval/pass@8"}
    shown = [name for of in charts_by_heading(names).values() for chart in of for name in chart.names]
    assert sorted(shown) == sorted(names - {"time/step"})


def test_the_peak_of_memory_is_drawn_by_phase_for_a_single_run():
    names = {"train/memory_gib", "memory/train", "memory/rollout"}
    (one,) = charts_by_heading(names)["Speed and memory"]
    assert one.names == ("train/memory_gib", "memory/rollout", "memory/train")
    (several,) = charts_by_heading(names, n_runs=2)["Speed and memory"]
    assert several.names == ("train/memory_gib",)


def test_the_loss_of_a_policy_is_not_about_learning():
    names = {"rollout/rewards_mean", "train/loss", "train/explained_variance", "train/critic_loss", "rollout/ref_kl"}
    found = {heading: [chart.title for chart in of] for heading, of in charts_by_heading(names).items()}
    assert found == {
        "Learning": ["Reward"],
        "Policy": ["KL to the reference", "Loss of the policy"],
        "Critic": ["Explained variance", "Loss of the critic"],
    }
    for other in ({"train/loss", "eval/loss"}, {"rollout/rewards_mean", "train/loss", "train/distill_loss"}):
        assert "Loss" in [chart.title for chart in charts_by_heading(other)["Learning"]]


def test_units_of_axes():
    units = {
        "memory/rollout": "GiB",
        "eval/accuracy": "share",
        "train/clip_frac": "share",
        "train/loss": "loss",
        "train/kl_loss": "nats",
        "train/entropy": "nats",
        "train/logp_abs_diff_mean": "nats",
        "time/reward": "s",
        "train/step_e2e_time_s": "s",
        "rollout/response_len_mean": "tokens",
        "train/tokens_per_second": "tokens/s",
        "train/memory_gib": "GiB",
        "rollout/reward_errors": "samples",
        "rollout/reward/format": "reward",
        "train/never_heard_of": "never heard of",
    }
    assert {name: unit_of(name) for name in units} == units
    assert [unit for unit in dict.fromkeys(units.values()) if is_count(unit)] == ["tokens", "tokens/s", "samples"]
