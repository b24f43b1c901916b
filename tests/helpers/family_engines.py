"""One rollout and one update of an engine, for all model families."""

from __future__ import annotations

from areno.config.models import MicroBatchSpec
from areno.engine.engine import Engine
from areno.loss_fns.gspo import gspo_loss_fn
from areno.specs.update import UpdateSpec
from tests.helpers.tiny_engine import request, rollout, scored, train_rows

REQUESTS = [request(0, n_samples=3, length=20), request(1, length=40), request(2, n_samples=2)]


def step(engine: Engine) -> tuple[list[list[int]], list[list[float]], list[list[float]], dict[str, float]]:
    """Rows, their log-probabilities in rollout and in training, and what an update says of itself."""
    rows = train_rows(rollout(engine, REQUESTS), REQUESTS)
    tokens = [list(row.tokens) for row in rows]
    sampled = [list(row.logprobs)[list(row.prompt_mask).index(False) :] for row in rows]
    trained = [line[-len(new) :] for line, new in zip(scored(engine, "actor", tokens), sampled, strict=True)]
    stats = engine.train(rows, gspo_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=90)))
    return tokens, sampled, trained, stats
