"""Steps of a training loop on played devices: how long these wait for the driver."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from areno.bench.arguments import Settings
from areno.bench.driver.played import PlayedGroup
from areno.bench.texts import Texts
from areno.bench.timing import tell
from areno.bench.work import Work
from areno.engine import engine as engine_module
from areno.engine.spec import EngineSpec
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.tracking.reader import RunReader
from areno.trainers.policy_only import PolicyOnlyTrainer
from areno.types import GenerationRequest

_ANSWER = " The answer is \\boxed{42}."
_SHIFTS = 7  # samples of a prompt begin at other words


def run_driver(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """By the number of copies, each with the samples of `settings.work`: medians over the steps, in seconds.

    idle: the devices wait for the driver. outside: of rollout and training. cpu: what the driver's main thread computes
    in the whole step. The rest are the time/* of the run. random_init: played devices have no weights.
    """
    del random_init
    found = {}
    for n_copies in settings.copies:
        name = f"{n_copies} copies, {n_copies * settings.work.n_rows} samples"
        found[name] = _medians(settings, folder, n_copies)
        tell(f"{name}: devices wait {found[name]['idle']:.3f} s")
    return found


def driver_page(found: dict[str, dict[str, float]]) -> str:
    """A line for each number of copies."""
    names = next(iter(found.values()))
    lines = ["seconds of a step".ljust(26) + "".join(name.removeprefix("time/").rjust(11) for name in names)]
    lines += [title.ljust(26) + "".join(f"{row[name]:11.4f}" for name in names) for title, row in found.items()]
    return "\n".join(lines)


def _medians(settings: Settings, folder: str, n_copies: int) -> dict[str, float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    work, n_steps, words = settings.work, settings.repeats + 1, Texts(tokenizer)
    texts = [text for number in range(n_copies * n_steps) for text in words.of(work, "prompt", number)]
    rows = [{"prompt": text, "solutions": str(41 + index % 2)} for index, text in enumerate(texts)]
    completions, groups = Completions(tokenizer, words, work), []

    def start(spec: EngineSpec, mode: str) -> PlayedGroup:
        groups.append(PlayedGroup(spec, completions))
        return groups[-1]

    overrides = [
        f"actor.path={folder}", "actor.init_from_scratch=true", f"tokenizer_path={settings.tokenizer}",
        "engine.device=cpu", f"engine.world_size={n_copies}", f"total_train_steps={n_steps}", "reward.fn=math",
        f"train_dataset.batch_size={n_copies * len(work.prompt_lens)}", "valid_dataset=null", "saver.freq_steps=null",
        f"train_dataset.max_length={4 * max(work.prompt_lens)}", f"gconfig.n_samples={work.n_samples}",
        f"gconfig.max_new_tokens={max(work.new_lens)}", "recover.mode=off",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as run_dir, mock.patch.object(engine_module, "start_workers", start):
        config = load(GSPOConfig, "quickstart", overrides)
        with PolicyOnlyTrainer(config, run_dir=run_dir, train_dataset=rows) as trainer:
            trainer.fit()
        reader = RunReader(Path(run_dir))
        series = {name: reader.series(name).values for name in sorted(reader.metrics()) if name.startswith("time/")}
    phases = (series[f"time/{name}"] for name in ("step", "rollout", "train"))
    outside = [step - rollout - train for step, rollout, train in zip(*phases, strict=True)]
    series = {"idle": groups[0].idle_s, "outside": outside, "cpu": groups[0].cpu_s, **series}
    return {name: statistics.median(values[1:]) for name, values in series.items()}  # the first step warms up


class Completions:
    """Words that end with an answer, as tokens of the lengths of a work. They are made before any step."""

    def __init__(self, tokenizer: Any, words: Texts, work: Work):
        answer = [*tokenizer.encode(_ANSWER), tokenizer.eos_token_id]
        texts = words.of(Work.fixed(len(work.new_lens), 1, 2 * max(work.new_lens), 1), "completion", 0)
        self._tokens = [
            [tokens[shift : shift + max(1, new_len - len(answer))] + answer for shift in range(_SHIFTS)]
            for tokens, new_len in zip(map(tokenizer.encode, texts), work.new_lens, strict=True)
        ]

    def __call__(self, request: GenerationRequest, sample: int) -> list[int]:
        of_prompt = self._tokens[request.request_id % len(self._tokens)]
        return of_prompt[sample % _SHIFTS]
