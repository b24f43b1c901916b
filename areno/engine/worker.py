"""A worker: the models, the decoder and the training of one device. Its public methods are the driver's commands."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno import heartbeat
from areno.config.teacher import Divergence
from areno.cost import remedies
from areno.cost.flops import TokenCost
from areno.cost.prefix_sharing import PrefixSharing
from areno.engine import device_memory as memory
from areno.engine import profiling
from areno.engine.chosen_token_budgets import TokenBudgets
from areno.engine.decoder.decoder import Decoder
from areno.engine.decoder_maker import DecoderMaker, n_table_elements
from areno.engine.deterministic import CpuThreads, explain_nondeterminism_errors, without_deterministic_mode
from areno.engine.model_saver import ModelSaver
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.reports import EngineInfo, RolloutStats
from areno.engine.requests import RequestLimits
from areno.engine.roles import Roles
from areno.engine.state.checkpointer import StateCheckpointer
from areno.engine.state.digests import digests_of_role
from areno.engine.train.backend import LossFn
from areno.engine.train.checked_rows import TOP
from areno.engine.train.micro_batches import StepMicroBatches, TrainResult
from areno.engine.train.teacher import TeacherPasses, Teachers
from areno.errors import EngineError
from areno.kernels.attention import choose_backend
from areno.kernels.backend import check_dtype, check_fp8
from areno.models.adapters import adapter_table, refresh_adapters
from areno.models.weights import checkpoint_table
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, GenerationRequest


class Worker:
    """The models (roles), the decoder and the training of one rank. Construction loads the actor."""

    def __init__(self, spec: EngineSpec, context: ParallelContext):
        self.spec, self.context = spec, context
        if context.device.type == "cuda":
            memory.use_expandable_segments()
        self.dtype = getattr(torch, spec.dtype)
        check_dtype(self.dtype, [context.device])
        if spec.actor.fp8 is not None and spec.actor.fp8.rounds_inputs:
            check_fp8([context.device])
        if spec.actor.fp8_kv:
            check_fp8([context.device], "rollout.kv_cache_dtype")
        self._peaks = {"step": 0.0, "phase": 0.0}  # GiB, since the last call of memory_gib and of phase_memory_gib
        self._profiler = profiling.Profiler(spec.profiling, context.rank, context.device)
        self.attn_backend = choose_backend(spec.engine.attn_backend, context.device, self.dtype, spec.engine.exact)
        self.roles = Roles(spec, context, self.attn_backend, self._kv_cache_advice, self._free_idle_cache)
        self.decoders = DecoderMaker(self.roles, spec, context, self.attn_backend)
        self.actor = self.roles.actor
        n_ranks = spec.n_ranks_on_machine(context.rank)
        self._threads = CpuThreads(
            context.device, n_ranks, self.roles.largest_parameter_count, one_number=spec.engine.exact
        )
        self.roles["actor"].backend.pass_threads = self._threads.for_pass
        self.decoder: Decoder | None = None
        self._decoder_spec: RolloutSpec | None = None
        self._is_held = False
        self._garbage = memory.RolloutGarbageCollector()
        self.states = StateCheckpointer(self.roles)
        self.saver = ModelSaver(self.roles, spec, context)

    def info(self) -> EngineInfo:
        config = self.actor.config
        return EngineInfo(
            n_params=n_table_elements(checkpoint_table(self.actor)),
            n_adapter_params=n_table_elements(adapter_table(self.actor)),
            context_len=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            device=str(self.context.device),
            device_name=torch.cuda.get_device_name() if self.context.device.type == "cuda" else "",
            dtype=self.spec.dtype,
            attn_backend=self.attn_backend,
            memory_gib=self.memory_gib(),
            device_bytes=self.roles.total_bytes,
            cost=TokenCost.from_config(config, self.dtype.itemsize),
            routes=self.decoders.route_shape,
            tp_sums=self.context.tp.sum_backend,
            sharing=self.roles["actor"].backend.train_sharing,
        )

    def memory_table(self) -> tuple[str, str]:
        """Return the estimated memory of the models on a device: one line, and a table."""
        return self.roles.memory_table()

    def begin_rollout(self, spec: RolloutSpec) -> RequestLimits:
        """Make the decoder ready for a rollout phase, and return the limits of its requests.

        If `spec` has the same decoder settings as the previous phase, the decoder and its CUDA graphs stay, but cached
        blocks are dropped. Otherwise a new decoder is made. Raises EngineError if there is too little memory for the KV
        cache.
        """
        before = self._decoder_spec
        if (
            self.decoder is not None
            and before is not None
            and _spec_of_shared_decoder(before) == _spec_of_shared_decoder(spec)
        ):
            self.decoder.reset_cache()
            self.decoder.reset_stats()
        else:
            self.end_rollout(drop=True)
            self.decoder = self.decoders.new_decoder(spec)
        self._decoder_spec = spec
        self.decoder.limit_running(self.decoders.max_running(spec))
        self.decoder.use_drafter(self.decoders.start_drafter(spec, self.decoder))
        self._prepare_decoder(self.decoder)
        profiling.set_anchor()
        self._garbage.begin()
        return self.decoder.limits

    def _prepare_decoder(self, decoder: Decoder) -> None:
        """Make a decoder use the current weights. Its cache must be empty."""
        decoder.weights_version = self.weights_version()
        refresh_adapters(self.actor)

    def token_budgets(self) -> TokenBudgets:
        wanted = None if self._decoder_spec is None else self.decoders.wanted_cache(self._decoder_spec)
        return self.roles.token_budgets(wanted)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. Raises EngineError outside a rollout phase, or if a request cannot be served."""
        if self.decoder is None:
            raise EngineError("a request arrived outside a rollout phase; call begin_rollout first")
        if any(request.params.stop or request.grammar for request in requests):
            _ = self.roles.vocabulary("actor").tokenizer  # load it now, so that an error is raised for the request
        for request in requests:
            self.decoder.submit(request)

    def abort(self, request_ids: Sequence[int]) -> None:
        if self.decoder is not None:
            for request_id in request_ids:
                self.decoder.abort(request_id)

    def drop_waiting(self, n_samples: int) -> None:
        if self.decoder is not None:
            self.decoder.drop_waiting(n_samples)

    def hold_decoding(self) -> None:
        """Stop decoding until the rollout phase ends, except in `advance`.

        Drafting is off, so that the number of tokens after a number of steps does not depend on settings of drafts.
        """
        self._is_held = True
        if self.decoder is not None:
            self.decoder.use_drafter(None)

    def suspend(self) -> list[int]:
        """Interrupt all samples but keep them in the decoder. Returns the number of tokens of each started sample."""
        self.hold_decoding()
        if self.decoder is None:
            return []
        self.decoder.reset_cache()
        return self.decoder.waiting_completion_lens

    def resume(self) -> None:
        self._is_held = False
        if self.decoder is not None:
            self._prepare_decoder(self.decoder)

    @property
    def has_work(self) -> bool:
        """Whether the decoder is not held and has unfinished requests or outputs that were not returned yet."""
        return self.decoder is not None and self.decoder.has_work and not self._is_held

    def advance(self, n_finished: int, n_steps: int) -> tuple[list[GenerationOutput], RolloutStats]:
        """Run at most `n_steps` steps of a held decoder until `n_finished` samples have finished."""
        outputs: list[GenerationOutput] = []
        while self.decoder is not None and self.decoder.has_work and n_steps > 0 and len(outputs) < n_finished:
            outputs += [output for output in self.step() if output.finish_reason is not None]
            heartbeat.beat()
            n_steps -= 1
        return outputs, self.rollout_stats()

    def park(self) -> list[GenerationOutput]:
        """End the hold, remove all samples from the decoder, and return them with their tokens so far."""
        self._is_held = False
        return [] if self.decoder is None else self.decoder.park()

    def step(self) -> list[GenerationOutput]:
        assert self.decoder is not None
        assert self._decoder_spec is not None
        return self._step(self.decoder, self._decoder_spec)

    def _step(self, decoder: Decoder, spec: RolloutSpec) -> list[GenerationOutput]:
        advice = partial(remedies.rollout_remedies, spec.decoder, on_cuda=self.context.device.type == "cuda")
        with memory.out_of_memory_hint("in rollout", advice), without_deterministic_mode():
            return decoder.step()

    def _kv_cache_advice(self) -> list[remedies.Option]:
        """Return setting changes that make the KV cache smaller, so that training has more memory."""
        return (
            []
            if self._decoder_spec is None
            else [*remedies.smaller_cache_in_training_options(self._decoder_spec.decoder)]
        )

    def _free_idle_cache(self) -> bool:
        """Free the KV cache between rollouts. Returns False if there is none, or if samples are in progress."""
        if self.decoder is None or self._garbage.in_rollout:
            return False
        self.end_rollout(drop=True)
        return True

    def rollout_stats(self) -> RolloutStats:
        return RolloutStats() if self.decoder is None else self.decoder.stats

    def end_rollout(self, drop: bool = False) -> None:
        self._is_held = False
        self._garbage.end()
        if self.decoder is None:
            return
        self.decoder.clear()
        if drop:
            self.decoder = self._decoder_spec = None
            memory.free_unused_memory()  # runner and graphs refer to each other, so only the collector frees them

    def release_departed_blocks(self) -> None:
        """Release the KV blocks that the samples of an ended rollout phase still hold.

        Otherwise the next phase would do so, which takes milliseconds for thousands of samples.
        """
        if self.decoder is not None and not self._garbage.in_rollout:
            self.decoder.release_departed_blocks()

    def weights_version(self) -> int:
        """Return the number of optimizer updates applied to the actor."""
        optimizer = self.roles["actor"].backend.optimizer
        return 0 if optimizer is None else optimizer.steps

    def load_role(self, name: str, spec: RoleSpec) -> PrefixSharing:
        """Load the model of another role. Returns the rule that decides when its training shares prefixes.

        First drops the KV cache, because its size depends on the remaining memory. Returns PrefixSharing() if another
        rank could not load the model.
        """
        self.end_rollout(drop=True)
        self.states.free_buffers()
        self.roles.load(name, spec)
        self._threads.set_for_decoding()
        if name not in self.roles:
            return PrefixSharing()
        self.roles[name].backend.pass_threads = self._threads.for_pass
        return self.roles[name].backend.train_sharing

    def release_role(self, name: str) -> None:
        self.states.free_buffers()
        self.roles.release(name)
        self._threads.set_for_decoding()

    def train(self, role: str, steps: list[StepMicroBatches], loss_fn: LossFn, update: UpdateSpec) -> TrainResult:
        """Apply optimizer steps to a role's model, on this rank's rows. The statistics contain `memory_gib`, too."""
        profiling.set_anchor()
        with ExitStack() as stack:
            teachers, divergence = None, update.divergence
            if divergence is not None and TOP[0] not in steps[0].rows.fields:
                hold = partial(self._hold_teacher, divergence)
                teachers = stack.enter_context(Teachers(hold, divergence.role))
            backend = stack.enter_context(self.roles[role].on_device(training=True))
            stack.enter_context(explain_nondeterminism_errors())
            result = backend.train(steps, loss_fn, update, teachers)
        result.stats["memory_gib"] = self.memory_gib()
        return result

    def skip_updates(self, role: str, n: int) -> dict[str, float]:
        return self.roles[role].backend.skip_updates(n)

    def _hold_teacher(self, divergence: Divergence, role: str) -> AbstractContextManager[TeacherPasses]:
        return self.roles[role].as_teacher(divergence)

    def score(
        self, role: str, what: str, token_rows: list[np.ndarray], settings: Mapping[str, Any]
    ) -> tuple[list[Any], int]:
        """Call TrainBackend.logprobs, .values or .rewards. Also returns how often micro-batches were halved."""
        profiling.set_anchor()
        with self.roles[role].on_device() as backend, explain_nondeterminism_errors():
            methods = {"logprobs": backend.logprobs, "values": backend.values, "rewards": backend.rewards}
            return methods[what](token_rows, **settings), backend.n_halvings

    def complete(self, spec: RolloutSpec, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Sample completions with a new decoder. The decoder of an open rollout phase keeps its cache."""
        outputs: list[GenerationOutput] = []
        if not requests:
            return outputs
        profiling.set_anchor()
        in_phase = gc.get_freeze_count() > 0  # of an open rollout phase
        gc.freeze()  # as in begin_rollout; the collection at the end then looks through new objects alone
        # For the whole time: an offloaded model must not leave, and CUDA graphs are captured with or without adapters.
        with self.roles[spec.role].on_device() as backend:
            refresh_adapters(backend.model)
            decoder: Decoder | None = None
            try:
                decoder = self.decoders.new_decoder(spec, beside_actor=self.decoder is not None)
                for request in requests:
                    decoder.submit(request)
                while decoder.has_work:
                    outputs += [output for output in self._step(decoder, spec) if output.finish_reason is not None]
                    heartbeat.beat()
            finally:
                decoder = None
                # before an offloaded model leaves, as graphs refer to the runner and its weights
                memory.free_unused_memory()
                if not in_phase:
                    gc.unfreeze()
        return outputs

    def save(self, folder: str, role: str, background: bool = False, merge: bool = False) -> None:
        self.saver.save(folder, role, background, merge)

    def is_saved(self) -> bool:
        return self.saver.is_saved()

    def save_state(self, folder: str, with_moments: bool = True) -> None:
        self.states.save(Path(folder), with_moments)

    def is_state_written(self) -> bool:
        return self.states.is_written()

    def load_state(self, folder: str, with_moments: bool = True) -> None:
        self.states.load(Path(folder), with_moments)

    def state_digests(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, role in self.roles.trained_roles().items():
            found |= digests_of_role(name, role)
        return found

    def close(self) -> None:
        """Stop the threads that write files in the background, and discard an unfinished profile.

        If `save` has queued several models, the one that is being written is completed, and the others are not written.
        """
        self._profiler.close()
        self.states.close()
        self.saver.close()

    def memory_gib(self) -> float:
        """Return the peak memory in GiB since the last call: of the device or, on a CPU, of the process."""
        return self._peak_since("step")

    def phase_memory_gib(self) -> float:
        return self._peak_since("phase")

    def _peak_since(self, event: str) -> float:
        peak = memory.take_peak_bytes(self.context.device) / 2**30
        self._peaks = {name: max(before, peak) for name, before in self._peaks.items()}
        found, self._peaks[event] = self._peaks[event], 0.0
        return found

    def begin_kernel_profile(self) -> None:
        self._profiler.begin_kernel_profile()

    def end_kernel_profile(self, name: str) -> None:
        self._profiler.end_kernel_profile(name)

    def write_memory_snapshot(self, name: str) -> None:
        self._profiler.write_snapshot(name)

    def synchronize(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()


def _spec_of_shared_decoder(spec: RolloutSpec) -> RolloutSpec:
    """Return `spec` without the settings (max_running, speculation) that may change between phases with one decoder."""
    return replace(spec, max_running=spec.n_slots, decoder=replace(spec.decoder, speculation="off"))
