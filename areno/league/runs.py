"""The runs of the league: which algorithms take part, under which conditions, and the command of each run."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.league.results import LeagueRun, Result

STAGES = ("rates", "countdown", "arithmetic", "staleness")
UPDATES = 4  # of each batch: with one, ratios are 1, and many of the algorithms are the same
_SLOW = "its rollout decodes without CUDA graphs and would take the devices' time; dppo_tv and dppo_kl take part"
NOT_IN_IT = {
    "gdpo": "the reward of countdown has one part, so it would be GRPO with advantages whitened once more",
    "dppo_topk_tv": _SLOW,
    "dppo_topk_kl": _SLOW,
}
"""Variant -> why it has no runs. Variants with a teacher have none either: no base model understands a solution."""
_OF_FILE = "conf/variant/"  # with which settings in the file of a variant begin in a result


@dataclass(frozen=True)
class Contender:
    """An algorithm: its recipe and settings.

    `rate_of` names the algorithm whose learning rate it takes, if it chooses none. `seeds_from` is added to its seeds.
    `n_samples` is the number of samples of a prompt, and None that of the task.
    """

    recipe: str = "grpo"
    settings: tuple[str, ...] = ()
    rate_of: str | None = None
    seeds_from: int = 0
    n_samples: int | None = None


@dataclass(frozen=True)
class Bed:
    """The conditions of all runs of a size. `tokens` are the sampled tokens of a run of each stage.

    `reached` is the mean reward for which tokens and seconds are counted. `batch` is (prompts, samples of a prompt).
    """

    rates: tuple[str, ...]
    tokens: Mapping[str, int]
    most_steps: int
    batch: tuple[int, int]
    problems: int
    reached: float
    settings: tuple[str, ...] = ()


BEDS = {
    "gpu": Bed(
        rates=("1e-5", "3e-5", "1e-4"),
        tokens={"rates": 2_000_000, "countdown": 4_000_000, "arithmetic": 2_000_000, "staleness": 4_000_000},
        most_steps=100,
        batch=(64, 16),
        problems=500,
        reached=0.25,
        # The device is shared by runs that know nothing of each other.
        settings=("actor.mb_spec.max_tokens_per_mb=32768",),
    ),
    "cpu": Bed(
        rates=("1e-4", "2e-4", "5e-4"),
        tokens={"rates": 100_000, "countdown": 200_000, "arithmetic": 200_000, "staleness": 200_000},
        most_steps=60,
        batch=(32, 8),
        problems=100,
        reached=0.2,
    ),
}


def contenders(size: str) -> dict[str, Contender]:
    """Return the algorithms of the league by name: recipes, the variants in conf/variant/, and two controls.

    Algorithms with a critic need the size gpu, because the cut for CPUs has no task for them.
    """
    from areno.files.small_yaml import load_yaml
    from areno.launch.yaml_files import variant_files

    actor = f"actor.ppo_n_minibatches={UPDATES}"
    critic = (actor, f"critic.ppo_n_minibatches={UPDATES}", "critic.warmup_steps=5")
    found = {
        "grpo": Contender(settings=(actor,)),
        "grpo_again": Contender(settings=(actor,), seeds_from=1000),
        "random_reward": Contender(
            settings=(actor, "reward.fn=examples/countdown/reward.py:random_reward"), rate_of="grpo"
        ),
        # Tells what the reduction of many variants does from what else they do.
        "grpo_token_mean": Contender(settings=(actor, "actor.reduction=token_mean")),
        "gspo": Contender("gspo", (actor,)),
        "ppo": Contender("ppo", critic),
    }
    for name, file in variant_files().items():
        sections = load_yaml(file)
        if name in NOT_IN_IT or "teacher" in sections:
            continue
        n_samples = sections.get("gconfig", {}).get("n_samples")
        if "critic" in sections:
            found[name] = Contender("ppo", (f"variant={name}", *critic), n_samples=n_samples)
        else:
            found[name] = Contender(settings=(f"variant={name}", actor), n_samples=n_samples)
    return {name: one for name, one in found.items() if size == "gpu" or one.recipe != "ppo"}


def keys_of_algorithms(size: str) -> dict[str, list[str]]:
    """Return key -> the algorithms that set it. A setting for all runs with such a key would make them others."""
    found: dict[str, list[str]] = {}
    for name, one in contenders(size).items():
        keys = list(as_values([*one.settings, *settings_of_variant(name)]))
        if one.n_samples is not None:
            keys.append("train_dataset.batch_size")
        for key in dict.fromkeys(keys):
            found.setdefault(key, []).append(name)
    return found


@functools.cache
def settings_of_variant(name: str) -> list[str]:
    """Return the settings in the file of a variant. [] for other algorithms."""
    from areno.files.small_yaml import load_yaml
    from areno.launch.yaml_files import variant_files

    def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in section.items():
            text = [f"{prefix}{key}={json.dumps(value)}"]
            yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else text

    files = variant_files()
    return list(leaves(load_yaml(files[name]))) if name in files else []


def task_of(stage: str) -> str:
    return "arithmetic" if stage == "arithmetic" else "countdown"


def digest(checkpoint: Path) -> str:
    """Return a short digest of the weights of a checkpoint."""
    found = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


class LeagueRuns:
    """The commands of the runs of a size, and their folders in `output`."""

    def __init__(self, size: str, output: Path):
        self.size, self.output = size, output
        self.bed, self.contenders = BEDS[size], contenders(size)

    def folder(self, run: LeagueRun) -> Path:
        name = f"{run.name}_base" if run.stage == "base" else run.file.removesuffix(".json").replace("/", "-")
        return self.output / name

    def base_of(self, task: str) -> Path:
        return self.folder(LeagueRun("base", task, 1)) / "checkpoints" / "latest"

    def command(self, run: LeagueRun) -> tuple[str, list[str]]:
        """Return (recipe, arguments) of a run."""
        suffix = "" if self.size == "gpu" else f"_{self.size}"
        place = [f"cluster.fileroot={_quoted(self.output.parent)}", f"experiment_name={_quoted(self.output.name)}"]
        place += [f"trial_name={self.folder(run).name}"]
        # A run that was interrupted begins again, and only its result is kept.
        place += ["recover.mode=off", "recorder.max_gib=0", "stats_logger.console=lines"]
        place += [f"engine.device={'cuda' if self.size == 'gpu' else 'cpu'}", *self.bed.settings]
        if run.stage == "base":
            # Parts of a league on several machines need the same base model.
            return "sft", [f"--config-name={run.name}_base{suffix}", *place, "seed=1", "engine.deterministic=true"]
        recipe, task = self.contenders[run.name].recipe, task_of(run.stage)
        config_name = f"{task}_ppo" if recipe == "ppo" else f"{task}{suffix}"
        place += [f"actor.path={_quoted(self.base_of(task))}", "reward.workers=2"]
        if recipe == "ppo":
            place += [setting.replace("actor.", "critic.") for setting in self.bed.settings]
        return recipe, [f"--config-name={config_name}", *place, *self.own_settings(run)]

    def own_settings(self, run: LeagueRun) -> list[str]:
        """Return the settings of a run that decide what it learns."""
        one, (prompts, n_samples) = self.contenders[run.name], self.bed.batch
        if one.n_samples is not None:
            prompts, n_samples = prompts * n_samples // one.n_samples, one.n_samples
        return [
            *one.settings,
            f"actor.optimizer.lr={run.rate}",
            f"seed={one.seeds_from + run.seed}",
            f"total_train_n_tokens={self.bed.tokens[run.stage]}",
            f"total_train_steps={self.bed.most_steps}",
            f"train_dataset.batch_size={prompts}",
            f"evaluator.eval_before_train={str(run.stage != 'rates' and run.name == 'grpo').lower()}",
            *self._valid_settings(run.stage),
            *_stale_settings(run.age, prompts, n_samples),
        ]

    def told_settings(self, run: LeagueRun) -> list[str]:
        """Return the settings of a run for its result. With those in the file of its variant, which may change."""
        file = f"{_OF_FILE}{run.name}.yaml: "
        return [*self.own_settings(run), *(file + setting for setting in settings_of_variant(run.name))]

    def given_settings(self, results: Iterable[Result]) -> list[str]:
        """Return the settings that a league was given besides its own, by its results."""
        found: dict[str, str] = {}
        for one in results:
            own = as_values(self._known_settings(one))
            for key, value in as_values(one.settings).items():
                if own.get(key) != value and not key.startswith(_OF_FILE):
                    found.setdefault(key, value)
        return [f"{key}={value}" for key, value in found.items()]

    def other_setting(
        self, results: Iterable[Result], given: Sequence[str], makes_runs: bool = True
    ) -> tuple[str, str, str] | None:
        """Return (file, its setting, the same setting here) of the first result that has not the settings `given`.

        The file of a variant must be as it is now if the league makes runs. Otherwise, only the results of one
        algorithm must agree.
        """
        files: dict[str, list[str]] = {}
        for one in results:
            of_file = [setting for setting in one.settings if setting.startswith(_OF_FILE)]
            now = self.told_settings(one.run) if makes_runs and one.run.name in self.contenders else of_file
            files.setdefault(one.run.name, [setting for setting in now if setting.startswith(_OF_FILE)])
            there = as_values(one.settings)
            here = as_values([*self._known_settings(one), *given, *files[one.run.name]])
            for key in sorted({*there, *here}):
                if there.get(key) != here.get(key):
                    texts = [f"{key}={of[key]}" if key in of else f"{key} as in the task" for of in (there, here)]
                    return one.run.file, texts[0], texts[1]
        return None

    def _known_settings(self, result: Result) -> list[str]:
        """Return the league's own settings of a run. Those of a removed variant are what its result says."""
        is_known = result.run.name in self.contenders and result.run.stage in STAGES
        return self.own_settings(result.run) if is_known else result.settings

    def _valid_settings(self, stage: str) -> list[str]:
        n = self.bed.problems
        if stage == "arithmetic":
            return [f"valid_dataset.sets.{name}.dataset_kwargs.count={n}" for name in ("seen", "deeper")]
        found = [f"valid_dataset.dataset_kwargs.count={n}"]
        if stage == "rates":
            loader = "examples/countdown/dataset_loader.py:validation"
            found += [f"valid_dataset.loader={loader}", "eval_gconfig.n_samples=4"]
        return found


def as_values(settings: Iterable[str]) -> dict[str, str]:
    """Return key -> value of settings. The last one of a key holds."""
    return {key.lstrip("+"): value for key, _, value in (setting.partition("=") for setting in settings)}


def _stale_settings(age: int, prompts: int, n_samples: int) -> list[str]:
    """Return settings with which a step samples the next `age` batches together with its own."""
    at_once = n_samples * prompts * (1 + age)
    found = [f"rollout.max_concurrent_rollouts={at_once}"]  # evaluations would otherwise go by the free memory
    if age:
        found += [f"rollout.max_head_offpolicyness={age}", f"rollout.prompts_ahead={prompts * age}"]
        found.append(f"rollout.max_kv_tokens={200 * at_once}")
    return found


def _quoted(path: Any) -> str:
    return '"' + str(path).replace('"', '\\"') + '"'
