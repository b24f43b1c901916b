"""Training on what agents did: by the recipes, by the example of the SDK, with failures and filters."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

import areno
from areno import SamplingParams
from areno.agents.pool import _PendingCalls
from areno.api.agentic import AgentBatch, AgentTrajectory, AgentTrajectoryTurn, LossMaskPolicy
from areno.errors import ArenoError, ConfigError, DataError, WorkerLost
from areno.launch.compose import load
from areno.loss_fns import group_advantages, gspo_loss_fn
from areno.recipes.gspo import GSPOConfig
from areno.sandbox.box import network_problem
from areno.trainers.agents import reward_records, trajectory_rows
from tests.helpers.agent_model import made, model_folder
from tests.helpers.agent_runs import AGENTS, DATA, run
from tests.helpers.policy_runs import play
from tests.helpers.resumed import lost_in


@pytest.mark.slow
def test_a_recipe_trains_on_two_turns_with_a_tool_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "areno"):
        played = run(tmp_path, "two_turns.py")
    assert [len(rows) for rows in played.rows] == [16, 16]
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4  # over turns and tool results, in fp32
    assert max(played.series("train/grad_norm")) > 0
    assert played.series("rollout/agent_turns_mean") == [2.0, 2.0]
    assert played.series("rollout/agent_rows_mean") == [1.0, 1.0]
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    for row in played.rows[0]:
        trained = np.flatnonzero(~np.asarray(row.prompt_mask))
        assert 2 <= len(trained) <= 12
        assert trained[-1] - trained[0] >= len(trained)  # the tool result is between the turns
    assert "agentic rollout batch prompts=4 n_samples=4 expected_requests=16 max_running_prompts=16" in caplog.text
    assert "agentic train batch built samples=16 tokens=" in caplog.text


def _as_lists(row: Any) -> Any:
    return [np.asarray(getattr(row, name)).tolist() for name in ("tokens", "prompt_mask", "logprobs", "advantages")]


@pytest.mark.slow
def test_the_record_of_a_session_trains_as_what_an_agent_returns(tmp_path: Path) -> None:
    returned, recorded = (run(tmp_path / name, name) for name in ("two_turns.py", "recorded_turns.py"))
    # Which sample of a prompt gets which seed depends on the order in which requests arrive.
    ours, theirs = (sorted(map(_as_lists, played.rows[0])) for played in (recorded, returned))
    for one, other in zip(ours, theirs, strict=True):
        assert one[:2] == other[:2]
        assert np.allclose(one[2:], other[2:], atol=1e-5)
    assert recorded.series("rollout/agent_main_rows_mean") == [1.0, 1.0]
    assert recorded.series("rollout/agent_refused") == [0.0, 0.0]


@pytest.mark.slow
def test_compactions_and_sub_agents_are_exact(tmp_path: Path) -> None:
    played = run(tmp_path, "compacting.py", "engine.exact=true", "gconfig.max_tokens=1000", "total_train_steps=1")
    assert played.series("train/logp_abs_diff_max") == [0.0]
    assert played.series("rollout/agent_turns_mean") == [10.0]
    kinds = {kind: played.series(f"rollout/agent_{kind}_rows_mean") for kind in ("main", "compaction", "subagent")}
    assert kinds["main"] == [1.0]
    assert kinds["compaction"][0] > 2
    assert kinds["subagent"][0] >= 1
    assert len(played.rows[0]) >= 16 * 5


@pytest.mark.slow
@pytest.mark.skipif(bool(network_problem()), reason=network_problem() or "a box can be made")
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_recipe_trains_through_a_program_in_a_box(tmp_path: Path, ahead: int) -> None:
    tasks = tmp_path / "tasks"
    for number in range(8):
        (tasks / f"t{number}/tests").mkdir(parents=True)
        (tasks / f"t{number}/instruction.md").write_text(f"Say {number}.")
        (tasks / f"t{number}/tests/test.sh").write_text(f"echo {number / 8} > /logs/verifier/reward.txt")
    config = [
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        "agent.command='python examples/agentic/tasks/loop.py {prompt}'",
        "agent.environment={OPENAI_BASE_URL: '{url}/v1', OPENAI_API_KEY: '{key}'}",
        "agent.workers=1",
        f"rollout.max_head_offpolicyness={ahead}",
        f"train_dataset.path={tasks}",
        "train_dataset.loader=null",
        "reward.fn=null",
        "train_dataset.max_length=50",
        "gconfig.temperature=1",
        "saver.freq_steps=null",
    ]
    played = play("gspo", tmp_path, *config)
    assert [len(rows) for rows in played.rows] == [16, 16]
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4 or ahead
    assert all(0 <= row.reward < 1 for rows in played.rows for row in rows)
    assert not list(Path(tempfile.gettempdir()).glob("areno-agent-*")), "nothing is left"


BUDGETS = ["agent.max_requests=1", "agent.max_total_completion_tokens=1"]


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_request_beyond_the_budget_is_refused(tmp_path: Path, budget: str) -> None:
    key = budget.split("=")[0]
    with pytest.raises(ArenoError, match=rf"410 - the agent has s\w+ \d+ \w+, and {key} allows 1") as caught:
        run(tmp_path, "recorded_turns.py", budget, "total_train_steps=1")
    assert str(caught.value).startswith(f"{key}: no reward could be computed")


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_an_agent_that_ends_at_its_budget_is_trained(tmp_path: Path, budget: str) -> None:
    agent = tmp_path / "ends.py"
    agent.write_text(
        f"import contextlib, openai, runpy\nwork = runpy.run_path({str(AGENTS / 'recorded_turns.py')!r})['run_agent']\n"
        "async def run_agent(ctx, batch):\n    with contextlib.suppress(openai.APIStatusError):\n"
        "        await work(ctx, batch)\n"
    )
    played = run(tmp_path, "recorded_turns.py", f"agent.fn={agent}", budget, "total_train_steps=1")
    assert len(played.rows[0]) == 16
    counted = ("over_budget", "refused", "filtered", "turns_mean")
    assert [played.series(f"rollout/agent_{name}") for name in counted] == [[16.0], [16.0], [0.0], [1.0]]


@pytest.mark.slow
def test_rows_of_agents_need_no_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = tmp_path / "equal.py"
    reward.write_text("def reward_fn(record):\n    return 0.0\n")
    rows = [{"prompt": f"hello {number}"} for number in range(8)]
    run(tmp_path, "quick_turns.py", f"reward.fn={reward}", "total_train_steps=1", rows=rows)
    assert "all rewards of this step are" not in caplog.text


@pytest.mark.slow
def test_the_example_with_a_tool_trains(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/agentic/tools"
    orders = [{"prompt": f"Go {way}.", "solutions": way} for way in ("up", "down", "left", "right")]
    played = run(
        tmp_path,
        str(example / "run_agent.py"),
        f"reward.fn={example / 'reward.py'}",
        "total_train_steps=1",
        "gconfig.max_tokens=900",
        rows=orders,
    )
    assert len(played.rows[0]) == 16
    assert {row.reward for row in played.rows[0]} == {-1.0}  # random weights call nothing
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4


@pytest.mark.slow
def test_two_runs_with_one_seed_draw_the_same(tmp_path: Path) -> None:
    def drawn(folder: Path, *settings: str) -> list[Any]:
        played = run(folder, "quick_turns.py", "total_train_steps=1", *settings)
        return sorted(tuple(np.asarray(row.tokens).tolist()) for row in played.rows[0])

    first = drawn(tmp_path / "a")
    assert drawn(tmp_path / "b") == first
    assert drawn(tmp_path / "c", "agent.whole_batch=true") == first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["agent.fn=a.py", "rollout.max_head_offpolicyness=1"], "agents start and end one by one, in no batch"),
        (["agent.fn=verifiers:a", "train_dataset.path=null"], "verifiers:a runs one sample at a time"),
        (["agent.fn=null"], "is true, but agent.fn is null, so there is no agent"),
    ],
)
def test_what_whole_batches_need(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"agent\.whole_batch: .*{message}"):
        load(GSPOConfig, "prompts", ["actor.path=folder", "agent.whole_batch=true", *settings])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gspo", "grpo"])
def test_greedy_agents(tmp_path: Path, recipe: str) -> None:
    """Samples of a prompt differ only by what tools answer, and these answer alike: a conversation for each prompt."""
    played = run(tmp_path, "quick_turns.py", "gconfig.greedy=true", "total_train_steps=1", recipe=recipe)
    found = {tuple(np.asarray(row.tokens).tolist()) for row in played.rows[0]}
    assert (len(played.rows[0]), len(found)) == (16, 4)
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4


@pytest.mark.slow
def test_a_critic_trains_on_turns_too(tmp_path: Path) -> None:
    settings = ["critic.warmup_steps=0", "ref=null", "actor.kl_ctl=0"]
    played = run(tmp_path, "quick_turns.py", *settings, recipe="ppo", task="quickstart_ppo")
    assert [len(rows) for rows in played.critic_rows] == [16, 16]
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4


@pytest.mark.slow
def test_tool_results_are_trained_where_that_is_asked_for(tmp_path: Path) -> None:
    played = run(tmp_path, "quick_turns.py", "agent.train_tool_results=true", "total_train_steps=1")
    for row in played.rows[0]:
        trained = ~np.asarray(row.prompt_mask)
        assert trained.sum() > 12
        assert row.logprobs is not None
        assert (np.asarray(row.logprobs)[trained] < 0).all()  # the policy's own of what it did not sample
    assert played.series("train/logp_abs_diff_max")[0] < 1e-4


@pytest.mark.slow
def test_failing_samples_leave_their_group_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, told, settle = tmp_path / "over", [], _PendingCalls._finish_call
    rows = [{"prompt": word} for word in ("ok", "raise", "edited", "nothing", f"sleep {over}")]

    def settled(self: _PendingCalls, *outcome: Any) -> None:
        told.append(outcome)
        if len(told) == 8:  # the others
            over.touch()
        settle(self, *outcome)

    monkeypatch.setattr(_PendingCalls, "_finish_call", settled)
    with caplog.at_level(logging.INFO, "areno"):
        played = run(
            tmp_path,
            "faulty.py",
            "agent.timeout_s=60",
            "train_dataset.batch_size=5",
            "total_train_steps=1",
            "gconfig.n_samples=2",
            "train_dataset.max_length=200",
            rows=rows,
        )
    assert len(played.rows[0]) == 2
    assert played.series("rollout/agent_errors") == [6.0]
    assert played.series("rollout/agent_timeouts") == played.series("rollout/agent_over_budget") == [2.0]
    assert played.series("rollout/num_sequences") == [2.0]
    assert "agent_error: ValueError: no luck" in caplog.text
    told = {sample["prompt"]: sample["status"] for sample in played.samples(1)}
    assert "agent_timeout" in told.values()


@pytest.mark.slow
def test_a_response_with_other_numbers_costs_only_its_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changed = {
        "choices.0.token_ids.0 1000000 whole": "token_ids holds 1000000; numbers from 0 to 388 are expected",
        "prompt_token_ids.2 -1 whole": "prompt_token_ids holds -1; numbers from 0 to 388",
        "choices.0.token_ids.1 5": "token_ids holds 5.0; whole numbers are expected",
        "choices.0.logprobs.1 nan": "logprobs holds nan; a log-probability is finite and not positive",
        "choices.0.logprobs.0 -inf": "logprobs holds -inf",
        "choices.0.logprobs.0 0.5": "logprobs holds 0.5",
        "choices.0.versions.0 1e30 whole": "versions holds 1000000000000000019884624838656",
        "sources.0.1 7 whole": "sources covers",
        "temperature 0": "temperature is 0.0",
    }
    rows = [{"prompt": "ok"}, *({"prompt": f"told {change}"} for change in changed)]
    settings = ["gconfig.n_samples=2", f"train_dataset.batch_size={len(rows)}", "total_train_steps=1"]
    with caplog.at_level(logging.WARNING, "areno"):
        played = run(tmp_path, "faulty.py", *settings, "train_dataset.max_length=100", rows=rows)
    assert len(played.rows[0]) == 2
    assert played.series("rollout/agent_errors") == [18.0]
    said = {sample["prompt"].split("told ")[-1]: sample["message"] for sample in played.samples(1) if sample["message"]}
    assert len(said) == len(changed)
    for message in changed.values():
        assert any(f"the response of turn 0 was changed: {message}" in text for text in said.values()), message
    assert "agent_error: the response of turn 0 was changed" in caplog.text


def test_a_run_whose_agents_all_fail_says_why(tmp_path: Path) -> None:
    with pytest.raises(ArenoError, match=r"agent\.fn: no reward could be computed for any .*no luck"):
        run(tmp_path, "faulty.py", rows=[{"prompt": "raise"}] * 8)


@pytest.mark.slow
def test_a_lost_worker_is_told_at_once_however_slow_agents_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_in(monkeypatch, "rollout_stats", 1)
    settings = ["engine.workers=spawn", "recover.retries=0", "agent.timeout_s=1000"]
    started = time.monotonic()
    with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
        run(tmp_path, "faulty.py", *settings, rows=[{"prompt": "sleep"}] * 8)
    assert time.monotonic() - started < 500


@pytest.mark.slow
def test_rows_that_are_too_long_are_filtered_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One has no room for its second turn; a row over the limit, though each request fitted, is dropped as well."""
    long = [{"prompt": "ok"}, {"prompt": "hello world " * 3}]
    with caplog.at_level(logging.INFO, "areno"):
        played = run(
            tmp_path,
            "two_turns.py",
            "gconfig.max_tokens=140",
            "gconfig.n_samples=2",
            "train_dataset.batch_size=2",
            "total_train_steps=1",
            rows=long,
        )
    assert len(played.rows[0]) == 2
    assert played.series("rollout/agent_filtered") == [2.0]
    assert "agentic trajectory filtered: BadRequestError" in caplog.text
    assert "(tokens=" in caplog.text
    assert "messages=3 assistant_turns=1 tool_results=1)" in caplog.text


def test_the_log_and_the_files_tell_what_an_agent_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", "1")
    with caplog.at_level(logging.INFO, "areno.rollout"):
        played = run(tmp_path, "quick_turns.py", "total_train_steps=1")
    [line] = [record.getMessage() for record in caplog.records if record.name == "areno.rollout"]
    for word in ("messages:", "final answer:", "tool calls:", "tool results:", "tokens:", "trained:"):
        assert word in line
    sample = played.samples(1)[0]
    turns = sample["trajectory"]["turns"]
    assert [message["role"] for message in turns[1]["messages"]] == ["user", "assistant", "tool"]
    assert turns[0]["message"]["role"] == "assistant"
    [row] = sample["trajectory"]["rows"]
    assert len(row["tokens"]) == sum(n for _, n in row["sources"]) == sum(n for _, n in row["trained"])
    assert json.dumps(sample)


# By hand, as in the reference of the SDK


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "choose_move",
            "parameters": {
                "type": "object",
                "properties": {"direction": {"type": "string", "enum": ["up", "down", "left", "right"]}},
                "required": ["direction"],
            },
        },
    }
]


async def run_agent(ctx: Any, batch: Any) -> Any:
    client = AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0)

    async def run_one(item: Any) -> Any:
        messages: Any = [
            {"role": "system", "content": "Call choose_move with the selected direction."},
            {"role": "user", "content": item.prompt},
        ]
        tool_choice: Any = {"type": "function", "function": {"name": "choose_move"}}
        response = await client.chat.completions.create(
            model="policy",
            messages=messages,
            tools=TOOLS,
            tool_choice=tool_choice,
            max_tokens=16,
            temperature=0.7,
        )
        return AgentTrajectoryTurn(
            item=item,
            messages=messages,
            response=response,
            tools=TOOLS,
            tool_choice=tool_choice,
        )

    try:
        turns = await asyncio.gather(*(run_one(item) for item in batch.iter_samples()))
        return [AgentTrajectory(turns=[turn]) for turn in turns]
    finally:
        await client.close()


async def collect_agentic_trajectories(trainer: Any, prompt_batch: Any) -> Any:
    agent_batch = AgentBatch.from_prompt_batch(prompt_batch, n_samples=4)
    async with trainer.rollout_session(
        sampling_params=SamplingParams(max_new_tokens=16, temperature=0.7),
        max_running_prompts=len(agent_batch),
    ) as ctx:
        return await run_agent(ctx, agent_batch)


def test_the_example_of_the_reference_trains() -> None:
    with made() as trainer:
        [prompt_batch] = trainer.load_prompt_batches(DATA[:2], batch_size=2, max_prompt_tokens=64)
        trajectories = asyncio.run(collect_agentic_trajectories(trainer, prompt_batch))
        records = reward_records(trainer, trajectories)
        assert [record.solutions for record in records] == [0] * 4 + [1] * 4
        assert all(record.messages[0]["role"] == "system" for record in records)
        rewards = [-1.0 if not record.tool_calls else 1.0 for record in records]
        lengths = [float(len(record.tokens)) for record in records]
        rows = trajectory_rows(trainer, trajectories, group_advantages(lengths, [0] * 4 + [1] * 4).tolist(), rewards)
        assert [row.reward for row in rows] == rewards
        stats = trainer.train(rows, gspo_loss_fn)
        assert stats["logp_abs_diff_max"] < 1e-4
        with pytest.raises(DataError, match="1 advantages for 8 trajectories"):
            trajectory_rows(trainer, trajectories, [0.0])
        [n_turns, *_] = [len(trajectory.turns) for trajectory in trajectories]
        of_turns = trajectory_rows(trainer, trajectories[:1], [np.arange(n_turns) + 2.0])
        for row in of_turns:
            trained = ~np.asarray(row.prompt_mask)
            assert np.asarray(row.advantages)[trained].tolist() == (row.turns[trained] + 2.0).tolist()  # type: ignore[index]
        with pytest.raises(DataError, match=f"has {n_turns} turns, and its advantages have the shape"):
            trajectory_rows(trainer, trajectories[:1], [[0.0] * (n_turns + 1)])
        with pytest.raises(DataError, match="the agent returned nothing"):
            reward_records(trainer, None)


def test_streams_are_responses_too_and_other_temperatures_are_scored_again() -> None:
    async def main(trainer: areno.Trainer, batch: AgentBatch) -> Any:
        async with (
            trainer.rollout_session(
                sampling_params=SamplingParams(max_new_tokens=8), loss_mask_policy=LossMaskPolicy(user_prompt=True)
            ) as ctx,
            AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client,
        ):
            found = []
            for item in batch.iter_samples():
                messages: Any = [{"role": "user", "content": item.prompt}]
                stream = await client.chat.completions.create(
                    model="policy", messages=messages, stream=True, temperature=0.5
                )
                chunks = [chunk async for chunk in stream]
                found.append(AgentTrajectoryTurn(item=item, messages=messages, response=chunks))
            return found

    with made() as trainer:
        batch = AgentBatch([{}], ["hello"], [[1]], 2)
        turns = asyncio.run(main(trainer, batch))
        asked = [trainer.engine.logprobs]
        score = lambda *args, **more: asked.append(args) or asked[0](*args, **more)  # noqa: E731
        trainer.engine.logprobs = score  # type: ignore[method-assign]
        rows = trajectory_rows(trainer, turns, [1.0, -1.0])
        assert len(asked[1:]) == 1, "rows are scored together"
        for row, record in zip(rows, reward_records(trainer, turns), strict=True):
            trained = ~np.asarray(row.prompt_mask)
            assert trained.sum() == len(record.tokens) + 1  # hello
            [expected] = trainer.score_logprobs("actor", [row.tokens], 1.0)
            assert np.asarray(row.logprobs)[trained] == pytest.approx(np.asarray(expected)[trained], abs=1e-5)
            assert record.logprobs != pytest.approx(np.asarray(row.logprobs)[trained][1:].tolist(), abs=1e-3)
