"""Trainer: one policy and what can be done with it. The loops in trainers/ are written in its terms."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areno.api.types import RolloutResult, RolloutSequence
from areno.config.model_roles import MicroBatchSpec
from areno.engine.engine import Engine, OnProgress
from areno.engine.spec import EngineSpec, RolloutSpec
from areno.engine.types import GenerationRequest, SamplingParams, TrainSequence
from areno.errors import ArenoError, EngineError
from areno.kernels.attention import BACKENDS

logger = logging.getLogger("areno")


class Trainer:
    """Rollout, scoring, training and saving of one policy. Use as a context manager, or call close().

    Construction starts the workers and loads the weights. Rollouts happen inside `with trainer.rollout_phase(...)`,
    which owns the KV cache; training and scoring happen outside of it.
    """

    def __init__(self, spec: EngineSpec, *, workers: str = "auto"):
        self.engine = Engine(spec, workers)
        self.info = info = self.engine.info
        logger.info(
            "model: %.1fM parameters, %s on %s, attention by %s", info.n_params / 1e6, info.dtype,
            ", ".join(spec.devices), BACKENDS[info.attn_backend],
        )  # fmt: skip
        self._rolling_out = False

    @contextlib.contextmanager
    def rollout_phase(self, spec: RolloutSpec, *, drop: bool = False) -> Iterator[None]:
        """The border of the decode phase; `drop` frees KV cache and graphs at its end."""
        self.engine.begin_rollout(spec)
        self._rolling_out = True
        try:
            yield
        except Exception:
            with contextlib.suppress(ArenoError):  # where workers are gone, the first error tells why
                self.engine.end_rollout(drop)
            raise
        else:
            self.engine.end_rollout(drop)
        finally:  # after Ctrl-C the engine is closed, not wound down
            self._rolling_out = False

    def rollout_token_batch(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        n_samples: int,
        sampling_params: SamplingParams,
        *,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> list[RolloutResult]:
        """Sample every prompt `n_samples` times; results in prompt order.

        What is drawn depends on `seed`, the prompt's place in the list, the sample's number and the weights; not on
        batching. Raises EngineError outside a rollout phase.
        """
        if not self._rolling_out:
            raise EngineError(
                "rollout_token_batch was called outside a rollout phase; wrap it in trainer.rollout_phase()"
            )
        requests = [
            GenerationRequest(
                request_id=index,
                prompt=list(tokens),
                n_samples=n_samples,
                params=sampling_params,
                seed=(seed << 32) + index,
            )
            for index, tokens in enumerate(prompt_tokens)
        ]
        outputs = self.engine.generate(requests, on_progress)
        return [
            RolloutResult(
                prompt_tokens=request.prompt,
                sequences=[
                    RolloutSequence(
                        resp_tokens=output.tokens, resp_logprobs=output.logprobs, finish_reason=output.finish_reason
                    )
                    for output in outputs[request.request_id]
                ],
            )
            for request in requests
        ]

    def train(
        self,
        batch_data: Sequence[TrainSequence],
        loss_fn: Any,
        *,
        mb_spec: MicroBatchSpec | None = None,
        n_minibatches: int = 1,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> dict[str, float]:
        """Optimizer steps on rows. `temperature` is the one the rows were sampled at."""
        return self.engine.train(
            batch_data,
            loss_fn,
            mb_spec=mb_spec,
            n_minibatches=n_minibatches,
            gradient_accumulation_steps=gradient_accumulation_steps,
            temperature=temperature,
            seed=seed,
        )

    def score_logprobs(
        self, role: str, token_rows: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Per-token log-probabilities of rows under a role ("actor", "ref"); the first token of a row has 0.0."""
        return self.engine.logprobs(role, token_rows, temperature)

    def save_checkpoint(self, path: str | Path) -> str:
        """Write the policy as a Hugging Face folder at `path` and return it. Raises CheckpointError."""
        self.engine.save(str(path))
        return str(path)

    def close(self) -> None:
        """Free the devices and end the workers."""
        self.engine.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
