"""One device: its models, its decoder, its train backend. The public methods are the commands a driver can send."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from areno.config.model_roles import MicroBatchSpec
from areno.engine.decoder.decoder import Decoder
from areno.engine.limits import RequestLimits
from areno.engine.memory import explained_out_of_memory
from areno.engine.parallel import Place
from areno.engine.roles import Roles
from areno.engine.spec import EngineInfo, EngineSpec, RoleSpec, RolloutSpec, RolloutStats
from areno.engine.train.backend import LossFn
from areno.engine.types import GenerationOutput, GenerationRequest, TrainSequence
from areno.errors import EngineError
from areno.kernels.attention import choose_backend
from areno.models.weights import checkpoint_table, save_weights

ONE_THREAD_BELOW = 5_000_000  # parameters
KV_BLOCK = 32  # tokens in a KV block: small enough to waste little, large enough for wide loads


class Worker:
    """Holds the roles of one rank. Construction loads the weights and is the slow part."""

    def __init__(self, spec: EngineSpec, place: Place):
        self.spec, self.place = spec, place
        self.dtype = getattr(torch, spec.dtype)
        self.attn_backend = choose_backend(spec.attn_backend, place.device, self.dtype)
        self.roles = Roles(spec, place, self.attn_backend)
        self.actor = self.roles.actor
        self._most_threads = max(1, torch.get_num_threads() // spec.world_size)
        self._set_threads()
        self.decoder: Decoder | None = None
        self._decoder_spec: RolloutSpec | None = None
        self._stats_before = RolloutStats()  # of the decoder, in earlier rollout phases
        self._tokenizer: Any = None

    def _set_threads(self) -> None:
        """Threads of a CPU rank. Those of a tiny model would wait for each other longer than they work, ten times so on
        a machine that does something else as well."""
        if self.place.device.type == "cpu":
            torch.set_num_threads(1 if self.roles.largest() < ONE_THREAD_BELOW else self._most_threads)

    def info(self) -> EngineInfo:
        """What was loaded."""
        config = self.actor.config
        return EngineInfo(
            n_params=sum(math.prod(entry.part.full_shape) for entry in checkpoint_table(self.actor)),
            context_len=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            device=str(self.place.device),
            dtype=self.spec.dtype,
            attn_backend=self.attn_backend,
            memory_gib=self.memory()["memory_gib"],
        )

    # -- rollout ---------------------------------------------------------------------------------------------------

    def begin_rollout(self, spec: RolloutSpec) -> RequestLimits:
        """Make ready to decode. A decoder of the same shape is kept, with its graphs; its cached blocks are not."""
        if self.decoder is not None and self._decoder_spec == spec:
            self.decoder.reset_cache()
            self._stats_before = self.decoder.stats
            return self.decoder.limits
        self.end_rollout(drop=True)
        self._stats_before = RolloutStats()
        max_running = max(1, -(-spec.max_running // self.spec.dp_size))
        with explained_out_of_memory(
            "making the KV cache",
            "lower rollout.mem_fraction or rollout.max_kv_tokens, or rollout.max_concurrent_rollouts",
        ):
            self.decoder = Decoder(
                self.actor,
                n_blocks=self._kv_blocks(spec, max_running),
                block_size=KV_BLOCK,
                max_running=max_running,
                max_prefill_tokens=spec.max_prefill_tokens,
                eos_token_ids={*self.actor.config.eos_token_ids, *self.spec.eos_token_ids},
                use_graphs=self.place.device.type == "cuda" and not spec.eager_decode,
                attn_backend=self.attn_backend,
                detokenize=lambda tokens: self._tokenizer.decode(tokens),
            )
        self._decoder_spec = spec
        return self.decoder.limits

    def _kv_blocks(self, spec: RolloutSpec, max_running: int) -> int:
        """KV blocks: what `max_running` full-length sequences need, or what memory allows, whichever is less."""
        config, tp = self.actor.config, self.place.tp
        block_bytes = (
            2 * config.num_layers * KV_BLOCK * (config.num_kv_heads // tp.size) * config.head_dim * self.dtype.itemsize
        )
        per_sequence = -(-spec.max_len // KV_BLOCK) + 1
        blocks = max_running * per_sequence + 1
        if spec.max_kv_tokens is not None:
            return min(blocks, -(-spec.max_kv_tokens // KV_BLOCK) + 1)
        affordable = int(self._free_bytes() * spec.mem_fraction) // block_bytes
        fewest = torch.tensor([affordable], device=self.place.device)
        affordable = int(tp.all_reduce(fewest, torch.distributed.ReduceOp.MIN).item())  # peers must schedule alike
        if affordable < per_sequence + 1:
            raise EngineError(
                f"the KV cache has room for {max(affordable, 0) * KV_BLOCK} tokens, one sequence may need "
                f"{spec.max_len}: lower gconfig.max_new_tokens or train_dataset.max_length, or raise "
                "rollout.mem_fraction"
            )
        return min(blocks, affordable)

    def _free_bytes(self) -> int:
        """Memory that nothing uses: of the device, or this worker's share of the machine's."""
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.place.device)[0]
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):  # not Linux
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return free // self.spec.world_size

    def _load_tokenizer(self) -> None:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            folder = self.spec.tokenizer_path or self.spec.model_path
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(folder)
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"stop strings need a tokenizer, and {folder} has none that loads; set tokenizer_path, or use "
                    "stop_token_ids"
                ) from error

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; they join the running batch at the next step."""
        if self.decoder is None:
            raise EngineError("a request arrived outside a rollout phase; call begin_rollout first")
        if any(request.params.stop for request in requests):
            self._load_tokenizer()
        for request in requests:
            self.decoder.submit(request)

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests early; their outputs say so."""
        if self.decoder is not None:
            for request_id in request_ids:
                self.decoder.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.decoder is not None and self.decoder.has_work

    def step(self) -> list[GenerationOutput]:
        """One turn of the decoder; the samples that finished in it."""
        assert self.decoder is not None
        with explained_out_of_memory(
            "in rollout",
            "lower rollout.mem_fraction to leave more beside the KV cache, rollout.max_prefill_tokens or "
            "rollout.max_concurrent_rollouts, or set rollout.eager_decode=true to do without CUDA graphs",
        ):
            return self.decoder.step()

    def rollout_stats(self) -> RolloutStats:
        """Counters of this rollout phase."""
        if self.decoder is None:
            return RolloutStats()
        return self.decoder.stats.since(self._stats_before)

    def end_rollout(self, drop: bool = False) -> None:
        """Leave the rollout phase; requests under way are dropped. `drop` gives KV cache and graphs back."""
        if self.decoder is None:
            return
        self.decoder.clear()
        if drop:
            self.decoder = self._decoder_spec = None
            if self.place.device.type == "cuda":
                torch.cuda.empty_cache()

    # -- roles -----------------------------------------------------------------------------------------------------

    def load_role(self, name: str, spec: RoleSpec) -> None:
        """One more model. The KV cache goes first: it is sized by what the models leave."""
        self.end_rollout(drop=True)
        self.roles.load(name, spec)
        self._set_threads()

    def release_role(self, name: str) -> None:
        """Free a role's memory."""
        self.roles.release(name)
        self._set_threads()

    def train(self, role: str, rows: list[TrainSequence], loss_fn: LossFn, **how: Any) -> dict[str, float]:
        """One call of TrainBackend.train on this rank's rows."""
        with self.roles[role].on_device(training=True) as backend:
            stats = backend.train(rows, loss_fn, **how)
        return {**stats, **self.memory()}

    def logprobs(
        self, role: str, token_rows: list[list[int]], temperature: float, mb_spec: MicroBatchSpec
    ) -> list[list[float]]:
        """Log-probability of every token given those before it."""
        with self.roles[role].on_device() as backend:
            return backend.logprobs(token_rows, temperature, mb_spec)

    def values(self, role: str, token_rows: list[list[int]], mb_spec: MicroBatchSpec) -> list[list[float]]:
        """Value of the state before every token."""
        with self.roles[role].on_device() as backend:
            return backend.values(token_rows, mb_spec)

    def rewards(self, role: str, token_rows: list[list[int]], mb_spec: MicroBatchSpec) -> list[float]:
        """Score at the last token of every row."""
        with self.roles[role].on_device() as backend:
            return backend.rewards(token_rows, mb_spec)

    def save(self, folder: str, role: str) -> None:
        """Write a role as a Hugging Face folder (every rank of the first model copy takes part)."""
        if self.place.dp.rank == 0:
            paths = (self.spec.tokenizer_path, self.roles[role].spec.path, self.spec.model_path)
            with self.roles[role].on_device() as backend:
                save_weights(backend.model, Path(folder), source=[path for path in paths if path])

    # -- the rest --------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, float]:
        """Peak device memory in GiB since the last call (CUDA), or of the process so far (CPU)."""
        if self.place.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
            return {"memory_gib": peak}
        import resource

        return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()

    def ping(self) -> int:
        """The process id."""
        return os.getpid()
