"""Faults of agents that lie in what they send: each is found by its name, and nothing in the agent without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.checks.agent_messages import agent_messages
from areno.checks.all_checks import CHECKS
from areno.checks.rewards import reward_functions
from tests.helpers.checked import data_file, failed, found_by, red
from tests.helpers.checked_rows import QUESTIONS, chat_model

pytestmark = pytest.mark.slow

AGENT = """
import asyncio

from openai import AsyncOpenAI

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn


async def run_agent(ctx, batch):
    items = list(batch.iter_samples())
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:

        async def run_one(item):
            messages, turns = [{"role": "user", "content": item.prompt}], []
            for _ in range(2):
                response = await client.chat.completions.create(model="policy", messages=messages, **SETTINGS)
                turns.append(AgentTrajectoryTurn(item=item, messages=list(messages), response=response))
                messages.append(response.choices[0].message)
                messages.append({"role": "user", "content": MESSAGE})
            return AgentTrajectory(turns=turns)

        return await asyncio.gather(*(run_one(item) for item in items))


def reward_fn(record):
    return float(record.final_answer.split()[-1:] == [record.solutions])
"""


def found_with(folder: Path, *changes: tuple[str, str], checks=(agent_messages,)):
    text = AGENT
    for name, value in (*changes, ("SETTINGS", "{}"), ("MESSAGE", '"Look at it again."')):
        text = text.replace(name, value)
    (folder / "agent.py").write_text(text, encoding="utf-8")
    files = [f"actor.path={chat_model(folder)}", f"train_dataset.path={data_file(folder / 'rows.jsonl', QUESTIONS)}"]
    functions = [f"{name}={folder / 'agent.py'}" for name in ("agent.fn", "reward.fn")]
    settings = (*files, *functions, "valid_dataset=null", "gconfig.n_samples=2")
    return found_by(checks, "gspo", "--config-name=prompts", *settings)


def test_an_agent_that_keeps_the_answer_to_itself_is_green(tmp_path):
    found = found_with(tmp_path, checks=CHECKS["reward"])
    assert not red(found), found
    assert not failed(found)
    assert {"told-answers", "agent-sampling", "reward-wrong"} <= {
        each.name for each in found if each.verdict == "green"
    }


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (("MESSAGE", "f\"No, it is {item.record['solutions']}.\""), "told-answers", "contains the answer of the row"),
        (("SETTINGS", '{"temperature": 0}'), "agent-sampling", "all samples of a prompt are the same"),
        (("SETTINGS", '{"temperature": 0.3}'), "agent-sampling", "ask at temperature 0.3"),
    ],
)
def test_a_fault_in_what_an_agent_sends_is_found(change, name, said, tmp_path):
    found = found_with(tmp_path, change)
    assert name in red(found), found
    [found] = [each for each in found if each.name == name]
    assert said in found.line
    rows = [str(each).partition(":")[0] for each in found.details]
    assert len(set(rows)) == len(rows) == 3 * (name == "told-answers")


def test_the_reward_of_an_agent_is_tried_with_wrong_answers(tmp_path):
    right = "record.final_answer.split()[-1:] == [record.solutions]"
    change = (right, "record.solutions in record.final_answer")
    assert "reward-wrong" in red(found_with(tmp_path, change, checks=[reward_functions]))
