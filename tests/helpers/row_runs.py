"""Configurations and data of the SFT and DPO quickstarts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from areno.config.datasets import DatasetConfig
from areno.config.experiments import ProcessRewardActorConfig
from areno.config.models import ModelConfig, OptimizerConfig
from areno.config.run import ClusterConfig, SaverConfig
from areno.data.sources import load_rows
from areno.files.paths import find_file
from areno.recipes.dpo import DPOActorConfig, DPOConfig
from areno.recipes.kto import KTOActorConfig, KTOConfig
from areno.recipes.prm import ProcessRewardConfig
from areno.recipes.rw import RewardModelActorConfig, RewardModelConfig
from areno.recipes.sft import SFTConfig
from areno.tracking.reader import RunReader

MODEL = str(find_file("examples/quickstart/model"))


PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b - 10)}
    for a in range(17, 77, 10)
    for b in (5, 27)
]


DEMONSTRATIONS = [{"prompt": f"{a}+9=", "response": str(a + 9) * (a % 3 + 1)} for a in range(11, 21)]


def settings(tmp_path, actor, **more):
    return {
        "experiment_name": "rows",
        "actor": actor,
        "cluster": ClusterConfig(fileroot=str(tmp_path)),
        "saver": SaverConfig(freq_steps=None),
        **more,
    }


def optimizer(lr=1e-4):
    return OptimizerConfig(lr=lr, lr_scheduler_type="constant", warmup_steps_proportion=0.0)


def config_of(
    kind: type, actor_kind: type, defaults: dict[str, Any], tmp_path: Path, *, batch_size=4, actor=None, **more
) -> Any:
    how = {"path": MODEL, "gradient_checkpointing": False, "optimizer": optimizer(), **defaults, **(actor or {})}
    data = DatasetConfig(batch_size=batch_size, max_length=64)
    return kind(**settings(tmp_path, actor_kind(**how), train_dataset=data, **more))


dpo_config = partial(config_of, DPOConfig, DPOActorConfig, {})
kto_config = partial(config_of, KTOConfig, KTOActorConfig, {})
reward_model_config = partial(config_of, RewardModelConfig, RewardModelActorConfig, {"optimizer": optimizer(1e-3)})
process_reward_config = partial(
    config_of, ProcessRewardConfig, ProcessRewardActorConfig, {"optimizer": optimizer(1e-3), "step_separator": "?"}
)


LABELLED = [
    {"prompt": row["prompt"], "response": row["rejected" if number % 3 else "chosen"], "label": number % 3 == 0}
    for number, row in enumerate(PAIRS)
]


RATED = [
    {"prompt": "27+35=", "answers": ["52", "62", "72"], "ratings": [1, 3, 2.5]},
    {"prompt": "18+44=", "answers": ["62", "52"], "ratings": [1, 0]},
    {"prompt": "59+27=", "answers": ["86", "76", "8", "86666"]},
]

STEP_LABELLED = [
    {"prompt": f"{a}+{b}=", "completions": [f"{a % 10}+{b}={a % 10 + b}", str(a + b - 10 * (a % 20 > 9))], "labels": y}
    for a, b, y in [(17, 5, [1, 1]), (27, 6, [True, False]), (38, 7, [0, 0]), (48, 5, [0.9, 0.3]), (59, 4, [0, 1])]
] + [{"prompt": "19+9=", "completions": ["28"], "labels": [True]}]


def scalars(run_dir: Path) -> dict[str, list[float]]:
    return {name: series.values for name, series in RunReader(run_dir).metrics().items()}


def hf_logprobs(folder, prompt: str, answer: str) -> list[float]:
    """Of the answer's tokens and the end of the sequence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = tokenizer.encode(prompt, add_special_tokens=False)
    tokens = [*start, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    with torch.no_grad():
        table = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return [table[t - 1, tokens[t]].item() for t in range(len(start), len(tokens))]


def quickstart_pairs(split: str) -> list[dict[str, Any]]:
    """The pairs of the quickstart: a correct sum, and the sum without carry."""
    loader = "examples/quickstart/dataset_loader.py:preferences"
    return list(load_rows(DatasetConfig(loader=loader, split=split), "dpo"))


def ranking(folder) -> float:
    """Share of the held-out problems of the quickstart whose correct sum is more likely than the sum without carry."""
    from areno.api.trainer import Trainer

    with Trainer(1, str(folder)) as trainer:
        trainer.init()
        tokenizer, sums, problems = trainer.get_tokenizer(), {}, quickstart_pairs("test")
        for name in ("chosen", "rejected"):
            rows = [pair["prompt"] + pair[name] for pair in problems]
            starts = [len(tokenizer.encode(pair["prompt"], add_special_tokens=False)) for pair in problems]
            tokens = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in rows]
            scored = trainer.score_logprobs("actor", tokens, 1.0)
            sums[name] = [sum(values[start:]) for start, values in zip(starts, scored, strict=True)]
    pairs = list(zip(sums["chosen"], sums["rejected"], strict=True))
    return sum(one > other for one, other in pairs) / len(pairs)


def sft_config(tmp_path, mb_spec, batch_size=10, **more):
    actor = ModelConfig(path=MODEL, gradient_checkpointing=False, optimizer=optimizer(), mb_spec=mb_spec)
    data = DatasetConfig(batch_size=batch_size, max_length=64)
    return SFTConfig(**settings(tmp_path, actor, train_dataset=data, **more))
