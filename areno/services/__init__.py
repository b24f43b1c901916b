"""The experiment trackers that can record a run, which areno calls services.

They are Weights & Biases, Trackio, SwanLab, MLflow, and trackers of other packages. Each file of this folder declares
one service with its settings, checks and calls. For example, the subclass of `Service` in `wandb.py` is the service
`wandb`, and its settings are the section `stats_logger.wandb`. A new file needs no registration elsewhere. Another
package declares a service by an entry point `NAME = "module:Class"` in the group "areno.trackers". The settings of such
a service are the entry `stats_logger.trackers.NAME`.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from areno.services.service import Service

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "areno.trackers"

SERVICES: dict[str, type[Service]] = {
    found.name: service
    for found in pkgutil.iter_modules(__path__)
    for service in vars(import_module(f"{__name__}.{found.name}")).values()
    if isinstance(service, type) and issubclass(service, Service) and service is not Service
}
"""The services of this folder, by file name."""


@cache
def installed_services() -> dict[str, EntryPoint]:
    """Return the services of other packages, from the metadata of all installed packages."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def installed_service(name: str) -> type[Service]:
    """Import a service of another package. Raises KeyError if there is none, TypeError if it is no Service."""
    service = installed_services()[name].load()
    if not (isinstance(service, type) and issubclass(service, Service)):
        raise TypeError(f"{installed_services()[name].value} is no subclass of areno.services.service.Service")
    return service
