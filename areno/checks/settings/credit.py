"""Checks of PPO: how much of a reward reaches the first token of an answer, and what the critic can learn."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Subject
from areno.checks.settings.run_length import n_steps, n_updates
from areno.recipes import ppo

_LEAST_LAMBDA, _LEAST_REACH = 0.5, 0.1
_LEAST_SEEN = 0.01  # of the reward, by the first token of an answer
_LEAST_ANSWER = 16  # tokens: a shorter reference answer is a result alone, without what leads to it
_LENGTHS = 200  # rows


def credit(subject: Subject) -> Iterator[Finding]:
    """Whether advantages of PPO see the rewards, and the critic can learn them."""
    config, steps = subject.config, n_steps(subject)
    if not isinstance(config, ppo.PPOConfig):
        return
    wrong, decay = list[Finding](), config.actor.gae_lambda
    most, is_fixed = config.gconfig.max_new_tokens, config.actor.length_lambda is None
    if decay < _LEAST_LAMBDA and is_fixed and most > 1 / _LEAST_LAMBDA:
        text = f"actor.gae_lambda={decay:g}: the reward counts {decay**2:.2g} two tokens before the end"
        wrong.append(red("credit", f"{text}, and all else is the critic's guess (usual: 0.95 to 1)"))
    updates = None if steps is None else n_updates(subject, "critic", steps)
    if updates and config.critic.eps_clip * updates < _LEAST_REACH:
        text = f"critic.eps_clip={config.critic.eps_clip:g}: in {updates} updates, a value moves by at most"
        wrong.append(red("credit", f"{text} {config.critic.eps_clip * updates:.2g}, so it never reaches the rewards"))
    rate, (n, what) = config.actor.discount, _usual_length(subject, most)
    text = f"the first token of an answer of {n} tokens ({what}) sees {rate**n:.2g} of the reward at its end"
    if rate**n < _LEAST_SEEN:
        n_seen = int(math.log(_LEAST_SEEN) / math.log(rate)) if rate else 1
        text = f"actor.discount={rate:g}: {text}"
        wrong.append(red("credit", f"{text}. Only the last {n_seen} tokens see more than {_LEAST_SEEN:g}: set it to 1"))
    elif is_fixed and decay < 1:
        direct = f"gae_lambda={decay:g} brings {(rate * decay) ** n:.2g} of it there directly"
        text += f"; {direct}, and the rest comes through the critic's values"
    yield from wrong or [green("credit", text)]


def _usual_length(subject: Subject, most: int) -> tuple[int, str]:
    """Return the number of tokens of a usual answer, and what it is taken from.

    It is the median of the longest text that a row has beside its prompt, if this can be a worked answer.
    """
    lengths = []
    for dataset in subject.training_rows:
        for row in subject.sample_of(dataset, _LENGTHS):
            if row.item is not None:
                texts = [
                    text for text in row.item.record.values() if isinstance(text, str) and text not in row.item.text
                ]
                lengths.append(len(subject.tokenizer.encode(max(texts, key=len, default=""))))
    n = int(np.median(lengths)) if lengths else 0
    return (n, "the solutions of the rows") if _LEAST_ANSWER <= n <= most else (most, "gconfig.max_new_tokens")


CHECKS = (credit,)
