"""Steps that do not wait for their longest samples: which prompts they train, and how old samples get."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.api.trainer import Trainer
from areno.errors import ArenoError, ConfigError
from areno.run.group_selection import FirstCompleteGroups, Group, n_groups_due
from areno.run.groups_in_flight import GroupsInFlight
from areno.trainers import rollout
from areno.types import GenerationOutput, PromptItem, TrainSequence
from tests.helpers.policy_runs import Played, play, trained

# Which groups belong to a step ---------------------------------------------------------------------------------------


def group(batch: int, place: int, begun_at: int | None = None, n_samples: int = 2) -> Group:
    item = PromptItem(prompt="", text="", tokens=[2, 3], index=10 * batch + place)
    return Group(batch, place, item, n_samples, begun_at)


def prompts_at(indices: Sequence[int]) -> list[PromptItem]:
    return [group(index // 10, index % 10).item for _, index in indices]


def output(sample: int, n_tokens: int = 3, reason: Any = "stop") -> GenerationOutput:
    return GenerationOutput(
        request_id=0,
        sample=sample,
        tokens=list(range(2, 2 + n_tokens)),
        logprobs=[-0.1 * k for k in range(n_tokens)],
        versions=[7] * n_tokens,
        finish_reason=reason,
    )


def test_groups_are_due_in_their_last_step_or_before_if_later_steps_have_no_room():
    assert n_groups_due([1, 1, 3, None], step=3, limit=2, sizes=[2, 2, 2]) == 2  # those of step 1
    assert (
        n_groups_due([2, 2, 2, None], step=3, limit=2, sizes=[2, 2, 2]) == 1
    )  # three are due in step 4, which trains two
    assert n_groups_due([2, 2, 2, None], step=3, limit=2, sizes=[2, 4, 2]) == 0
    assert n_groups_due([None, None, None], step=3, limit=2, sizes=[2, 1]) == 2  # the run ends with step 4
    assert n_groups_due([None, None], step=4, limit=2, sizes=[2]) == 2
    assert n_groups_due([1], step=1, limit=0, sizes=[1]) == 1


def test_due_groups_belong_to_the_step_and_the_first_whole_ones_fill_it():
    old, first, second, third = group(1, 0, 1), group(2, 0), group(2, 1), group(2, 2)
    old.finished[0] = output(0)
    choice = FirstCompleteGroups([old, first, second, third], [old], 2)

    def known(samples: Any) -> list[tuple[Group, int]]:
        return [(group, output.sample) for group, output in samples]

    assert known(choice.known) == [(old, 0)]  # the step trains on all samples of a group that is due
    assert choice.min_missing_samples == 3
    assert choice.record_outputs([(second, output(0)), (third, output(1))]) == []
    assert choice.min_missing_samples == 2
    added = choice.record_outputs([(third, output(0)), (second, output(1))])  # both are whole; third was before
    assert known(added) == [(third, 0), (third, 1)]
    assert choice.min_missing_samples == 1
    assert known(choice.record_outputs([(old, output(1))])) == [(old, 1)]
    assert choice.min_missing_samples == 0
    assert choice.taken == [third, old]


def items_of(sizes: Sequence[int]) -> list[list[PromptItem]]:
    """Return the prompts of each batch."""
    return [[group(batch, place).item for place in range(size)] for batch, size in enumerate(sizes, 1)]


def begun(in_flight: GroupsInFlight, batches: Sequence[list[PromptItem]], step: int, ahead: int) -> FirstCompleteGroups:
    return in_flight.begin_rollout(step, ahead, batches[step - 1], lambda n: batches[step : step + n])


@pytest.mark.parametrize("limit", [0, 1, 2, 4])
@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("sizes", [[1] * 17, [4] * 11 + [1] + [4] * 5, [4, 1] * 9, [4, 4, 1], [4] * 5 + [1, 1, 2]])
def test_a_simulated_run_trains_each_prompt_once_and_in_time(limit, ahead, sizes):
    draw, batches, size = random.Random(3), items_of(sizes), sizes[0]
    ahead = min(ahead, max(1, limit) * size)
    in_flight = GroupsInFlight(lambda indices: [], 2, limit)
    seen, begun_at, n_sampled = Counter[int](), {}, []
    for step in range(1, len(sizes) + 1):
        choice = begun(in_flight, batches, step, ahead)
        waiting = [(each, k) for each in choice.groups for k in range(2) if k not in each.finished]
        draw.shuffle(waiting)
        n_known = len(choice.known)
        while choice.min_missing_samples:
            each, sample = waiting.pop()
            begun_at[each.item.index] = begun_at.get(each.item.index, step) if limit else step
            n_known += len(choice.record_outputs([(each, output(sample))]))
        assert len(choice.taken) == sizes[step - 1]
        assert n_known == 2 * len(choice.taken)  # all samples of the step were announced, once
        n_sampled.append(len(choice.groups))
        in_flight.end_rollout(step, choice, [(each, output(k, draw.randint(0, 1), None)) for each, k in waiting])
        for each in choice.taken:
            seen[each.item.index] += 1
            assert step - begun_at[each.item.index] <= limit
        if not limit:
            assert not any(each.finished or each.parked for each in in_flight.groups)
    assert not in_flight.groups
    assert set(seen.values()) == {1}
    assert len(seen) == sum(sizes)
    assert max(n_sampled) <= size + ahead
    assert n_sampled[-1] == sizes[-1]
    if set(sizes) == {size} and limit:
        assert n_sampled[0] == size + ahead


@pytest.mark.parametrize("ahead", [6, 8])
def test_tail_batching_samples_as_many_prompts_as_it_is_told(ahead):
    batches, in_flight, n_sampled = items_of([8] * 12), GroupsInFlight(lambda indices: [], 1, 0), []
    for step in range(1, 7):
        choice = begun(in_flight, batches, step, ahead)
        n_sampled.append(len(choice.groups))
        for each in choice.groups:
            if choice.min_missing_samples:
                choice.record_outputs([(each, output(0))])
        in_flight.end_rollout(step, choice, [(each, output(0, 1, None)) for each in choice.groups if not each.finished])
    assert set(n_sampled) == {8, 8 + ahead}
    assert n_sampled.count(8) < 4


def test_postponed_prompts_have_steps_of_their_own():
    in_flight, batches, rounds = GroupsInFlight(lambda indices: [], 1, 0), items_of([2] * 6), []
    for step in range(1, 7):
        choice = begun(in_flight, batches, step, 1)
        rounds.append([each.item.index for each in choice.groups])
        long = [each for each in choice.groups if each.item.index % 10 == 0]  # the first prompt of each batch
        for each in [*(each for each in choice.groups if each not in long), *long]:
            if choice.min_missing_samples:
                choice.record_outputs([(each, output(0))])
        stopped = [(each, output(0, 4, None)) for each in choice.groups if not each.finished]
        assert in_flight.end_rollout(step, choice, stopped) == 4 * len(stopped)
    # Prompts 10, 20 and so on are long. Two of them make a long round.
    assert rounds == [[10, 11, 20], [21, 30, 31], [20, 30], [40, 41, 50], [51, 60, 61], [50, 60]]


def test_groups_are_written_and_read():
    in_flight, batches = GroupsInFlight(prompts_at, 3, 1), items_of([2] * 3)
    choice = begun(in_flight, batches, 1, 1)
    first, second, third = in_flight.groups
    first.finished[1] = output(1)
    first.finished[1].top_logprobs = [[(5, -0.5), (k, -1.0)] for k in range(3)]
    first.finished[1].routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    choice.taken.append(second)
    third.is_postponed = True
    in_flight.end_rollout(1, choice, [(first, output(2, 5, None)), (first, output(0, 0, None))])
    other = GroupsInFlight(prompts_at, 3, 1)
    other.load_state_dict(json.loads(json.dumps(in_flight.state_dict())))
    assert [(each.batch, each.prompt_index, each.begun_at) for each in other.groups] == [(1, 0, 1), (2, 0, None)]
    [read, new] = other.groups
    assert (read.is_postponed, new.is_postponed) == (False, True)
    assert read.item.index == 10
    for samples, known in ((read.finished, first.finished), (read.parked, first.parked)):
        assert list(samples) == list(known)
        for number, sample in samples.items():
            assert (sample.tokens, sample.logprobs, sample.versions) == (
                known[number].tokens,
                known[number].logprobs,
                known[number].versions,
            )
            assert sample.finish_reason == known[number].finish_reason
            assert sample.top_logprobs == known[number].top_logprobs
    assert (read.finished[1].routes == first.finished[1].routes).all()
    assert [part.sample for part in new.unfinished_outputs] == [0, 1, 2]
    begun(other, batches, 2, 1)
    assert [(each.batch, each.prompt_index) for each in other.groups] == [(1, 0), (2, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize(("n_samples", "limit", "ahead"), [(1, 4, 8), (2, 1, 2), (2, 0, 2), (2, 0, 0)])
def test_after_a_change_of_settings_all_prompts_are_trained_with_new_samples(n_samples, limit, ahead):
    batches, before = items_of([2] * 8), GroupsInFlight(prompts_at, 2, 4)
    choice = begun(before, batches, 1, 8)
    for each in choice.groups[:2]:
        choice.record_outputs([(each, output(0)), (each, output(1))])
    before.end_rollout(1, choice, [(each, output(k, 5, None)) for each in choice.groups[2:] for k in range(2)])
    in_flight, seen = (
        GroupsInFlight(prompts_at, n_samples, limit),
        Counter[int](each.item.index for each in choice.taken),
    )
    in_flight.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert len(in_flight.groups) == 8
    for step in range(2, 9):
        choice = begun(in_flight, batches, step, ahead)
        assert all(not part.tokens for each in choice.groups for part in each.unfinished_outputs)
        waiting = [(each, k) for each in choice.groups for k in range(n_samples)]
        while choice.min_missing_samples:
            each, sample = waiting.pop()
            choice.record_outputs([(each, output(sample))])
        in_flight.end_rollout(step, choice, [(each, output(k, 0, None)) for each, k in waiting])
        seen.update(each.item.index for each in choice.taken)
    assert not in_flight.groups
    assert set(seen.values()) == {1}
    assert len(seen) == 16


# Runs ----------------------------------------------------------------------------------------------------------------

POSTPONED = "rollout/postponed_prompts"
LONG = ["gconfig.max_new_tokens=60", "gconfig.temperature=3.0", "rollout.max_concurrent_rollouts=8"]
AHEAD = [*LONG, "rollout.max_head_offpolicyness=2", "rollout.prompts_ahead=3", "actor.use_decoupled_loss=true"]


def rows_file(folder: Path, n: int) -> str:
    folder.mkdir(exist_ok=True)
    file = folder / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{10 + k}+{20 + k}=", "solutions": [str(30 + 2 * k)]}) for k in range(n)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def epoch(folder: Path, *more: str, n: int = 22, recipe: str = "grpo") -> Played:
    """A whole epoch of 22 prompts, in five steps of four and one of two."""
    data = ["train_dataset.loader=null", f"train_dataset.path={rows_file(folder.parent, n)}", "total_train_steps=null"]
    data += ["total_train_epochs=1", "train_dataset.drop_last=false", "total_train_steps=null"]
    return play(recipe, folder, *data, *more)


def drawn(rows: list[TrainSequence]) -> Counter[tuple[Any, ...]]:
    return Counter((tuple(row.tokens), tuple(row.logprobs)) for row in rows)  # type: ignore[arg-type]


def prompts(rows: list[TrainSequence]) -> set[tuple[int, ...]]:
    return {tuple(np.asarray(row.tokens)[: list(row.prompt_mask).index(False)].tolist()) for row in rows}  # type: ignore


def lengths(run: Played) -> list[int]:
    return sorted(len(trained(row, "logprobs")) for rows in run.rows for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2, 4])
def test_with_frozen_weights_an_epoch_trains_the_samples_of_a_run_that_waits(limit, tmp_path):
    frozen = ["actor.optimizer.lr=0", "engine.exact=true"]
    waits = epoch(tmp_path / "waits", *LONG, *frozen)
    ahead = epoch(tmp_path / "ahead", *AHEAD, *frozen, f"rollout.max_head_offpolicyness={limit}")
    assert lengths(ahead) == lengths(waits)
    assert [len(rows) for rows in ahead.rows] == [len(rows) for rows in waits.rows] == [16] * 5 + [8]
    assert drawn([*chain(*ahead.rows)]) == drawn([*chain(*waits.rows)])
    assert [prompts(rows) for rows in ahead.rows] != [prompts(rows) for rows in waits.rows]  # in another order
    assert len(set().union(*map(prompts, ahead.rows))) == 22
    assert 1 <= max(ahead.series("rollout/oldest_gap")) <= limit
    assert sum(ahead.series("rollout/parked_samples")) > 0
    assert ahead.series("rollout/parked_samples")[-1] == 0  # the last step leaves none


@pytest.mark.slow
def test_without_a_limit_a_step_samples_its_own_prompts_alone(tmp_path, monkeypatch):
    """A run with max_head_offpolicyness=0 has the bits of samples that the engine draws for each batch by itself."""

    def sample(*args: Any) -> Any:
        raise AssertionError("samples are in flight")

    monkeypatch.setattr(rollout, "sample_ahead", sample)
    monkeypatch.setattr(rollout, "run_dynamic_sampling", sample)
    drawn_alone: list[Counter[tuple[Any, ...]]] = []
    sample_batch = Trainer.rollout_token_batch

    def twice(self: Trainer, prompts: Any, n_samples: int, params: Any, **how: Any) -> Any:
        alone = sample_batch(self, prompts, n_samples, params, seed=how["seed"])
        drawn_alone.append(
            Counter(
                ((*each.prompt_tokens, *sequence.resp_tokens), tuple(sequence.resp_logprobs))
                for each in alone
                for sequence in each.sequences
            )
        )
        return sample_batch(self, prompts, n_samples, params, **how)

    monkeypatch.setattr(Trainer, "rollout_token_batch", twice)
    run = epoch(tmp_path / "run", *LONG, "rollout.max_head_offpolicyness=0")
    assert len(run.rows) == len(drawn_alone) == 6
    for rows, alone in zip(run.rows, drawn_alone, strict=True):
        assert Counter((tuple(row.tokens), tuple(trained(row, "logprobs"))) for row in rows) == alone
        assert {row.staleness for row in rows} == {0}
    assert not run.names() & {"rollout/oldest_gap", "rollout/parked_samples", "rollout/begun_len_mean"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["engine.world_size=2"], ["engine.world_size=2", "engine.tp_size=2"]])
def test_on_several_devices_too(layout, tmp_path):
    frozen = ["actor.optimizer.lr=0", "engine.exact=true", *layout]
    waits = epoch(tmp_path / "waits", *LONG, *frozen)
    ahead = epoch(tmp_path / "ahead", *AHEAD, *frozen)
    again = epoch(tmp_path / "again", *AHEAD, *frozen)
    assert drawn([*chain(*ahead.rows)]) == drawn([*chain(*waits.rows)])
    assert max(ahead.series("rollout/oldest_gap")) >= 1
    assert [drawn(rows) for rows in ahead.rows] == [drawn(rows) for rows in again.rows]


@pytest.mark.slow
def test_samples_go_on_under_new_weights_and_say_so(tmp_path):
    run = epoch(tmp_path / "run", *AHEAD)
    again = epoch(tmp_path / "again", *AHEAD)
    for rows, others in zip(run.rows, again.rows, strict=True):
        assert drawn(rows) == drawn(others)
    gaps = [max(row.staleness for row in rows) for rows in run.rows]
    assert gaps == run.series("rollout/oldest_gap")
    assert 1 <= max(gaps) <= 2
    assert max(run.series("rollout/carried_tokens")) > 0
    assert max(run.series("rollout/versions_per_sample")) > 1
    assert max(run.series("rollout/recomputed_tokens")) > 0
    # The decoupled loss weighs the tokens of older weights.
    stale = [row for rows in run.rows for row in rows if row.staleness]
    assert any(weight != 1 for row in stale for weight in trained(row, "weights"))


@pytest.mark.slow
def test_lengths_are_those_of_trained_samples_and_of_samples_that_a_step_began(tmp_path, monkeypatch):
    limit, step, sampled = 2, [0], {}
    sample = rollout.sample_ahead

    def watched(setup: Any, batch: Any, scores: Any) -> Any:
        step[0] += 1
        samples, keep, scalars = sample(setup, batch, scores)
        for each in samples:  # the version of a token says which step sampled it: each step has one update
            versions = np.asarray(each.sequence.resp_versions)
            begun = step[0] - (setup.trainer.engine.weights_version - int(versions.min()))
            sampled.setdefault((step[0], each.item.index), []).append((begun, len(versions)))
        return samples, keep, scalars

    monkeypatch.setattr(rollout, "sample_ahead", watched)
    run = epoch(tmp_path / "run", *AHEAD)
    trained_lens: dict[int, list[int]] = {}
    begun_lens: dict[int, list[int]] = {}
    for (trained_at, _), parts in sampled.items():
        lengths = [length for _, length in parts]
        trained_lens.setdefault(trained_at, []).extend(lengths)
        begun_lens.setdefault(min(begun for begun, _ in parts), []).extend(lengths)
    cohorts = [begun_lens[k] for k in range(1, len(run.rows) - limit + 1)]
    assert len(cohorts) == 4
    assert trained_lens[1] != begun_lens[1]
    for name, lengths in (("trained_len", [trained_lens[k] for k in sorted(trained_lens)]), ("begun_len", cohorts)):
        assert run.series(f"rollout/{name}_mean") == pytest.approx([sum(each) / len(each) for each in lengths])
        assert run.series(f"rollout/{name}_max") == [max(each) for each in lengths]
        ranked = [sorted(each) for each in lengths]
        for value, each in zip(run.series(f"rollout/{name}_p90"), ranked, strict=True):
            place = 0.9 * (len(each) - 1)
            low, high = each[int(place)], each[min(int(place) + 1, len(each) - 1)]
            assert value == pytest.approx(low + (place - int(place)) * (high - low))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [AHEAD, [*LONG, "rollout.prompts_ahead=3"]], ids=["stale", "postponed"])
def test_a_resumed_run_trains_the_same_samples(settings, tmp_path, monkeypatch):
    settings = [*settings, "recover.mode=auto", "recover.freq_steps=1"]
    whole = epoch(tmp_path / "whole", *settings)
    waiting = whole.series("rollout/parked_samples" if "rollout.max_head_offpolicyness=2" in settings else POSTPONED)
    assert waiting[2] > 0
    sample, n_calls = rollout.sample_ahead, itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(n_calls) == 4:
            raise ArenoError("the machine stops")
        return sample(*args)

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "sample_ahead", interrupted)
        with pytest.raises(ArenoError, match="stops"):
            epoch(tmp_path / "run", *settings)
    rest = epoch(tmp_path / "run", *settings)
    assert len(rest.rows) == 3
    assert [drawn(rows) for rows in rest.rows] == [drawn(rows) for rows in whole.rows[3:]]


@pytest.mark.slow
def test_postponed_prompts_are_sampled_anew(tmp_path):
    run = epoch(tmp_path / "run", *LONG, "rollout.prompts_ahead=3")
    assert [len(rows) for rows in run.rows] == [16] * 5 + [8]
    assert len(set().union(*map(prompts, run.rows))) == 22
    assert {row.staleness for rows in run.rows for row in rows} == {0}
    assert max(run.series("rollout/postponed_prompts")) > 0
    assert run.series("rollout/postponed_prompts")[-1] == 0
    assert max(run.series("rollout/discarded_tokens")) > 0


@pytest.mark.slow
def test_a_critic_is_trained_on_the_same_rows(tmp_path):
    run = epoch(tmp_path / "run", *AHEAD, "critic.warmup_steps=0", recipe="ppo", n=14)
    assert [len(rows) for rows in run.rows] == [len(rows) for rows in run.critic_rows] == [16, 16, 16, 8]
    for rows, others in zip(run.rows, run.critic_rows, strict=True):
        assert drawn(rows) == drawn(others)
    assert max(run.series("rollout/oldest_gap")) >= 1


DYNAMIC, STALE = "rollout.dynamic_sampling=true", "rollout.max_head_offpolicyness=1"


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (["rollout.prompts_ahead=5"], "rollout.prompts_ahead", "more than the prompts"),
        ([STALE, "rollout.prompts_ahead=5"], "rollout.prompts_ahead", "more than the prompts"),
        (["rollout.max_head_offpolicyness=-1"], "rollout.max_head_offpolicyness", "-1"),
        ([DYNAMIC, "rollout.prompts_ahead=1"], "rollout.dynamic_sampling", "does not replace prompts"),
        ([DYNAMIC, STALE, "reward.path=somewhere"], "rollout.dynamic_sampling", "not known yet"),
        ([DYNAMIC, STALE, "agent.fn=examples/agent.py"], "rollout.dynamic_sampling", "not known yet"),
    ],
)
def test_settings_that_do_not_fit(settings, key, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        play("grpo", tmp_path / "run", *settings)
    assert key in str(caught.value)
    assert words in str(caught.value)
