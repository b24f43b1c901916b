"""The phases of a training step, their memory and their time.

The memory of a phase is the sum of its terms: the models that are on the device, the KV cache, and the activations of
the largest micro-batch. The engine calls the same functions to choose the sizes of micro-batches and of the KV cache.
The time comes from `areno/cost/time.py`.
"""

from __future__ import annotations

from dataclasses import replace

from areno.config.experiments import ExperimentConfig, ReferencedExperimentConfig
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.cost.footprint import Footprint, LongestRow, ModelFootprint
from areno.cost.kv_cache import FIXED_ORDER_KV_BLOCK, KV_BLOCK, WantedCache, max_verification_rows, may_verify_drafts
from areno.cost.prefix_sharing import PrefixSharing
from areno.cost.time import (
    PassWork,
    Rates,
    RolloutWork,
    device_seconds,
    host_rollout_seconds,
    host_seconds,
    pass_seconds,
    rollout_seconds,
    update_seconds,
)
from areno.cost.token_budget import SCORE, TRAIN, choose_token_budget
from areno.models.config import TransformerConfig
from areno.plan.hardware import Hardware
from areno.plan.phases import (
    PassMemory,
    Phase,
    RowWorkload,
    SequenceLengths,
    decoder_concurrency,
    questions_of_step,
    rows_of_role,
    values_per_token,
)
from areno.plan.plan import max_sequence_len
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec

_PROCESS_BYTES = int(0.35 * 2**30)  # of a Python process with torch, which counts as the memory of a CPU run
_GRAPH_BYTES = int(0.15 * 2**30)  # of CUDA graphs and the buffers of sampling
_COPY_BYTES_S = 45e9  # bytes per second between device and pinned host memory, in each direction
_DROPPED_S = 2.0  # seconds to make a decoder with its CUDA graphs again
_SCORED_BY = {
    "actor": "recompute",
    "critic": "values",
    "judge": "reward",
}  # model -> name of its scoring phase in time/*, if another


class StepForecast:
    def __init__(
        self,
        config: ExperimentConfig,
        hardware: Hardware,
        spec: EngineSpec,
        footprint: Footprint,
        lengths: SequenceLengths,
        roles: dict[str, RoleSpec],
    ):
        self.config, self.hardware, self.spec, self.footprint = config, hardware, spec, footprint
        self.lengths, self.roles, self.layout = lengths, roles, spec.layout
        self.models = {model.name: model for model in footprint.models}
        self.total = hardware.memory
        self.free = self.total - hardware.cuda_context_bytes - footprint.total_resident_bytes
        self.cache = self._rollout_cache()
        rollout = config.rollout if isinstance(config, PolicyExperimentConfig) else None
        drops = rollout is not None and rollout.drop_rollout_state
        self.room_of_cache = self.free - (0 if drops else footprint.max_extra_bytes_in_use)
        self.stays = 0 if drops or self.cache is None else self.cache.bytes_within(self.room_of_cache)
        is_idle = rollout is not None and rollout.max_head_offpolicyness == 0  # the cache, in training
        self.may_free_cache = is_idle and self.layout.tp_size == self.layout.cp_size == 1
        judge = self._footprint_of_model("judge")
        self.room_of_judge = self.free - self.stays - footprint.extra_bytes_in_use(judge, training=False)
        self.cache_of_judge = self._cache_of_judge(judge)
        self._phases: list[Phase] = []

    # -- memory ----------------------------------------------------------------------------------------------------

    def _rollout_cache(self) -> WantedCache | None:
        config, model = self.config, self.footprint.models[0].config
        if not isinstance(config, PolicyExperimentConfig):
            return None
        rollout = RolloutSpec(
            max_running=config.max_concurrent_samples,
            max_len=max_sequence_len(config, model.max_position_embeddings),
            decoder=config.rollout,
            keeps_cache=not config.rollout.drop_rollout_state,
            shared=decoder_concurrency(config, model, self.layout),
        )
        return self._wanted_cache(model, rollout)

    def _cache_of_judge(self, judge: ModelFootprint) -> WantedCache | None:
        """Return the KV cache in which a judge writes its replies. None if no judge of the run writes replies."""
        config, context = self.config, judge.config.max_position_embeddings
        if not isinstance(config, PolicyExperimentConfig) or not self._has_generative_judge:
            return None
        asked, at_once = questions_of_step(config, self.lengths), config.rollout.max_concurrent_rollouts
        call = ("judge", asked.n, min(asked.tokens_per_row, context), config.rollout, at_once, self.layout)
        return self._wanted_cache(judge.config, RolloutSpec.for_call(*call))

    def _wanted_cache(self, model: TransformerConfig, rollout: RolloutSpec) -> WantedCache:
        return WantedCache.for_rollout(
            model,
            self.footprint.itemsize,
            self.spec,
            rollout,
            block_size=FIXED_ORDER_KV_BLOCK if self.config.engine.exact else KV_BLOCK,
            route_bytes=0,
        )

    def _resident_terms(self, visitor: str, trains: bool = False) -> dict[str, int]:
        """Return name of a term -> bytes per device of all models, while the model `visitor` computes."""
        terms: dict[str, int] = {} if self.hardware.is_cuda else {"process": _PROCESS_BYTES}
        for model in self.footprint.models:
            found, here = self.footprint.model_bytes(model), model.name == visitor
            if model.keeps_weights or here:
                terms["weights"] = terms.get("weights", 0) + found.weights
            if not model.offload or (here and trains):
                terms["gradients"] = terms.get("gradients", 0) + found.gradients
            if not model.offload:
                terms["masters"] = terms.get("masters", 0) + found.masters
                terms["moments"] = terms.get("moments", 0) + found.moments
        return {name: n_bytes for name, n_bytes in terms.items() if n_bytes}

    def _pass_memory(self, name: str, phase: str, n_tokens: int, n_predicted: int) -> PassMemory:
        """Return the memory of a pass over the largest micro-batch of a phase, which has `n_tokens` tokens."""
        model = self._footprint_of_model(name)
        terms, trains = self._resident_terms(name, phase == TRAIN), phase == TRAIN
        need = self.footprint.training_pass_bytes(model) if trains else self.footprint.scoring_pass_bytes(model)
        recomputed = model.config.num_layers if trains and model.gradient_checkpointing else 0
        room = self.hardware.usable_bytes - sum(terms.values()) if self.hardware.is_cuda else None
        cache = self.stays, trains and self.may_free_cache
        return PassMemory.from_terms(terms, need, n_tokens, n_predicted, recomputed, room, cache)

    def longest_row(self) -> LongestRow | None:
        actor = self.footprint.models[0]
        room = self.hardware.usable_bytes - sum(self._resident_terms(actor.name, trains=True).values())
        return self.footprint.longest_row(actor, room, self.stays, self.may_free_cache)

    def _footprint_of_model(self, name: str) -> ModelFootprint:
        return self.models.get(name) or self.models["actor"]

    def micro_batch_tokens(self, name: str, phase: str) -> int:
        """Return the number of tokens in a micro-batch: that of the settings, or else the engine's choice."""
        mb_spec = self.config.trained_models()[name if phase == TRAIN else "actor"].mb_spec
        if mb_spec.max_tokens_per_mb is not None:
            return mb_spec.max_tokens_per_mb
        row = rows_of_role(self.config, self.lengths, name, self.roles).tokens_per_row
        if mb_spec.mini_bs is not None:
            return mb_spec.mini_bs * row
        if self.config.actor.gradient_accumulation_steps is not None and phase == TRAIN:
            return (mb_spec.with_fixed_size.mini_bs or 1) * row
        room = self.total - self.footprint.total_resident_bytes - self.footprint.max_extra_bytes_in_use
        cache = self.cache.bytes_within(room) if self.stays and self.cache else 0
        return choose_token_budget(self.footprint, self._footprint_of_model(name), phase, self.total, cache)

    # -- phases ----------------------------------------------------------------------------------------------------

    def phases(self) -> list[Phase]:
        config, found = self.config, []
        if isinstance(config, PolicyExperimentConfig):
            found.append(self._rollout_phase(config))
        for name, role in self.roles.items():
            if name == "actor" or role.in_training or isinstance(config, ReferencedExperimentConfig):
                continue
            found.append(
                self._judge_phase() if name == "judge" and self._has_generative_judge else self._pass_phase(name, SCORE)
            )
            if role.optimizer is not None:
                found.append(self._pass_phase(name, TRAIN))
        if isinstance(config, PolicyExperimentConfig) and config.actor.is_scored_before_update:
            found.append(self._pass_phase("actor", SCORE))
        found.append(self._pass_phase("actor", TRAIN))
        self._phases = found
        return found

    @property
    def _rates(self) -> Rates:
        return self.hardware.rates.for_devices(self.layout.tp_size)

    @property
    def _has_generative_judge(self) -> bool:
        """Whether the run loads a judge that writes replies. Other judges only score labels."""
        config = self.config
        writes = isinstance(config, PolicyExperimentConfig) and config.reward.judge.verdict == "json"
        return writes and "judge" in self.roles

    def _rollout_phase(self, config: PolicyExperimentConfig) -> Phase:
        assert self.cache is not None
        model, at_once = self.footprint.models[0], config.max_concurrent_samples
        work = RolloutWork(
            n_prompts=config.train_dataset.batch_size,
            n_samples=config.gconfig.n_samples,
            prompt_len=self.lengths.prompt,
            answer_len=self.lengths.answer,
            n_running=at_once,
            tp_size=self.layout.tp_size,
        )
        shared = decoder_concurrency(config, model.config, self.layout)  # an evaluation may decode more than training
        n_logits = max_running = self.layout.samples_per_replica(at_once if shared is None else shared.most)
        if may_verify_drafts(config.rollout, on_cuda=self.hardware.is_cuda) and model.config.delta is None:
            n_logits = max(max_running, max_verification_rows(max_running))
        found = self._decoding_phase("rollout", work, model, self.cache, self.room_of_cache, n_logits)
        dropped_s = _DROPPED_S if config.rollout.drop_rollout_state and self.hardware.is_cuda else 0.0
        has_critic = isinstance(config, CriticExperimentConfig)
        host_s = host_rollout_seconds(config.rows_per_step, found.n_tokens, has_critic)
        return replace(found, seconds=found.seconds + dropped_s + host_s)

    def _judge_phase(self) -> Phase:
        """Return the phase in which the judge writes replies, each as long as reward.judge.max_tokens allows."""
        config, model, cache = self.config, self._footprint_of_model("judge"), self.cache_of_judge
        assert isinstance(config, PolicyExperimentConfig)
        assert cache is not None
        asked = questions_of_step(config, self.lengths)
        work = RolloutWork(
            n_prompts=asked.n,
            n_samples=1,
            prompt_len=asked.lengths.prompt,
            answer_len=asked.lengths.answer,
            n_running=cache.n_slots * self.layout.dp_size,
            tp_size=self.layout.tp_size,
        )
        base = replace(model, lora=None)  # if it is the actor's
        found = self._decoding_phase("write judge", work, base, cache, self.room_of_judge, cache.n_slots, self.stays)
        more_s = _DROPPED_S * self.hardware.is_cuda + self.footprint.extra_bytes_in_use(model, False) / _COPY_BYTES_S
        return replace(found, clock=_SCORED_BY["judge"], seconds=found.seconds + more_s)

    def _decoding_phase(
        self,
        name: str,
        work: RolloutWork,
        model: ModelFootprint,
        cache: WantedCache,
        room: int,
        n_logits: int,
        beside: int = 0,
    ) -> Phase:
        """Return the phase `name` in which a model decodes. A full cache may allow fewer than `work.n_running` samples.

        `room`: the free memory before the cache is made. `n_logits`: the number of tokens whose logits are in memory at
        the same time. `beside`: the memory of the actor's cache, if another model decodes.
        """
        config, copies = self.config, self.layout.dp_size
        assert isinstance(config, PolicyExperimentConfig)
        cache_bytes = cache.bytes_within(room)
        row = work.prompt_len / max(1, work.n_samples) + work.answer_len
        cached_tokens = cache_bytes // max(1, cache.block_bytes) * cache.layout.block_size
        work = replace(work, n_running=max(1, min(work.n_running, int(cached_tokens / row) * copies)))
        cost = self.footprint.token_cost(model, model.adapters)
        n_prefill = min(config.rollout.max_prefill_tokens, -(-work.n_prompts // copies) * work.prompt_len)
        logits = n_logits * self.layout.share_rounded_up(model.config.vocab_size) * 4
        forward = self.footprint.scoring_pass_bytes(model).expected(n_prefill, 0, 0)
        terms = self._resident_terms(model.name) | {"KV cache": cache_bytes + beside}
        terms["activations"] = forward + logits + _GRAPH_BYTES * self.hardware.is_cuda
        return Phase(
            name=name,
            clock=name,
            seconds=sum(rollout_seconds(model.config, cost, work, self._rates, copies)),
            terms=terms,
            n_tokens=work.n_prompts * work.n_samples * work.answer_len,
            least=sum(terms.values()),
        )

    def _pass_phase(self, name: str, phase: str) -> Phase:
        model, role = self._footprint_of_model(name), self.roles[name]
        rows = rows_of_role(self.config, self.lengths, name, self.roles)
        row, n_each = rows.tokens_per_row, -(-rows.n // self.layout.n_data_parallel_groups)
        budget = self.micro_batch_tokens(name, phase)
        shared_lens = (rows.lengths.prompt,) * self._n_sharing_rows(model, rows, n_each, phase, budget)
        n_tokens = -(-(n_each * row - sum(shared_lens)) // self.layout.cp_size)
        head = 0.0 if model.config.head != "lm" else rows.lengths.answer / row  # logits of answers alone
        in_batch = max(1, min(max(budget, -(-row // self.layout.cp_size)), n_tokens))
        memory = self._pass_memory(name, phase, in_batch, int(head * in_batch))
        cost = self.footprint.token_cost(model, model.adapters if phase == TRAIN else None)
        work = PassWork(
            row_lens=(row,) * n_each,
            n_predicted=int(head * n_each * row),
            trains=phase == TRAIN,
            n_recomputed=memory.n_recomputed,
            budget=budget * self.layout.cp_size,
            tp_size=self.layout.tp_size,
            shared_lens=shared_lens,
        )
        rates = self._rates.for_devices(self.layout.cp_size)
        seconds = pass_seconds(model.config, cost, work, rates)
        # Inputs of layers leave the device in the forward pass and come back in the backward pass.
        seconds = max(seconds, 2 * n_tokens * memory.host_bytes_of_token / _COPY_BYTES_S)
        seconds += _DROPPED_S * memory.frees_cache
        seconds *= self._repeated_passes(phase, name)
        if model.offload:
            found = self.footprint.model_bytes(model)
            moved = 0 if model.keeps_weights else found.weights * (2 if phase == TRAIN else 1)
            if phase == TRAIN:  # copies to the device and back run at the same time
                moved += self._n_updates(name) * (found.masters + found.moments)
            seconds += moved / _COPY_BYTES_S
        if phase == TRAIN and role.optimizer is not None:
            n_parts = self.layout.dp_size if self.footprint.zero_stage else 1
            how = role.optimizer.type, self.hardware.rates, self.layout.tp_size, n_parts
            seconds += self._n_updates(name) * update_seconds(model.config, cost, *how)
        if phase == TRAIN and name == "actor":
            seconds += self._teacher_seconds(work)
        seconds += host_seconds(rows.n, rows.n * row * (values_per_token(self.config) if phase == TRAIN else 1))
        if phase == TRAIN:
            named, clock = f"train {name}", "train" if name == "actor" else f"train_{name}"
        else:
            named, clock = f"score {name}" + " again" * (name == "actor"), _SCORED_BY.get(name, name)
        return Phase(
            name=named,
            clock=clock,
            seconds=seconds,
            terms=memory.terms,
            n_tokens=rows.n * row,
            budget=budget,
            least=memory.least,
            host_bytes=in_batch * memory.host_bytes_of_token,
        )

    def _teacher_seconds(self, work: PassWork) -> float:
        """Return the time of the teachers' forward passes while the actor trains on all of its rows."""
        teachers = [self._footprint_of_model(name) for name, role in self.roles.items() if role.in_training]
        scored, seconds = replace(work, trains=False, n_recomputed=0), 0.0
        rates = self._rates.for_devices(self.layout.cp_size)
        for model in teachers:
            cost = self.footprint.token_cost(model, None)
            seconds += device_seconds(model.config, cost, scored, rates) / len(teachers)
            if model.offload:
                seconds += self.footprint.model_bytes(model).weights / _COPY_BYTES_S
        return seconds

    def _n_sharing_rows(self, model: ModelFootprint, rows: RowWorkload, n_rows: int, phase: str, budget: int) -> int:
        """Return how many of a device's `n_rows` rows reuse a prompt that another row computes."""
        config, lengths, trains = self.config, rows.lengths, phase == TRAIN
        rule = PrefixSharing.from_setting(
            config.actor.share_prefixes,
            model.config,
            self.footprint.itemsize,
            trains=trains,
            on_cuda=self.hardware.is_cuda,
            adapters=model.adapters if trains else None,
            tp_size=self.layout.tp_size,
        )
        if not isinstance(config, PolicyExperimentConfig) or rule.when == "off":
            return 0
        if trains and config.divergence is not None and config.teacher and config.teacher.prompt_key is not None:
            return 0  # the teacher reads other prompts
        sharing = n_rows - -(-n_rows // rows.n_same)
        n_tokens, saved = n_rows * rows.tokens_per_row, sharing * lengths.prompt
        apart, shared = ([min(n, budget)] * -(-n // budget) for n in (n_tokens, n_tokens - saved))
        return sharing if rule.saves_enough(saved, n_tokens) and rule.is_faster(shared, apart, n_rows) else 0

    def _n_updates(self, name: str) -> int:
        section = vars(vars(self.config)[name])
        return int(section.get("ppo_n_minibatches", 1)) * int(section.get("epochs", 1))

    def _repeated_passes(self, phase: str, name: str) -> float:
        """Return the factor of passes over the rows: a scoring pass before several updates, and epochs of a critic."""
        if phase == TRAIN and name == "critic" and isinstance(self.config, CriticExperimentConfig):
            return self.config.critic.epochs
        if phase != TRAIN or name != "actor" or not isinstance(self.config, PolicyExperimentConfig):
            return 1.0
        return 1.0 + (0.3 * self.config.actor.passes_before_later_updates if self._n_updates(name) > 1 else 0.0)

    # -- problems --------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        limit = self.hardware.usable_bytes
        worst = max(self._phases, key=lambda phase: phase.least)
        if worst.least > limit:
            return [f"{worst.name} needs {_gib(worst.least)} GiB, and {_gib(limit)} GiB of a device can be used"]
        if self.footprint.min_device_bytes > limit:
            need = _gib(self.footprint.min_device_bytes)
            return [f"the models need {need} GiB, and {_gib(limit)} GiB of a device can be used"]
        caches = {"": (self.cache, self.room_of_cache), " of the judge": (self.cache_of_judge, self.room_of_judge)}
        for of, (cache, room) in caches.items():
            if cache is not None and (tokens := cache.sequence_tokens(room)) < cache.max_len:
                return [f"the KV cache{of} has room for {tokens:,} tokens, and a sample may need {cache.max_len:,}"]
        return []


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f}"
