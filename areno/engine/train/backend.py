"""Trains one model on rows: pack, forward, loss, backward, update. Scores rows under a model by the same code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.config.model_roles import MicroBatchSpec, OptimizerConfig
from areno.engine.train.activations import HEAD_BYTES, free_bytes, layers_to_keep
from areno.engine.train.flat import FlatParameters, flatten
from areno.engine.train.optimizer import AdamW
from areno.engine.train.packing import (
    PackedTokens,
    Unit,
    micro_batches,
    optimizer_steps,
    pack_tokens,
    pack_units,
    read_rows,
    read_tokens,
    split_balanced,
    units_of,
)
from areno.engine.train.stats import StepStats, over_steps
from areno.engine.types import TrainSequence
from areno.errors import DataError, EngineError
from areno.kernels.logprobs import KEEP_BYTES, selected_logprobs
from areno.layers.attention import PackedAttend
from areno.layers.parallel import TensorParallel
from areno.loss_fns.pack import DataPack
from areno.models.transformer import Transformer

LossFn = Callable[[DataPack, Tensor], tuple[Tensor, dict[str, Tensor]]]


class TrainBackend:
    """A model with its optimizer, or without one (optimizer None): a frozen model that only scores.

    attn_backend: of kernels.attention.choose_backend. recompute: activations per layer again in the backward pass (on
    CUDA of as many layers as memory requires).
    dp: the ranks that hold copies of this model, each training on its share of the rows. section: the settings that
    messages name.

    A model with an "lm" head predicts tokens: its loss functions are given log-probabilities. One with a "value" head
    judges the state before each token: its loss functions are given values in their place.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: OptimizerConfig | None,
        *,
        attn_backend: str,
        recompute: bool = True,
        dp: TensorParallel = TensorParallel(),  # noqa: B008  (frozen)
        section: str = "actor",
    ):
        self.model, self.attn_backend, self.recompute, self.dp = model, attn_backend, recompute, dp
        self.section = section
        self.device = model.device
        self.flat: FlatParameters | None = None
        self.optimizer: AdamW | None = None
        if optimizer is None:
            model.requires_grad_(False)
            self.params = flatten(model)[0]
        else:
            self.flat = FlatParameters(model, model.is_sharded)
            self.params = self.flat.params
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
        granularity: int = 1,
    ) -> dict[str, float]:
        """Optimizer steps on `rows`: one, or n_minibatches, or one per gradient_accumulation_steps micro-batches.

        Every data-parallel rank is given the same rows and trains on its share of them; loss and gradient are those of
        all rows together, whatever the number of ranks or micro-batches. temperature: the one the rows were sampled at;
        values have none. seed: of the cut into `n_minibatches`, where later ones meet a policy that the earlier ones
        changed. granularity: so many adjacent rows are never separated, by whatever cuts the rows.

        Returns statistics of the step (means over several steps, `*_max` their maximum, `lr` the last, `skipped_steps`
        the number of updates not applied because loss or gradient was not finite or no token was trained). grad_norm is
        taken before clipping. DataError for rows of the wrong form, EngineError when memory runs out.
        """
        data = read_rows(rows, self.model.config.vocab_size)
        units, unit_spec = units_of(data, granularity, mb_spec)
        lengths = [unit.n_tokens for unit in units]
        steps = optimizer_steps(lengths, unit_spec, n_minibatches, gradient_accumulation_steps, seed)
        with self._explained_out_of_memory(mb_spec):
            return over_steps([self._step([units[i] for i in step], loss_fn, unit_spec, temperature) for step in steps])

    def logprobs(
        self, token_rows: Sequence[Sequence[int]], temperature: float, mb_spec: MicroBatchSpec
    ) -> list[list[float]]:
        """log p(token | tokens before it) for each token of each row; 0.0 for the first, which nothing predicts."""

        def logprobs_of(packed: PackedTokens) -> Tensor:
            return self._logprobs(packed, _later(packed), temperature)[0]

        return self._score(token_rows, mb_spec, logprobs_of)

    def values(self, token_rows: Sequence[Sequence[int]], mb_spec: MicroBatchSpec) -> list[list[float]]:
        """The value of the state before each token of each row; 0.0 for the first, before which there is nothing."""
        return self._score(token_rows, mb_spec, lambda packed: self._values(packed, _later(packed)))

    def rewards(self, token_rows: Sequence[Sequence[int]], mb_spec: MicroBatchSpec) -> list[float]:
        """The score of each row: what the value head gives at its last token.

        Trailing tokens that the model's config.json calls padding do not count, even where the row itself ends with
        them (a pad token that is the end-of-sequence token, too): transformers, with which the model was trained, reads
        the score before them.
        """
        pad = self.model.config.hf.get("pad_token_id")
        token_rows = [_without_trailing(row, pad) for row in token_rows]

        def rewards_of(packed: PackedTokens) -> Tensor:
            last_R = packed.cu_seqlens[1:].long() - 1
            return self._aligned(packed, last_R, self.model.values(self._hidden(packed).index_select(0, last_R)))

        return [row[-1] for row in self._score(token_rows, mb_spec, rewards_of)]

    def _score(
        self,
        token_rows: Sequence[Sequence[int]],
        mb_spec: MicroBatchSpec,
        score: Callable[[PackedTokens], Tensor],
    ) -> list[list[float]]:
        """What `score` gives for each token, (N,) of a micro-batch, put back into rows."""
        vocab_size = self.model.config.vocab_size
        rows = [read_tokens(tokens, index, vocab_size) for index, tokens in enumerate(token_rows)]
        batches = micro_batches([len(row) for row in rows], mb_spec)
        scored: list[Tensor] = []
        with torch.no_grad(), self._explained_out_of_memory(mb_spec):
            for batch in batches:
                scored.append(score(pack_tokens([rows[i] for i in batch], self.device)))
            numbers = torch.cat(scored).cpu().numpy() if scored else np.zeros(0, np.float32)
        out: list[list[float]] = [[] for _ in rows]
        order = [i for batch in batches for i in batch]
        ends = np.cumsum([len(rows[i]) for i in order])
        for i, end in zip(order, ends, strict=True):
            out[i] = numbers[end - len(rows[i]) : end].tolist()
        return out

    def _hidden(self, packed: PackedTokens) -> Tensor:
        attend = PackedAttend(packed.cu_seqlens, packed.max_len, self.attn_backend)
        n_kept = 0
        if self.recompute and self.device.type == "cuda" and torch.is_grad_enabled():
            n_kept = layers_to_keep(self.model, len(packed.tokens_N), free_bytes(self.device))
        return self.model(packed.tokens_N, packed.positions_N, attend, recompute=self.recompute, n_kept=n_kept)

    def _aligned(self, packed: PackedTokens, places: Tensor, numbers: Tensor) -> Tensor:
        """(N,) float32 with `numbers` at `places`, 0 elsewhere."""
        return torch.zeros_like(packed.tokens_N, dtype=torch.float32).index_copy(0, places, numbers)

    def _values(self, packed: PackedTokens, trained_T: Tensor) -> Tensor:
        """Values at `trained_T`, (N,) float32: the state before token t is what the model has seen at t - 1."""
        values_T = self.model.values(self._hidden(packed).index_select(0, trained_T - 1))
        return self._aligned(packed, trained_T, values_T)

    def _logprobs(self, packed: PackedTokens, trained_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at `trained_T`, each (N,) float32 aligned with the tokens and 0 elsewhere."""
        model = self.model
        hidden_ND, weight_VD = self._hidden(packed), model.head_weight
        logprobs_T, entropy_T = selected_logprobs(
            hidden_ND.index_select(0, trained_T - 1),  # token t is predicted at t - 1
            weight_VD,
            packed.tokens_N[trained_T],
            temperature=temperature,
            tp=model.tp,
            vocab_size=model.config.vocab_size,
            weight_grad=None if self.flat is None else model.output.weight.grad[: weight_VD.shape[0]],  # type: ignore[index]
            keep_bytes=HEAD_BYTES if self.device.type == "cuda" else KEEP_BYTES,
        )
        return self._aligned(packed, trained_T, logprobs_T), self._aligned(packed, trained_T, entropy_T)

    def _step(
        self, units: list[Unit], loss_fn: LossFn, unit_spec: MicroBatchSpec, temperature: float
    ) -> dict[str, float]:
        if self.flat is None or self.optimizer is None:
            raise EngineError("this model was built without an optimizer and cannot be trained")
        step_tokens = sum(row.n_trained for unit in units for row in unit.rows)
        step_rows = sum(row.n_trained > 0 for unit in units for row in unit.rows)
        mine = self._share(units)
        # All tensors go to the device before the first forward pass, so that no copy waits between two of them.
        batches = [
            pack_units([mine[i] for i in batch], step_tokens, step_rows, self.device)
            for batch in micro_batches([unit.n_tokens for unit in mine], unit_spec)
        ]
        stats = StepStats(self.device)
        self.flat.zero_grad()
        for packed, pack in batches:
            if self.model.config.head == "value":
                loss, loss_stats = _checked(loss_fn(pack, self._values(packed, pack.trained_T)))
            else:
                logprobs_N, pack.entropy = self._logprobs(packed, pack.trained_T, temperature)
                loss, loss_stats = _checked(loss_fn(pack, logprobs_N))
                _compare_with_rollout(stats, pack, logprobs_N.detach())
            loss.backward()
            stats.add({"loss": loss, "total_loss": loss, **loss_stats})
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

    def _share(self, units: list[Unit]) -> list[Unit]:
        """This data-parallel rank's units. Every rank computes the same split."""
        if self.dp.size == 1:
            return units
        if len(units) < self.dp.size:
            n_rows = sum(len(unit.rows) for unit in units)
            pairs = f", in units of {len(units[0].rows)}," if n_rows > len(units) else ""
            raise DataError(
                f"an optimizer step has {n_rows} rows{pairs} for {self.dp.size} copies of the model; each needs one: "
                f"raise train_dataset.batch_size, or lower {self.section}.ppo_n_minibatches or engine.world_size"
            )
        return [units[i] for i in split_balanced([unit.n_tokens for unit in units], self.dp.size)[self.dp.rank]]

    @contextmanager
    def _explained_out_of_memory(self, mb_spec: MicroBatchSpec) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"out of device memory in training, with {self.section}.mb_spec.max_tokens_per_mb="
                f"{mb_spec.max_tokens_per_mb} and mini_bs={mb_spec.mini_bs}: lower the former (or the latter where the "
                f"former is null), set {self.section}.gradient_checkpointing=true, or lower rollout.mem_fraction, "
                "which reserves memory for the KV cache"
            ) from error


def _checked(returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What a loss function returned. EngineError where that is not a loss with statistics."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise EngineError(
            f"loss_fn returned {_described(returned)}; (loss, stats) is expected, stats a dict, such as {{}}"
        )
    loss, stats = returned
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise EngineError(
            f"the loss of loss_fn is {_described(loss)}; a float tensor with no dimensions is expected: this "
            "micro-batch's share of the loss, as pack.token_mean and pack.row_mean give it"
        )
    if not loss.requires_grad:
        raise EngineError(
            "the loss of loss_fn has no gradient; compute it from its second argument, without .detach(), .item(), "
            "numpy or torch.no_grad()"
        )
    for name, value in stats.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.dim() > 1:
            raise EngineError(
                f"stats[{name!r}] of loss_fn is {_described(value)}; a tensor is expected, with no dimensions for a "
                "share (they are summed over micro-batches) or with one for single observations"
            )
    return loss, dict(stats)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _later(packed: PackedTokens) -> Tensor:
    """All tokens but the first of each row."""
    return packed.positions_N.nonzero().squeeze(-1)


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


def _without_trailing(tokens: Sequence[int], pad: int | None) -> Sequence[int]:
    """The row up to its last token that is not `pad`, or its first token."""
    end = len(tokens)
    while end > 1 and tokens[end - 1] == pad:
        end -= 1
    return tokens[:end]
