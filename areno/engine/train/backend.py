"""Trains one model on rows: pack, forward, loss, backward, update. Scores rows under a model by the same code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from areno.config.model_roles import MicroBatchSpec, OptimizerConfig
from areno.engine.train.flat import FlatParameters
from areno.engine.train.optimizer import AdamW
from areno.engine.train.packing import (
    PackedTokens,
    Row,
    micro_batches,
    optimizer_steps,
    pack_rows,
    pack_tokens,
    read_rows,
    read_tokens,
    split_balanced,
)
from areno.engine.train.stats import StepStats, over_steps
from areno.engine.types import TrainSequence
from areno.errors import DataError, EngineError
from areno.kernels.logprobs import selected_logprobs
from areno.layers.attention import PackedAttend
from areno.layers.parallel import TensorParallel
from areno.loss_fns.pack import DataPack
from areno.models.transformer import Transformer

LossFn = Callable[[DataPack, Tensor], tuple[Tensor, dict[str, Tensor]]]


class TrainBackend:
    """A model with its optimizer, or without one (optimizer None): a reference that only scores.

    attn_backend: of kernels.attention.choose_backend. recompute: activations per layer again in the backward pass.
    dp: the ranks that hold copies of this model, each training on its share of the rows.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: OptimizerConfig | None,
        *,
        attn_backend: str,
        recompute: bool = True,
        dp: TensorParallel = TensorParallel(),  # noqa: B008  (frozen)
    ):
        self.model, self.attn_backend, self.recompute, self.dp = model, attn_backend, recompute, dp
        self.device = model.head_weight.device
        self.flat: FlatParameters | None = None
        self.optimizer: AdamW | None = None
        if optimizer is None:
            model.requires_grad_(False)
        else:
            self.flat = FlatParameters(model, model.is_sharded)
            self.optimizer = AdamW(self.flat, optimizer, model.tp)

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        *,
        mb_spec: MicroBatchSpec,
        n_minibatches: int = 1,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> dict[str, float]:
        """Optimizer steps on `rows`: one, or n_minibatches, or one per gradient_accumulation_steps micro-batches.

        Every data-parallel rank is given the same rows and trains on its share of them; loss and gradient are those of
        all rows together, whatever the number of ranks or micro-batches. temperature: the one the rows were sampled at.
        seed: of the cut into `n_minibatches`, where later ones meet a policy that the earlier ones changed.

        Returns statistics of the step (means over several steps, `*_max` their maximum, `lr` the last, `skipped_steps`
        the number of updates not applied because loss or gradient was not finite or no token was trained). grad_norm is
        taken before clipping. DataError for rows of the wrong form, EngineError when memory runs out.
        """
        data = read_rows(rows, self.model.config.vocab_size)
        lengths = [row.n_tokens for row in data]
        steps = optimizer_steps(lengths, mb_spec, n_minibatches, gradient_accumulation_steps, seed)
        with _explained_out_of_memory(mb_spec):
            return over_steps([self._step([data[i] for i in step], loss_fn, mb_spec, temperature) for step in steps])

    def logprobs(
        self, token_rows: Sequence[Sequence[int]], temperature: float, mb_spec: MicroBatchSpec
    ) -> list[list[float]]:
        """log p(token | tokens before it) for each token of each row; 0.0 for the first, which nothing predicts."""
        vocab_size = self.model.config.vocab_size
        rows = [read_tokens(tokens, index, vocab_size) for index, tokens in enumerate(token_rows)]
        batches = micro_batches([len(row) for row in rows], mb_spec)
        scored: list[Tensor] = []
        with torch.no_grad(), _explained_out_of_memory(mb_spec):
            for batch in batches:
                packed = pack_tokens([rows[i] for i in batch], self.device)
                later_T = packed.positions_N.nonzero().squeeze(-1)
                scored.append(self._score(packed, later_T, temperature)[0])
            values = torch.cat(scored).cpu().numpy() if scored else np.zeros(0, np.float32)
        out: list[list[float]] = [[] for _ in rows]
        order = [i for batch in batches for i in batch]
        ends = np.cumsum([len(rows[i]) for i in order])
        for i, end in zip(order, ends, strict=True):
            out[i] = values[end - len(rows[i]) : end].tolist()
        return out

    def _score(self, packed: PackedTokens, trained_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at `trained_T`, each (N,) float32 aligned with the tokens and 0 elsewhere."""
        model = self.model
        attend = PackedAttend(packed.cu_seqlens, packed.max_len, self.attn_backend)
        hidden_ND = model(packed.tokens_N, packed.positions_N, attend, recompute=self.recompute)
        weight_VD = model.head_weight
        logprobs_T, entropy_T = selected_logprobs(
            hidden_ND.index_select(0, trained_T - 1),  # token t is predicted at t - 1
            weight_VD,
            packed.tokens_N[trained_T],
            temperature=temperature,
            tp=model.tp,
            vocab_size=model.config.vocab_size,
            weight_grad=None if self.flat is None else model.output.weight.grad[: weight_VD.shape[0]],  # type: ignore[index]
        )
        zeros_N = torch.zeros_like(packed.tokens_N, dtype=torch.float32)
        return zeros_N.index_copy(0, trained_T, logprobs_T), zeros_N.index_copy(0, trained_T, entropy_T)

    def _step(self, rows: list[Row], loss_fn: LossFn, mb_spec: MicroBatchSpec, temperature: float) -> dict[str, float]:
        if self.flat is None or self.optimizer is None:
            raise EngineError("this model was built without an optimizer and cannot be trained")
        step_tokens = sum(row.n_trained for row in rows)
        step_rows = sum(row.n_trained > 0 for row in rows)
        mine = self._share(rows)
        # All tensors go to the device before the first forward pass, so that no copy waits between two of them.
        batches = [
            pack_rows([mine[i] for i in batch], step_tokens, step_rows, self.device)
            for batch in micro_batches([row.n_tokens for row in mine], mb_spec)
        ]
        stats = StepStats(self.device)
        self.flat.zero_grad()
        for packed, pack in batches:
            logprobs_N, pack.entropy = self._score(packed, pack.trained_T, temperature)
            loss, loss_stats = loss_fn(pack, logprobs_N)
            loss.backward()
            stats.add({"loss": loss, "total_loss": loss, **loss_stats})
            _compare_with_rollout(stats, pack, logprobs_N.detach())
        self.dp.all_reduce(self.flat.grads)

        numbers = stats.finish(self.dp)
        gradient = self.optimizer.gradient_stats()
        numbers |= {
            "response_len": step_tokens / max(step_rows, 1),
            "grad_norm": gradient.norm,
            "grad_zero_frac": gradient.zero_frac,
            "lr": self.optimizer.lr,
            "skipped_steps": 0.0,
        }
        if step_tokens and math.isfinite(gradient.norm) and math.isfinite(numbers["loss"]):
            self.optimizer.step(gradient.norm)
        else:
            self.optimizer.skip()
            numbers["skipped_steps"] = 1.0
        return numbers

    def _share(self, rows: list[Row]) -> list[Row]:
        """This data-parallel rank's rows. Every rank computes the same split."""
        if self.dp.size == 1:
            return rows
        if len(rows) < self.dp.size:
            raise DataError(
                f"an optimizer step has {len(rows)} rows for {self.dp.size} copies of the model; each needs one: raise "
                "train_dataset.batch_size, or lower actor.ppo_n_minibatches or engine.world_size"
            )
        return [rows[i] for i in split_balanced([row.n_tokens for row in rows], self.dp.size)[self.dp.rank]]


def _compare_with_rollout(stats: StepStats, pack: DataPack, logprobs_N: Tensor) -> None:
    """How well the model agrees with the log-probabilities that the rows came with (rollout minus training)."""
    train_T = pack.trained(logprobs_N)
    stats.add({"train_logprobs_mean": pack.token_mean(train_T)})
    if pack.old_logprobs is not None:
        rollout_T = pack.trained(pack.old_logprobs)
        diff_T = rollout_T - train_T
        stats.add(
            {
                "rollout_logprobs_mean": pack.token_mean(rollout_T),
                "logp_diff_mean": pack.token_mean(diff_T),
                "logp_abs_diff_mean": pack.token_mean(diff_T.abs()),
            }
        )
        stats.maximum("logp_abs_diff_max", diff_T.abs())


@contextmanager
def _explained_out_of_memory(mb_spec: MicroBatchSpec) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"out of device memory in training, with actor.mb_spec.max_tokens_per_mb={mb_spec.max_tokens_per_mb} and "
            f"mini_bs={mb_spec.mini_bs}: lower the former (or the latter where the former is null), set "
            "actor.gradient_checkpointing=true, or lower rollout.mem_fraction, which reserves memory for the KV cache"
        ) from error
