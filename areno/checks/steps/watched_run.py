"""Two steps of the run that is checked, and everything that its updates saw, made and changed.

The loop is the one that trains: only a few methods of its objects are wrapped, in this process, on one CPU device.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.checks.inputs.varied_reward import stand_in_reward
from areno.checks.steps.agent_episodes import Episodes, recorded_episodes
from areno.checks.steps.transformers_model import TransformersModel
from areno.config.models import MicroBatchSpec
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.engine.train.micro_batches import divide_steps
from areno.engine.train.training_rows import read_training_rows
from areno.loss_fns.adv_estimators import GDPO
from areno.loss_fns.data_pack import DataPack
from areno.specs.update import UpdateSpec
from areno.tracking.tracker import Tracker
from areno.trainers.kto import KTOTrainer
from areno.types import GenerationRequest, ScoredSample, TrainSequence

Tensors = dict[str, Tensor]

_IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # weights of a step are written and read at once


def reward_parts(config: Any) -> dict[str, float]:
    """Return the parts of the stand-in reward and their weights. Only an estimator that reads parts has any."""
    estimator = config.actor.chosen_adv_estimator
    return dict(estimator.weights or {"first": 1.0, "second": 1.0}) if isinstance(estimator, GDPO) else {}


@dataclass
class LossRow:
    """One row as the loss function saw it: arrays of the length of the row."""

    number: int  # of the optimizer step among those of the call, from 0
    tokens: np.ndarray
    trained: np.ndarray  # bool
    outputs: np.ndarray  # log-probabilities, or values
    slopes: np.ndarray  # derivative of the loss of the step with respect to `outputs`
    old_logprobs: np.ndarray | None


@dataclass
class Update:
    """One call that trains a role. It takes one optimizer step, unless a probe asks for more."""

    role: str
    step: int  # of the run, from 1
    rows: list[TrainSequence]
    given: list[TrainSequence]  # before the call, which sets old_logprobs
    loss_fn: Callable[..., Any]
    how: UpdateSpec
    before: Tensors
    stats: dict[str, float] = field(default_factory=dict)
    gradient: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    n_steps: int = 0
    n_micro_batches: int = 0
    seen: list[LossRow] = field(default_factory=list)
    own_gradient: list[Tensor] = field(default_factory=list)  # of the parameters of areno's model


@dataclass
class Probe:
    """The loss and the gradient of rows with the last weights, without an update."""

    loss: float
    gradient: Tensors
    stats: dict[str, float]
    rows: list[TrainSequence]
    seen: list[LossRow]
    n_micro_batches: int = 1
    own_gradient: list[Tensor] = field(default_factory=list)


@dataclass
class WatchedRun:
    """What happened in the steps of a run. Roles have a `TransformersModel` of their shape."""

    loop: Any
    config: Any
    models: dict[str, TransformersModel] = field(default_factory=dict)
    frozen: dict[str, Tensors] = field(default_factory=dict)  # weights of roles that are not trained
    updates: list[Update] = field(default_factory=list)
    samples: dict[int, list[ScoredSample]] = field(default_factory=dict)  # by step
    episodes: Episodes = field(default_factory=Episodes)  # of agents
    seeds: dict[int, list[int]] = field(default_factory=dict)  # of the requests of each step, without agents
    points: list[tuple[Any, ...]] = field(default_factory=list)  # of KTO: what each reference point was made of

    def of(self, role: str = "actor") -> list[Update]:
        return [update for update in self.updates if update.role == role]

    def has_equal_samples(self, step: int) -> bool:
        """Whether all samples of each prompt are equal, as a sure model may draw them, so that they train nothing."""
        groups: dict[int, set[tuple[int, ...]]] = {}
        samples = self.samples.get(step, [])
        for sample in samples:
            groups.setdefault(sample.group, set()).add(tuple(sample.sequence.resp_tokens))
        return len(samples) > len(groups) and all(len(distinct) == 1 for distinct in groups.values())

    @property
    def engine(self) -> Any:
        return self.loop.setup.trainer.engine

    @property
    def _worker(self) -> Any:
        return self.engine.workers.worker

    def holds(self, role: str) -> bool:
        return role in self._worker.roles

    def start(self, role: str = "actor") -> Tensors:
        return self.of(role)[0].before

    # -- watching ----------------------------------------------------------------------------------------------------

    def saved(self, role: str) -> Tensors:
        """Return the weights of a role, as transformers reads them from a checkpoint."""
        with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as folder:
            self._worker.save(folder, role)
            return self._model_of(role, Path(folder)).read(Path(folder))

    def saved_gradient(self, role: str) -> Tensors:
        """Return the gradient under the names of the weights: it is written as a checkpoint in their place."""
        trained = self._trained_parameters(role)
        kept = [parameter.detach().clone() for parameter in trained]
        with torch.no_grad():
            for parameter in trained:
                parameter.copy_(parameter.grad)
            try:
                return self.saved(role)
            finally:
                for parameter, values in zip(trained, kept, strict=True):
                    parameter.copy_(values)

    def _trained_parameters(self, role: str) -> list[Any]:
        model = self._worker.roles[role].backend.model
        return [parameter for parameter in model.parameters() if parameter.grad is not None]

    def _model_of(self, role: str, folder: Path) -> TransformersModel:
        if role not in self.models:
            spec = self._worker.roles[role].spec
            is_adapted = (folder / "adapter_config.json").is_file()
            self.models[role] = TransformersModel(
                Path(spec.path) if is_adapted else folder, spec.head, folder if is_adapted else None
            )
        return self.models[role]

    @contextmanager
    def watching(self, kept: list[Update] | None = None, *, apply: bool = True, full: bool = True) -> Iterator[None]:
        """Record each update inside of a `with` block. Without `apply`, no weight is changed.

        Without `full`, weights and gradients are not recorded.
        """
        engine, kept = self.engine, self.updates if kept is None else kept
        train = engine.train

        def watched(
            rows: Sequence[TrainSequence],
            loss_fn: Any,
            update: UpdateSpec | None = None,
            role: str = "actor",
            *args: Any,
            **more: Any,
        ) -> dict[str, float]:
            assert update is not None
            given = [copy.copy(row) for row in rows]
            found = Update(role, self.loop.run.step, list(rows), given, loss_fn, update, {})
            if apply and full:
                found.before = self.saved(role)
            with self._watched_optimizer(found, apply, full):
                found.stats = train(rows, self._watched_loss(found), update, role, *args, **more)
            if apply and full:
                found.after = self.saved(role)
            kept.append(found)
            return found.stats

        engine.train = watched
        try:
            yield
        finally:
            del engine.train

    @contextmanager
    def _watched_optimizer(self, found: Update, apply: bool, keeps_gradient: bool = True) -> Iterator[None]:
        optimizer = self._worker.roles[found.role].backend.optimizer
        step = optimizer.step

        def watched(norm: float) -> None:
            if keeps_gradient:
                found.gradient = self.saved_gradient(found.role)
            found.own_gradient = [tensor.grad.clone() for tensor in self._trained_parameters(found.role)]
            found.n_steps += 1
            if apply:
                step(norm)

        optimizer.step = watched
        try:
            yield
        finally:
            del optimizer.step

    def _watched_loss(self, found: Update) -> Callable[..., Any]:
        def watched(pack: DataPack, outputs: Tensor) -> Any:
            loss, stats = found.loss_fn(pack, outputs)
            [slopes] = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
            found.seen += _loss_rows(found.n_steps, pack, outputs, slopes)
            found.n_micro_batches += 1
            return loss, stats

        return watched

    # -- probes ------------------------------------------------------------------------------------------------------

    def probe(
        self,
        update: Update,
        rows: Sequence[TrainSequence] | None = None,
        *,
        loss_fn: Any = None,
        mini_bs: int | None = None,
        shares_prefixes: bool = False,
        n_ranks: int = 1,
        n_minibatches: int = 1,
        keeps_gradient: bool = True,
    ) -> Probe:
        """Compute the loss and the gradient of an update's rows again, with the weights as they are now.

        With several `n_minibatches`, the weights are updated after each.
        """
        rows = [copy.copy(row) for row in (update.rows if rows is None else rows)]
        spec = MicroBatchSpec(mini_bs=len(rows) if mini_bs is None else mini_bs)
        how = replace(update.how, mb_spec=spec, gradient_accumulation_steps=None, n_minibatches=n_minibatches)
        engine, role, kept = self.engine, update.role, list[Update]()
        loss_fn = update.loss_fn if loss_fn is None else loss_fn
        rule = engine._train_sharing[role]
        engine._train_sharing[role] = replace(rule, when="on" if shares_prefixes else "off")
        try:
            if n_ranks > 1:
                return self._probe_ranks(update, rows, loss_fn, how, n_ranks)
            with self.watching(kept, apply=n_minibatches > 1, full=keeps_gradient):
                engine.train(rows, loss_fn, how, role)
        finally:
            engine._train_sharing[role] = rule
        [found] = kept
        return Probe(
            found.stats["loss"],
            found.gradient,
            found.stats,
            rows,
            found.seen,
            found.n_micro_batches,
            found.own_gradient,
        )

    def _probe_ranks(
        self, update: Update, rows: list[TrainSequence], loss_fn: Any, how: UpdateSpec, n_ranks: int
    ) -> Probe:
        """Compute the share of each data-parallel rank one after another, and sum loss and gradient over them."""
        engine, role = self.engine, update.role
        checked = read_training_rows(rows, engine.info, "row {}", how.divergence is not None)
        sharing = engine._train_sharing[role]
        shares = divide_steps(checked, how, n_ranks, "actor", engine.info.cost, 1, sharing)
        total, gradient, seen = 0.0, Tensors(), list[LossRow]()
        for steps in shares:
            found = Update(role, 0, rows, rows, loss_fn, how, {})
            with self._watched_optimizer(found, apply=False):
                result = self._worker.train(role, steps, self._watched_loss(found), how)
            total += result.stats["loss"]
            gradient = {name: gradient.get(name, 0.0) + tensor for name, tensor in found.gradient.items()}
            seen += found.seen
        return Probe(total, gradient, {}, rows, seen, n_ranks)

    @contextmanager
    def moved(self, role: str, direction: Sequence[Tensor], amount: float) -> Iterator[None]:
        """Add `amount` times a direction, as in `Probe.own_gradient`, to the weights inside of a `with` block."""
        trained = self._trained_parameters(role)
        kept = [parameter.detach().clone() for parameter in trained]
        with torch.no_grad():
            for parameter, step in zip(trained, direction, strict=True):
                parameter.add_(step, alpha=amount)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, values in zip(trained, kept, strict=True):
                    parameter.copy_(values)


class _Samples(Tracker):
    def __init__(self, kept: dict[int, list[ScoredSample]]):
        self._kept = kept

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        self._kept[step] = list(samples)


def _loss_rows(number: int, pack: DataPack, outputs: Tensor, slopes: Tensor | None) -> Iterator[LossRow]:
    slopes = torch.zeros_like(outputs) if slopes is None else slopes
    arrays = [pack.tokens, pack.loss_mask, outputs, slopes]
    tokens, trained, values, derivatives = (each.detach().cpu().numpy() for each in arrays)
    old = None if pack.old_logprobs is None else pack.old_logprobs.detach().cpu().numpy()
    rows = pack.row_of_token.cpu().numpy()
    for index in range(pack.n_rows):
        own = rows == index
        before = None if old is None else old[own]
        yield LossRow(number, tokens[own], trained[own], values[own], derivatives[own], before)


@contextmanager
def _recorded_seeds(found: WatchedRun) -> Iterator[Episodes]:
    engine, submit = found.engine, found.engine.submit

    def watched(requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        found.seeds.setdefault(found.loop.run.step, []).extend(request.seed for request in requests)
        submit(requests)

    engine.submit = watched
    try:
        yield found.episodes
    finally:
        del engine.submit


def _watch_points(loop: KTOTrainer, kept: list[tuple[Any, ...]]) -> None:
    right = loop.reference_point

    def watched(*given: Any) -> float:
        kept.append(given)
        return right(*given)

    loop.reference_point = watched  # type: ignore[method-assign]


@contextmanager
def watched_run(
    algorithm: Any, config: Any, folder: Path, rows: Any = None, reward: Callable[..., Any] | None = stand_in_reward
) -> Iterator[WatchedRun]:
    """Train the steps of `config` in `folder`, and yield what was seen. The models stay loaded in the block."""
    samples: dict[int, list[ScoredSample]] = {}
    given: dict[str, Any] = {"trackers": [_Samples(samples)]}
    if rows is not None:
        given["train_dataset"] = rows
    if reward is not None:
        given["reward_fn"] = reward
    with algorithm.trainer(config, folder, **given) as loop:
        found = WatchedRun(loop, config, samples=samples)
        for role, spec in loop.setup.roles.items():
            if spec.optimizer is None and found.holds(role):
                found.frozen[role] = found.saved(role)
        watched: Any = nullcontext(found.episodes)
        if isinstance(config, PolicyExperimentConfig) and config.agent.fn is not None:
            watched = recorded_episodes(loop.setup, lambda: loop.run.step)
        elif isinstance(config, PolicyExperimentConfig):
            watched = _recorded_seeds(found)
        if isinstance(loop, KTOTrainer):
            _watch_points(loop, found.points)
        with found.watching(), watched as found.episodes:
            loop.fit()
        yield found
