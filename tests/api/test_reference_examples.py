"""The examples of the SDK's reference, run as they are written there, but for the path of the model and the data."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from areno import SamplingParams
from areno.loss_fns import group_advantages, gspo_loss_fn
from areno.trainers.agents import reward_records, trajectory_rows
from tests.helpers.agent_model import made

REFERENCE = Path(__file__).parents[3] / "shared/reference/000_30907682021e30ae.txt"
ROWS = [{"prompt": f"hello {number}", "solutions": number} for number in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that areno wrote."""
    path = tmp_path_factory.mktemp("model") / "model"
    with made() as trainer:
        trainer.write_checkpoint(path)
    return str(path)


def example(heading: str, end: str, folder: str, *changes: tuple[str, str]) -> str:
    """The code of a section of the reference, with the model's path and these changes, each of which must apply."""
    if not REFERENCE.exists():
        pytest.skip(f"the reference is not at {REFERENCE}")
    text = REFERENCE.read_text(encoding="utf-8")
    text = text[text.index(heading) :]
    code = text[text.index("import asyncio") : text.index(end) + len(end)]
    for pattern, new in ((r'"Qwen/[\w.-]+"', repr(folder)), *changes):
        code, n = re.subn(pattern, lambda _, new=new: new, code)
        assert n, f"nothing of the example is {pattern}"
    return code


def test_the_agentic_example(folder: str) -> None:
    last = "trajectories = asyncio.run(collect_agentic_trajectories(trainer, prompt_batch))"
    names: dict[str, Any] = {"__name__": "example"}
    exec(example("\nAgentic rollout with tools\n", last, folder), names)
    trainer = names["trainer"]
    with trainer:
        # What its last comment says.
        [prompt_batch] = trainer.load_prompt_batches(ROWS, batch_size=2, max_prompt_tokens=64)
        trajectories = asyncio.run(names["collect_agentic_trajectories"](trainer, prompt_batch))
        assert len(trajectories) == 2 * 4
        records = reward_records(trainer, trajectories)
        rewards = [names["reward_fn"](record) for record in records]
        assert set(rewards) <= {-1.0, 1.0}
        lengths = [float(len(record.tokens)) for record in records]
        advantages = group_advantages(lengths, [0] * 4 + [1] * 4).tolist()
        stats = trainer.train(trajectory_rows(trainer, trajectories, advantages, rewards), gspo_loss_fn)
        assert stats["logp_abs_diff_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["", ", proxy=False"])
def test_the_step_of_gspo(
    proxy: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a session with its default, which serves the policy beside the script's own rollout."""
    row = {"question": "How many are three apples and four apples?", "answer": "3 + 4 = 7\n#### 7"}
    monkeypatch.setattr("datasets.load_dataset", lambda *path, **how: [row])
    code = example(
        "\nOne GSPO-style rollout/train step\n",
        "asyncio.run(main())",
        folder,
        (re.escape(", proxy=False"), proxy),
        (r"\n        \)\n    \)\n", "\n        )\n"),  # one parenthesis too many there
    )
    exec(code, {"__name__": "example"})
    told = eval(capsys.readouterr().out.splitlines()[-1])
    assert told["logp_abs_diff_max"] < 1e-4


def test_the_synchronous_client_in_a_session() -> None:
    """In the with statement of a script without asyncio, which the server's thread serves."""
    messages: Any = [{"role": "user", "content": "hello"}]
    with (
        made() as trainer,
        trainer.rollout_session(sampling_params=SamplingParams(max_new_tokens=8)) as ctx,
        OpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client,
    ):
        whole = client.chat.completions.create(model="policy", messages=messages, seed=3)
        chunks = client.chat.completions.create(model="policy", messages=messages, seed=3, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == (whole.choices[0].message.content or "")
