"""Trains and scores one model: packs rows, runs forward and backward passes, and updates the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno import heartbeat
from areno.config.models import MicroBatchSpec
from areno.config.optimizers import OPTIMIZERS
from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence
from areno.cost.remedies import Option
from areno.engine.device_memory import training_memory_hint
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.profiling import phase
from areno.engine.train import old_logprobs
from areno.engine.train.checked_rows import without_padding
from areno.engine.train.gradients import Gradients, ReducedGradients, StepStats, average_steps
from areno.engine.train.micro_batches import NO_SHARING, StepMicroBatches, TrainResult, row_micro_batches
from areno.engine.train.optimizer import Optimizer
from areno.engine.train.packing import PackedTokens, PrefixPass, StepBatches, pack_group, predicted_mask
from areno.engine.train.passes import ForwardPasses
from areno.engine.train.recomputation import RecomputationPolicy, free_bytes
from areno.engine.train.rollout_mismatch import compare_with_rollout
from areno.engine.train.shared_prefixes import order_to_share, prefix_sharing_rules
from areno.engine.train.smaller_pieces import retry_with_smaller_micro_batches
from areno.engine.train.teacher import TeacherPasses, Teachers
from areno.engine.train.zero_buffers import ALIGN, FlatParameters, flatten
from areno.errors import EngineError, Key
from areno.kernels.backend import to_device
from areno.kernels.logprobs.collision import Collision, logit_gradient
from areno.kernels.logprobs.divergence import CommonTokenIds
from areno.loss_fns.data_pack import DataPack, check_loss_result
from areno.models.quantization import quantize_again
from areno.models.transformer import Transformer
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.update import UpdateSpec
from areno.types import TokenValue

TokenRows = Sequence[np.ndarray]
LossFn = Callable[[DataPack, Tensor], tuple[Tensor, dict[str, Tensor]]]


class TrainBackend:
    """A model with its optimizer, or a frozen model that only scores.

    Loss functions receive log-probabilities or, for a model with a value head, the value of the state before each
    token. The backward pass recomputes activations on CUDA only in as many layers as memory requires.

    `fill` sets the weights. It is called after the parameters have moved into the buffer in which they stay. The
    parameters of a frozen role with adapters have their values already, and are not moved. With `role.offload`, master
    weights and moments are in host memory, and each update streams them through the device. `beside` returns setting
    changes that make the KV cache smaller. `free_cache` frees the cache if no sample uses it.
    """

    pass_threads: Callable[[int], AbstractContextManager[Any]] = nullcontext

    def __init__(
        self,
        model: Transformer,
        role: RoleSpec,
        spec: EngineSpec,
        context: ParallelContext,
        attn_backend: str,
        fill: Callable[[], object] = lambda: None,
        beside: Callable[[], Iterable[Option]] = tuple,
        free_cache: Callable[[], bool] = bool,
    ):
        self.model, self.role, self.context, self.attn_backend = model, role, context, attn_backend
        self.device, self.exact, self._beside = model.device, spec.engine.exact, beside
        on_cuda = self.device.type == "cuda"
        self.score_sharing, self.train_sharing = prefix_sharing_rules(model, role, spec.share_prefixes)
        split = spec.is_sequence_parallel
        self.n_halvings = 0  # of micro-batches in the last call of `train` or a scoring method
        self._is_alone = model.tp.size == context.cp.size == 1
        free = partial(free_bytes, self.device) if on_cuda else None
        more = spec.n_ranks_on_machine(context.rank), free_cache
        kept_layers = RecomputationPolicy(model, free, self._is_alone, split, *more)
        self.passes = ForwardPasses(model, role, context, attn_backend, kept_layers, split=split)
        self.flat: FlatParameters | None = None
        self.optimizer: Optimizer | None = None
        if role.optimizer is None:
            model.requires_grad_(False)
            named = list(model.named_parameters())
            self.params = [parameter.detach() for _, parameter in named] if role.lora else flatten(named)
            fill()
        else:
            stage, dp, kind = spec.engine.zero_stage, context.dp, OPTIMIZERS[role.optimizer.type]
            flat = self.flat = FlatParameters(
                model,
                model.is_sharded,
                max(ALIGN, kind.block),
                in_parts=partial(model.partial_gradient_slices, split=split),
                stage=model.backward_stage if stage else None,
                dp=dp,
                divide_grads=stage == 2,
                fill=fill,
                in_host=role.offload,
                matrix_parts=model.matrix_parts if kind.matrix_moment_bytes is not None else lambda _: (),
            )
            self._divides_grads = stage == 2 and dp.size > 1
            self._gradients = ReducedGradients(flat, model) if flat.is_divided else Gradients(flat, dp, model.tp)
            self.params = self.flat.buffers
            self.optimizer = Optimizer(self.flat, role.optimizer, model.tp)

    def as_teacher(
        self,
        divergence: Divergence,
        switch: Callable[[], AbstractContextManager[None]] = nullcontext,
        common_ids: Sequence[tuple[int, int]] = (),
    ) -> TeacherPasses:
        head = self.model.lm_head
        common = CommonTokenIds.from_ranges(common_ids, head.first, head.n_valid, self.device) if common_ids else None
        return TeacherPasses(self.passes.run_layers, self.model.local_logits, divergence, switch, common)

    def train(
        self, steps: Sequence[StepMicroBatches], loss_fn: LossFn, update: UpdateSpec, teachers: Teachers | None = None
    ) -> TrainResult:
        """Take optimizer steps on this data-parallel rank's share of the rows.

        The loss and the gradient of a step are those of all ranks, and do not depend on the division into ranks and
        micro-batches. `skipped_steps` counts updates that were not applied, because the loss or the gradient was not
        finite or no token was trained. `teachers` is None if there is no divergence, or if rows list the teacher's
        log-probabilities.

        Raises EngineError if memory runs out or the loss function returns something invalid. With `exact`, also if the
        model disagrees with a rollout log-probability of a row with staleness 0.
        """
        self.passes.teachers = self.passes.kept_layers.teacher = teachers
        with self._out_of_memory_hint(update.mb_spec):
            batches = [StepBatches(step, update.rows_per_unit, self.device) for step in steps]
            is_policy = self.model.config.head == "lm"
            if is_policy:
                score = partial(self.no_grad_logprobs, sampling=update.sampling)
                with self.passes.prefix_passes():
                    old_logprobs.set_old_logprobs(batches, update.old_logprobs, self.exact, score)
            stats, old, keeps_old = [], [], is_policy and update.old_logprobs == "recompute"
            self.n_halvings = 0
            for number, (step, of_step) in enumerate(zip(steps, batches, strict=True)):
                stats.append(self._optimizer_step(step, of_step, loss_fn, update, is_first=number == 0))
                old.append(old_logprobs.step_old_logprobs(of_step) if keeps_old else None)
            return TrainResult(average_steps(stats), old, self.n_halvings)

    def skip_updates(self, n: int) -> dict[str, float]:
        assert self.optimizer is not None
        rates = [self.optimizer.skip_update(is_empty=True) for _ in range(n)]
        return {"lr": rates[-1], "skipped_steps": float(n)}

    def no_grad_logprobs(self, packed: PackedTokens, sampling: SamplingConfig) -> Tensor:
        """Compute log-probabilities (U,) without gradient, by the same forward pass as in an update."""
        with torch.no_grad(), phase("old logprobs", tokens=packed.n_computed):
            logprobs_N = self.passes.logprobs(packed, sampling)[0]
        self.passes.routing.free_tensors()
        heartbeat.beat()
        return logprobs_N

    def logprobs(
        self,
        token_rows: TokenRows,
        sampling: SamplingConfig,
        mb_spec: MicroBatchSpec,
        routes: TokenRows | None = None,
        prompt_masks: TokenRows | None = None,
        may_halve: bool = False,
        value: TokenValue = "logprob",
    ) -> list[np.ndarray]:
        def score(packed: PackedTokens) -> Tensor:
            teacher = Collision() if value == "logit_gradient" else None
            found = self.passes.logprobs(packed, sampling, value_teacher=teacher)
            return logit_gradient(found[0], found[2]) if len(found) > 2 else found[int(value == "entropy")]

        return self._score(token_rows, mb_spec, may_halve, score, routes, prompt_masks)

    def values(self, token_rows: TokenRows, mb_spec: MicroBatchSpec, may_halve: bool = False) -> list[np.ndarray]:
        return self._score(token_rows, mb_spec, may_halve, self.passes.values)

    def rewards(self, token_rows: TokenRows, mb_spec: MicroBatchSpec, may_halve: bool = False) -> list[float]:
        """Return the score of each row: the output of the value head at the row's last token.

        Padding tokens at the end of a row are ignored, even if the padding token is also the end-of-sequence token,
        because the transformers library trains reward models in this way.
        """
        pad = self.model.config.hf.get("pad_token_id")
        token_rows = [without_padding(row, pad) for row in token_rows]

        def rewards_of(packed: PackedTokens) -> Tensor:
            hidden_nD, share = self.passes.hidden_states(packed)
            every_N = torch.arange(share.n_tokens, device=self.device)
            indices_n, hidden_nD = share.select(hidden_nD, every_N, every_N)
            return share.gather_values(indices_n, self.model.values(hidden_nD))

        return [float(row[-1]) for row in self._score(token_rows, mb_spec, may_halve, rewards_of)]

    def _score(
        self,
        rows: TokenRows,
        mb_spec: MicroBatchSpec,
        may_halve: bool,
        score: Callable[[PackedTokens], Tensor],
        routes: TokenRows | None = None,
        prompt_masks: TokenRows | None = None,
    ) -> list[np.ndarray]:
        """Apply `score`, which returns one value per token, to micro-batches, and return one array per row.

        If memory runs out, micro-batches are halved and computed again. If `may_halve` is False, or other ranks take
        part in the same layers, EngineError is raised.
        """
        self.n_halvings, longest = 0, max(map(len, rows), default=0)

        def divide() -> bool:
            nonlocal mb_spec
            budget = mb_spec.max_tokens_per_mb
            if not (may_halve and self._is_alone and budget is not None and budget > longest):
                return False
            mb_spec = MicroBatchSpec(max_tokens_per_mb=budget // 2)
            self.n_halvings += 1
            return True

        def attempt() -> list[np.ndarray]:
            return self._score_once(rows, mb_spec, score, routes, prompt_masks)

        return retry_with_smaller_micro_batches(attempt, divide) if rows else []

    def _score_once(
        self,
        rows: TokenRows,
        mb_spec: MicroBatchSpec,
        score: Callable[[PackedTokens], Tensor],
        routes: TokenRows | None,
        prompt_masks: TokenRows | None,
    ) -> list[np.ndarray]:
        order = order_to_share(rows, self.score_sharing)
        rule = NO_SHARING if order is None else self.score_sharing
        groups, share = row_micro_batches([[row] for row in rows], mb_spec, self.context.cp.size, rule, order)
        with torch.no_grad(), self._out_of_memory_hint(mb_spec), self.passes.prefix_passes():
            scored = []
            for group in groups:
                given = None if routes is None else [[routes[i] for i in batch] for batch in group]
                asked = None if prompt_masks is None else [predicted_mask(prompt_masks, batch) for batch in group]
                packs = pack_group([[rows[i] for i in batch] for batch in group], self.device, given, asked, share)
                for batch, packed in zip(group, packs, strict=True):
                    with phase("score", rows=len(batch)), self.pass_threads(packed.n_computed):
                        scored.append(score(packed))
                    heartbeat.beat()
            numbers = torch.cat(scored).cpu().numpy()
        self.passes.routing.free_tensors()
        order = [i for group in groups for batch in group for i in batch]
        pieces = np.split(numbers, np.cumsum([len(rows[i]) for i in order])[:-1])
        return [piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda pair: pair[0])]

    def _optimizer_step(
        self, step: StepMicroBatches, batches: StepBatches, loss_fn: LossFn, update: UpdateSpec, is_first: bool
    ) -> dict[str, float]:
        if self.flat is None or self.optimizer is None:
            raise EngineError("this model was built without an optimizer and cannot be trained")
        with self.passes.prefix_passes():
            self.passes.routing.begin_step((packed for packed, _ in batches), self.passes.hidden_states)
        stats = self._accumulate(step, batches, loss_fn, update, is_first)

        numbers = stats.finish(self.context.data)  # the ranks of `context.cp` have the same statistics
        self.passes.routing.free_tensors()
        self.passes.routing.add_statistics(numbers)
        apart = numbers.pop("on_policy_logp_abs_diff_max", 0.0)
        if self.exact and is_first and apart:
            raise EngineError(
                "{} is true, but the model disagrees by {:.3g} with a log-probability that a row of staleness 0 came "
                "with, before any update; give such rows the rollout's own log-probabilities and temperature, and set "
                "TrainSequence.staleness where the weights were updated since. If they have them, this is a fault of "
                "areno: please report it with your model and device",
                Key("engine.exact"),
                apart,
            )
        with phase("gradient norm"):
            gradient = self.optimizer.gradient_stats()
        applies = step.step_tokens > 0 and math.isfinite(gradient.norm) and math.isfinite(numbers["loss"])
        numbers |= {
            "response_len": step.step_tokens / max(step.step_rows, 1),
            "grad_norm": gradient.norm,
            "grad_zero_frac": gradient.zero_frac,
            "lr": self.optimizer.lr,
            "skipped_steps": float(not applies),
        }
        with phase("optimizer"):
            if applies:
                self.optimizer.step(gradient.norm)
                quantize_again(self.model)
            else:
                self.optimizer.skip_update(is_empty=not step.step_tokens)
        heartbeat.beat()
        return numbers

    def _accumulate(
        self, step: StepMicroBatches, batches: StepBatches, loss_fn: LossFn, update: UpdateSpec, is_first: bool
    ) -> StepStats:
        """Compute the gradient of a step over all ranks, and return the statistics of its micro-batches.

        If memory runs out, all micro-batches are repeated, and fewer layers keep activations. If no layer keeps any,
        each micro-batch is split in two, if `update.may_halve` allows it. Else the inputs of more layers go to host
        memory, and at last the KV cache is freed. `is_first` is True for the first step of a call of `train`, before
        which the weights have not changed.
        """
        self._gradients.begin(step)
        given: list[Tensor | None] = []

        def attempt() -> StepStats:
            with self.passes.prefix_passes():
                stats = self._accumulate_all(batches, given, loss_fn, update, is_first)
            with phase("sum gradients"):
                self._gradients.finish()
            return stats

        def halve() -> bool:
            if not (update.may_halve and self._is_alone and not self._divides_grads):
                return False
            if not batches.halve(given + [pack.old_logprobs for _, pack in batches[len(given) :]]):
                return False
            self.n_halvings += 1
            given.clear()
            return True

        def divide() -> bool:
            policy = self.passes.kept_layers
            if not (policy.recompute_more() or halve() or policy.offload_more() or policy.free_cache()):
                return False
            self._gradients.begin(step, again=True)
            return True

        return retry_with_smaller_micro_batches(attempt, divide)

    def _accumulate_all(
        self, batches: StepBatches, given: list[Tensor | None], loss_fn: LossFn, update: UpdateSpec, is_first: bool
    ) -> StepStats:
        """Run the forward and backward passes of all micro-batches of a step.

        `given` records the old log-probabilities that each micro-batch had before the first attempt at the step. A
        repeated attempt starts from them again.
        """
        stats = StepStats(self.device)
        self.passes.routing.restart()
        n_computed = 0
        for number, (packed, pack) in enumerate(batches):
            if number == len(given):
                given.append(pack.old_logprobs)
            pack.old_logprobs = given[number]
            with phase("forward", tokens=packed.n_computed), self.pass_threads(packed.n_computed):
                loss, loss_stats = self._micro_batch_loss(packed, pack, loss_fn, update, is_first, stats)
            self.passes.routing.count_experts()
            with phase("backward", tokens=packed.n_computed), self.pass_threads(packed.n_computed):
                self._gradients.backward(loss)
            n_computed += packed.n_computed
            if packed.prefix is not None:
                following = batches[number + 1][0] if number + 1 < len(batches) else None
                if following is None or following.prefix is not packed.prefix:
                    self._prefix_backward(packed.prefix)
                    n_computed += packed.n_prefix_tokens
            heartbeat.beat()
            stats.add({"loss": loss, "total_loss": loss, **loss_stats})
        counts = np.array([n_computed, sum(len(pack.tokens) for _, pack in batches)], dtype=np.float64)
        computed, of_rows = to_device(counts, self.device)
        stats.add({"computed_tokens": computed, "row_tokens": of_rows})
        return stats

    def _prefix_backward(self, prefix: PrefixPass) -> None:
        """Run the backward pass of prefixes, after the backward passes of all micro-batches that share them."""
        with phase("backward", tokens=len(prefix.packed.tokens_N)):
            if self.model.routing is not None:  # the settings of the forward pass, for recomputation
                share = self.passes.share_of(prefix.packed)
                self.passes.routing.begin_pass(prefix.packed, share)
            self._gradients.backward(*prefix.output_and_gradient())
        self.passes.finish_shared_prefix()

    def _micro_batch_loss(
        self,
        packed: PackedTokens,
        pack: DataPack,
        loss_fn: LossFn,
        update: UpdateSpec,
        is_first: bool,
        stats: StepStats,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the forward pass of a micro-batch, and return its loss and statistics.

        Sets `pack.entropy` and the missing `pack.old_logprobs`, and adds the comparison with the rollout to `stats`.
        """
        if self.model.config.head != "lm":
            return check_loss_result(loss_fn(pack, self.passes.values(packed)))
        logprobs_N, pack.entropy, *more = self.passes.logprobs(packed, update.sampling, pack, update)
        pack.take_divergence(more[0] if more else None, is_negentropy=update.differentiates_entropy)
        own_N = logprobs_N.detach()
        if is_first and (pack.rollout_logprobs is not None or pack.old_logprobs is not None):
            pack.old_logprobs = old_logprobs.fill_missing(pack.old_logprobs, own_N)
        loss, loss_stats = check_loss_result(loss_fn(pack, logprobs_N))
        before_N = pack.old_logprobs
        if update.old_logprobs == "rollout":
            before_N = own_N if is_first else None
        compare_with_rollout(stats, pack, own_N, before_N)
        return loss, loss_stats

    def _out_of_memory_hint(self, mb_spec: MicroBatchSpec) -> AbstractContextManager[None]:
        recomputes = self.role.gradient_checkpointing or not torch.is_grad_enabled()
        how = {"recomputes": recomputes, "on_cuda": self.device.type == "cuda"}
        text = self.passes.kept_layers.fitting_micro_batch_text
        return training_memory_hint(self.role, mb_spec, text, self._beside, **how)
