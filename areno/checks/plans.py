"""Whether the run fits on its devices, and how long a step takes: the forecast of `areno plan`."""

from __future__ import annotations

from collections.abc import Iterator

from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Subject
from areno.errors import ArenoError
from areno.plan import hardware
from areno.plan.forecast import Forecast, forecast
from areno.plan.settings_that_fit import command_line_of, fitting_changes

_SHOWN = 3


def fits(subject: Subject) -> Iterator[Finding]:
    """Forecast the memory and the time of a step."""
    found = _forecast(subject)
    where = f"{found.n_devices} x {found.hardware.title}" if found.n_devices > 1 else found.hardware.title
    memory = f"peak {found.peak_memory_bytes / 2**30:.1f} of {found.hardware.usable_bytes / 2**30:.1f} GiB"
    phases = [f"{phase.name}: {phase.seconds:.2f} s" for phase in found.phases]
    if found.fits:
        yield green("fits", f"a step takes about {found.step_seconds:.1f} s on {where}; {memory}", phases)
        return

    def predict(config: object, n_devices: int) -> Forecast:
        return forecast(config, found.hardware, n_devices)  # type: ignore[arg-type]

    ways = [f"with {command_line_of(way.changes)} it fits" for way in fitting_changes(found, predict)[:_SHOWN]]
    yield red("fits", f"it does not fit on {where}: {'; '.join(found.problems)}", ways)


def rollout_seconds(subject: Subject) -> tuple[float | None, str]:
    """Return the forecast time of a step's rollout, and the device. None if there is no forecast."""
    try:
        found = _forecast(subject)
    except ArenoError:  # the check of the plan says why
        return None, ""
    seconds = sum(phase.seconds for phase in found.phases if phase.decodes)
    return (seconds if found.fits else None), found.hardware.title


def _forecast(subject: Subject) -> Forecast:
    name = subject.options.device
    here = [hardware.hardware_of(name)] if name else hardware.local_devices()
    n_devices = subject.config.engine.world_size or (1 if name else len(here))
    return forecast(subject.config, here[0], n_devices)
