"""A variant takes the same steps on two data-parallel or tensor-parallel ranks.

A run on one device keeps its calls of the engine. Engines with two ranks, which all variants share, are then asked the
same, from the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.engine.engine import Engine
from areno.specs.engine import EngineSpec
from tests.helpers.variant_runs import ALSO, MOVED, OWN, RECIPES, VARIANTS, player

COMPARED = ("train", "logprobs", "values")
LAYOUTS = {"dp": 1, "tp": 2}  # tp_size of two ranks


@dataclass
class Call:
    name: str
    args: Any
    result: Any = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of the last run, and the spec of its engine as the first of them."""
    kept: list[Call] = []

    def keep(name: str, call: Callable[..., Any], engine: Engine, *args: Any, **how: Any) -> Any:
        kept.append(Call(name, copy.deepcopy((args, how))))
        mine = kept[-1]
        mine.result = call(engine, *args, **how)
        return mine.result

    for name in (*COMPARED, "ensure_roles", "__init__"):
        own = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda *args, name=name, own=own, **how: keep(name, own, *args, **how))
    return kept


class RankedEngines:
    """Engines of two ranks. Specs that are equal share one, which each variant gets with the weights of its start."""

    def __init__(self, folder: Path):
        self._folder, self._stack = folder, ExitStack()
        self._made: list[tuple[EngineSpec, Engine, Path]] = []

    def __enter__(self) -> RankedEngines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def of(self, spec: EngineSpec, tp_size: int) -> Engine:
        wanted = replace(spec, devices=["cpu"] * 2, engine=replace(spec.engine, tp_size=tp_size, world_size=2))
        wanted = replace(wanted, planned={})
        found = [(engine, start) for other, engine, start in self._made if other == wanted]
        if not found:
            engine, start = self._stack.enter_context(Engine(wanted, "spawn")), self._folder / str(len(self._made))
            engine.save_state(start)
            engine.is_state_written(wait=True)
            self._made.append((wanted, engine, start))
            found = [(engine, start)]
        [(engine, start)] = found
        engine.load_state(start)
        return engine

    @property
    def n_made(self) -> int:
        return len(self._made)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedEngines]:
    with RankedEngines(tmp_path_factory.mktemp("states")) as engines:
        yield engines


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VARIANTS, *ALSO])
def test_ranks(name: str, tmp_path: Path, models: dict[str, Path], calls: list[Call], ranked: RankedEngines) -> None:
    recipe = RECIPES.get(name, "grpo")
    task = f"quickstart_{recipe}" if name in RECIPES else "quickstart"
    run = partial(player(recipe, tmp_path, models["reward"]), task=task)
    settings = [f"variant={name}", *MOVED, *({**VARIANTS, **ALSO}[name])]
    run(*[text.replace("OTHER", str(models["lm"])) for text in settings])
    spec, made = calls[0].args[0][0], list(calls[1:])
    asked = {call.args[0][0] for call in made if call.name in COMPARED[1:]}
    for layout, tp_size in LAYOUTS.items():
        engine, n_trained = ranked.of(spec, tp_size), 0
        loaded: list[str] = []
        for call in made:
            args, how = copy.deepcopy(call.args)
            if call.name == "ensure_roles":
                roles = {role: of_role for role, of_role in args[0].items() if role != "reward"}
                engine.ensure_roles(roles)
                loaded += roles
                continue
            found = getattr(engine, call.name)(*args, **how)
            if call.name == "train":
                n_trained += 1
                for metric in {"loss", "grad_norm", *(each.partition("/")[2] for each in OWN)} & call.result.keys():
                    expected = pytest.approx(call.result[metric], rel=1e-3, abs=1e-4)
                    assert found[metric] == expected, (layout, metric)
            else:
                for one, other in zip(found, call.result, strict=True):
                    np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4, err_msg=f"{layout} {call.name}")
        assert n_trained
        for role in loaded:
            engine.release_role(role)
    assert asked <= {"actor", "ref", "critic", "teacher"}


@pytest.mark.slow
def test_the_variants_share_engines(ranked: RankedEngines) -> None:
    assert ranked.n_made <= 3 * len(LAYOUTS)
