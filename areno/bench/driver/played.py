"""Workers that play their part: they answer as devices of a given speed would, and compute nothing.

What passes between driver and workers is pickled in both directions as it is over a pipe.
"""

from __future__ import annotations

import heapq
import pickle
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from areno.engine.limits import RequestLimits
from areno.engine.processes.messages import pack
from areno.engine.spec import EngineInfo, EngineSpec, RolloutSpec, RolloutStats
from areno.models.cost import Cost
from areno.models.registry import load_config
from areno.types import GenerationOutput, GenerationRequest

Completion = Callable[[GenerationRequest, int], list[int]]
"""(a request, the number of a sample) -> the tokens of the sample."""

# Of a 0.6B model on an H200: a step of the decoder with 256 samples, and tokens that it trains on in a second.
STEP_S = 0.0037
TRAIN_TOK_S = 110_000


class PlayedGroup:
    """A WorkerGroup. Every copy of the model takes `step_s` for a token of each of its samples.

    idle_s: seconds of each step in which all devices waited for the driver. cpu_s: those that its main thread computed
    meanwhile.
    """

    def __init__(self, spec: EngineSpec, completion: Completion, step_s: float = STEP_S):
        self.spec, self._completion, self._step_s = spec, completion, step_s
        self._config = load_config(spec.model_path)
        self._due: list[tuple[float, int, int, bytes]] = []  # when a sample is done, its copy, a number, the message
        self._n, self._version = 0, 0
        self._n_tokens = [0] * spec.dp_size
        self._slots: list[list[float]] = []  # when each slot of each copy is free
        self.idle_s: list[float] = []
        self.cpu_s: list[float] = []
        self._trained_at = self._idle_s = self._cpu_s = self._trained_cpu = self._sampled_cpu = 0.0
        self._sampled_at: float | None = None  # when the last sample that was asked for will be done
        self.watchdog = SimpleNamespace(stop=lambda: None)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.call_each(method, [args] * self.spec.dp_size)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        first, *_ = [pickle.loads(pack(method, each)) for each in args]
        plays: dict[str, Callable[..., Any]] = {
            "info": self._info, "begin_rollout": self._begin_rollout, "train": self._train,
            "weights_version": lambda: self._version, "saved": lambda: True, "memory_table": lambda: ("no memory", ""),
        }  # fmt: skip
        return [plays[method](*first) if method in plays else None] * self.spec.dp_size

    def cast(self, dp_rank: int, method: str, *args: Any) -> None:
        sent = pickle.loads(pack(method, args))
        if method == "submit":
            for request in sent[0]:
                self._begin_request(dp_rank, request)

    def poll(self, timeout: float) -> list[GenerationOutput]:
        now = time.perf_counter()
        if not self._due:
            return []
        time.sleep(max(0.0, min(timeout, self._due[0][0] - now)))
        now, found, self._sampled_cpu = time.perf_counter(), [], time.thread_time()
        while self._due and self._due[0][0] <= now:
            _, rank, _, message = heapq.heappop(self._due)
            output = pickle.loads(message)
            self._n_tokens[rank] += len(output.tokens)
            found.append(output)
        return found

    def stats(self) -> list[RolloutStats]:
        return [RolloutStats(generated_tokens=n) for n in self._n_tokens]

    def close(self) -> None:
        self._due = []

    def _begin_request(self, rank: int, request: GenerationRequest) -> None:
        now = time.perf_counter()
        if self._sampled_at is None:
            self._idle_s, self._sampled_at = now - self._trained_at, now
            self._cpu_s = time.thread_time() - self._trained_cpu
        for sample in range(request.n_samples):
            tokens = self._completion(request, sample)
            output = GenerationOutput(
                request_id=request.request_id, sample=request.first_sample + sample, tokens=tokens,
                logprobs=[-0.6931] * len(tokens), versions=[self._version] * len(tokens), finish_reason="stop",
            )  # fmt: skip
            free = heapq.heappop(self._slots[rank])
            done = max(now, free) + len(tokens) * self._step_s
            heapq.heappush(self._slots[rank], done)
            self._sampled_at = max(self._sampled_at, done)
            self._n += 1
            heapq.heappush(self._due, (done, rank, self._n, pickle.dumps(output, pickle.HIGHEST_PROTOCOL)))

    def _info(self) -> EngineInfo:
        return EngineInfo(
            n_params=Cost.of(self._config, 2).n_params, context_len=self._config.max_position_embeddings,
            vocab_size=self._config.vocab_size, device="played", dtype=self.spec.dtype, attn_backend="sdpa",
            memory_gib=0.0, cost=Cost.of(self._config, 2),
        )  # fmt: skip

    def _begin_rollout(self, spec: RolloutSpec) -> RequestLimits:
        n_slots = -(-spec.max_running // self.spec.dp_size)
        self._slots = [[0.0] * n_slots for _ in range(self.spec.dp_size)]
        self._n_tokens = [0] * self.spec.dp_size
        return RequestLimits(
            vocab_size=self._config.vocab_size, context_len=self._config.max_position_embeddings,
            kv_tokens=1 << 30, stop_strings=True,
        )  # fmt: skip

    def _train(self, role: str, steps: Any, loss_fn: Any, update: Any) -> dict[str, float]:
        begun = time.perf_counter()
        if self._sampled_at is not None:
            self.idle_s.append(self._idle_s + begun - self._sampled_at)
            self.cpu_s.append(self._cpu_s + time.thread_time() - self._sampled_cpu)
        n_tokens = sum(row.n_tokens for step in steps for batch in step.micro_batches for row in batch)
        time.sleep(n_tokens / TRAIN_TOK_S)
        self._trained_at, self._trained_cpu, self._sampled_at = time.perf_counter(), time.thread_time(), None
        self._version += 1
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "memory_gib": 0.0}
