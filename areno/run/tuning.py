"""Chooses settings of memory and speed by trials before a run, as the section `tune` of the settings asks for.

`areno/plan/tuning_candidates.py` lists candidates from a forecast, and `areno/run/tuning_trials.py` tries the best
ones. The chosen settings are written to tuned.yaml in the folder of the run. A resumed run reads them from there, and
is not tuned again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.cost.footprint import gib_text
from areno.errors import ConfigError, EngineError, Problem
from areno.files.durable import atomic_write_text
from areno.plan.hardware import Hardware, local_cpu, local_devices
from areno.plan.plan import plan_of_experiment
from areno.plan.settings_that_fit import command_line_of, set_values
from areno.plan.tuning_candidates import (
    AT_ONCE,
    BATCH,
    CHOSEN,
    Candidate,
    candidates,
    given_candidate_settings,
    nothing_fits_error,
    shortlist,
)
from areno.run.tuning_trials import MeasuredTrial, Trials
from areno.schema.fields import changed_settings
from areno.schema.values import value_at
from areno.specs.engine import EngineSpec
from areno.tracking.run_folder import TUNED, has_description, run_folder_path, settings_of

logger = logging.getLogger("areno")


def tune(config: ExperimentConfig, given: Collection[str], reuse: str = "") -> str | None:
    """If tune.enabled is true, choose settings of a new run that the user has not set, and set them in `config`.

    `given`: dotted names of settings that the user has set. `reuse`: the task that tuned.yaml extends, if any.
    Returns the content of tuned.yaml, or None if nothing was chosen. Raises EngineError if each trial has failed.
    """
    if not isinstance(config, PolicyExperimentConfig) or not config.tune.enabled:
        return None
    began = time.monotonic()
    chosen = choose_settings(config, given_candidate_settings(given))
    if not chosen:
        logger.info("tune: no setting is left to choose, so that nothing is tried")
        return None
    if BATCH in chosen:
        text = "tune: %s=%d is chosen, since it was not given; unlike the other settings, it changes what is learned"
        logger.info(text, BATCH, chosen[BATCH])
    set_values(config, chosen)
    logger.info("tune: in %.0f s, chosen: %s", time.monotonic() - began, command_line_of(chosen))
    return _tuned_yaml(chosen, reuse)


def _tuned_yaml(chosen: Mapping[str, Any], base: str) -> str:
    nested = OmegaConf.create({"defaults": [base or "recipe", "_self_"]})
    for key, value in chosen.items():
        OmegaConf.update(nested, key, value)
    lines = [
        "# Settings of memory and speed that tune.enabled=true has chosen. To start another run with them, add",
        f"#   {command_line_of(chosen)}",
        f"# or name the folder of this file: --config-dir=FOLDER --config-name={Path(TUNED).stem}",
    ]
    return "\n".join([*lines, OmegaConf.to_yaml(nested)])


def restore_tuned_settings(config: ExperimentConfig, folder: Path, given: Collection[str] = ()) -> None:
    """Set the settings that were tuned when the run first started, except those that the user sets now.

    They are set even if tune.enabled is now false, because the run continues with the settings that it began with.
    """
    if not isinstance(config, PolicyExperimentConfig):  # another algorithm, with which the run cannot be resumed
        return
    before, kept = settings_of(folder, TUNED), given_candidate_settings(given)
    found = {key: value_at(before, key) for key in CHOSEN if key not in kept}
    set_values(config, {key: value for key, value in found.items() if value is not None})


def tune_for_script(config: ExperimentConfig, run_dir: str | Path | None) -> str | None:
    """Tune a run that a script starts. If the script resumes a run, restore its tuned settings.

    Settings that differ from their defaults count as set by the user. Does nothing if a command has tuned the run.
    """
    if run_dir is not None and has_description(Path(run_dir)):
        return None
    given = [key for key, _ in changed_settings(config)]
    folder = run_folder_path(config, config.trial_name) if run_dir is None and config.trial_name else run_dir
    if folder is not None and (Path(folder) / TUNED).exists():
        restore_tuned_settings(config, Path(folder), given)
        return None
    return tune(config, given)


def write_tuned_settings(folder: Path, text: str | None) -> None:
    if text is None:
        return
    try:
        atomic_write_text(folder / TUNED, text)
    except OSError as error:
        raise ConfigError(Problem("cluster.fileroot", "cannot write to {}: {}", folder, error.strerror)) from error


def choose_settings(config: PolicyExperimentConfig, given: Collection[str]) -> dict[str, Any]:
    """Try the best candidates for a run, and return the settings of the fastest one that fits."""
    plan = plan_of_experiment(config)
    hardware, n_devices = _hardware(plan.spec), len(plan.spec.devices)
    found = candidates(config, hardware, n_devices, given)
    if not found[0].settings:
        return {}
    most = int(config.tune.mem_frac * hardware.memory)
    fitting: list[tuple[Candidate, MeasuredTrial]] = []
    least: int | None = None  # peak of a candidate that is too large
    error: EngineError | None = None
    with Trials(plan, probes_rollout=AT_ONCE not in given) as trials:
        smallest = min(found, key=lambda candidate: candidate.peak_memory_bytes)
        for number, candidate in enumerate([*(tried := shortlist(found)), smallest]):
            is_last_resort = number == len(tried)
            if number and (not trials.fits_time_limit(candidate) or (is_last_resort and fitting)):
                break
            try:
                measured = trials.run(candidate)
            except EngineError as failure:
                error = failure
                logger.warning("tune: %s: discarded, %s", candidate, str(failure).partition("\n")[0])
                continue
            is_too_large = f"; discarded, more than {gib_text(most)} GiB" if measured.peak > most else ""
            logger.info("tune: %s: %s%s", candidate, _describe_trial(candidate, measured), is_too_large)
            if is_too_large:
                least = min(measured.peak, least or measured.peak)
            else:
                fitting.append((candidate, measured))
    if fitting:
        best, _ = min(fitting, key=lambda result: (-result[0].n_rows, result[0].seconds_per_sample(result[1].step_s)))
        return dict(best.settings)
    if least is None and error is not None:
        raise error
    raise nothing_fits_error(config, hardware, n_devices, least)


def _describe_trial(candidate: Candidate, measured: MeasuredTrial) -> str:
    return (
        f"{candidate.usual.step_seconds:.2f} s a step predicted, {measured.step_s:.2f} s measured; "
        f"{gib_text(candidate.peak_memory_bytes)} GiB predicted, {gib_text(measured.peak)} GiB measured"
    )


def _hardware(spec: EngineSpec) -> Hardware:
    """Return the device of each worker of an engine. Workers on a CPU share its memory equally."""
    if spec.devices[0].startswith("cuda"):
        here = local_devices()[0]
        if not here.is_cuda:
            text = "needs the command nvidia-smi, which is not there or finds no GPU; set it to false"
            raise ConfigError(Problem("tune.enabled", text))
        return here
    cpu = local_cpu()
    return replace(cpu, memory=cpu.memory // spec.world_size)
