"""Choose the samples of a step that best show what a warning is about."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from areno.types import ScoredSample

N_TELLING = 3


def telling_samples(kind: str, samples: Sequence[ScoredSample], parts: tuple[str, str] = ("", "")) -> list[int]:
    """Return the indices of at most N_TELLING samples for a kind of warning, the most telling first.

    Kinds without a choice of their own get the first samples. `parts` are two parts of the reward that disagree.
    """
    if kind == "hacked":
        return _preferred(samples, *parts)
    if kind == "flat":  # only samples of one prompt show that its rewards are equal
        return [index for index, sample in enumerate(samples) if sample.group == samples[0].group][:N_TELLING]
    choose = _TELLING.get(kind)
    weights = [0.0] * len(samples) if choose is None else choose(samples)
    order = sorted(range(len(samples)), key=lambda index: -weights[index])
    return order[:N_TELLING]


def _each(weight: Callable[[ScoredSample], float]) -> Callable[[Sequence[ScoredSample]], list[float]]:
    def weights(samples: Sequence[ScoredSample]) -> list[float]:
        found = [weight(sample) for sample in samples]
        return [math.inf if math.isnan(value) else value for value in found]  # what is not finite tells most

    return weights


def _length(sample: ScoredSample) -> float:
    return sample.sequence.n_tokens


def _mean_logprob(sample: ScoredSample) -> float:
    logprobs = vars(sample.sequence)["resp_logprobs"]
    return float(np.mean(logprobs)) if len(logprobs) else -math.inf


def _distance_of_policies(sample: ScoredSample) -> float:
    """Return the mean absolute difference of the log-probabilities of rollout and training."""
    if sample.train_logprobs is None or not len(sample.train_logprobs):
        return -1.0
    return float(np.nanmean(np.abs(np.asarray(vars(sample.sequence)["resp_logprobs"]) - sample.train_logprobs)))


def _largest_advantage(sample: ScoredSample) -> float:
    if sample.advantages is None or not len(sample.advantages):
        return -1.0
    return float(np.max(np.abs(sample.advantages)))


def _push(sample: ScoredSample) -> float:
    """Return how far a sample moves the policy: unlikely tokens with a large advantage move it most."""
    return _largest_advantage(sample) * max(0.0, -_mean_logprob(sample))


def _oldest_version(sample: ScoredSample) -> float:
    versions = vars(sample.sequence)["resp_versions"]
    return float(np.min(versions)) if len(versions) else math.inf


def _certain_and_wrong(samples: Sequence[ScoredSample]) -> list[float]:
    best = max((sample.outcome.value for sample in samples if sample.outcome.value is not None), default=math.inf)
    return [
        _mean_logprob(sample) if sample.outcome.value is not None and sample.outcome.value < best else -math.inf
        for sample in samples
    ]


def _without_reward(sample: ScoredSample) -> float:
    return float(sample.outcome.value is None)


def _preferred(samples: Sequence[ScoredSample], model: str, rule: str) -> list[int]:
    """Return the indices of the samples that one part of the reward likes more than the other, the most first.

    Each part counts in units of its standard deviation over the samples.
    """
    scored = [index for index, sample in enumerate(samples) if {model, rule} <= set(sample.outcome.parts)]
    weights = dict.fromkeys(scored, 0.0)
    for name, sign in ((model, 1.0), (rule, -1.0)):
        values = [samples[index].outcome.parts[name] for index in scored]
        spread = statistics.pstdev(values) if len(values) > 1 else 0.0
        for index, value in zip(scored, values, strict=True):
            weights[index] += sign * value / (spread or 1.0)
    return sorted(scored, key=lambda index: -weights[index])[:N_TELLING]


_TELLING: dict[str, Callable[[Sequence[ScoredSample]], list[float]]] = {
    "longer": _each(_length),
    "shorter": _each(lambda sample: -_length(sample)),
    "truncated": _each(_length),
    "nothing trained": _each(_length),
    "entropy": _certain_and_wrong,
    "kl": _each(_push),
    "skipped": _each(_push),
    "logprobs": _each(_distance_of_policies),
    "rounding": _each(_distance_of_policies),
    "stale": _each(_distance_of_policies),
    "aged": _each(lambda sample: -_oldest_version(sample)),
    "not_finite": _each(_without_reward),
    "unrewarded": _each(_without_reward),
}
