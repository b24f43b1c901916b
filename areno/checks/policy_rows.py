"""The training rows of a step beside the samples that they are made of, and what rewards and advantages should be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from areno.checks.formulas import advantage_formulas as formulas
from areno.checks.formulas.advantage_formulas import Norm
from areno.checks.step_formula import field_of, mask_of
from areno.checks.watched_run import Update, WatchedRun, reward_of_tokens, reward_parts
from areno.config.policy_experiments import CriticExperimentConfig
from areno.loss_fns.adv_estimators import GDPO, OTB, REAL, MaxRL
from areno.recipes import grpo, gspo, ppo
from areno.types import ScoredSample, TrainSequence

Arrays = list[np.ndarray]


@dataclass
class StepRows:
    """Rows of an update, each with its sample. None: a row is no sample of the step."""

    run: WatchedRun
    update: Update
    rows: list[TrainSequence]
    samples: list[ScoredSample | None]

    def wanted_mask(self, number: int) -> np.ndarray:
        """Return True at the completion of a row's sample."""
        sample, n_tokens = self.samples[number], len(self.rows[number].tokens)  # type: ignore[arg-type]
        if sample is None:
            return np.zeros(n_tokens, bool)
        start, places = len(sample.item.tokens), np.arange(n_tokens)
        return (places >= start) & (places < start + len(sample.sequence.resp_tokens))

    def raw_rewards(self) -> list[float]:
        return [
            0.0 if sample is None else reward_of_tokens(sample.item.tokens, sample.sequence.resp_tokens)
            for sample in self.samples
        ]

    def rewards(self) -> list[float]:
        """Return the reward of each row, from its own completion, shaped as the settings say."""
        actor, found = self.run.config.actor, [0.0] * len(self.rows)
        for source, indices in self._sources().items():
            raw = [self.raw_rewards()[index] for index in indices]
            lengths = [len(self.samples[index].sequence.resp_tokens) for index in indices]  # type: ignore[union-attr]
            limit = self.run.config.gconfig_of(source).max_new_tokens
            shaped = formulas.shaped_rewards(raw, lengths, actor, limit)
            if (norm := Norm.of(actor.reward_norm)) is not None:
                shaped = norm.apply(shaped, [self.groups[index] for index in indices])
            for index, value in zip(indices, shaped, strict=True):
                found[index] = value
        return found

    @property
    def groups(self) -> list[int]:
        return [-1 if sample is None else sample.group for sample in self.samples]

    def _sources(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, sample in enumerate(self.samples):
            if sample is not None:
                found.setdefault(sample.item.source, []).append(index)
        return found

    @property
    def has_advantages(self) -> bool:
        known = [each.advantages for each in (grpo.GRPOConfig, gspo.GSPOConfig, ppo.PPOConfig)]
        estimator = self.run.config.actor.chosen_adv_estimator
        is_known = estimator is None or isinstance(estimator, MaxRL | GDPO | REAL | OTB)
        return is_known and type(self.run.config).advantages in known and None not in self.samples

    def advantages(self, actor: Any = None, groups: list[int] | None = None) -> tuple[Arrays, Arrays | None]:
        """Return (advantages, returns) of each row by the formula. Without a critic there are no returns."""
        actor = self.run.config.actor if actor is None else actor
        groups, rewards = self.groups if groups is None else groups, self.rewards()
        advantages: list[Any] = [None] * len(self.rows)
        returns: list[Any] = [None] * len(self.rows)
        has_critic = isinstance(self.run.config, CriticExperimentConfig)
        for indices in self._sources().values():
            own = [self.rows[index] for index in indices]
            more = [rewards[index] for index in indices], [groups[index] for index in indices]
            policy = [field_of(row, "logprobs").numpy() for row in own]
            has_reference = own[0].ref_logprobs is not None
            reference = [field_of(row, "ref_logprobs").numpy() for row in own] if has_reference else None
            if has_critic:
                values = [field_of(row, "values").numpy() for row in own]
                found, targets = formulas.critic_advantages(*more, policy, reference, values, actor)
            elif actor.chosen_adv_estimator is not None:
                if isinstance(actor.chosen_adv_estimator, OTB):
                    found = formulas.otb(*more, *self._distributions(own))
                else:
                    of_rows = self._estimated(actor.chosen_adv_estimator, indices, *more)
                    found = [np.full(len(row), value) for row, value in zip(policy, of_rows, strict=True)]
                targets = [None] * len(own)
            else:
                found, targets = formulas.outcome_advantages(*more, policy, reference, actor), [None] * len(own)
            for index, advantage, target in zip(indices, found, targets, strict=True):
                advantages[index], returns[index] = advantage, target
        return advantages, returns if has_critic else None

    def _distributions(self, rows: list[TrainSequence]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the distribution at each trained token of rows under the policy before the update, and the tokens."""
        model, temperature, found = self.run.models[self.update.role], self.update.how.sampling.logprob_temperature, []
        weights = {name: tensor.double() for name, tensor in self.update.before.items()}
        for row in rows:
            with torch.no_grad():
                q = model.log_distributions(weights, np.asarray(row.tokens).tolist(), temperature).exp()
            found.append(q[mask_of(row)[1:]].numpy())
        return found, [np.asarray(row.tokens)[mask_of(row).numpy()] for row in rows]

    def _estimated(self, estimator: Any, indices: list[int], rewards: list[float], groups: list[int]) -> list[float]:
        if isinstance(estimator, MaxRL):
            return formulas.maxrl(rewards, groups)
        if isinstance(estimator, REAL):
            return formulas.real(rewards, groups, estimator.tau)
        weights, samples = reward_parts(self.run.config), [self.samples[index] for index in indices]
        parts = {
            name: [
                reward_of_tokens(sample.item.tokens, sample.sequence.resp_tokens, name) for sample in samples if sample
            ]
            for name in weights
        }
        return formulas.gdpo(parts, weights, groups, estimator.eps)

    def other_advantages(self) -> Iterator[tuple[str, Arrays]]:
        """Yield wrong advantages, each with what is wrong about those that equal them."""
        actor = self.run.config.actor
        norm = actor.adv_norm
        yield "the rows are grouped by order and not by prompt", self.advantages(groups=_interleaved(self.groups))[0]
        if norm is not None and actor.chosen_adv_estimator is None:
            changes = [
                ("the mean is over the batch", {"mean_level": "batch"}),
                ("the mean is over the group", {"mean_level": "group"}),
                ("no mean is subtracted", {"mean_level": None}),
                ("they are not divided by a standard deviation", {"std_level": None}),
                ("the standard deviation is over the batch", {"std_level": "batch"}),
                ("the standard deviation is over the group", {"std_level": "group"}),
                (
                    "the variance is divided by n - 1" if not norm.std_unbiased else "the variance is divided by n",
                    {"std_unbiased": not norm.std_unbiased},
                ),
            ]
            for text, change in changes:
                yield text, self.advantages(_changed(actor, adv_norm=_changed(norm, **change)))[0]
            yield "adv_norm is left out", self.advantages(_changed(actor, adv_norm=None))[0]
        if isinstance(actor, ppo.PPOActorConfig):
            yield "gae_lambda is 1", self.advantages(_changed(actor, gae_lambda=1.0, length_lambda=None))[0]
            yield "gae_lambda is 0", self.advantages(_changed(actor, gae_lambda=0.0, length_lambda=None))[0]


def _interleaved(groups: list[int]) -> list[int]:
    distinct = list(dict.fromkeys(groups))
    return [distinct[index % len(distinct)] for index in range(len(groups))]


def _changed(section: Any, **changes: Any) -> Any:
    """Return a copy of settings with other values, without the checks of a configuration."""
    found = copy.copy(section)
    vars(found).update(changes)
    return found


def _tokens_of(sample: ScoredSample) -> list[int]:
    return [*sample.item.tokens, *sample.sequence.resp_tokens]


def step_rows(run: WatchedRun, update: Update) -> StepRows:
    """Find the sample of each row by its tokens."""
    left, found = list(run.samples[update.step]), list[ScoredSample | None]()
    for row in update.given:
        tokens = np.asarray(row.tokens).tolist()
        same = [sample for sample in left if _tokens_of(sample) == tokens]
        same = same or [sample for sample in left if tokens[: sample.n_tokens] == _tokens_of(sample)]  # padded
        found.append(same[0] if same else None)
        left = [sample for sample in left if not same or sample is not same[0]]
    return StepRows(run, update, update.given, found)


def sampled_steps(run: WatchedRun) -> Iterator[StepRows]:
    """Yield the steps of the actor whose rows are all samples of the policy."""
    for update in run.of():
        if update.step in run.samples and all(row.logprobs is not None for row in update.given):
            yield step_rows(run, update)
