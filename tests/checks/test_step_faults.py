"""Faults that tests plant into training: `areno check` finds each by name, and nothing in the run without the fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.api.trainer import Trainer
from areno.checks.all_checks import CHECKS
from areno.checks.inputs.findings import Finding, run_checks
from areno.checks.inputs.subject import Options, Subject
from areno.checks.steps import two_steps
from areno.cli.given_command import split_command
from areno.engine.train import backend, gradients, optimizer, optimizer_updates
from areno.engine.worker import Worker
from areno.loss_fns import dpo, grpo, gspo, kto, preferences, process_reward, reward_model, surrogates
from areno.loss_fns.data_pack import DataPack
from areno.models.adapters import without_adapters
from areno.trainers import forward_passes, reward_sources, rows, turn_credit, update

pytestmark = pytest.mark.slow

GROUPS = {name: CHECKS[name] for name in ("gradient", "algorithm")}
GSPO = ["gspo", "gconfig.temperature=1.5"]
GRPO = ["grpo", "gconfig.temperature=1.5", "actor.kl_ctl=0.05", "ref=default"]
LORA = [*GSPO, "actor.use_lora=true", "actor.lora_rank=4"]
BF16 = [*GSPO, "actor.optimizer.type=adam_bf16"]
PPO = ["ppo", "gconfig.temperature=1.5", "actor.gae_lambda=0.9"]
DPO, KTO, RW, PRM = ["dpo"], ["kto"], ["rw"], ["prm"]
# transformers gives the padding token's embedding no gradient; a random model samples this token.
SAMPLES_PADDING = ["grpo", "--config-name=countdown_cpu", "actor.path=examples/countdown/model_cpu"]

Patch = Callable[[pytest.MonkeyPatch], None]


def findings(folder: Path, command: Sequence[str]) -> list[Finding]:
    given = split_command(list(command), "check")
    return list(run_checks(GROUPS, Subject(given.algorithm, given.compose(), folder, Options())))


def red(found: Sequence[Finding]) -> dict[str, str]:
    return {each.name: each.line for each in reversed(found) if each.verdict == "red"}  # the first of a name


# -- the faults --------------------------------------------------------------------------------------------------------


def changed_rows(change: Callable[[Any], Any]) -> Patch:
    """Change each training row that the policy loops make."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = rows.policy_rows
        for module in (update, forward_passes):
            patch.setattr(module, "policy_rows", lambda *given, **how: [change(row) for row in make(*given, **how)])

    return plant


def mask_shifted(row: Any) -> Any:
    return replace(row, prompt_mask=np.append(row.prompt_mask[1:], row.prompt_mask[-1]))


def mask_late(row: Any) -> Any:
    mask = row.prompt_mask.copy()
    mask[: int(np.argmin(mask)) + 2] = True
    return replace(row, prompt_mask=mask)


def padding_trained(row: Any) -> Any:
    fields = {name: np.append(vars(row)[name], [0, 0]) for name in ("tokens", "logprobs")}
    return replace(row, prompt_mask=np.append(row.prompt_mask, [False, False]), **fields)


def reward_of_another_row(patch: pytest.MonkeyPatch) -> None:
    right = update.rewards_by_source
    patch.setattr(update, "rewards_by_source", lambda *given: np.roll(right(*given), 1).tolist())


def advantages_of_another_group(patch: pytest.MonkeyPatch) -> None:
    right = rows.outcome_advantages

    def wrong(of_rows: Any, groups: Any, actor: Any) -> Any:
        found, size = right(of_rows, groups, actor), list(groups).count(groups[0])
        return [np.full(len(own), other[0]) for own, other in zip(found, [*found[size:], *found[:size]], strict=True)]

    patch.setattr(turn_credit, "outcome_advantages", wrong)


def logprobs_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = rows.token_arrays

    def wrong(prompt: Any, sequence: Any) -> Any:
        found = right(prompt, sequence)
        found.logprobs[len(prompt) :] = np.roll(found.logprobs[len(prompt) :], 1)
        return found

    patch.setattr(reward_sources, "token_arrays", wrong)


def temperature_missing_in_training(patch: pytest.MonkeyPatch) -> None:
    right = update.update_actor
    patch.setattr(update, "update_actor", lambda *given, **how: right(*given, **{**how, "sampling": None}))


def adapters_left_out_of_rollout(patch: pytest.MonkeyPatch) -> None:
    right = Worker._step

    def wrong(self: Worker, *given: Any) -> Any:
        with without_adapters(self.actor):
            return right(self, *given)

    patch.setattr(Worker, "_step", wrong)


class Before:
    """The weights of a role before its last update."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.kept: dict[int, torch.Tensor] = {}
        right = optimizer.Optimizer.step

        def step(own: Any, norm: float) -> None:
            self.kept[id(own.flat)] = own.flat.params.clone()
            right(own, norm)

        patch.setattr(optimizer.Optimizer, "step", step)

    @contextmanager
    def swapped_in(self, flat: Any) -> Iterator[None]:
        now = flat.params.clone()
        flat.params.copy_(self.kept.get(id(flat), now))
        try:
            yield
        finally:
            flat.params.copy_(now)


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    before, right = Before(patch), Worker._step

    def wrong(self: Worker, *given: Any) -> Any:
        with before.swapped_in(self.roles["actor"].backend.flat):
            return right(self, *given)

    patch.setattr(Worker, "_step", wrong)


def critic_one_step_late(patch: pytest.MonkeyPatch) -> None:
    before, right = Before(patch), Trainer.score_values

    def wrong(self: Any, *given: Any, **how: Any) -> Any:
        with before.swapped_in(self.engine.workers.worker.roles["critic"].backend.flat):
            return right(self, *given, **how)

    patch.setattr(Trainer, "score_values", wrong)


def reference_is_live_policy(patch: pytest.MonkeyPatch) -> None:
    right = forward_passes.logprobs_of
    patch.setattr(forward_passes, "logprobs_of", lambda setup, role, of_rows: right(setup, "actor", of_rows))


def wrong_sign(patch: pytest.MonkeyPatch) -> None:
    right = surrogates.Clip.surrogate_loss

    def wrong(self: Any, *given: Any) -> Any:
        loss, stats = right(self, *given)
        return -loss, stats

    patch.setattr(surrogates.Clip, "surrogate_loss", wrong)


def clip_on_wrong_side(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, ratio: Any, advantages: Any, logprobs: Any = None) -> Any:
        clipped = ratio.clamp(*self.bounds()) * advantages
        nothing = {"clip_frac_low": torch.zeros_like(ratio), "clip_frac_high": torch.zeros_like(ratio)}
        return -(ratio * advantages).maximum(clipped), nothing

    patch.setattr(surrogates.Clip, "surrogate_loss", wrong)


def without_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(surrogates.Clip, "bounds", lambda self: (0.0, 1e9))


def ratio_summed(patch: pytest.MonkeyPatch) -> None:
    right = gspo.token_log_ratio

    def wrong(pack: DataPack, *given: Any) -> Any:
        log_ratio_T, weights_T = right(pack, *given)
        return log_ratio_T * pack.of_rows(pack.sum_rows(torch.ones_like(log_ratio_T))), weights_T

    patch.setattr(gspo, "token_log_ratio", wrong)


def wrong_reduction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grpo, "reduce_tokens", lambda pack, values, *how: pack.token_mean(values))


def kl_with_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    right = grpo.add_kl

    def wrong(pack: Any, loss: Any, logprobs: Any, stats: Any, coef: float, *how: Any) -> Any:
        return right(pack, loss, logprobs, stats, -coef, *how)

    patch.setattr(grpo, "add_kl", wrong)


def other_kl_estimator(patch: pytest.MonkeyPatch) -> None:
    from areno.loss_fns import policy

    right = policy.kl_per_token
    patch.setattr(policy, "kl_per_token", lambda one, other, estimator: right(one, other, "k2"))


def accumulation_not_scaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DataPack, "row_mean", lambda self, values: values.sum() / max(1, int((self.row_lengths() > 0).sum())))
    patch.setattr(DataPack, "token_mean", lambda self, values: values.sum() / max(1, len(self.trained_T)))


def chosen_and_rejected_swapped(patch: pytest.MonkeyPatch) -> None:
    right = preferences.Sigmoid.pair_losses
    patch.setattr(preferences.Sigmoid, "pair_losses", lambda self, one, other: right(self, other, one))


def label_smoothing_ignored(patch: pytest.MonkeyPatch) -> None:
    right = dpo.make_preference_loss
    patch.setattr(dpo, "make_preference_loss", lambda name, **how: right(name, **{**how, "label_smoothing": 0.0}))


def loss_without_reference(patch: pytest.MonkeyPatch) -> None:
    right = dpo.make_preference_loss

    def wrong(name: str, **how: Any) -> Any:
        found = right(name, **how)
        vars(found)["uses_reference"] = False
        return found

    patch.setattr(dpo, "make_preference_loss", wrong)


def values_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = Trainer.score_values

    def wrong(self: Any, *given: Any, **how: Any) -> Any:
        return [np.roll(row, -1).tolist() for row in right(self, *given, **how)]

    patch.setattr(Trainer, "score_values", wrong)


def value_loss_off_by_one(patch: pytest.MonkeyPatch) -> None:
    from areno.loss_fns import ppo

    right = ppo.value_loss_fn
    patch.setattr(ppo, "value_loss_fn", lambda pack, values, **how: right(pack, values.roll(-1), **how))


def value_clip_left_out(patch: pytest.MonkeyPatch) -> None:
    from areno.loss_fns import ppo

    right = ppo.value_loss_fn

    def wrong(pack: Any, values: Any, **how: Any) -> Any:
        return right(pack, values, **{**how, "cliprange_value": 1e9})

    patch.setattr(ppo, "value_loss_fn", wrong)


def lambda_ignored(patch: pytest.MonkeyPatch) -> None:
    right = rows.gae
    patch.setattr(rows, "gae", lambda rewards, values, discount, decay: right(rewards, values, discount, 1.0))


def variance_unbiased(patch: pytest.MonkeyPatch) -> None:
    right = rows.group_advantages
    patch.setattr(rows, "group_advantages", lambda *given, **how: right(*given, **{**how, "std_unbiased": True}))


def ratios_with_live_policy(patch: pytest.MonkeyPatch) -> None:
    from areno.engine.train import old_logprobs

    def wrong(self: Any, packed: Any, pack: Any, loss_fn: Any, spec: Any, is_first: bool, stats: Any) -> Any:
        return right(self, packed, pack, loss_fn, spec, True, stats)

    right = backend.TrainBackend._micro_batch_loss
    patch.setattr(backend.TrainBackend, "_micro_batch_loss", wrong)
    patch.setattr(old_logprobs, "set_old_logprobs", lambda *given: None)


def prompt_has_gradient(patch: pytest.MonkeyPatch) -> None:
    right = backend.StepBatches

    def wrong(step: Any, *given: Any) -> Any:
        of_step = copy.copy(step)
        trained = np.ones_like(step.rows.trained)
        trained[np.concatenate([[0], np.cumsum(step.rows.lengths)[:-1]])] = False
        of_step.rows = replace(step.rows, trained=trained)
        return right(of_step, *given)

    patch.setattr(backend, "StepBatches", wrong)


def weights_do_not_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizer_updates.Adam, "apply", lambda *given: None)


def bf16_does_not_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizer_updates.AdamBf16, "apply", lambda *given: None)


def gradient_not_clipped(patch: pytest.MonkeyPatch) -> None:
    right = optimizer.Optimizer.step
    patch.setattr(optimizer.Optimizer, "step", lambda self, norm: right(self, 0.0))


def labels_swapped(patch: pytest.MonkeyPatch) -> None:
    right = kto.kto_loss_fn

    def wrong(pack: Any, logprobs: Any, **how: Any) -> Any:
        return right(replace(pack, rewards=1 - pack.rewards), logprobs, **how)

    patch.setattr(kto, "kto_loss_fn", wrong)


def ranking_swapped(patch: pytest.MonkeyPatch) -> None:
    right = reward_model.reward_model_loss_fn

    def wrong(pack: Any, values: Any, **how: Any) -> Any:
        return right(replace(pack, rewards=-pack.rewards), values, **how)

    patch.setattr(reward_model, "reward_model_loss_fn", wrong)


def steps_swapped(patch: pytest.MonkeyPatch) -> None:
    right = process_reward.process_reward_loss_fn

    def wrong(pack: Any, values: Any) -> Any:
        return right(replace(pack, returns=1 - pack.returns), values)

    patch.setattr(process_reward, "process_reward_loss_fn", wrong)


def ranks_divide_by_their_own_rows(patch: pytest.MonkeyPatch) -> None:
    from areno.checks.steps import watched_run

    right = watched_run.divide_steps

    def wrong(*given: Any) -> Any:
        return [
            [replace(step, step_rows=int((step.rows.n_trained > 0).sum())) for step in of_rank]
            for of_rank in right(*given)
        ]

    patch.setattr(watched_run, "divide_steps", wrong)


def gradients_not_cleared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradients.Gradients, "begin", lambda self, step, again=False: None)


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


STALE_LR = [*GSPO, "total_train_steps=100", "actor.optimizer.lr_scheduler_type=linear"]
STALE_LR += ["actor.optimizer.lr_decay_steps=5", "actor.optimizer.min_lr_ratio=0"]

FAULTS: list[tuple[str, list[str], Patch, str, str]] = [
    ("mask shifted by one", GSPO, changed_rows(mask_shifted), "loss-mask", "shifted by one"),
    ("padding trained", GSPO, changed_rows(padding_trained), "loss-mask", "padding"),
    ("prompt trained", GSPO, prompt_has_gradient, "loss-mask", "tokens before the completion are trained"),
    ("reward of another row", GSPO, reward_of_another_row, "row-rewards", "other rows"),
    ("advantages of another group", GSPO, advantages_of_another_group, "advantages", "other rows or groups"),
    ("variance by n - 1", GSPO, variance_unbiased, "advantages", "n - 1"),
    ("log-probabilities off by one", GSPO, logprobs_off_by_one, "rollout-logprobs", "off by one"),
    ("temperature missing", GSPO, temperature_missing_in_training, "training-logprobs", "temperature 1"),
    ("adapters left out", LORA, adapters_left_out_of_rollout, "rollout-logprobs", "adapters are left out"),
    ("stale weights", GSPO, stale_weights, "rollout-logprobs", "stale weights"),
    ("learning rate 0 by schedule", STALE_LR, nothing, "learning-rate", "is 0 in 95 of 100 updates"),
    ("wrong sign", GSPO, wrong_sign, "slope-signs", "wrong sign"),
    ("clip on the wrong side", GRPO, clip_on_wrong_side, "off-policy-loss", "wrong side"),
    ("no clip", GRPO, without_clip, "off-policy-loss", "not clipped"),
    ("wrong reduction", GRPO, wrong_reduction, "loss-formula", "the reduction is token_mean"),
    ("summed ratio", GSPO, ratio_summed, "loss-formula", "summed and not averaged"),
    ("KL with the wrong sign", GRPO, kl_with_wrong_sign, "off-policy-loss", "KL has the wrong sign"),
    ("other KL", GRPO, other_kl_estimator, "off-policy-loss", "estimated by k2"),
    ("reference is the live policy", GRPO, reference_is_live_policy, "reference-logprobs", "live policy"),
    ("ratios with the live policy", GRPO, ratios_with_live_policy, "old-logprobs", "live policy"),
    ("accumulation not scaled", GRPO, accumulation_not_scaled, "micro-batches", "times as large"),
    ("ranks not scaled", GSPO, ranks_divide_by_their_own_rows, "data-parallel-ranks", "times as large"),
    ("weights do not move", GSPO, weights_do_not_move, "optimizer-update", "moves the weights of the actor by 0"),
    (
        "gradient not clipped",
        ["gspo", "actor.optimizer.type=sgd"],
        gradient_not_clipped,
        "optimizer-update",
        "gradient_clipping is left out",
    ),
    ("weights do not move in bf16", BF16, bf16_does_not_move, "optimizer-update", "of the actor by 0"),
    ("critic one step late", PPO, critic_one_step_late, "critic-values", "one step before"),
    ("values off by one", PPO, values_off_by_one, "critic-values", "one token later (off by one)"),
    ("value loss off by one", PPO, value_loss_off_by_one, "loss-formula", "token after"),
    ("value clip left out", PPO, value_clip_left_out, "off-policy-loss", "values are not clipped"),
    ("lambda ignored", PPO, lambda_ignored, "advantages", "gae_lambda is 1"),
    ("chosen and rejected swapped", DPO, chosen_and_rejected_swapped, "pair-margin", "falls"),
    ("label smoothing ignored", DPO, label_smoothing_ignored, "off-policy-loss", "label_smoothing is left out"),
    ("loss without reference", DPO, loss_without_reference, "off-policy-loss", "reference is left out"),
    ("KTO labels swapped", KTO, labels_swapped, "loss-formula", "answers are swapped"),
    ("gradients not cleared", RW, gradients_not_cleared, "loss-formula", "Gradients are not cleared"),
    ("ranking swapped", RW, ranking_swapped, "loss-formula", "answers are swapped"),
    ("step labels swapped", PRM, steps_swapped, "loss-formula", "steps are swapped"),
]


CLEAN = [BF16, GSPO, GRPO, LORA, PPO, DPO, KTO, RW, PRM, ["sft"], ["online_dpo"], SAMPLES_PADDING]


@pytest.mark.parametrize("command", CLEAN, ids=" ".join)
def test_nothing_is_red_without_a_fault(command, tmp_path):
    found = findings(tmp_path, command)
    assert red(found) == {}
    assert len(found) > 8


@pytest.mark.parametrize(
    ("command", "plant", "name", "said"), [each[1:] for each in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_planted_fault_is_found_by_name(command, plant, name, said, tmp_path, monkeypatch):
    plant(monkeypatch)
    monkeypatch.setattr(two_steps, "_draw", lambda *given: [])  # a third of the time, for sampled-tokens alone
    found = red(findings(tmp_path, command))
    assert name in found, found
    assert said in found[name]


def test_a_mask_that_begins_late_is_named_once(tmp_path, monkeypatch):
    changed_rows(mask_late)(monkeypatch)
    found = findings(tmp_path, GSPO)
    reds = [each for each in found if each.verdict == "red"]
    assert "begins late: the first 2 tokens" in red(found)["loss-mask"]
    assert "the loss mask is another" in red(found)["rollout-logprobs"]
    assert len({(each.name, each.line) for each in reds}) == len(reds)
    assert not any("the check itself failed" in each.line for each in found)
