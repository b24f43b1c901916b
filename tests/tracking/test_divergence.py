"""Signs that a run goes wrong: found in made-up series, told once, and not where nothing is wrong."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import areno
from areno.config.run import RecorderConfig
from areno.launch.compose import load
from areno.plan.plan import sampling_params
from areno.recipes.gspo import GSPOConfig
from areno.run.outputs import RunOutputs, RunTexts
from areno.run.recorded_run import RecordedRun
from areno.tracking.changes import BEFORE, FEWEST, LASTING
from areno.tracking.reader import RunReader
from areno.tracking.training_warnings import FIRST, LAST, N_FLAT, N_TRUNCATED, History, TrainingWarnings, mean
from tests.helpers.started_runs import start

HEALTHY = json.loads((Path(__file__).parent / "healthy_runs.json").read_text(encoding="utf-8"))
"""Run on two CPU cores -> its curves."""

FINE = {
    "rollout/rewards_mean": 0.5,
    "rollout/rewards_max": 1.0,
    "rollout/rewards_min": 0.0,
    "rollout/accuracy": 0.5,
    "rollout/advantages_mean": 0.0,
    "rollout/advantages_std": 1.0,
    "rollout/num_sequences": 64.0,
    "rollout/response_len_mean": 128.0,
    "rollout/truncated": 0.25,
    "rollout/reward_not_finite": 0.0,
    "train/entropy": 0.6,
    "train/logp_abs_diff_mean": 0.004,
}
FLAT = {"rollout/rewards_min": 1.0}
NO_ADVANTAGE = {"rollout/advantages_std": 0.0}


def told(steps, divergence=None):
    """(step, the beginning of what is told) for steps that differ from FINE; steps count from 1."""
    divergence = divergence or TrainingWarnings("reward.py:near")
    found = [
        (step, warning.text)
        for step, changes in enumerate(steps, 1)
        for warning in divergence.new_warnings(step, {**FINE, **changes})
    ]
    return [(step, " ".join(text.split()[:4])) for step, text in found]


@pytest.mark.parametrize(
    ("ratio", "apart", "is_told"),
    [
        ((3e-4, "sequence"), {"train/logp_row_diff_mean": 2e-4}, True),
        ((3e-4, "sequence"), {"train/logp_row_diff_mean": 7e-5, "train/logp_abs_diff_mean": 0.05}, False),
        ((0.2, "token"), {"train/logp_abs_diff_mean": 0.06}, True),
        ((0.2, "token"), {"train/logp_abs_diff_mean": 0.04}, False),
        ((None, "token"), {"train/logp_abs_diff_mean": 0.06}, False),
        ((3e-4, "sequence"), {"train/logp_row_diff_mean": math.nan}, False),
    ],
)
def test_rounding_against_a_clip_range_that_compares_with_the_rollout(ratio, apart, is_told):
    divergence = TrainingWarnings()
    divergence.ratio = (*ratio, "actor.recompute_logprob=true")
    found = told([apart, apart], divergence)
    assert found == ([(1, "rollout and training differ")] if is_told else [])


def entropies(*values):
    return [{"train/entropy": value} for value in values]


def test_nothing_is_told_of_a_run_that_learns():
    learning = [
        {
            "train/entropy": 0.6 * 0.985**step + 0.02,
            "rollout/accuracy": 1 - 0.9**step,
            "train/logp_abs_diff_mean": 0.004 * 1.01**step,
            "rollout/advantages_std": 1 - step / 250,
        }
        for step in range(200)
    ]
    assert told(learning) == []


def test_entropy_collapse_is_told_when_the_mean_of_the_last_steps_is_low():
    low = 0.6 * 0.1 * 0.5  # and below 0.05
    assert told(entropies(*[0.6] * FIRST, *[low] * (LAST - 1), 0.6, 0.6)) == []
    steps = entropies(*[0.6] * FIRST, *[low] * 3 * LAST)
    assert told(steps) == [(FIRST + LAST, "the entropy of the")]


@pytest.mark.parametrize(
    ("first", "last", "accuracy"),
    [
        (0.6, 0.07, 0.5),  # more than a tenth
        (2.0, 0.1, 0.5),  # a tenth of much is still something
        (0.3, 0.001, 0.97),  # it is right: nothing is left to explore
        (0.3, math.nan, 0.5),
    ],
)
def test_an_entropy_that_is_no_collapse(first, last, accuracy):
    steps = [*entropies(*[first] * FIRST), *({"train/entropy": last, "rollout/accuracy": accuracy},) * 20]
    assert told(steps) == []


@pytest.mark.parametrize("flat", [FLAT, NO_ADVANTAGE])
def test_rewards_without_a_difference_are_told_after_a_while(flat):
    assert told([flat] * (N_FLAT - 1) + [{}] + [flat] * (N_FLAT - 1)) == []
    assert told([{}, *[flat] * 3 * N_FLAT]) == [(N_FLAT + 1, f"for {N_FLAT} steps no")]


def test_completions_that_never_end_are_told_after_a_while():
    cut = {"rollout/truncated": 1.0}
    assert told([cut] * (N_TRUNCATED - 1) + [{}] + [cut] * (N_TRUNCATED - 1)) == []
    divergence = TrainingWarnings()
    texts = [each.text for step in range(3 * N_TRUNCATED) for each in divergence.new_warnings(step, {**FINE, **cut})]
    assert len(texts) == 1
    assert "cut off at the length limit (128 tokens" in texts[0]
    assert "raise gconfig.max_new_tokens" in texts[0]


def test_rows_without_answers_are_told_where_all_rewards_are_equal():
    divergence = TrainingWarnings("reward.py:near", "no row of data.jsonl")
    assert divergence.new_warnings(1, FINE) == [], "this reward needs none"
    [warning] = divergence.new_warnings(1, {**FINE, **FLAT})
    assert warning.text.startswith("all rewards of this step are 0.5, and no row of data.jsonl has solutions; ")
    assert divergence.new_warnings(1, {**FINE, **FLAT}) == []
    assert TrainingWarnings("reward.py:near").new_warnings(1, {**FINE, **FLAT}) == []


def test_rewards_that_only_have_no_advantage_are_not_called_equal():
    """Each prompt has its own reward, so "all rewards are 0.5" would be wrong."""
    divergence = TrainingWarnings("reward.py:near", "no row of data.jsonl")
    assert divergence.new_warnings(1, {**FINE, **NO_ADVANTAGE}) == []


def test_equal_rewards_are_no_problem_if_the_run_does_not_train_on_rewards():
    divergence = TrainingWarnings("reward.py:near", "no row of data.jsonl", needs_rewards=False)
    assert [divergence.new_warnings(1, {**FINE, **FLAT}) for _ in range(30)] == [[]] * 30


def test_advantages_that_only_cancel_out_are_not_flat():
    assert told([{"rollout/advantages_mean": 0.0, "rollout/advantages_std": 1e-9}] * 3 * N_FLAT) == []


@pytest.mark.parametrize(
    ("first", "then", "is_told"),
    [(3e-7, 2e-6, False), (3e-7, 0.2, True), (0.004, 0.09, False), (0.004, 0.11, True), (0.05, 0.4, False)],
)
def test_log_probabilities_that_drift_apart(first, then, is_told):
    steps = [{"train/logp_abs_diff_mean": value} for value in [first] * FIRST + [then] * LAST]
    assert [text for _, text in told(steps)] == ["log-probabilities of rollout and"] * is_told


def test_rewards_that_are_not_finite_are_told_with_their_number_and_their_function():
    divergence = TrainingWarnings("reward.py:near")
    assert divergence.new_warnings(1, FINE) == []
    [warning] = divergence.new_warnings(1, {**FINE, "rollout/reward_not_finite": 3.0})
    assert warning.text.startswith("3 of 64 rewards of reward.py:near are NaN, infinite or too large for float32")
    assert divergence.new_warnings(1, {**FINE, "rollout/reward_not_finite": 4.0}) == []


def test_steps_without_rewards_or_updates_are_passed_over():
    divergence = TrainingWarnings()
    assert divergence.new_warnings(1, {"train/entropy": 0.0, "train/loss": 1.0}) == []
    warmup = {name: value for name, value in FINE.items() if not name.startswith("train/")}
    for _ in range(20):  # a critic's: no update of the policy
        assert divergence.new_warnings(1, warmup) == []
    assert told(entropies(*[0.6] * FIRST, *[0.01] * LAST), divergence) == [(FIRST + LAST, "the entropy of the")]


@pytest.mark.parametrize("cut", range(1, 30, 3))
def test_a_resumed_run_is_told_the_same(cut):
    steps = [*entropies(*[0.5] * 6, *[0.01] * 10), *[FLAT] * 14, *[{"rollout/reward_not_finite": 1.0}] * 2]
    whole = told(steps)
    assert len(whole) == 3
    before, after = TrainingWarnings(), TrainingWarnings()
    first = told(steps[:cut], before)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert first + [(step + cut, text) for step, text in told(steps[cut:], after)] == whole


def test_what_is_kept_of_a_scalar():
    history = History([], [])
    assert math.isnan(history.first_mean)
    for value in range(100):
        history.add(float(value), value + 1)
    assert (history.first_mean, history.last_mean) == (mean(range(FIRST)), mean(range(100 - LAST, 100)))
    assert len(history.first) + len(history.last) == FIRST + BEFORE + LASTING
    assert history.since(lambda value: value > 90) == 92
    assert history.since(lambda value: value > 98) is None, "it began in the last step"


def test_a_run_tells_how_many_rewards_were_not_finite_and_whose(tmp_path, caplog):
    def near(record):
        return math.inf if int(record.solutions) % 2 else float(len(record.completion))

    overrides = ["total_train_steps=3", "train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=4"]
    config = load(GSPOConfig, "quickstart", [*overrides, "valid_dataset=null", "reward.workers=1", "engine.device=cpu"])
    with areno.PolicyOnlyTrainer(config, run_dir=tmp_path / "run", reward_fn=near) as trainer:
        trainer.fit()
        counts = RunReader(tmp_path / "run").series("rollout/reward_not_finite").values
    assert sum(counts) > max(counts) > 0
    told = re.findall(r"step (\d): (\d+) of 16 rewards of (\S+) are NaN, infinite", caplog.text)
    first = next(step for step, count in enumerate(counts, 1) if count)
    assert told == [(str(first), f"{counts[first - 1]:.0f}", "near")]
    [(numbers, run, step, number)] = re.findall(
        r"Telling samples: ([\d, and]+) \(areno replay (\S+) --step (\d) --sample (\d+)\)", caplog.text
    )
    samples = RunReader(tmp_path / "run").samples(int(step))
    named = [int(text) for text in re.findall(r"\d+", numbers)]
    assert (int(step), len(named), named[0]) == (first, 3, int(number))
    assert {samples[each]["status"] for each in named} == {"not_finite"}
    assert f"The step again: areno replay {run} --step {first}" in caplog.text
    assert first in RecordedRun(tmp_path / "run").replayable()


def test_a_step_that_is_not_recorded_is_told_without_a_command(tmp_path, caplog):
    run = start(tmp_path, recorder=RecorderConfig(max_gib=0))
    next(run.steps())
    run.outputs.watch_update({"loss": math.nan, "grad_norm": 1.0}, False)
    run.end_step({"loss": math.nan})
    run.close()
    [text] = [record.message for record in caplog.records if "the update was skipped" in record.message]
    assert text.endswith("The step cannot be computed again: no record or no earlier state is left (recorder.max_gib)")


def noisy(level, spread, seed, n=60):
    """A series with normal noise, of which `spread` is the standard deviation relative to the level."""
    draw = random.Random(seed)
    return [level * (1 + spread * draw.gauss(0, 1)) for _ in range(n)]


PLANTED = 31


def warnings_of(divergence=None, **curves):
    """(kind, step, since) of each warning about curves; `__` in a name stands for a slash."""
    divergence = divergence or TrainingWarnings()
    found = []
    for step, values in enumerate(zip(*curves.values(), strict=True), 1):
        scalars = {name.replace("__", "/"): value for name, value in zip(curves, values, strict=True)}
        found += [(each.kind, step, each.since) for each in divergence.new_warnings(step, {**FINE, **scalars})]
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("factor", "kind"), [(1.4, "longer"), (0.72, "shorter")])
def test_a_length_that_drifts_while_the_reward_falls(factor, kind, seed):
    length, reward = noisy(128, 0.03, seed), noisy(0.5, 0.03, seed + 100)
    assert warnings_of(rollout__response_len_mean=length, rollout__rewards_mean=reward) == []
    length[PLANTED - 1 :] = [value * factor for value in length[PLANTED - 1 :]]
    assert warnings_of(rollout__response_len_mean=length, rollout__rewards_mean=reward) == [], "it may be needed"
    reward[PLANTED - 1 :] = [value * 0.5 for value in reward[PLANTED - 1 :]]
    found = warnings_of(rollout__response_len_mean=length, rollout__rewards_mean=reward)
    assert found == [(kind, PLANTED + LASTING - 1, PLANTED)]


@pytest.mark.parametrize("seed", range(5))
def test_a_length_that_explodes_without_a_better_reward(seed):
    length, reward = noisy(128, 0.03, seed), noisy(0.5, 0.03, seed + 100)
    length[PLANTED - 1 :] = [value * 3 for value in length[PLANTED - 1 :]]
    found = warnings_of(rollout__response_len_mean=length, rollout__rewards_mean=reward)
    assert found == [("longer", PLANTED + LASTING - 1, PLANTED)]
    reward[PLANTED - 1 :] = [value * 1.5 for value in reward[PLANTED - 1 :]]
    assert warnings_of(rollout__response_len_mean=length, rollout__rewards_mean=reward) == [], "the answers got better"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["train/approx_kl", "train/kl_loss", "rollout/ref_kl"])
@pytest.mark.parametrize(("level", "peak"), [(1e-4, 0.2), (0.02, 1.5), (0.0, 0.1)])
def test_a_kl_divergence_that_jumps(name, level, peak, seed):
    kl = noisy(level, 0.3, seed)
    assert warnings_of(**{name: kl}) == []
    kl[PLANTED - 1] = peak
    assert warnings_of(**{name: kl}) == [("kl", PLANTED, None)]


def test_a_kl_divergence_that_grows_is_no_jump():
    assert warnings_of(train__kl_loss=[0.001 * 1.15**step for step in range(60)]) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("level", "stale"), [(3e-7, 0.01), (0.004, 0.06)])
def test_samples_of_older_weights_than_those_that_are_trained(level, stale, seed):
    difference = noisy(level, 0.1, seed)
    assert warnings_of(train__logp_abs_diff_mean=difference) == []
    difference[PLANTED - 1] = stale
    assert warnings_of(train__logp_abs_diff_mean=difference) == [("stale", PLANTED, None)]
    ahead = {"rollout__oldest_gap": [2.0] * 60}
    assert warnings_of(train__logp_abs_diff_mean=difference, **ahead) == [], "they are older by intention"


@pytest.mark.parametrize(("most", "late"), [(0, 1), (2, 3)])
def test_samples_that_are_older_than_the_setting_allows(most, late, tmp_path, caplog):
    config = load(GSPOConfig, "quickstart", [f"rollout.max_head_offpolicyness={most}", "actor.use_decoupled_loss=true"])
    progress = SimpleNamespace(step=0)
    with RunOutputs(config, tmp_path, SimpleNamespace(), progress, RunTexts()) as outputs:
        for step in range(1, 21):
            progress.step = step
            steps_late = late if step == 17 else min(step - 1, most)
            outputs.watch_ages(4 * (step - 1), 4 * steps_late)  # four updates in each step
            outputs.give_warnings(lambda step: True)
    assert re.findall(r"step (\d+): a trained sample has tokens of weights that are (\d) steps old", caplog.text) == [
        ("17", str(late))
    ]


@pytest.mark.parametrize("model", ["model", "judge"])
@pytest.mark.parametrize("seed", range(5))
def test_a_model_that_is_pleased_while_a_rule_is_not(model, seed):
    by_model, rule = noisy(1.0, 0.03, seed), noisy(0.6, 0.03, seed + 100)
    names = {f"rollout/reward/{model}": by_model, "rollout/reward/rule": rule}
    assert warnings_of(**names) == []
    by_model[PLANTED - 1 :] = [value * 1.5 for value in by_model[PLANTED - 1 :]]
    assert warnings_of(**names) == []
    rule[PLANTED - 1 :] = [value * 0.5 for value in rule[PLANTED - 1 :]]
    assert warnings_of(**names) == [("hacked", PLANTED + LASTING - 1, PLANTED)]


def test_a_policy_that_exploits_a_reward_model() -> None:
    """The quickstart of RLHF without its KL term: sums that are too large please the reward model."""
    curves = json.loads((Path(__file__).parent / "pleased_model.json").read_text(encoding="utf-8"))
    rule = curves["rollout/reward/reward"]
    assert warnings_of(**curves) == [("hacked", 41, 37)]
    assert max(rule[:36]) > 0.7 > min(rule[:36]) > rule[36] > rule[40]


def test_two_rules_may_disagree():
    """Such as a penalty of length beside a reward of right answers."""
    rises, falls = [0.1] * 20 + [0.9] * 20, [0.9] * 20 + [0.1] * 20
    assert warnings_of(**{"rollout/reward/right": rises, "rollout/reward/short": falls}) == []


def test_a_few_steps_are_too_few_to_judge():
    jump = [1e-3] * (FEWEST - 1) + [5.0]
    assert warnings_of(train__kl_loss=jump) == []
    assert warnings_of(train__kl_loss=[1e-3] * FEWEST + [5.0]) == [("kl", FEWEST + 1, None)]


@pytest.mark.parametrize("run", sorted(HEALTHY))
def test_nothing_is_told_of_recorded_runs_that_learned(run):
    curves = HEALTHY[run]
    found = []
    divergence = TrainingWarnings()
    for step in range(len(curves["rollout/rewards_mean"])):
        scalars = {name: values[step] for name, values in curves.items()}
        found += divergence.new_warnings(step + 1, {"rollout/num_sequences": 256.0, **scalars})
    assert found == []


@pytest.mark.slow
def test_a_rollout_at_another_temperature_in_one_step(tmp_path, caplog, monkeypatch):
    calls = []

    def hotter_once(*given):
        calls.append(sampling_params(*given))
        if len(calls) == 11:
            calls[-1].temperature *= 2
        return calls[-1]

    monkeypatch.setattr("areno.trainers.rollout.sampling_params", hotter_once)
    overrides = ["total_train_steps=12", "train_dataset.batch_size=4", "gconfig.n_samples=4", "valid_dataset=null"]
    overrides += ["gconfig.max_new_tokens=4", "reward.workers=1", "engine.device=cpu", "rollout.dynamic_sampling=false"]
    config = load(GSPOConfig, "quickstart", overrides)
    with areno.PolicyOnlyTrainer(config, run_dir=tmp_path / "run") as trainer:
        trainer.fit()
    assert len(calls) == 12
    found = re.findall(
        r"step (\d+): the samples are not those of the policy .*Telling samples: (\d+), (\d+) and (\d+)", caplog.text
    )
    [(step, *numbers)] = found
    assert step == "11"
    samples = RunReader(tmp_path / "run").samples(11)
    apart = [abs(np.array(each["logprobs"]) - np.array(each["train_logprobs"], dtype=float)).mean() for each in samples]
    assert [apart[int(number)] for number in numbers] == sorted(apart, reverse=True)[:3]
