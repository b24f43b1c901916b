"""engine.deterministic: two runs of the same configuration are equal bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.bench import __main__
from areno.bench.work import model_folder as shape_folder
from areno.config.models import MicroBatchSpec
from areno.config.rollout import DecoderConfig
from areno.engine.decoder_maker import DecoderMaker
from areno.engine.deterministic import begin_deterministic, end_deterministic
from areno.engine.dispatcher import Dispatcher
from areno.engine.engine import Engine
from areno.engine.processes.spawned import SpawnedGroup
from areno.engine.processes.workers import InlineGroup
from areno.engine.reports import RolloutStats
from areno.engine.train.recomputation import RecomputationPolicy
from areno.errors import ConfigError, EngineError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, TrainSequence
from tests.helpers.policy_runs import MODEL, Played, classifier, play
from tests.helpers.tiny_engine import ROLLOUT, model_folder, request, rollout, spec, train_rows

# Fewer samples at once than a step has, of different lengths: what runs together changes all the time.
SETTINGS = [
    "engine.deterministic=true",
    "recover.mode=auto",
    "actor.init_from_scratch=true",
    "train_dataset.batch_size=8",
    "gconfig.max_new_tokens=16",
    "rollout.max_concurrent_rollouts=8",
    "actor.ppo_n_minibatches=2",
    "actor.mb_spec.max_tokens_per_mb=200",
]


def fingerprint(run: Played) -> dict[str, Any]:
    """What a run has left: the bits of its last model, masters and moments by file, and its metrics but times."""
    folder = run.folder
    bits = [*folder.glob("checkpoints/step-*/*.safetensors"), *folder.glob("state/step-*/engine/*.bin")]
    found = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in bits}
    assert {"actor.master.0.bin", "actor.exp_avg.0.bin"} <= {file.name for file in bits}
    assert any(file.suffix == ".safetensors" for file in bits)
    clock = re.compile(r"time|tokens_per_second|memory")
    return found | {name: run.series(name) for name in run.names() if not clock.search(name)}


def tokens_of(run: Played) -> list[list[list[int]]]:
    """Of each row of each update."""
    return [[list(map(int, row.tokens)) for row in rows if row.tokens is not None] for rows in run.rows]


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is slow to look at what the workers have done, each time by another time."""
    clock = random.Random()
    for group in (InlineGroup, SpawnedGroup):
        own = group.poll

        def poll(self: Any, timeout: float, own: Any = own) -> list[GenerationOutput]:
            time.sleep(clock.uniform(0.0, 0.01))
            return own(self, timeout)

        monkeypatch.setattr(group, "poll", poll)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_runs_are_equal(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SETTINGS, "total_train_steps=2", f"engine.world_size={world_size}"]
    settings += ["reward.fn=null", f"reward.path={classifier(tmp_path / 'reward')}"]
    first = play("gspo", tmp_path / "first", *settings)
    late(monkeypatch)
    second = play("gspo", tmp_path / "second", *settings)
    assert fingerprint(first) == fingerprint(second)
    assert tokens_of(first) == tokens_of(second)
    if world_size == 1:
        assert fingerprint(first) != fingerprint(play("gspo", tmp_path / "other", *settings, "seed=2"))


# What decides when requests begin -------------------------------------------------------------------------------------


def end_of(number: int, sample: int = 0) -> GenerationOutput:
    return GenerationOutput(
        request_id=number, sample=sample, tokens=[1], logprobs=[0.0], versions=[0], finish_reason="stop"
    )


@pytest.mark.parametrize("fixed", [True, False])
def test_no_copy_takes_what_another_would_draw(fixed: bool) -> None:
    """Of 6 requests, 2 copies with 1 place each; the second one is done with its first before the other."""
    sent: dict[int, list[int]] = {0: [], 1: []}
    out = Dispatcher(2, fixed)
    out.begin(1)
    out.add([request(number) for number in range(6)], {number: 100 - number for number in range(6)})
    for done in ([], [1], [3], [5]):
        list(out.count_received([end_of(number) for number in done]))
        for rank, batch in out.take_due_requests():
            sent[rank] += [each.request_id for each in batch]
    assert (sent == {0: [0, 3, 4], 1: [1, 2, 5]}) == fixed
    # Copy 0 has not begun what it was sent, and copy 1 is idle.
    stats = [RolloutStats(waiting=2), RolloutStats()]
    assert not fixed or out.choose_to_rebalance(stats) is None


def test_all_requests_are_submitted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    submit = Engine.submit
    monkeypatch.setattr(
        Engine, "submit", lambda self, asked: submit(self, (own := list(asked))) or sizes.append(len(own))
    )
    for deterministic, first in ((True, 5), (False, 2)):
        with Engine(spec(model_folder(tmp_path), deterministic=deterministic), "inline") as engine:
            engine.begin_rollout(ROLLOUT)
            engine.generate([request(number) for number in range(5)], at_once=2)
        assert sizes[0] == first
        sizes.clear()


def test_the_kv_cache_may_not_follow_from_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderMaker, "free_bytes", lambda self: 2**19)
    folder = model_folder(tmp_path)
    small = replace(ROLLOUT, decoder=DecoderConfig(max_kv_tokens=512))
    with Engine(spec(folder, deterministic=True), "inline") as engine:
        with pytest.raises(EngineError, match=r"which samples run together would come .*max_kv_tokens=\d+"):
            engine.begin_rollout(ROLLOUT)
        engine.begin_rollout(small)
    with Engine(spec(folder, deterministic=True, exact=True), "inline") as engine:
        engine.begin_rollout(ROLLOUT)


def test_the_named_size_of_the_kv_cache_holds_the_longest_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 2 * 2 * 32 * 2 * 16 * 4  # k and v, layers, tokens, heads, head size, fp32
    monkeypatch.setattr(DecoderMaker, "free_bytes", lambda self: 32 * block_bytes)
    long = replace(ROLLOUT, max_len=512, decoder=DecoderConfig(mem_fraction=0.5))
    with Engine(spec(model_folder(tmp_path), deterministic=True), "inline") as engine:
        with pytest.raises(EngineError, match=r"room for 512 of \d+ tokens.*max_kv_tokens=512"):
            engine.begin_rollout(long)
        engine.begin_rollout(replace(long, decoder=DecoderConfig(max_kv_tokens=512)))
        [output] = engine.generate([request(0, length=500, max_new_tokens=12, ignore_eos=True)])[0]
        assert len(output.tokens) == 12


# What is asked of torch -----------------------------------------------------------------------------------------------


def unordered_loss(pack: Any, logprobs: torch.Tensor) -> Any:
    place = torch.zeros(1, dtype=torch.int64)
    return logprobs.sum() + torch.zeros(1).put_(place, torch.ones(1)).sum(), {}


def test_an_operation_without_a_fixed_order_is_named(tmp_path: Path) -> None:
    with Engine(spec(model_folder(tmp_path), deterministic=True), "inline") as engine:
        rows = train_rows(rollout(engine))
        with pytest.raises(EngineError, match=r"engine\.deterministic is true, but .* no deterministic form of put_ "):
            engine.train(rows, unordered_loss)
        assert torch.are_deterministic_algorithms_enabled()
        rollout(engine)
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with Engine(spec(model_folder(tmp_path)), "inline") as engine:
        engine.train(rows, unordered_loss)


def test_two_engines_of_one_process(tmp_path: Path) -> None:
    settings = spec(model_folder(tmp_path), deterministic=True)
    first, second = Engine(settings, "inline"), Engine(settings, "inline")
    assert not torch.utils.deterministic.fill_uninitialized_memory
    for engine, is_on in ((first, True), (second, False)):
        engine.close()
        engine.close()
        assert torch.are_deterministic_algorithms_enabled() == is_on
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="does not exist"):
        Engine(spec(tmp_path / "nothing", deterministic=True), "inline")
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_environment_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(EngineError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0' .* expected one of :4096:8, :16:8"):
        begin_deterministic("cuda:0", 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with monkeypatch.context() as patch:
        patch.setattr("areno.engine.deterministic.find_spec", lambda name: None)
        with pytest.raises(EngineError, match=r"engine\.deterministic needs triton on CUDA"):
            begin_deterministic("cuda:0", 1)
    monkeypatch.setattr("areno.engine.deterministic.find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(EngineError, match=r"has used CUDA already.* set engine\.workers=spawn"):
        begin_deterministic("cuda:0", 1)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    begin_deterministic("cuda:0", 1)
    assert "NCCL_ALGO" not in os.environ
    begin_deterministic("cuda:1", 2)
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    end_deterministic()
    end_deterministic()


def test_agents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.deterministic: is true, but agents ask for samples when"):
        play("gspo", tmp_path, *SETTINGS, "agent.fn=examples/tictactoe/agent.py")


@pytest.mark.slow
def test_the_benchmark_tells_its_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[bool, bool]] = []
    start = Engine.__init__

    def note(self: Engine, spec: Any, *how: Any) -> None:
        begun.append((spec.engine.exact, spec.engine.deterministic))
        start(self, spec, *how)

    monkeypatch.setattr(Engine, "__init__", note)
    small = "--device cpu --prompts 2 --samples 3 --prompt-len 6 --new-tokens 5 --repeats 1 --json"
    command = f"step --shape {model_folder(tmp_path)} {small} --exact --deterministic --against plain"
    assert __main__.main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert begun == [(True, True), (False, False)]
    assert found["settings"]["deterministic"]
    assert found["areno"]["logp_abs_diff_max"] == 0.0 < found["plain"]["logp_abs_diff_max"]
    assert found["ratio"]["plain"]["step"] == found["areno"]["step_tok_s"] / found["plain"]["step_tok_s"]


# On CUDA --------------------------------------------------------------------------------------------------------------


def shape_of_a_model(folder: Path, shape: str, n_layers: int) -> Path:
    """A model of so many layers of a shape, with the quickstart's tokenizer and no weights.

    About each sixteenth token of random weights ends a completion, so that these have different lengths.
    """
    shape_folder(shape, folder)
    config = json.loads((folder / "config.json").read_text())
    changes = {"num_hidden_layers": n_layers, "eos_token_id": [1]}
    (folder / "config.json").write_text(json.dumps(config | changes))
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


BIG = [
    "actor.optimizer.lr=1e-4",
    "gconfig.temperature=1.0",
    "gconfig.n_samples=8",
    "gconfig.max_new_tokens=100",
    "train_dataset.batch_size=16",
    "rollout.max_concurrent_rollouts=64",
    "actor.mb_spec.max_tokens_per_mb=4096",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "shape", "n_layers", "n_steps", "settings"),
    [
        # The same test as below on a CPU, so that a fault of the test itself shows here.
        pytest.param("cpu", "tiny", 2, 2, ["train_dataset.batch_size=4", "gconfig.max_new_tokens=12"], id="cpu"),
        pytest.param("cuda", "qwen3-0.6b", 4, 20, [], id="cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "qwen3.5-4b", 4, 4, [], id="cuda, recurrent states", marks=pytest.mark.gpu),
        *(
            pytest.param("cuda", "qwen3-0.6b", 4, 5, settings, id=f"cuda, {name}", marks=pytest.mark.gpu)
            for name, settings in {
                "preempted": ["rollout.max_kv_tokens=4096"],
                "exact": ["engine.exact=true"],
                "8 bits": ["actor.optimizer.type=adam_8bit"],
            }.items()
        ),
    ],
)
def test_a_model_of_real_sizes(
    device: str,
    shape: str,
    n_layers: int,
    n_steps: int,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA in bf16, with the kernels of attention and products that real runs have."""
    model = shape_of_a_model(tmp_path / "model", shape, n_layers)
    reward = tmp_path / "reward.py"  # completions of random weights are no text, but their tokens differ
    reward.write_text("def reward_fn(record):\n    return sum(record.tokens) % 7\n", encoding="utf-8")
    settings = [
        *SETTINGS,
        *BIG,
        f"actor.path={model}",
        f"total_train_steps={n_steps}",
        f"engine.device={device}",
        "engine.workers=spawn",
        f"reward.fn={reward}",
        *settings,
    ]
    first = play("gspo", tmp_path / "first", *settings)
    late(monkeypatch)
    second = play("gspo", tmp_path / "second", *settings)
    assert min(first.series("train/grad_norm")) > 0
    assert fingerprint(first) == fingerprint(second)


@pytest.mark.parametrize(
    ("device", "shape", "n_layers"),
    [
        pytest.param("cpu", "tiny", 2, id="cpu"),
        pytest.param("cuda:0", "qwen3-0.6b", 4, id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_what_memory_lets_be_kept_changes_no_bit(
    device: str, shape: str, n_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of how many layers the forward pass is kept for the backward pass follows from free memory."""
    path, _ = shape_folder(shape, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": n_layers}))
    dtype = "float32" if device == "cpu" else "bfloat16"
    settings = spec(path, [device], dtype=dtype, gradient_checkpointing=True)
    rows = [
        TrainSequence(
            prompt_mask=[True] * 5 + [False] * n,
            tokens=[7 * n + i for i in range(5 + n)],
            logprobs=[0.0] * 5 + [-5.0] * n,
            advantages=[0.0] * 5 + [float(n % 3 - 1)] * n,
        )
        for n in range(10, 60)
    ]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the first product with a fixed order looks at it
    begin_deterministic(device, 1)
    found = []
    try:
        for n_kept in (0, 1, n_layers):
            monkeypatch.setattr(RecomputationPolicy, "n_kept_layers", lambda self, n_tokens, n_kept=n_kept: n_kept)
            with Engine(settings, "inline") as engine:
                stats = engine.train(rows, grpo_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=700)))
                engine.save(str(tmp_path / f"kept-{n_kept}"))
            weights = (tmp_path / f"kept-{n_kept}" / "model.safetensors").read_bytes()
            found.append((stats["grad_norm"], stats["loss"], hashlib.sha256(weights).hexdigest()))
    finally:
        end_deterministic()
    assert found[0] == found[1] == found[2]
