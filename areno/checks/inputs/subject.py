"""The run that is checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from areno.api.algorithms import Algorithm
from areno.checks.inputs.encoded_rows import EncodedRow, form_of, read_rows
from areno.checks.inputs.small_model import (
    folder_without_weights,
    have_same_weights,
    is_small,
    model_values,
    write_small_model,
)
from areno.config.datasets import DatasetConfig
from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.sources import source_key
from areno.data.loader import BatchLoader
from areno.data.row_schema import RowKind
from areno.data.sources import valid_sets
from areno.files.paths import existing_path, name_model_setting_in_errors
from areno.launch.compose import Composition
from areno.plan.folders import model_folder
from areno.plan.plan import TrainerPlan, plan_of_experiment
from areno.run.open_rows import open_loader
from areno.run.states import folder_fingerprint, rows_fingerprint

# Sections that do not change what is trained. A check uses their defaults.
_SIDE_SETTINGS = ("scheduler", "perf_tracer", "memory_profiler", "saver", "recover", "tune", "enable_offload")
_SIDE_SETTINGS += ("evaluator", "engine", "trial_name")
_OF_MODELS = ("offload", "dtype", "fp8_config", "init_from_scratch", "init_lora_from", "mb_spec")
_OF_ROLLOUT = ("kv_cache_dtype", "mem_fraction", "max_kv_tokens", "max_concurrent_rollouts", "dump_to_file")
_MODELS = ("actor", "ref", "critic", "teacher", "reward")


@dataclass(frozen=True)
class Options:
    """What the user allows the checks to do."""

    offline: bool = False  # judges and remote rewards are not asked
    n_calls: int = 9  # at most, of a judge
    device: str | None = None  # kind of device of the run, as in areno plan; None: those of this machine
    real_model: bool = False  # instead of a small random one
    most_rows: int = 20_000  # of each dataset, evenly chosen


@dataclass(frozen=True, eq=False)
class Dataset:
    """The rows of one source or validation set, and the loader that encodes them for the run."""

    key: str  # of the configuration section
    source: str  # its name among several, or ""
    section: DatasetConfig
    loader: BatchLoader[Any]

    @property
    def trains(self) -> bool:
        return self.key.startswith("train_dataset")


class Subject:
    """The run that is checked: the user's configuration, and the same run on a small random model on the CPU.

    `config` is what the user's command composes. `small_config` makes the configurations that checks run, in
    `folder`, a temporary folder.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        composition: Composition,
        folder: Path,
        options: Options,
        announce: Callable[[str], None] = lambda text: None,
    ):
        self.announce = announce  # called before something that costs, and while a check takes long
        self.doing = ""  # what a check that takes long is at
        self.algorithm, self._composition, self.folder, self.options = algorithm, composition, folder, options
        self.config: ExperimentConfig = composition.build(algorithm.config)
        self._models: dict[str, Path] = {}  # path in the settings -> local folder
        self._rows: dict[str, list[EncodedRow]] = {}  # key of a dataset -> its rows

    @cached_property
    def kind(self) -> RowKind:
        return self.algorithm.loop().kind

    @property
    def tokenizer(self) -> Any:
        return self.plan.tokenizer

    @cached_property
    def plan(self) -> TrainerPlan:
        """The plan of the run on the small model."""
        return plan_of_experiment(self.small_config(evaluates=True))

    @property
    def changed_turns(self) -> str:
        return self.config.train_dataset.changed_turns

    @cached_property
    def end_ids(self) -> set[int]:
        """The tokens at which the rollout ends a completion."""
        spec, own = self.plan.spec, self.tokenizer.eos_token_id
        return {*spec.eos_token_ids, *spec.turn_end_ids, *([] if own is None else [own])}

    @cached_property
    def context(self) -> int:
        """The context of the run's model, as its config.json has it."""
        return model_values(self.config.actor.path).get("max_position_embeddings") or self.plan.spec.context_len

    @cached_property
    def tokenizer_folder(self) -> Path:
        key = "tokenizer_path" if self.config.tokenizer_path else "actor.path"
        with name_model_setting_in_errors(key):
            return folder_without_weights(self.config.tokenizer_path or self.config.actor.path)

    @property
    def model_folder(self) -> Path:
        """The model that checks run in place of the actor: a whole model in fp32, which transformers loads too."""
        return self._model_of(self.config.actor.path, "actor.path")

    @property
    def has_own_model(self) -> bool:
        """Whether `model_folder` is the run's own model: it is small, or the user has asked for it."""
        return not self.model_folder.is_relative_to(self.folder)

    def small_config(self, changes: Mapping[str, Any] | None = None, *, evaluates: bool = False) -> ExperimentConfig:
        """Return the user's settings, but on `model_folder`, in fp32 on one CPU device, with files in `folder`.

        Args:
            changes: Dotted key -> value of settings that a check changes besides.
            evaluates: Keep the validation sets, which are left out otherwise.
        """
        data = copy.deepcopy(self._composition.data)
        for name in _SIDE_SETTINGS:
            data.pop(name, None)
        data |= {"engine": {"device": "cpu", "world_size": 1}, "stats_logger": {"console": "quiet"}}
        data |= {"cluster": {"fileroot": str(self.folder / "runs")}, "recover": {"mode": "off"}}
        data["recorder"] = {"max_gib": 0.0}
        data["tokenizer_path"] = str(self.tokenizer_folder)
        if not evaluates:
            data |= {"valid_dataset": None, **({"eval_gconfig": None} if "eval_gconfig" in data else {})}
        for name in _MODELS:
            if isinstance(section := data.get(name), dict):
                self._use_small_models(name, section)
        data["actor"]["dtype"] = "float32"
        for name in _OF_ROLLOUT:
            data.get("rollout", {}).pop(name, None)
        for key, value in (changes or {}).items():
            *sections, name = key.split(".")
            section = data
            for each in sections:
                section = section.setdefault(each, {})
            section[name] = value
        return replace(self._composition, data=data, problems=[], files=()).build(self.algorithm.config)

    def _use_small_models(self, name: str, section: dict[str, Any]) -> None:
        for setting in _OF_MODELS:
            section.pop(setting, None)
        if section.get("path"):
            section["path"] = str(self._model_of(section["path"], f"{name}.path"))
        if isinstance(models := section.get("models"), dict):
            section["models"] = {
                of: path and str(self._model_of(path, f"{name}.models.{of}")) for of, path in models.items()
            }
        if isinstance(judge := section.get("judge"), dict) and judge.get("path"):
            judge["path"] = str(self._model_of(judge["path"], f"{name}.judge.path"))

    def _model_of(self, path: str, key: str) -> Path:
        if path not in self._models:
            with name_model_setting_in_errors(key):
                if self.options.real_model:
                    self._models[path] = Path(model_folder(path, key))
                elif (folder := existing_path(path)) is not None and is_small(folder):
                    self._models[path] = folder
                else:
                    target = self.folder / "models" / str(len(self._models))
                    seed = self.config.seed + self._number_of_weights(path)
                    self._models[path] = write_small_model(path, target, seed)
        return self._models[path]

    def _number_of_weights(self, path: str) -> int:
        """Return the number of the first model that has the weights of a path, which may be that of a new model."""
        folder = existing_path(path)
        for number, other in enumerate(self._models):
            of_other = existing_path(other)
            if folder is not None and of_other is not None and have_same_weights(folder, of_other):
                return number
        return len(self._models)

    @cached_property
    def datasets(self) -> list[Dataset]:
        """The sources of training rows, and then the validation sets."""
        config, found = self.small_config(evaluates=True), list[Dataset]()
        sources: dict[str, DatasetConfig] = {"": config.train_dataset}
        if isinstance(config, PolicyExperimentConfig):
            sources = config.train_dataset.by_name()
        for name, source in sources.items():
            found.append(self._open(config, name, source, source_key(name) if name else "train_dataset"))
        for valid in valid_sets(config, None):
            found.append(self._open(config, valid.name, valid.config, valid.key))
        return found

    def _open(self, config: ExperimentConfig, name: str, section: DatasetConfig, key: str) -> Dataset:
        return Dataset(key, name, section, open_loader(config, self.kind, self.plan, section, None, key, name))

    @property
    def training_rows(self) -> list[Dataset]:
        return [dataset for dataset in self.datasets if dataset.trains]

    def rows_of(self, dataset: Dataset) -> list[EncodedRow]:
        """Return the rows of a dataset beside what the run makes of them. Of a large dataset, an even sample."""
        if dataset.key not in self._rows:
            self._rows[dataset.key] = read_rows(dataset.loader, dataset.key, self.options.most_rows)
        return self._rows[dataset.key]

    def sample_of(self, dataset: Dataset, most: int = 1000) -> list[EncodedRow]:
        """Return at most `most` rows: the first of each form of row, and others evenly."""
        rows = self.rows_of(dataset)
        firsts = {form_of(row.given): row for row in reversed(rows)}.values()
        even = rows[:: max(1, -(-len(rows) // max(1, most - len(firsts))))]
        found = {row.index: row for row in (*list(firsts)[:most], *even)}
        return [found[index] for index in sorted(found)]

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of local models and of the training rows, by the settings that name them."""
        config, found = self.config, dict[str, str]()
        if (folder := existing_path(config.actor.path)) is not None:
            found["actor.path"] = folder_fingerprint(folder)
            tokenizer = existing_path(config.tokenizer_path) if config.tokenizer_path else folder
            found |= {} if tokenizer is None else {"tokenizer_path": folder_fingerprint(tokenizer)}
        return found | {dataset.key: rows_fingerprint(dataset.loader.rows) for dataset in self.training_rows}
