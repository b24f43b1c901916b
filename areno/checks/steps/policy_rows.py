"""The training rows of a step beside the samples that they are made of, and what rewards and advantages should be."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from areno.checks.formulas import advantage_formulas as formulas
from areno.checks.formulas.advantage_formulas import Norm
from areno.checks.inputs.varied_reward import reward_of_tokens
from areno.checks.steps.agent_episodes import Turn
from areno.checks.steps.step_formula import field_of, mask_of
from areno.checks.steps.watched_run import Update, WatchedRun, reward_parts
from areno.config.policy_experiments import CriticExperimentConfig
from areno.loss_fns.adv_estimators import GDPO, OTB, REAL, MaxRL
from areno.recipes import grpo, gspo, ppo
from areno.types import ScoredSample, TrainSequence

Arrays = list[np.ndarray]


@dataclass
class StepRows:
    """Rows of an update, each with its sample. None: a row is no sample of the step.

    The sample of an agent may have several rows, which count as one sequence.
    """

    run: WatchedRun
    update: Update
    rows: list[TrainSequence]
    samples: list[ScoredSample | None]

    def turns_of(self, number: int) -> list[Turn]:
        """Return the turns that a row of an agent is made of: what the model read and wrote in each begins the row."""
        tokens = np.asarray(self.rows[number].tokens).tolist()
        found = [turn for turn in self.run.episodes.turns.get(self.update.step, []) if turn.begins(tokens)]
        if self.run.config.agent.export_style == "individual":
            found = [turn for turn in found if turn.span.stop == len(tokens)]
        return list({turn.span.start: turn for turn in found}.values())

    def is_agents(self, number: int) -> bool:
        sample = self.samples[number]
        return sample is not None and sample.trajectory is not None

    def is_left_out(self, number: int) -> bool:
        sample = self.samples[number]
        is_cut = sample is not None and sample.sequence.finish_reason == "length"
        return is_cut and self.run.config.actor.mask_no_eos_with_zero

    def wanted_mask(self, number: int) -> np.ndarray:
        """Return True at the completion of a row's sample, or at what the model wrote in the turns of an agent.

        Nothing is trained of a sample that was cut off, if the settings say so.
        """
        sample, n_tokens = self.samples[number], len(self.rows[number].tokens)  # type: ignore[arg-type]
        found = np.zeros(n_tokens, bool)
        if self.is_left_out(number):
            pass
        elif self.is_agents(number):
            for turn in self.turns_of(number):
                found[turn.span] = not turn.is_forced
        elif sample is not None:
            start = len(sample.item.tokens)
            found[start : start + len(sample.sequence.resp_tokens)] = True
        return found

    def sampled_logprobs(self, number: int) -> np.ndarray:
        """Return the log-probabilities at which the tokens of `wanted_mask` were sampled."""
        sample = self.samples[number]
        if sample is None or self.is_left_out(number):
            return np.zeros(0)
        if not self.is_agents(number):
            return np.asarray(sample.sequence.resp_logprobs, np.float64)
        found = np.zeros(len(self.rows[number].tokens))  # type: ignore[arg-type]
        for turn in self.turns_of(number):
            found[turn.span] = turn.logprobs
        return found[self.wanted_mask(number)]

    @property
    def members(self) -> list[list[int]]:
        """The numbers of the rows of each sample."""
        found: dict[int, list[int]] = {}
        for number, sample in enumerate(self.samples):
            found.setdefault(-1 - number if sample is None else id(sample), []).append(number)
        return list(found.values())

    def raw_rewards(self) -> list[float]:
        return [0.0 if sample is None else self.raw_reward(sample) for sample in self.samples]

    def raw_reward(self, sample: ScoredSample) -> float:
        """Return the reward of the stand-in, and that of the agent."""
        has_equal = self.run.config.rollout.dynamic_sampling
        found = reward_of_tokens(sample.item.tokens, sample.sequence.resp_tokens, has_equal=has_equal)
        if sample.trajectory is None:
            return found
        own = self.run.episodes.rewards[self.update.step][self._key(sample)]
        if own is None:
            own = 0.0 if sample.trajectory.reward is None else sample.trajectory.reward[0]
        return found + own

    def _key(self, sample: Any) -> tuple[int, int]:
        of_group = [other for other in self.run.samples[self.update.step] if other.group == sample.group]
        return sample.group, next(place for place, other in enumerate(of_group) if other is sample)

    def rewards(self) -> list[float]:
        """Return the reward of each row, from its own sample, shaped as the settings say."""
        actor, found, every = self.run.config.actor, [0.0] * len(self.rows), self.raw_rewards()
        for source, members in self._sources().items():
            heads = [rows[0] for rows in members]
            raw = [every[index] for index in heads]
            lengths = [len(self.samples[index].sequence.resp_tokens) for index in heads]  # type: ignore[union-attr]
            limit = self.run.config.gconfig_of(source).max_new_tokens
            shaped = formulas.shaped_rewards(raw, lengths, actor, limit)
            if (norm := Norm.of(actor.reward_norm)) is not None:
                shaped = norm.apply(shaped, [self.groups[index] for index in heads])
            for rows, value in zip(members, shaped, strict=True):
                for index in rows:
                    found[index] = value
        return found

    @property
    def groups(self) -> list[int]:
        return [-1 if sample is None else sample.group for sample in self.samples]

    def _sources(self) -> dict[str, list[list[int]]]:
        """Return source -> the rows of each of its samples."""
        found: dict[str, list[list[int]]] = {}
        for rows in self.members:
            if (sample := self.samples[rows[0]]) is not None:
                found.setdefault(sample.item.source, []).append(rows)
        return found

    def _joined(self, members: list[list[int]], name: str, dtype: type = float) -> Arrays:
        """Return a field at the trained tokens of all rows of each sample."""
        fields = [[field_of(self.rows[index], name).numpy() for index in rows] for rows in members]
        return [np.concatenate(of_rows).astype(dtype) for of_rows in fields]

    @property
    def has_advantages(self) -> bool:
        known = [each.advantages for each in (grpo.GRPOConfig, gspo.GSPOConfig, ppo.PPOConfig)]
        estimator = self.run.config.actor.chosen_adv_estimator
        is_known = estimator is None or isinstance(estimator, MaxRL | GDPO | REAL | OTB)
        return is_known and type(self.run.config).advantages in known and None not in self.samples

    def advantages(
        self, actor: Any = None, groups: list[int] | None = None, agent: Any = None
    ) -> tuple[Arrays, Arrays | None]:
        """Return (advantages, returns) of each row by the formula. Without a critic there are no returns."""
        actor = self.run.config.actor if actor is None else actor
        agent = self.run.config.agent if agent is None else agent
        groups, rewards = self.groups if groups is None else groups, self.rewards()
        advantages: list[Any] = [None] * len(self.rows)
        returns: list[Any] = [None] * len(self.rows)
        has_critic = isinstance(self.run.config, CriticExperimentConfig)
        for members in self._sources().values():
            heads = [rows[0] for rows in members]
            more = [rewards[index] for index in heads], [groups[index] for index in heads]
            policy = self._joined(members, "logprobs")
            has_reference = self.rows[heads[0]].ref_logprobs is not None
            reference = self._joined(members, "ref_logprobs") if has_reference else None
            targets: list[Any] = [None] * len(members)
            if agent.turn_credit != "outcome":
                found, targets = self._turn_advantages(members, *more, actor, agent)
            elif has_critic:
                values = self._joined(members, "values")
                found, targets = formulas.critic_advantages(*more, policy, reference, values, actor)
            elif actor.chosen_adv_estimator is not None:
                if isinstance(actor.chosen_adv_estimator, OTB):
                    found = formulas.otb(*more, *self._distributions(members))
                else:
                    of_rows = self._estimated(actor.chosen_adv_estimator, heads, *more)
                    found = [np.full(len(row), value) for row, value in zip(policy, of_rows, strict=True)]
            else:
                found = formulas.outcome_advantages(*more, policy, reference, actor)
            for rows, advantage, target in zip(members, found, targets, strict=True):
                ends = np.cumsum([int(mask_of(self.rows[index]).sum()) for index in rows])[:-1]
                for place, index in enumerate(rows):
                    advantages[index] = np.split(advantage, ends)[place]
                    returns[index] = None if target is None else np.split(target, ends)[place]
        return advantages, returns if has_critic else None

    def _turn_advantages(
        self, members: list[list[int]], rewards: list[float], groups: list[int], actor: Any, agent: Any
    ) -> tuple[Arrays, list[Any]]:
        """Return (advantages, returns) of the trained tokens of each sample, by agent.turn_credit."""
        of_turns = []
        for rows, reward in zip(members, rewards, strict=True):
            trajectory = self.samples[rows[0]].trajectory  # type: ignore[union-attr]
            given = [] if trajectory is None else trajectory.turn_rewards
            own = self.run.episodes.turn_rewards.get(self.update.step, {}).get(self._key(self.samples[rows[0]]))
            given = own if own is not None and len(own) == len(given) else given
            before = [actor.reward_scaling * each for each in given[:-1]]
            of_turns.append(np.array([*before, reward - math.fsum(before)]))
        turns = [np.concatenate([self._turns(index) for index in rows]) for rows in members]
        norm = formulas.Norm.of(actor.adv_norm)
        if agent.turn_credit != "gae":
            same = agent.turn_credit == "turn_baseline"
            by_turn = formulas.turn_advantages(of_turns, groups, agent.turn_discount, norm, same_turn=same)
            found = [own[of_tokens] for own, of_tokens in zip(by_turn, turns, strict=True)]
            return found, [None] * len(members)
        values = self._joined(members, "values")
        pairs = [
            formulas.turn_gae(*each, agent.turn_discount, actor.gae_lambda)
            for each in zip(of_turns, values, turns, strict=True)
        ]
        found, targets = [one for one, _ in pairs], [other for _, other in pairs]
        return (found if norm is None else formulas.over_tokens(norm, found, groups)), targets

    def _turns(self, number: int) -> np.ndarray:
        """Return the turn of each trained token of a row: by its requests, if the sample has no other rows."""
        row, sample = self.rows[number], self.samples[number]
        mask, spans = mask_of(row).numpy(), sorted(turn.span.start for turn in self.turns_of(number))
        trajectory = None if sample is None else sample.trajectory
        if trajectory is not None and len(trajectory.rows) == 1 and len(spans) == len(trajectory.turn_rewards):
            return np.searchsorted(spans, np.flatnonzero(mask), side="right") - 1
        return np.zeros(int(mask.sum()), int) if row.turns is None else np.asarray(row.turns)[mask]

    def _distributions(self, members: list[list[int]]) -> tuple[Arrays, Arrays]:
        """Return the distribution at each trained token of each sample, before the update, and the tokens."""
        model, temperature, found = self.run.models[self.update.role], self.update.how.sampling.logprob_temperature, []
        weights = {name: tensor.double() for name, tensor in self.update.before.items()}

        def distribution(row: TrainSequence) -> np.ndarray:
            with torch.no_grad():
                q = model.log_distributions(weights, np.asarray(row.tokens).tolist(), temperature).exp()
            return q[mask_of(row)[1:]].numpy()

        for rows in members:
            found.append(np.concatenate([distribution(self.rows[index]) for index in rows]))
        return found, self._joined(members, "tokens", int)

    def _estimated(self, estimator: Any, indices: list[int], rewards: list[float], groups: list[int]) -> list[float]:
        if isinstance(estimator, MaxRL):
            return formulas.maxrl(rewards, groups)
        if isinstance(estimator, REAL):
            return formulas.real(rewards, groups, estimator.tau)
        has_equal = self.run.config.rollout.dynamic_sampling
        weights, samples = reward_parts(self.run.config), [self.samples[index] for index in indices]
        parts = {
            name: [
                reward_of_tokens(sample.item.tokens, sample.sequence.resp_tokens, name, has_equal)
                for sample in samples
                if sample
            ]
            for name in weights
        }
        return formulas.gdpo(parts, weights, groups, estimator.eps)

    def other_advantages(self) -> Iterator[tuple[str, Arrays]]:
        """Yield wrong advantages, each with what is wrong about those that equal them."""
        actor = self.run.config.actor
        norm = actor.adv_norm
        yield "the rows are grouped by order and not by prompt", self.advantages(groups=_interleaved(self.groups))[0]
        agent = self.run.config.agent
        if agent.turn_credit != "outcome":
            changes = [("all turns have the advantage of the sample", {"turn_credit": "outcome"})]
            changes += [("turn_discount is left out", {"turn_discount": 1.0})] * (agent.turn_discount != 1)
            other = {"return": "turn_baseline", "turn_baseline": "return"}.get(agent.turn_credit)
            changes += [(f"turn_credit is {other}", {"turn_credit": other})] if other else []
            for text, change in changes:
                yield text, self.advantages(agent=_changed(agent, **change))[0]
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


def _rows_of(sample: ScoredSample) -> list[list[int]]:
    if sample.trajectory is not None:
        return [list(row.tokens) for row in sample.trajectory.rows]
    return [[*sample.item.tokens, *sample.sequence.resp_tokens]]


def step_rows(run: WatchedRun, update: Update) -> StepRows:
    """Find the sample of each row by its tokens."""
    left = [(sample, tokens) for sample in run.samples[update.step] for tokens in _rows_of(sample)]
    found = list[ScoredSample | None]()
    for row in update.given:
        own = np.asarray(row.tokens).tolist()
        same = [at for at, (_, tokens) in enumerate(left) if tokens == own]
        same = same or [at for at, (_, tokens) in enumerate(left) if own[: len(tokens)] == tokens]  # padded
        found.append(left.pop(same[0])[0] if same else None)
    return StepRows(run, update, update.given, found)


def sampled_steps(run: WatchedRun) -> Iterator[StepRows]:
    """Yield the steps of the actor whose rows are all samples of the policy."""
    for update in run.of():
        if update.step in run.samples and all(row.logprobs is not None for row in update.given):
            yield step_rows(run, update)
