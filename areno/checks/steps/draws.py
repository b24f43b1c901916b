"""Checks of the draws of the rollout: which tokens, from which distribution, and where completions end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from areno.checks.formulas.draw_formulas import drawn_logits, outside, truncated
from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.steps.policy_rows import sampled_steps
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.checks.steps.watched_run import Tensors, WatchedRun
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import SamplingConfig

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_MOST_DEVIATIONS = 6.0
_RARE = 3.0  # of the rarest token's -log p: sums with rare tokens are not normal
_MOST_RANKED = 20_000  # tokens of a vocabulary that is sorted
_SHARES = (0.0, 0.5, 0.9, 0.97, 1.0)  # of the probability, the most likely tokens first
_RANKS = (1, 2, 4, 8, 16, 32)
_RECORDED = 1e-3  # error of a log-probability
_NO_CHANCE = 16.0  # -log of a probability
_ALL = SamplingConfig()
_LIMITS = ("top_k", "top_p", "min_p")


@dataclass
class _Draws:
    """Draws of tokens with the same settings, each place with the distribution that the formula gives."""

    settings: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the policy, without penalties and limits
    outside: list[str] = field(default_factory=list)  # what is known of tokens outside of the allowed set
    apart: float = 0.0  # -log q of the tokens from the entropy
    variance: float = 0.0
    rarest: float = 0.0
    by_temperature: float = 0.0  # what `apart` would be at another temperature
    limited: list[float] = field(default_factory=list)  # log-probabilities among the allowed tokens
    counts: dict[str, np.ndarray] = field(default_factory=dict)  # of the tokens that a text names: (draws, expected)

    def add(self, logits: Tensor, completion: Sequence[int], other: float, end_ids: Sequence[int] = ()) -> None:
        drawn = torch.tensor(list(completion))[:, None]
        log_p = drawn_logits(logits, completion, self.settings, end_ids).log_softmax(-1)
        at_temperature = (logits / self.settings.logprob_temperature).log_softmax(-1)
        self.tokens += list(completion)
        self.logprobs += at_temperature.gather(-1, drawn)[:, 0].tolist()
        for place in outside(log_p, drawn[:, 0], self.settings).nonzero()[:, 0].tolist():
            own, most = log_p[place, completion[place]], log_p[place].max()
            rank, share = int((log_p[place] > own).sum()) + 1, float((own - most).exp())
            self.outside.append(f"number {rank} by its probability, {share:.2g} times as likely as the first")
        if self.settings.is_greedy:
            return
        log_q = truncated(log_p, self.settings)
        of_drawn = log_q.gather(-1, drawn)[:, 0]
        self.limited += of_drawn.tolist()
        known = of_drawn.isfinite()
        log_q, of_drawn = log_q[known], of_drawn[known]
        q, log_q = log_q.exp(), log_q.clamp_min(-1e3)
        entropy = -(q * log_q).sum(-1)
        self.apart += float((-of_drawn - entropy).sum())
        self.variance += float(((q * log_q.square()).sum(-1) - entropy.square()).sum())
        self.rarest = max([self.rarest, *(-of_drawn).tolist()])
        warmer = truncated(log_p[known] * (self.settings.logprob_temperature / other), self.settings)
        self.by_temperature += float((-(warmer.exp() * log_q).sum(-1) - entropy).sum())
        if log_q.shape[1] <= _MOST_RANKED:
            self._add_ranks(q, drawn[known])

    def _add_ranks(self, q: Tensor, drawn: Tensor) -> None:
        """Count the draws among the most likely tokens, and so on. A token on an edge counts in parts."""
        ordered, order = q.sort(-1, descending=True)
        after = ordered.cumsum(-1)
        place = (order == drawn).int().argmax(-1, keepdim=True)
        for low, high in pairwise(_SHARES):
            inside = (after.clamp(low, high) - (after - ordered).clamp(low, high)) / ordered.clamp_min(1e-300)
            text = f"between {low:g} and {high:g} of the probability, the most likely first"
            self._count(text, torch.where(ordered > 0, inside.clamp(0, 1), 0.0), ordered, place)
        for rank in _RANKS:
            self._count(
                f"beyond the {rank} most likely", (torch.arange(q.shape[1]) >= rank).expand_as(q), ordered, place
            )

    def _count(self, text: str, inside: Tensor, ordered: Tensor, place: Tensor) -> None:
        found = [float(inside.gather(-1, place).sum()), float((ordered * inside).sum())]
        self.counts[text] = self.counts.get(text, np.zeros(2)) + found


def _other_temperature(settings: Any) -> float:
    return 1.0 if settings.logprob_temperature != 1 else 0.5


def drawn_tokens(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether tokens are drawn from the distribution that the settings give, and recorded with their probability."""
    run = found.run
    if not isinstance(run.config, PolicyExperimentConfig):
        return
    draws, given = _Draws(found.drawing), list[float]()
    weights = _in_double(run.of()[-1].after)
    for tokens, start, logprobs in found.drawn:
        draws.add(_logits(run, weights, tokens, start), tokens[start:], _other_temperature(draws.settings))
        given += logprobs
    if found.drawn:
        yield from _recorded(draws, given)
        yield from _sampled(draws)
    else:
        yield not_checked("sampled-tokens", "agents choose how their tokens are drawn")
    yield from _allowed([draws, *_of_steps(subject, run)])


def _of_steps(subject: Subject, run: WatchedRun) -> Iterator[_Draws]:
    """Yield the draws of the samples of the steps, if the settings leave some tokens out."""
    for step in sampled_steps(run):
        weights = _in_double(step.update.before)
        for sample in step.samples:
            if sample is None or sample.trajectory is not None or not len(sample.sequence.resp_tokens):
                continue
            draws = _Draws(run.config.gconfig_of(sample.item.source))
            prompt, completion = ([*map(int, each)] for each in (sample.item.tokens, sample.sequence.resp_tokens))
            if draws.settings.is_greedy or _limits(draws.settings):
                ends = _end_ids(subject, draws.settings)
                logits = _logits(run, weights, [*prompt, *completion], len(prompt))
                draws.add(logits, completion, _other_temperature(draws.settings), sorted(ends))
                yield draws


def _end_ids(subject: Subject, settings: Any) -> set[int]:
    return set(settings.stop_token_ids or ()) | (set() if settings.ignore_eos else subject.end_ids)


def _logits(run: WatchedRun, weights: Tensors, tokens: list[int], start: int) -> Tensor:
    with torch.no_grad():
        return run.models["actor"].outputs(weights, tokens)[start - 1 : -1]


def _sampled(draws: _Draws) -> Iterator[Finding]:
    """Compare -log q of the draws with the entropy, which it is on average, whatever the distributions are.

    Another temperature, or a limit or penalty that only the draw knows, moves it.
    """
    name = "sampled-tokens"
    if draws.settings.is_greedy:
        return
    scale = math.sqrt(draws.variance) or 1.0
    z, power = draws.apart / scale, abs(draws.by_temperature) / scale
    text = f"-log p of the drawn tokens is {z:+.1f} standard deviations from the entropy of their distributions"
    temperature = draws.settings.logprob_temperature
    slack = _RARE * draws.rarest / scale if z > 0 else 0.0
    if abs(z) > _MOST_DEVIATIONS + slack:
        kind = "more likely" if z < 0 else "less likely"
        said = f"{text}: they are {kind} than samples at the temperature {temperature:g} that the rollout records"
        close = abs(draws.apart - draws.by_temperature) < _MOST_DEVIATIONS / 2 * scale
        other = _other_temperature(draws.settings)
        yield red(name, f"{said}; they fit draws at {other:g}" if close else said + _limits(draws.settings))
    elif wrong := _missing_ranks(draws):
        yield red(name, wrong)
    elif power > _MOST_DEVIATIONS:
        yield green(name, text)
    else:
        yield not_checked(name, f"{text}; the model here is too even to tell")


def _recorded(draws: _Draws, given: Sequence[float]) -> Iterator[Finding]:
    if (apart := float(np.abs(np.subtract(draws.logprobs, given)).max())) > _RECORDED:
        text = f"the recorded log-probabilities of drawn tokens are not those of the policy, by up to {apart:.2g}"
        if draws.limited and np.abs(np.subtract(draws.limited, given)).max() < _RECORDED:
            text += ": they are those among the tokens that gconfig leaves, with its penalties"
        yield red("rollout-logprobs", text)


def _limits(settings: Any) -> str:
    given = [f"{name}={vars(settings)[name]:g}" for name in _LIMITS if vars(settings)[name] != vars(_ALL)[name]]
    return f" with gconfig.{', '.join(given)}" if given else ""


def _missing_ranks(draws: _Draws) -> str:
    """Say which tokens, by their rank, are drawn too seldom or too often, or "".

    A sum of independent numbers from 0 to 1 is as far from its expectation with no larger probability than Chernoff's
    bound, that of Poisson.
    """
    for which, (seen, wanted) in draws.counts.items():
        if wanted and (seen * math.log(seen / wanted) if seen else 0.0) - seen + wanted > _NO_CHANCE:
            text = f"{seen:.0f} of {len(draws.tokens)} drawn tokens, expected {wanted:.0f}, are {which}"
            return f"{text}: the draw has other limits than gconfig{_limits(draws.settings)}"
    return ""


def _allowed(every: Sequence[_Draws]) -> Iterator[Finding]:
    limited = [draws for draws in every if draws.tokens and (draws.settings.is_greedy or _limits(draws.settings))]
    for draws in limited:
        if draws.outside:
            how = "greedy=true" if draws.settings.is_greedy else _limits(draws.settings).removeprefix(" with gconfig.")
            text = f"a token was drawn that gconfig.{how} leaves out: {draws.outside[0]}"
            yield red("allowed-tokens", text)
            return
    if limited:
        n_tokens = sum(len(draws.tokens) for draws in limited)
        yield green("allowed-tokens", f"all {n_tokens} drawn tokens lie in the set that gconfig leaves")


def completion_ends(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether completions end at an end token and nowhere else, within the numbers of tokens of the settings."""
    run, name, wrong = found.run, "completion-ends", list[str]()
    if not isinstance(run.config, PolicyExperimentConfig):
        return
    how: Counter[str] = Counter()
    for samples in run.samples.values():
        for sample in samples:
            if sample.trajectory is not None:
                continue
            own, tokens = run.config.gconfig_of(sample.item.source), [*map(int, sample.sequence.resp_tokens)]
            ends = _end_ids(subject, own)
            n, places = len(tokens), [place for place, token in enumerate(tokens) if token in ends]
            room = math.inf if own.max_tokens is None else own.max_tokens - len(sample.item.tokens)
            is_full = n >= min(own.max_new_tokens, room)
            how["the limit" if is_full else "an end token"] += 1
            if n > own.max_new_tokens:
                wrong.append(f"a completion has {n} tokens, more than gconfig.max_new_tokens={own.max_new_tokens}")
            elif places and places[0] + 1 < max(n, own.min_new_tokens):
                text = f"a completion of {n} tokens has an end token in place {places[0] + 1}"
                wrong.append(f"{text}, with gconfig.min_new_tokens={own.min_new_tokens}")
            elif not places and not is_full and not own.stop:
                wrong.append(f"a completion ends after {n} tokens, without an end token")
            elif not own.stop and (sample.sequence.finish_reason == "length") == bool(places):
                said = sample.sequence.finish_reason
                wrong.append(f"a completion that ends {'with' if places else 'without'} an end token counts as {said}")
    if wrong:
        yield red(name, wrong[0])
    elif how:
        yield green(name, "completions end at " + " and ".join(f"{each} ({n})" for each, n in how.items()))


def _in_double(weights: Tensors) -> Tensors:
    return {key: value.double() for key, value in weights.items()}


CHECKS = [of_two_steps(check) for check in (drawn_tokens, completion_ends)]
