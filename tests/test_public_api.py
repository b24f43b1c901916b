"""The public surface is a list, and every name on it can be had."""

from __future__ import annotations

import subprocess
import sys

import areno

PUBLIC = {
    "Areno", "ArenoConfig", "DPOTrainer", "ModelRole", "PPOTrainer", "PolicyOnlyTrainer", "SFTTrainer",
    "SamplingParams", "TrainSequence", "Trainer",
}  # fmt: skip


def test_the_list_is_what_we_promise() -> None:
    assert set(areno.__all__) == PUBLIC


def test_every_name_can_be_imported_and_is_documented() -> None:
    for name in areno.__all__:
        assert getattr(areno, name).__doc__


def test_other_names_are_an_attribute_error() -> None:
    assert not hasattr(areno, "Trianer")


def test_import_is_light() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'datasets', 'hydra', 'omegaconf'}"
    code = f"import sys, areno; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
