"""Runs that are traced: the same results, a file that Perfetto can read, and a bar for all that a step does."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from areno import trace
from areno.engine.engine import Engine
from areno.errors import ConfigError, EngineError
from areno.report.trace_summary import summarise
from areno.specs.engine import ProfilingSpec
from areno.tracking.trace_file import TraceFile, read_trace
from tests.helpers import agent_runs
from tests.helpers.policy_runs import MODEL, play
from tests.helpers.recipe_runs import without_times
from tests.helpers.tiny_decoder import make_decoder
from tests.helpers.tiny_decoder import request as decoder_request
from tests.helpers.tiny_engine import ROLLOUT, model_folder, request, rollout, spec, train_rows
from tests.helpers.trace_events import problems

TRACED = ["perf_tracer.enabled=true", "reward.workers=1", "saver.freq_steps=null"]


def reward(folder: Path) -> str:
    """A setting of reward.fn that tells the completions of a random model apart."""
    (folder / "sums.py").write_text("def reward_fn(record):\n    return sum(map(ord, record.completion)) % 7 / 7\n")
    return f"reward.fn={folder / 'sums.py'}"


def bars(events: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """(process, name) of each event with a duration -> how often it is there."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return Counter((names[event["pid"]], event["name"]) for event in events if event["ph"] in "Xb")


@pytest.mark.slow
def test_a_traced_run_is_the_same_and_shows_each_step(tmp_path: Path) -> None:
    more = [reward(tmp_path), "reward.workers=1", "saver.freq_steps=null"]
    plain = play("gspo", tmp_path / "plain", *more)
    assert not (plain.folder / "traces").exists()
    assert not trace.active
    traced = play("gspo", tmp_path / "traced", *more, *TRACED, "perf_tracer.profile_steps=[2]")
    assert not trace.active
    assert without_times(plain.folder) == without_times(traced.folder)
    weights = [folder / "checkpoints/latest/model.safetensors" for folder in (plain.folder, traced.folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    events = read_trace(traced.folder / "traces/trace-0001.json")
    assert json.loads((traced.folder / "traces/trace-0001.json").read_text()) == events
    assert not problems(events)
    assert min(traced.series("train/grad_norm")) > 0
    found = bars(events)
    assert found["driver", "step"] == found["driver", "data"] == found["driver", "train"] == 2
    assert found["driver", "checkpoint"] == 1
    assert found["reward processes", "reward"] == 32
    assert found["rank 0", "begin_rollout"] == found["rank 0", "optimizer"] == found["rank 0", "sum gradients"] == 2
    assert found["rank 0", "forward"] == found["rank 0", "backward"] >= 2
    assert found["rank 0", "prefill"] >= 2
    assert found["rank 0", "decode"] >= 4
    for phase in ("sample", "queued", "prefill", "decode", "scored", "trained"):
        assert found["samples", phase] == 32, phase
    [first, *_] = [event for event in events if event["name"] == "sample" and event["ph"] == "b"]
    assert first["args"].keys() == {
        *("of", "prompt", "sample", "tokens", "reward", "status", "finish_reason", "weights_version")
    }
    versions = {
        (event["name"], event["id"][0], event["args"]["weights_version"])
        for event in events
        if event["ph"] == "b" and event["name"] in ("sample", "trained")
    }
    assert versions == {("sample", "1", 0), ("trained", "1", 1), ("sample", "2", 1), ("trained", "2", 2)}

    summary = summarise(traced.folder)
    for step in summary.steps:
        assert step.seconds == pytest.approx(traced.series("time/step")[step.step - 1], abs=0.05)
        assert sum(step.phases.values()) == pytest.approx(step.seconds)
        assert sum(step.critical_path.values()) == pytest.approx(step.seconds)
        assert 0 <= step.idle["rank 0"] < step.seconds
    assert len(summary.samples) == 5
    [file] = (traced.folder / "traces").glob("kernels*")
    assert file.name == "kernels-step2-rank0.json.gz"
    kernels = json.loads(gzip.decompress(file.read_bytes()))
    assert any("aten::" in event["name"] for event in kernels["traceEvents"])
    assert all(value > 0.05 for value in traced.series("train/host_memory_gib"))


@pytest.mark.slow
def test_agents_have_lanes_and_sessions(tmp_path: Path) -> None:
    sessions = ["perf_tracer.session_tracer.enabled=true", "perf_tracer.session_tracer.flush_threshold=10"]
    played = agent_runs.run(tmp_path, "two_turns.py", *TRACED, *sessions)
    events = read_trace(played.folder / "traces/trace-0001.json")
    assert not problems(events)
    found = bars(events)
    assert found["agent processes", "agent"] == found["samples", "agent"] == found["samples", "sample"] == 32
    assert found["samples", "scored"] == found["samples", "trained"] == 32
    assert found["requests of agents", "request"] >= 64
    assert found["requests of agents", "decode"] >= 64
    lines = [json.loads(line) for line in (played.folder / "traces/sessions.jsonl").read_text().splitlines()]
    assert {(line["step"], line["prompt"], line["sample"]) for line in lines} == {
        (step, prompt, sample) for step in (1, 2) for prompt in range(4) for sample in range(4)
    }
    for line in lines:
        assert (line["phase"], line["status"], line["turns"], line["rows"]) == ("rollout", "ok", 2, 1)
        assert line["weights_version"] == line["step"] - 1
        assert line["agent_seconds"] > 0
        assert line["scored_began"] > line["agent_began"] > 1.7e9
        assert 2 <= line["tokens"] <= 12
        assert line["reward"] is not None


@pytest.mark.slow
def test_a_session_file_needs_no_trace(tmp_path: Path) -> None:
    more = ["perf_tracer.session_tracer.enabled=true", "total_train_steps=1"]
    played = agent_runs.run(tmp_path, "two_turns.py", *more)
    assert [file.name for file in (played.folder / "traces").iterdir()] == ["sessions.jsonl"]
    assert len((played.folder / "traces/sessions.jsonl").read_text().splitlines()) == 16


def test_a_profile_of_a_step_that_does_not_come_ends_with_the_run(tmp_path: Path) -> None:
    """A process that exits while it is profiled crashes."""
    played = play("gspo", tmp_path / "run", *TRACED, "perf_tracer.profile_steps=[3]", reward(tmp_path))
    assert not torch.autograd._profiler_enabled()
    assert [file.name for file in (played.folder / "traces").iterdir()] == ["trace-0001.json"]


def test_every_interval_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[int]] = []
    write = TraceFile.write

    def spy(self: TraceFile, events: list[trace.Event]) -> None:
        written.append([event[4]["step"] for event in events if event[1] == "step"])
        write(self, events)

    monkeypatch.setattr(TraceFile, "write", spy)
    more = ["total_train_steps=5", "perf_tracer.save_interval=2", reward(tmp_path)]
    play("gspo", tmp_path / "run", *TRACED, *more)
    assert written == [[1, 2], [3, 4], [5]]


@pytest.mark.slow
def test_ranks_in_processes_send_their_events(tmp_path: Path) -> None:
    """Of a tensor-parallel group, too, of which only the leader sends results."""
    profiling, requests = ProfilingSpec(folder=str(tmp_path), events=True), [request(0, 4)]
    trace.begin()
    try:
        two = spec(model_folder(tmp_path / "model"), devices=["cpu", "cpu"], tp_size=2, profiling=profiling)
        with Engine(two, "spawn") as engine:
            engine.begin_rollout(ROLLOUT)
            started = trace.now()
            outputs = engine.generate(requests)
            engine.end_rollout()
            engine.begin_kernel_profile()
            engine.train(train_rows(outputs, requests), _loss)
            engine.end_kernel_profile("step1")
            ended = trace.now()
            memory = engine.host_memory_gib()
            assert engine.workers.host_bytes() > 2 * 100 * 2**20
        found = {(event[0], event[1]) for event in trace.drain_events()}
        phases = outputs[0][0].phases
    finally:
        trace.end()
    assert [name for name, _ in phases] == ["queued", "prefill", "decode", "end"]
    times = [time for _, time in phases]
    assert started <= times[0] <= times[-1] <= ended
    for rank in range(2):
        assert {(f"rank {rank}/device", name) for name in ("prefill", "decode", "forward", "optimizer")} <= found
        assert {(f"rank {rank}/commands", name) for name in ("begin_rollout", "train")} <= found
        assert (tmp_path / f"kernels-step1-rank{rank}.json.gz").exists()
    assert memory > engine.info.memory_gib


def _loss(pack: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -pack.token_mean(logprobs), {}


def test_a_preempted_sample_says_so() -> None:
    decoder = make_decoder(n_blocks=9, block_size=4, max_prefill_tokens=20)
    trace.begin()
    try:
        for number in range(3):
            decoder.submit(decoder_request(number))
        outputs = []
        while decoder.has_work:
            outputs += decoder.step()
    finally:
        trace.end()
    assert decoder.stats.preemptions > 0
    by_length = sorted((list(output.phases) for output in outputs), key=len)
    assert [name for name, _ in by_length[0]] == ["queued", "prefill", "decode", "end"]
    assert "preempted" in [name for name, _ in by_length[-1]]
    for phases in by_length:
        assert [time for _, time in phases] == sorted(time for _, time in phases)
    decoder.submit(decoder_request(9))
    while decoder.has_work:
        for output in decoder.step():
            assert output.phases == ()


def test_snapshots_of_device_memory_need_a_device(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory_profiler: takes snapshots of CUDA memory, but the run is on the CPU"):
        play("gspo", tmp_path, "memory_profiler.profile_steps=[1]", f"actor.path={MODEL}")


@pytest.mark.gpu
def test_on_cuda_phases_are_times_of_the_device_and_memory_is_kept(tmp_path: Path) -> None:
    more = [reward(tmp_path), *TRACED, "engine.device=cuda", "engine.world_size=1", "actor.dtype=bfloat16"]
    more += ["memory_profiler.profile_steps=[2]", "perf_tracer.profile_steps=[1]"]
    played = play("gspo", tmp_path / "run", *more)
    events = read_trace(played.folder / "traces/trace-0001.json")
    assert not problems(events)
    found = bars(events)
    assert found["rank 0", "forward"] == found["rank 0", "backward"] >= 2
    assert found["rank 0", "optimizer"] >= 1
    assert found["rank 0", "decode"] >= 4
    for step in summarise(played.folder).steps:
        assert 0 < step.idle["rank 0"] < step.seconds
    files = {file.name for file in (played.folder / "traces").iterdir()}
    assert files == {"trace-0001.json", "kernels-step1-rank0.json.gz", "memory-step2-rank0.pickle"}
    kernels = json.loads(gzip.decompress((played.folder / "traces/kernels-step1-rank0.json.gz").read_bytes()))
    assert any(event.get("cat") == "kernel" for event in kernels["traceEvents"])


@pytest.mark.gpu
def test_a_device_that_is_full_leaves_a_snapshot(tmp_path: Path) -> None:
    profiling, requests = ProfilingSpec(folder=str(tmp_path), memory_entries=1000), [request(0, 4)]
    with Engine(spec(model_folder(tmp_path / "model"), devices=["cuda:0"], profiling=profiling), "spawn") as engine:
        outputs = rollout(engine, requests)
        with pytest.raises(EngineError, match="out of device memory"):
            engine.train(train_rows(outputs, requests), _too_large)
    assert (tmp_path / "memory-out-of-memory-1-rank0.pickle").stat().st_size > 0


def _too_large(pack: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.empty(2**44, dtype=torch.uint8, device=logprobs.device)
    return _loss(pack, logprobs)
