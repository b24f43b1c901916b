"""An evaluation decodes more samples at the same time than training, with the same decoder and the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areno.api import get_algorithm
from areno.config.layout import Layout
from areno.config.models import OptimizerConfig
from areno.cost.kv_cache import WantedCache
from areno.engine.decoder.decoder import Decoder
from areno.launch.compose import load
from areno.models.registry import load_config
from areno.plan.phases import decoder_concurrency
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import DecoderConcurrency, RolloutSpec
from areno.tracking.reader import RunReader
from areno.trainers.loop import PolicyEvaluation
from tests.helpers.policy_runs import MODEL

SMALL = ["engine.device=cpu", "train_dataset.batch_size=2", "gconfig.n_samples=4"]
GREEDY = ["valid_dataset.batch_size=null", "eval_gconfig.n_samples=1"]


def loaded(*words: str) -> Any:
    return load(get_algorithm("grpo").config, "quickstart", [*SMALL, *GREEDY, *words])


def evaluated(folder: Any, *words: str) -> tuple[dict[str, float], int, int, int]:
    """The metrics of an evaluation, its decode steps, its tokens, and the most samples of the batch."""
    with PolicyEvaluation(loaded(f"cluster.fileroot={folder}", *words), run_dir=folder) as evaluation:
        metrics = evaluation.evaluate()
        (stats,) = evaluation.setup.trainer.engine.rollout_stats()
    return metrics, stats.decode_steps, stats.generated_tokens, evaluation.setup.evaluated_at_once or 8


@pytest.mark.slow
def test_an_evaluation_takes_fewer_steps_for_the_same_answers(tmp_path):
    words = ["valid_dataset.max_rows=60", "+eval_gconfig.temperature=1.0", "eval_gconfig.greedy=false"]
    alone, many_steps, n_tokens, at_once = evaluated(tmp_path / "8", *words, "rollout.max_concurrent_rollouts=8")
    assert at_once == 8
    together, few_steps, same_tokens, at_once = evaluated(tmp_path / "60", *words)
    assert at_once == 60
    assert together == pytest.approx(alone)
    assert same_tokens == n_tokens
    assert few_steps * 4 < many_steps


def test_training_keeps_its_number_and_the_decoder(tmp_path, monkeypatch):
    made, running = [], []
    start, step = Decoder.__init__, Decoder.step

    def counted(self: Decoder, model: Any, vocabulary: Any, spec: Any, rollout: RolloutSpec, **options: Any) -> None:
        made.append(rollout.n_slots)
        start(self, model, vocabulary, spec, rollout, **options)

    def watched(self: Decoder) -> Any:
        outputs = step(self)
        running.append(self.stats.running)
        return outputs

    monkeypatch.setattr(Decoder, "__init__", counted)
    monkeypatch.setattr(Decoder, "step", watched)
    words = ["valid_dataset.max_rows=40", "evaluator.eval_before_train=true", "evaluator.freq_steps=1"]
    algorithm = get_algorithm("grpo")
    config = loaded(*words, "total_train_steps=2", "engine.workers=inline", "reward.workers=1")
    with algorithm.trainer(config, tmp_path / "run") as trainer:
        trainer.fit()
    assert made == [40]
    assert max(running) > 8
    assert len(RunReader(tmp_path / "run").series("eval/accuracy").values) == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], DecoderConcurrency(usual=8, most=1024)),
        (["valid_dataset.batch_size=30"], DecoderConcurrency(usual=8, most=30)),
        (["valid_dataset.max_rows=30", "eval_gconfig.n_samples=3"], DecoderConcurrency(usual=8, most=90)),
        (["valid_dataset.max_rows=8"], None),
        (["rollout.max_concurrent_rollouts=4"], None),
    ],
)
def test_the_number_comes_from_the_settings(words, expected):
    assert decoder_concurrency(loaded(*words), load_config(str(MODEL)), Layout(2, 1)) == expected


def test_the_cache_grows_by_a_tenth_of_the_free_memory():
    config = load_config(str(MODEL))
    actor = RoleSpec(path=str(MODEL), head="lm", optimizer=OptimizerConfig(lr=1e-3))
    engine = EngineSpec(actor=actor, devices=["cpu"])
    spec = RolloutSpec(max_running=8, max_len=64, shared=DecoderConcurrency(usual=8, most=80))

    def wanted(spec: RolloutSpec, engine: EngineSpec = engine) -> WantedCache:
        return WantedCache.for_rollout(config, 4, engine, spec, block_size=32, route_bytes=0)

    found, few = wanted(spec), wanted(replace(spec, shared=None))
    assert few.needed == few.blocks == found.needed < found.blocks
    assert found.blocks == wanted(replace(spec, max_running=80, shared=None)).blocks
    share = found.needed + 5
    for free, n_blocks in ((10 * share * found.block_bytes, share), (2**40, found.blocks), (0, found.needed)):
        assert found.fitting_blocks(free, 10**6) == n_blocks
    assert found.fitting_blocks(2**40, 3) == 3
    assert wanted(replace(spec, keeps_cache=False)).more_fraction == spec.decoder.mem_fraction
    assert wanted(spec, engine.without_optimizer()).more_fraction == spec.decoder.mem_fraction
    set_by_hand = replace(spec, decoder=replace(spec.decoder, max_kv_tokens=10**6))
    assert wanted(set_by_hand).blocks == found.needed  # evaluations enlarge no cache whose size is given
    deterministic = replace(engine, engine=replace(engine.engine, deterministic=True))
    assert wanted(spec, deterministic).fitting_blocks(2**40, 10**6) == found.needed
