"""The forecast of a run from its configuration: memory, time, and why it does not fit. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from areno.config.experiments import ExperimentConfig
from areno.cost.footprint import Footprint, LongestRow, footprint_of
from areno.errors import ConfigError
from areno.models.known_shapes import resolve_model_config
from areno.plan.hardware import Hardware
from areno.plan.phases import Phase, SequenceLengths, rows_of_step
from areno.plan.plan import check_rows_per_replica, door_problems, engine_spec, fp8_unit_problems
from areno.plan.records import record_bytes
from areno.plan.roles import actor_role, experiment_roles
from areno.plan.step_forecast import StepForecast
from areno.specs.shared_models import roles_to_load


@dataclass(frozen=True, kw_only=True)
class Forecast:
    config: ExperimentConfig
    hardware: Hardware
    n_devices: int
    footprint: Footprint
    lengths: SequenceLengths
    phases: list[Phase]
    problems: list[str] = field(default_factory=list)  # why the run cannot start or runs out of memory
    longest_row: LongestRow | None = None  # to train the actor on; None on a CPU and without recompute

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def peak_memory_bytes(self) -> int:
        return max(phase.peak_memory_bytes for phase in self.phases)

    @property
    def n_rows(self) -> int:
        return rows_of_step(self.config)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that offloaded models and inputs of layers take, for all devices together."""
        return self.footprint.offloaded_bytes * self.n_devices + self.host_bytes_of_inputs

    @property
    def host_bytes_of_inputs(self) -> int:
        """The part of `host_bytes` for the inputs of layers. Each trained model keeps its own."""
        return sum(phase.host_bytes for phase in self.phases) * self.n_devices

    @property
    def record_bytes(self) -> int:
        """Bytes that the flight recorder writes for a step. 0 if it is off."""
        return record_bytes(self.config, self.footprint.models[0].config, self.lengths, self.n_rows)

    @property
    def step_seconds(self) -> float:
        """The time of a step. Evaluation, checkpoints, and rewards that outlast the rollout are not included."""
        return sum(phase.seconds for phase in self.phases)


def forecast(
    config: ExperimentConfig,
    hardware: Hardware,
    n_devices: int,
    prompt_tokens: int | None = None,
    answer_tokens: int | None = None,
) -> Forecast:
    """Compute the memory and the time of each phase of a step. `answer_tokens` is a mean."""
    model = resolve_model_config(config.actor.path, "actor.path", config.head)
    devices = ["cuda:0" if hardware.is_cuda else "cpu"] * n_devices
    if problems := [*door_problems(config, model, devices), *fp8_unit_problems(config, hardware)]:
        raise ConfigError(problems)
    itemsize = 4 if config.actor.dtype == "float32" or not hardware.is_cuda else 2
    spec = engine_spec(config, actor_role(config, config.actor.path, model), devices)
    # `set_values` checks nothing, so settings that contradict each other raise a ConfigError here.
    _, engine = replace(config.actor), replace(config.engine, world_size=n_devices)
    spec = replace(spec, engine=engine)
    check_rows_per_replica(config, spec)
    roles = {"actor": spec.actor, **experiment_roles(config, lambda path, key: path)}
    roles = {name: replace(role, path=role.path or config.actor.path) for name, role in roles.items()}
    shapes = {name: resolve_model_config(it.path, it.key, it.head, it.needs_head) for name, it in roles.items()}
    apart = roles_to_load(roles, spec.actor)
    footprint = footprint_of(spec, {name: shapes[name] for name in apart}, apart, itemsize, hardware.is_cuda)
    lengths = SequenceLengths.from_settings(config, model.max_position_embeddings, prompt_tokens, answer_tokens)
    step = StepForecast(config, hardware, spec, footprint, lengths, roles)
    return Forecast(
        config=config,
        hardware=hardware,
        n_devices=n_devices,
        footprint=footprint,
        lengths=lengths,
        phases=step.phases(),
        problems=step.problems(),
        longest_row=step.longest_row(),
    )
