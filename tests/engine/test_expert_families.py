"""Each family with experts in an engine: rollout and training agree, also if it is cut, preempted or interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areno.engine.engine import Engine
from areno.specs.rollout import RolloutSpec
from tests.helpers.expert_rollouts import NARROW, TIGHT, apart, assert_same, rows_of, sampled
from tests.helpers.family_cases import CASES, EXPERTS, random_model
from tests.helpers.parked import largest_difference
from tests.helpers.tiny_engine import Outputs, spec

FAMILIES = [*EXPERTS, *(case for case in CASES if case.endswith("experts"))]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    random_model(request.param, folder, max_position_embeddings=512)
    with Engine(spec(folder, random_init=False, routing_replay=True), "inline") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Outputs:
    return sampled(engine)


@pytest.mark.parametrize("rollout", [TIGHT, NARROW], ids=["preempted, prompts in pieces", "few at a time"])
def test_rollouts_are_the_same_however_they_are_cut(engine: Engine, expected: Outputs, rollout: RolloutSpec) -> None:
    outputs = sampled(engine, rollout)
    assert_same(outputs, expected)
    for with_routes in (True, False):
        assert apart(engine, rows_of(outputs, with_routes)) < 1e-4


@pytest.mark.parametrize("replays", [True, False])
def test_samples_go_on_under_new_weights(engine: Engine, replays: bool) -> None:
    """As if these had drawn all tokens before. The last test, since it changes the weights."""
    assert largest_difference(engine, replays) < 1e-4
