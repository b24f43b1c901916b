"""The time that devices wait for the driver process in a training loop, with simulated workers. Needs no GPU.

`SimulatedWorkers` takes the place of the engine's worker processes. It replies as fast as devices of a given speed
would, and computes nothing. Messages between the driver and the workers are pickled in both directions, like messages
over a pipe.
"""

from __future__ import annotations

import argparse
import heapq
import math
import pickle
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from areno.bench.__main__ import checked_model
from areno.bench.arguments import Settings, positive_int
from areno.bench.work import Workload
from areno.cost.flops import TokenCost
from areno.cost.token_budget import SCORE, TRAIN
from areno.engine import engine as engine_module
from areno.engine.processes.messages import WorkerOutputs, pack_command
from areno.engine.reports import EngineInfo, RolloutStats
from areno.engine.requests import RequestLimits
from areno.engine.train.micro_batches import TrainResult
from areno.launch.compose import load
from areno.models.registry import load_config
from areno.recipes.gspo import GSPOConfig
from areno.specs.engine import EngineSpec
from areno.specs.rollout import RolloutSpec
from areno.tracking.reader import RunReader
from areno.trainers.policy_only import PolicyOnlyTrainer
from areno.types import GenerationOutput, GenerationRequest
from benchmarks.texts import RandomTexts, add_tokenizer_argument

Completion = Callable[[GenerationRequest, int], list[int]]
"""(a request, the number of a sample) -> the tokens of the sample."""

# Of a 0.6B model on an H200.
STEP_S = 0.0037  # seconds of a decoder step with 256 samples, which generates a token for each of them
TRAIN_TOK_S = 110_000  # trained tokens per second


class SimulatedWorkers:
    """Simulated workers with the interface of WorkerGroup, to time the driver alone.

    For each training step, `idle_s` has the seconds in which all devices waited for the driver, and `cpu_s` the CPU
    seconds of the driver's main thread, without those of the simulation.
    """

    def __init__(self, spec: EngineSpec, completion: Completion):
        self.spec, self._completion = spec, completion
        self._config = load_config(spec.actor.path)
        self._submitted: list[tuple[int, float, GenerationRequest]] = []  # (copy, time of arrival, request)
        # (time at which samples are finished, copy, running number, tokens of the samples, message)
        self._due: list[tuple[float, int, int, int, bytes]] = []
        self._n, self._version = 0, 0
        self._n_tokens = [0] * spec.layout.dp_size
        self._slots: list[list[float]] = []  # for each copy, the times at which its batch slots become free
        self.idle_s: list[float] = []
        self.cpu_s: list[float] = []
        self._trained_at = self._idle_s = self._simulation_cpu = 0.0
        self._step_cpu = time.thread_time()  # at the start of the step
        self._sampled_at: float | None = None  # time at which the last submitted sample will be finished
        self.watchdog = SimpleNamespace(stop=lambda: None)

    def host_bytes(self) -> int:
        return 0

    @contextmanager
    def _simulating(self) -> Iterator[None]:
        """Count the CPU time of this `with` block as the simulation's, so that `cpu_s` excludes it."""
        began = time.thread_time()
        yield
        self._simulation_cpu += time.thread_time() - began

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.call_each(method, [args] * self.spec.layout.dp_size)

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answer a call with the same result for each data-parallel rank, None for a method that is not simulated.

        All arguments are pickled, but only those of the first rank are used.
        """
        packed = [pack_command(method, each) for each in args]
        answers: dict[str, Callable[..., Any]] = {
            "info": self._info,
            "begin_rollout": self._begin_rollout,
            "train": self._train,
            "weights_version": lambda: self._version,
            "is_saved": lambda: True,
            "phase_memory_gib": lambda: 0.0,
            "memory_table": lambda: ("no memory", ""),
            "state_digests": dict,
            "token_budgets": lambda: {"actor": {TRAIN: 16384, SCORE: 16384}},
        }
        with self._simulating():
            first = pickle.loads(packed[0])  # once, since real workers would read theirs in parallel
            answer = answers[method](*first) if method in answers else None
        if method == "train":
            now = time.thread_time()
            self.cpu_s.append(now - self._step_cpu - self._simulation_cpu)
            self._step_cpu, self._simulation_cpu = now, 0.0
        return [answer] * self.spec.layout.dp_size

    def call_nowait(self, dp_rank: int, method: str, *args: Any) -> None:
        """Accept a command that needs no reply. Only `submit` has an effect: its requests are sampled."""
        sent, now = pack_command(method, args), time.perf_counter()
        if method == "submit":
            if self._sampled_at is None:
                self._idle_s, self._sampled_at = now - self._trained_at, now
            with self._simulating():
                self._submitted += [(dp_rank, now, request) for request in pickle.loads(sent)[0]]

    def poll(self, timeout: float) -> list[GenerationOutput]:
        with self._simulating():
            self._sample()
        if not self._due:
            return []
        time.sleep(max(0.0, min(timeout, self._due[0][0] - time.perf_counter())))
        now, found = time.perf_counter(), []
        while self._due and self._due[0][0] <= now:
            _, rank, _, n_tokens, message = heapq.heappop(self._due)
            self._n_tokens[rank] += n_tokens
            found += pickle.loads(message).outputs
        return found

    def stats(self) -> list[RolloutStats]:
        return [RolloutStats(generated_tokens=n) for n in self._n_tokens]

    def close(self) -> None:
        self._due = []

    def _sample(self) -> None:
        """Choose the tokens of all submitted requests, and the times at which their samples finish.

        Samples that a copy of the model finishes in one decoding step share a message.
        """
        done: defaultdict[tuple[int, float], list[GenerationOutput]] = defaultdict(list)
        for rank, now, request in self._submitted:
            for sample in range(request.n_samples):
                tokens = self._completion(request, sample)
                output = GenerationOutput(
                    request_id=request.request_id,
                    sample=request.first_sample + sample,
                    tokens=tokens,
                    logprobs=[-0.6931] * len(tokens),
                    versions=[self._version] * len(tokens),
                    finish_reason="stop",
                )
                ends = max(now, heapq.heappop(self._slots[rank])) + len(tokens) * STEP_S
                heapq.heappush(self._slots[rank], ends)
                done[rank, math.ceil(ends / STEP_S) * STEP_S].append(output)
        self._submitted = []
        for (rank, ends), outputs in done.items():
            self._n += 1
            message = pickle.dumps(WorkerOutputs(outputs, self.stats()[rank]), pickle.HIGHEST_PROTOCOL)
            n_tokens = sum(len(output.tokens) for output in outputs)
            heapq.heappush(self._due, (ends, rank, self._n, n_tokens, message))
            self._sampled_at = max(self._sampled_at or 0.0, ends)

    def _info(self) -> EngineInfo:
        return EngineInfo(
            n_params=TokenCost.from_config(self._config, 2).n_params,
            context_len=self._config.max_position_embeddings,
            vocab_size=self._config.vocab_size,
            device="simulated",
            dtype=self.spec.dtype,
            attn_backend="sdpa",
            memory_gib=0.0,
            device_bytes=0,
            cost=TokenCost.from_config(self._config, 2),
        )

    def _begin_rollout(self, spec: RolloutSpec) -> RequestLimits:
        n_slots = -(-spec.max_running // self.spec.layout.dp_size)
        self._slots = [[0.0] * n_slots for _ in range(self.spec.layout.dp_size)]
        self._n_tokens = [0] * self.spec.layout.dp_size
        return RequestLimits(
            vocab_size=self._config.vocab_size,
            context_len=self._config.max_position_embeddings,
            kv_tokens=1 << 30,
        )

    def _train(self, role: str, steps: Any, loss_fn: Any, update: Any) -> TrainResult:
        """Sleep as long as training on the rows would take, and return made-up statistics."""
        if self._sampled_at is not None:
            self.idle_s.append(self._idle_s + time.perf_counter() - self._sampled_at)
        n_tokens = sum(row.n_tokens for step in steps for batch in step.micro_batches for row in batch)
        time.sleep(n_tokens / TRAIN_TOK_S)
        self._trained_at, self._sampled_at = time.perf_counter(), None
        self._version += 1
        return TrainResult({"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "memory_gib": 0.0}, [None] * len(steps))


_ANSWER = " The answer is \\boxed{42}."
_SHIFTS = 7  # number of different first words among the samples of a prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_tokenizer_argument(parser)
    parser.set_defaults(kind="step")
    copies = "numbers of model copies; each copy gets all prompts (default: 1 2)"
    parser.add_argument("--copies", type=positive_int, nargs="+", default=[1, 2], help=copies)


def run(settings: Settings, folder: Path) -> dict[str, dict[str, float]]:
    """Run a training loop on simulated workers, once for each number of model copies, each with the whole work.

    The figures are medians over the steps after the first, in seconds: `idle` (all devices wait for the driver),
    `outside` (of rollout and training), `cpu` (of the driver's main thread), and the phases of a step.
    """
    path, _ = checked_model(settings, folder)
    n_rows = settings.work.n_rows
    return {f"{n} copies, {n * n_rows} samples": _medians(settings, path, n) for n in settings.copies}


def _medians(settings: Settings, folder: str, n_copies: int) -> dict[str, float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    work, n_steps, words = settings.work, settings.repeats + 1, RandomTexts(tokenizer)
    texts = [text for number in range(n_copies * n_steps) for text in words.draw(work, "prompt", number)]
    rows = [{"prompt": text, "solutions": str(41 + index % 2)} for index, text in enumerate(texts)]
    completions, groups = _completions(tokenizer, words, work), []

    def start(spec: EngineSpec, mode: str) -> SimulatedWorkers:
        groups.append(SimulatedWorkers(spec, completions))
        return groups[-1]

    overrides = [
        f"actor.path={folder}",
        "actor.init_from_scratch=true",
        f"tokenizer_path={settings.tokenizer}",
        "engine.device=cpu",
        f"engine.world_size={n_copies}",
        f"total_train_steps={n_steps}",
        "reward.fn=math",
        f"train_dataset.batch_size={n_copies * len(work.prompt_lens)}",
        "valid_dataset=null",
        "saver.freq_steps=null",
        f"train_dataset.max_length={4 * max(work.prompt_lens)}",
        f"gconfig.n_samples={work.n_samples}",
        f"gconfig.max_new_tokens={max(work.new_lens)}",
        "recover.mode=off",
    ]
    with tempfile.TemporaryDirectory() as run_dir, mock.patch.object(engine_module, "start_workers", start):
        config = load(GSPOConfig, "quickstart", overrides)
        with PolicyOnlyTrainer(config, run_dir=run_dir, train_dataset=rows) as trainer:
            trainer.fit()
        metrics = sorted(RunReader(Path(run_dir)).metrics().items())
        series = {name: found.values for name, found in metrics if name.startswith("time/")}
    phases = (series[f"time/{name}"] for name in ("step", "rollout", "train"))
    outside = [step - rollout - train for step, rollout, train in zip(*phases, strict=True)]
    series = {"idle": groups[0].idle_s, "outside": outside, "cpu": groups[0].cpu_s, **series}
    return {name: statistics.median(values[1:]) for name, values in series.items()}  # the first step warms up


def _completions(tokenizer: Any, words: RandomTexts, work: Workload) -> Completion:
    """Return made-up completions that end with a boxed answer. All are encoded first, so that a call costs little."""
    answer = [*tokenizer.encode(_ANSWER), tokenizer.eos_token_id]
    texts = words.draw(Workload.fixed(len(work.new_lens), 1, 2 * max(work.new_lens), 1), "completion", 0)
    tokens = [
        [encoded[shift : shift + max(1, new_len - len(answer))] + answer for shift in range(_SHIFTS)]
        for encoded, new_len in zip(map(tokenizer.encode, texts), work.new_lens, strict=True)
    ]
    return lambda request, sample: tokens[request.request_id % len(tokens)][sample % _SHIFTS]
