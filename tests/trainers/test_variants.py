"""Variants that differ in advantages, reductions and the samples they train on, run for two steps.

Formulas are written out over the rows that reached the update. The first update of on-policy rows has the ratio 1, so
there the loss is a weighted mean of advantages.
"""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from areno.api import get_algorithm
from areno.launch.compose import load
from areno.loss_fns import DataPack, grpo_loss_fn
from tests.helpers.algorithms_page import commands
from tests.helpers.policy_runs import MODEL, groups, play, trained, watched
from tests.helpers.variant_runs import MOVING, Variant, advantages, close, on_policy_loss, rewards


def test_grpo(grpo: Variant) -> None:
    run = grpo()
    for step, rows in enumerate(run.rows):
        for group in groups(rows):
            r = np.array(rewards(group))
            assert r.std() > 0
            assert advantages(group) == close((r - r.mean()) / (r.std() + 1e-6))
        assert run.series("train/policy_loss")[step] == close(on_policy_loss(rows, "seq_mean_token_mean"))
    assert run.series("train/ratio_std")[0] < 1e-5
    assert not {"rollout/sampling_rounds", "train/kl_loss", "train/weights_mean", "train/clip_frac_dual"} & run.names()


def test_dr_grpo(grpo: Variant) -> None:
    run = grpo("variant=dr_grpo")
    for step, rows in enumerate(run.rows):
        for group in groups(rows):
            assert advantages(group) == close(np.array(rewards(group)) - np.mean(rewards(group)))
        expected = on_policy_loss(rows, "seq_mean_token_sum_norm")
        assert abs(expected) > 1e-4
        assert run.series("train/policy_loss")[step] == close(expected, 1e-6)


def test_token_mean(grpo: Variant) -> None:
    run = grpo("actor.reduction=token_mean")
    expected = [on_policy_loss(rows, "token_mean") for rows in run.rows]
    assert min(map(abs, expected)) > 1e-3
    assert run.series("train/policy_loss") == close(expected)


def test_rloo(grpo: Variant) -> None:
    run = grpo("variant=rloo")
    for rows in run.rows:
        for group in groups(rows):
            r = rewards(group)
            assert advantages(group) == close([x - (sum(r) - x) / 3 for x in r])


def test_maxrl(grpo: Variant) -> None:
    run = grpo("variant=maxrl", "actor.reward_bias=9.0")
    for rows in run.rows:
        for group in groups(rows):
            r = np.array(rewards(group))
            assert advantages(group) == close((r - r.mean()) / r.mean())


def test_real(grpo: Variant) -> None:
    """Two updates of whole groups. The advantages of the second are those of its own log-probabilities."""
    seen: list[tuple[torch.Tensor, DataPack]] = []

    def loss_fn(pack: DataPack, logprobs: torch.Tensor) -> Any:
        seen.append((logprobs.detach(), pack))
        return grpo_loss_fn(pack, logprobs, surrogate="reinforce")

    run = grpo("variant=real", "actor.ppo_n_minibatches=2", "total_train_steps=1", loss_fn=loss_fn)
    assert [len(rows) for rows in run.rows] == [8, 8]
    assert len({str(groups(rows)[0][0].tokens) for rows in run.rows}) == 2
    for (logprobs, pack), rows in zip(seen, run.rows, strict=True):
        s = pack.mean_rows(pack.trained(logprobs - pack.need("old_logprobs"))).double().numpy()
        assert s.any() == (rows is run.rows[1])
        for group, own in zip(groups(rows), s.reshape(2, 4), strict=True):
            better = np.array(rewards(group)) > np.mean(rewards(group))
            sums = {True: 1 + np.exp(-own[better] / 0.5).sum(), False: 1 + np.exp(own[~better] / 0.5).sum()}
            expected = [
                8 * math.exp(-x / 0.5) / sums[True] if right else -8 * math.exp(x / 0.5) / sums[False]
                for x, right in zip(own, better, strict=True)
            ]
            assert advantages(group) == close(expected)
    assert run.series("train/ratio_std")[0] > 1e-3


def test_otb(grpo: Variant) -> None:
    """Baselines of tokens, from the distributions of transformers."""
    run = grpo("variant=otb", "total_train_steps=1", "actor.optimizer.lr=1e-30")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    differ = 0
    for group in groups(run.rows[0]):
        weights = []
        for row in group:
            mask = ~torch.as_tensor(row.prompt_mask)
            with torch.no_grad():
                q = (model(torch.tensor([list(row.tokens)])).logits[0, :-1] / 2.0).softmax(-1)[mask[1:]]
            chosen = torch.nn.functional.one_hot(torch.tensor(list(row.tokens))[mask], q.shape[1])
            weights.append((chosen - q).square().sum(-1).cumsum(0).tolist())
        r = rewards(group)
        for i, row in enumerate(group):
            alive = [[j for j in range(4) if len(weights[j]) > t] for t in range(len(weights[i]))]
            expected = [
                r[i] - sum(r[j] * weights[j][t] for j in own) / sum(weights[j][t] for j in own)
                for t, own in enumerate(alive)
            ]
            assert trained(row, "advantages") == close(expected)
            differ += len({round(value, 3) for value in expected}) > 1
    assert differ > 2


def test_gdpo(grpo: Variant, tmp_path: Path) -> None:
    text = "def reward_fn(record):\n    n = len(record.completion)\n    return {'long': n, 'even': n % 2}\n"
    (tmp_path / "parts.py").write_text(text)
    weights = "actor.gdpo.weights={long: 1.0, even: 0.5}"
    run = grpo("variant=gdpo", f"reward.fn={tmp_path / 'parts.py'}", "reward.workers=1", weights)
    for step, rows in enumerate(run.rows):
        lengths = np.array([len(sample["completion"]) for sample in run.samples(step + 1)]).reshape(4, 4)
        sums = np.zeros((4, 4))
        for weight, values in ((1.0, lengths), (0.5, lengths % 2)):
            apart = values - values.mean(axis=1, keepdims=True)
            sums += weight * apart / (values.std(axis=1, keepdims=True) + 1e-6)
        assert advantages(rows) == close(((sums - sums.mean()) / (sums.std() + 1e-6)).ravel())


def test_reinforce_plus_plus(grpo: Variant, models: dict[str, Path]) -> None:
    """One sample a prompt; each token is credited with the KL that follows, the last one with the reward too."""
    run = grpo(
        "variant=reinforce_pp",
        "gconfig.n_samples=1",
        "train_dataset.batch_size=16",
        f"ref.path={models['lm']}",
        "actor.kl_ctl=0.5",
    )
    assert "train/kl_loss" not in run.names()
    for rows in run.rows:
        returns = []
        for row in rows:
            kl = [old - ref for old, ref in zip(trained(row, "logprobs"), trained(row, "ref_logprobs"), strict=True)]
            returns += [row.reward - 0.5 * sum(kl[t:]) for t in range(len(kl))]
        mean, std = np.mean(returns), np.std(returns)
        found = [a for row in rows for a in trained(row, "advantages")]
        assert found == close((np.array(returns) - mean) / (std + 1e-6))
        assert len(set(trained(rows[0], "advantages"))) > 1


def test_reinforce_plus_plus_with_a_baseline(grpo: Variant, models: dict[str, Path]) -> None:
    run = grpo(
        "variant=reinforce_pp",
        "+actor.reward_norm.mean_level=group",
        "+actor.reward_norm.std_level=null",
        f"ref.path={models['lm']}",
    )
    for step, rows in enumerate(run.rows):
        given = [sample["reward"] for sample in run.samples(step + 1)]
        for group, raw in zip(groups(rows), np.reshape(given, (4, 4)), strict=True):
            assert rewards(group) == close(raw - raw.mean())
        found = np.concatenate([trained(row, "advantages") for row in rows])
        assert found.mean() == close(0.0)
        assert found.std() == close(1.0)


def test_rewards_shaped_and_normalised(grpo: Variant) -> None:
    run = grpo(
        "actor.reward_bias=0.5",
        "actor.reward_scaling=2",
        "actor.reward_clip=1.5",
        "actor.adv_norm=null",
        "actor.reduction=token_mean",
    )
    raw = [sample["reward"] for sample in run.samples(1)]
    shaped = np.clip((np.array(raw) + 0.5) * 2, -1.5, 1.5)
    assert 0 < sum(abs(value) == 1.5 for value in shaped) < 16
    assert rewards(run.rows[0]) == close(shaped)
    assert advantages(run.rows[0]) == close(shaped)  # adv_norm=null: the reward itself
    assert run.series("rollout/rewards_mean")[0] == close(np.mean(raw))  # the log has them as they were given
    run = grpo("+actor.reward_norm.mean_level=batch", "+actor.reward_norm.std_level=batch", "actor.adv_norm=null")
    raw = np.array([sample["reward"] for sample in run.samples(1)])
    assert rewards(run.rows[0]) == close((raw - raw.mean()) / (raw.std() + 1e-6))


RIGHT_OR_WRONG = ["reward.workers=1", "gconfig.n_samples=2"]  # half of the pairs have no difference


def test_dynamic_sampling_fills_the_step_with_other_prompts(grpo: Variant) -> None:
    run = grpo(*RIGHT_OR_WRONG, "variant=dapo", "total_train_steps=3")
    rounds, dropped = run.series("rollout/sampling_rounds"), run.series("rollout/dropped_groups")
    assert max(rounds) >= 2
    assert run.series("train/policy_loss")[0] == close(on_policy_loss(run.rows[0], "token_mean"))
    for step, rows in enumerate(run.rows):
        assert len(rows) == 8
        for group in groups(rows, 2):
            assert sorted(rewards(group)) == [0.0, 1.0]
        n_sampled = run.series("rollout/num_sequences")[step]
        assert n_sampled == 8 * rounds[step] == len(run.samples(step + 1))
        assert dropped[step] == n_sampled / 2 - 4
        assert run.series("train/grad_norm")[step] > 0


def test_a_prompt_that_comes_again_makes_a_group_of_its_own(grpo: Variant) -> None:
    """Five prompts for steps of four: what is sampled anew are, epoch after epoch, the same."""
    few = [
        {"prompt": f"{a}+{b}=", "solutions": str(a + b)} for a, b in ((27, 35), (18, 44), (56, 17), (48, 33), (29, 9))
    ]
    run = grpo(*RIGHT_OR_WRONG, "variant=dapo", "total_train_epochs=40", train_dataset=few)
    assert max(run.series("rollout/sampling_rounds")) > 2
    for step, rows in enumerate(run.rows):
        assert [sorted(rewards(group)) for group in groups(rows, 2)] == [[0.0, 1.0]] * 4
        n_groups = run.series("rollout/num_sequences")[step] / 2
        assert run.series("rollout/dropped_groups")[step] == n_groups - 4


def test_dynamic_batch_size_trains_on_what_is_left(grpo: Variant) -> None:
    run = grpo(*RIGHT_OR_WRONG, "rollout.dynamic_sampling=true", "dynamic_bs=true", "total_train_steps=4")
    assert run.series("rollout/sampling_rounds") == [1] * 4
    sizes = [len(rows) for rows in run.rows]
    assert min(sizes) < 8
    assert [8 - 2 * n for n in run.series("rollout/dropped_groups")] == sizes
    for rows in run.rows:
        for group in groups(rows, 2):
            assert sorted(rewards(group)) == [0.0, 1.0]


def test_sampling_rounds_have_an_end(grpo: Variant) -> None:
    run = grpo(*RIGHT_OR_WRONG, "rollout.dynamic_sampling=true", "rollout.max_sampling_rounds=1")
    assert run.series("rollout/sampling_rounds") == [1, 1]
    assert [8 - 2 * n for n in run.series("rollout/dropped_groups")] == [len(rows) for rows in run.rows]


def test_nothing_to_prefer_anywhere(grpo: Variant) -> None:
    """All rewards equal, in every round: a step without a gradient, and a warning."""
    rounds = ["rollout.dynamic_sampling=true", "rollout.max_sampling_rounds=3"]
    run = grpo("reward.workers=1", *rounds, reward_fn=lambda record: 1.0)
    assert run.series("rollout/sampling_rounds") == [3, 3]
    assert run.series("rollout/dropped_groups") == [12, 12]
    assert run.series("train/grad_norm") == [0, 0]
    assert (run.folder / "logs/run.log").read_text().count("there is nothing to prefer") == 2


def test_fewer_rows_than_minibatches_are_still_trained(grpo: Variant) -> None:
    run = grpo(
        *RIGHT_OR_WRONG,
        "rollout.dynamic_sampling=true",
        "dynamic_bs=true",
        "actor.ppo_n_minibatches=8",
        "total_train_steps=3",
    )
    assert min(len(rows) for rows in run.rows) < 8
    assert all(norm > 0 for norm in run.series("train/grad_norm"))


def test_overlong_completions_are_punished(grpo: Variant) -> None:
    run = grpo(
        "gconfig.max_new_tokens=4",
        "actor.overlong_reward_penalty=true",
        "actor.overlong_tokens=2",
        "actor.overlong_penalty_factor=3",
    )
    for step, rows in enumerate(run.rows):
        samples = run.samples(step + 1)
        penalties = [{1: 0.0, 2: 0.0, 3: -1.5, 4: -3.0}[sample["response_tokens"]] for sample in samples]
        assert len(set(penalties)) > 1
        assert rewards(rows) == close([s["reward"] + p for s, p in zip(samples, penalties, strict=True)])
        assert np.mean(rewards(rows)) < run.series("rollout/rewards_mean")[step] - 1


@pytest.mark.slow
def test_clip_higher(grpo: Variant) -> None:
    found = []
    for bound in (0.02, 0.2, 100):
        run = grpo(*MOVING, f"actor.eps_clip_higher={bound}")
        [low], [high], [both] = (run.series(f"train/clip_frac{name}") for name in ("_low", "_high", ""))
        assert low > 0
        assert both == close(low + high)
        found.append(high)
    assert found[0] > found[1] > found[2] == 0


def test_truncated_completions_are_not_trained(grpo: Variant) -> None:
    """With three tokens a sum of three digits has no room for the end of the sequence."""
    short = ["gconfig.max_new_tokens=3", "train_dataset.batch_size=8"]
    whole, masked = grpo(*short), grpo(*short, "actor.mask_no_eos_with_zero=true")
    cut = [sample["finish_reason"] == "length" for sample in masked.samples(1)]
    assert 0 < sum(cut) < len(cut)
    for row, was_cut, other in zip(masked.rows[0], cut, whole.rows[0], strict=True):
        assert len(trained(row, "logprobs")) == (0 if was_cut else len(trained(other, "logprobs")))
        if not was_cut:
            assert trained(row, "advantages") == trained(other, "advantages")  # the cut one still counts in its group
    n_tokens = [sum(len(trained(row, "logprobs")) for row in run.rows[0]) for run in (whole, masked)]
    assert n_tokens[1] < n_tokens[0]
    assert masked.series("train/grad_norm")[0] != whole.series("train/grad_norm")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "command"),
    [(section, line) for section, line in commands() if not any(word in line for word in (".sft", ".dpo", "agent.fn"))],
)
def test_commands_of_the_page_run(section: str, command: str, tmp_path: Path) -> None:
    """As they stand there, on the quickstart's task, for two steps."""
    words = shlex.split(command)
    settings = [word for word in words[3:] if "--" not in word]
    recipe = words[2].removeprefix("areno.recipes.")
    if recipe in ("kto", "rw", "prm"):
        of_rows = get_algorithm(recipe)
        config = load(of_rows.config, f"quickstart_{recipe}", ["total_train_steps=2", *settings])
        run = watched(tmp_path / "run", lambda: of_rows.trainer(config, tmp_path / "run"))
        assert all(math.isfinite(value) for value in run.series("train/loss"))
        return
    if any("outputs/quickstart_prm/prm/" in word for word in settings):  # of the command before
        short = ["total_train_steps=1", "trial_name=prm", f"cluster.fileroot={tmp_path}/outputs"]
        before = get_algorithm("prm")
        watched(tmp_path, lambda: before.trainer(load(before.config, "quickstart_prm", short)))
        settings = [word.replace("outputs/", f"{tmp_path}/outputs/") for word in settings]
    n_tokens = ["gconfig.max_new_tokens=120"] if any("overlong_tokens" in word for word in words) else []
    n_tokens += ["actor.overlong_tokens=100"] if n_tokens else []
    task = {"ppo": "quickstart_ppo", "distill": "quickstart_distill"}.get(recipe, "quickstart")
    if "teacher.prompt_key=solved" in words:
        settings.append("train_dataset.loader=examples/quickstart/dataset_loader.py:with_responses")
    if "actor.adv_estimator=gdpo" in words:
        parts = "def reward_fn(record):\n    return {'answer': 1.0, 'format': len(record.completion)}\n"
        (tmp_path / "parts.py").write_text(parts)
        settings.append(f"reward.fn={tmp_path / 'parts.py'}")
    warmup = ["critic.warmup_steps=0"] if recipe == "ppo" else []
    warmup += ["critic.ppo_n_minibatches=1"] if "gconfig.n_samples=1" in words and recipe == "ppo" else []
    if recipe == "distill":
        settings.append(f"teacher.path={shutil.copytree(MODEL, tmp_path / 'teacher')}")
    run = play(recipe, tmp_path / "run", "reward.workers=1", *settings, *n_tokens, *warmup, task=task)
    assert run.series("train/skipped_steps") == [0, 0]
    assert all(math.isfinite(value) for value in run.series("train/loss"))
    assert MODEL.is_dir()
