"""Steps of a training loop on played devices: how long they take beside what the devices need."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from areno.api.trainers.policy_only import PolicyOnlyTrainer
from areno.bench.arguments import Settings
from areno.bench.driver.played import PlayedGroup
from areno.bench.texts import Texts
from areno.bench.timing import repeat_name, tell
from areno.bench.work import Work
from areno.config.run import EngineConfig
from areno.engine import engine as engine_module
from areno.engine.spec import EngineSpec
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.tracking.reader import RunReader
from areno.types import GenerationRequest

_ANSWER = " The answer is \\boxed{42}."
_COPIES = (1, 2)


def run_driver(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """For so many copies of the model, each with the samples of `settings.work`: medians of time/*, in seconds.

    devices: what the played devices need of a step. driver: the rest. Every step of a run but the first counts.
    """
    del random_init
    return {f"{n} copies": _steps(settings, folder, n) for n in settings.copies}


def _steps(settings: Settings, folder: str, n_copies: int) -> dict[str, float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    work, n_steps = settings.work, settings.repeats + 1
    n_prompts = len(work.prompt_lens) * n_copies
    words = Texts(tokenizer)
    texts = [text for copy in range(n_copies * n_steps) for text in words.of(work, "prompt", copy)]
    play = _Completions(tokenizer, words, work)
    groups: list[PlayedGroup] = []

    def start(spec: EngineSpec, mode: str) -> PlayedGroup:
        groups.append(PlayedGroup(spec, play))
        return groups[-1]

    with tempfile.TemporaryDirectory() as run_dir, mock.patch.object(engine_module, "start_workers", start):
        config = load(GSPOConfig, "quickstart", [
            f"actor.path={folder}", f"tokenizer_path={settings.tokenizer}", f"engine.world_size={n_copies}",
            "engine.device=cpu", f"train_dataset.batch_size={n_prompts}", f"train_dataset.max_length={4 * max(work.prompt_lens)}",
            f"gconfig.n_samples={work.n_samples}", f"gconfig.max_new_tokens={max(work.new_lens)}", f"total_train_steps={n_steps}",
            "reward.fn=math", "valid_dataset=null", "actor.init_from_scratch=true", "saver.freq_steps=null", "recover.mode=off", *settings.overrides,
        ])
        rows = [{"prompt": text, "solutions": str(41 + index % 2)} for index, text in enumerate(texts)]
        with PolicyOnlyTrainer(config, run_dir=run_dir, train_dataset=rows) as trainer:
            trainer.fit()
        reader = RunReader(Path(run_dir))
        names = [name for name in reader.metrics() if name.startswith("time/")]
        return {name: reader.series(name).values[1:] for name in names} | {"idle": groups[0].idle_s[1:], "cpu": groups[0].cpu_s[1:]}


class _Completions:
    """Texts that end with an answer, as tokens of the lengths of a work. The same for each call."""

    def __init__(self, tokenizer: Any, words: Texts, work: Work):
        self._lens, self._answer = work.new_lens, tokenizer.encode(_ANSWER) + [tokenizer.eos_token_id]
        longest = work.with_new_at_most(max(work.new_lens))
        self._tokens = [tokenizer.encode(text) for text in words.of(longest, "completion", 0)]

    def __call__(self, request: GenerationRequest, sample: int) -> list[int]:
        n = self._lens[request.request_id % len(self._lens)] - len(self._answer)
        start = sample % 7
        return (self._tokens[request.request_id % len(self._tokens)] * 8)[start : start + max(n, 0)] + self._answer
