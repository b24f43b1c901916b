"""The longest row that a run can train on, and the host memory that it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from areno.api.algorithms import get_algorithm
from areno.cli.__main__ import main
from areno.cost.footprint import LongestRow
from areno.launch.compose import load
from areno.models.known_shapes import published_config
from areno.plan.forecast import forecast
from areno.plan.hardware import hardware_of


def longest_row(*settings: str, device: str = "h100-80gb") -> LongestRow | None:
    words = ["actor.path=Qwen/Qwen3-8B", "actor.use_lora=true", "train_dataset.batch_size=32", "valid_dataset=null"]
    words += ["gconfig.n_samples=8", "gconfig.max_new_tokens=256", "actor.gradient_checkpointing=true"]
    config = load(get_algorithm("gspo").config, "quickstart", [*words, *settings])
    return forecast(config, hardware_of(device), 1, 256, 256).longest_row


def test_long_rows_have_the_inputs_of_layers_in_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of 128k tokens of the 8B shape with adapters fits 80 GB. Its layers' inputs alone would not."""
    (tmp_path / "config.json").write_text(
        json.dumps({**(published_config("Qwen/Qwen3-8B") or {}), "max_position_embeddings": 2**17})
    )
    settings = [f"actor.path={tmp_path}", "actor.use_lora=true", "gconfig.max_new_tokens=131000"]
    settings += ["train_dataset.max_length=72", "train_dataset.batch_size=1", "gconfig.n_samples=2"]
    lengths = ["--prompt-tokens", "72", "--answer-tokens", "131000"]
    words = ["plan", "--device", "h100-80gb", *lengths, "python", "-m", "areno.recipes.gspo", "--config-name=gsm8k"]
    assert main([*words, *settings]) == 0
    told = " ".join(capsys.readouterr().out.split())
    found = re.search(r"It also takes (\d+) GiB of host memory for inputs of layers\.", told)
    assert found is not None
    inputs, of_layer = float(found[1]), (4 + 2) * 4096 * 131072 / 2**30
    assert 24 * of_layer < inputs < 32 * of_layer
    row = re.search(r"longest row to train on: ([\d,]+) tokens, or ([\d,]+) with ([\d.]+) GiB of host memory", told)
    assert row is not None
    on_device, longest = (int(row[n].replace(",", "")) for n in (1, 2))
    assert on_device < 2**15 < 2**17 < longest
    assert float(row[3]) == pytest.approx(35 * of_layer * longest / 2**17, rel=0.01)
    assert main(["plan", "--json", *words[1:], *settings, "rollout.drop_rollout_state=true"]) == 0
    dropped = json.loads(capsys.readouterr().out)
    assert dropped["longest_row"]["tokens"] == longest
    assert main(["plan", "--json", *words[1:], *settings]) == 0
    freed = json.loads(capsys.readouterr().out)
    assert freed["phases"][-1]["terms"] == dropped["phases"][-1]["terms"]
    # Samples in progress keep the cache.
    assert main([*words, *settings, "rollout.max_head_offpolicyness=1"]) == 1
    assert "It does not fit: train actor needs" in capsys.readouterr().out


def test_the_longest_row_is_longer_without_a_kv_cache() -> None:
    more = "rollout.max_head_offpolicyness=1", "rollout.max_head_offpolicyness=0", "rollout.drop_rollout_state=true"
    beside, freed, dropped = map(longest_row, more)
    assert beside is not None
    assert freed is not None
    assert dropped is not None
    assert beside.tokens < freed.tokens == dropped.tokens
    assert beside.tokens_on_device == freed.tokens_on_device < dropped.tokens_on_device
    assert longest_row(device="cpu") is None
    assert longest_row("actor.gradient_checkpointing=false") is None
