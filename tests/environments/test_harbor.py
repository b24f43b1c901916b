"""Tasks in Harbor's format: what their files mean, and which tasks cannot be used."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from areno.config.datasets import DatasetConfig
from areno.data.sources import load_rows
from areno.environments.harbor import Task, read_tasks
from areno.environments.packages import check_packages, package_of
from areno.errors import ConfigError, DataError
from areno.sandbox.box import network_problem
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import play

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="task.toml is read by Python 3.11")


def task(folder: Path, name: str = "one", settings: str = "", dockerfile: str = "", **files: str) -> Path:
    made = folder / name
    (made / "environment/data").mkdir(parents=True)
    (made / "tests").mkdir()
    (made / "instruction.md").write_text(f"Do {name}.\n")
    (made / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (made / "environment/data/a.txt").write_text("a")
    (made / "environment/b.txt").write_text("b")
    for at, text in {"task.toml": settings, "environment/Dockerfile": dockerfile}.items():
        if text:
            (made / at).write_text(text)
    return made


def copied(made: Path, work: Path) -> set[str]:
    work.mkdir()
    Task(made).copy_files(work)
    return {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}


@needs_toml
def test_rows(tmp_path: Path) -> None:
    made = task(tmp_path / "tasks", settings="[metadata]\ndifficulty = 'easy'\nmade = 2026-01-01\n")
    task(tmp_path / "tasks", "two")
    environment = package_of(f"harbor:{tmp_path}/tasks", "train_dataset.path")
    assert environment is not None
    rows = environment.rows("train", {})
    assert rows == load_rows(DatasetConfig(path=f"{tmp_path}/tasks"), "prompt")
    assert rows[0] == {"prompt": "Do one.", "task_folder": str(made), "metadata": {"difficulty": "easy"}}
    assert rows[1] == {"prompt": "Do two.", "task_folder": str(tmp_path / "tasks/two")}
    with pytest.raises(ConfigError, match=r"^train_dataset\.dataset_kwargs\.size: is no option of harbor:"):
        environment.rows("train", {"size": 2})


def test_a_folder_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^train_dataset\.path: harbor:.* has no tasks: there is no .*instruction.md"
    ):
        check_packages([("train_dataset.path", f"harbor:{tmp_path}")])


@pytest.mark.parametrize(
    ("dockerfile", "files"),
    [
        ("", {"data/a.txt", "b.txt"}),
        ("FROM x\nWORKDIR /app\n", set()),
        ("FROM x\nWORKDIR /app\nCOPY . .\n", {"data/a.txt", "b.txt", "Dockerfile"}),
        ("# files\nFROM x\nWORKDIR /app\nCOPY data \\\n  b.txt in/\nCMD bash\n", {"in/a.txt", "in/b.txt"}),
        ("FROM x\nWORKDIR /app\nCOPY b.txt c.txt\nCOPY data/*.txt /app/new/\n", {"c.txt", "new/a.txt"}),
        ("FROM x\nWORKDIR /app\nWORKDIR in\nWORKDIR ..\nADD b.txt .\n", {"b.txt"}),
    ],
)
def test_files_of_a_task(tmp_path: Path, dockerfile: str, files: set[str]) -> None:
    made = task(tmp_path / "tasks", dockerfile=dockerfile)
    assert [read.folder for read in read_tasks(tmp_path / "tasks", "path")] == [made]
    assert copied(made, tmp_path / "work") == files


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        (
            "FROM x\nWORKDIR /app\nRUN apt-get install -y git\n",
            "needs an image, for 'RUN apt-get install -y git' of its",
        ),
        ("FROM x\nWORKDIR /app\nENV A=1\n", "needs an image, for 'ENV A=1'"),
        ("FROM x\nWORKDIR /app\nCOPY --from=y /a /app/a\n", "needs an image, for 'COPY --from=y"),
        ("FROM x AS y\n", "needs an image, for 'FROM x AS y'"),
        ("FROM x\n", "works in / by its Dockerfile, and a box has /app"),
        ("FROM x\nWORKDIR /work\n", "works in /work by its Dockerfile"),
        ("FROM x\nWORKDIR /app\nCOPY b.txt /etc/b\n", "copies files to /etc/b by its Dockerfile"),
        ("FROM x\nWORKDIR /app\nCOPY c.txt .\n", "copies c.txt by its Dockerfile, which is not in its folder"),
        ("FROM x\nWORKDIR /app\nCOPY ../tests .\n", r"copies ../tests by its Dockerfile, which is not in its folder"),
    ],
)
def test_tasks_that_need_an_image(tmp_path: Path, dockerfile: str, message: str) -> None:
    task(tmp_path / "tasks", "good")
    task(tmp_path / "tasks", "bad", dockerfile=dockerfile)
    with pytest.raises(DataError, match=rf"^key: .*tasks has 1 tasks that cannot be used: bad {message}"):
        read_tasks(tmp_path / "tasks", "key")


@needs_toml
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[environment]\ndocker_image = 'x'\n", r"needs an image \(environment.docker_image in task.toml\)"),
        ("[environment]\nworkdir = '/x'\n", "needs the working folder /x, and a box has /app"),
        ("[environment]\nos = 'windows'\n", "needs another system than Linux"),
        ("[environment]\ngpus = 1\n", "needs GPUs"),
        ("[environment.env]\nKEY = '${KEY}'\n", "takes KEY from the variables of the machine"),
        ("[[steps]]\nname = 'a'\n", "needs several steps"),
        ("[agent]\ntimeout_sec = 0\n", "has 0 as agent.timeout_sec"),
        ("[agent\n", "has a task.toml that cannot be read: "),
    ],
)
def test_settings_that_a_box_cannot_have(tmp_path: Path, settings: str, message: str) -> None:
    task(tmp_path, settings=settings)
    with pytest.raises(DataError, match=rf"1 tasks that cannot be used: one {message}"):
        read_tasks(tmp_path, "key")


def test_services_need_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task(tmp_path) / "environment/docker-compose.yaml").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DataError, match=r"one needs the containers of environment/docker-compose.yaml$"):
        read_tasks(tmp_path, "key")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/podman").touch(0o755)
    with pytest.raises(DataError, match=r"yaml. podman is installed here, but tasks do not run in containers yet$"):
        read_tasks(tmp_path, "key")


@needs_toml
def test_what_is_ignored_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = "version = '1.0'\n[agent]\ntimeout_sec = 5\nuser = 'a'\n[environment]\ncpus = 2\nbuild_timeout_sec = 9\n"
    task(tmp_path, settings=settings, dockerfile="FROM python:3.13\nWORKDIR /app\n")
    task(tmp_path, "two", settings="[environment]\ncpus = 1\n")
    environment = package_of(f"harbor:{tmp_path}", "train_dataset.path")
    assert environment is not None
    with caplog.at_level(logging.WARNING, "areno"):
        environment.rows("train", {})
    told = "agent.user (1 tasks), environment.cpus (2 tasks), the image python:3.13 (1 tasks)"
    assert caplog.messages == [f"harbor:{tmp_path}: what a box does not have is ignored: {told}"]


@pytest.mark.slow
@needs_toml
@pytest.mark.skipif(bool(network_problem()), reason=network_problem() or "a box can be made")
def test_training(tmp_path: Path) -> None:
    for number in range(8):
        settings = f"[agent]\ntimeout_sec = 60\n[verifier.env]\nREWARD = '{number / 8}'\n"
        made = task(tmp_path / "tasks", f"t{number}", settings, "FROM scratch\nWORKDIR /app\nCOPY b.txt .\n")
        script = 'echo "{\\"reward\\": $REWARD, \\"files\\": $(ls | wc -l)}" > /logs/verifier/reward.json\n'
        (made / "tests/test.sh").write_text(script)
    played = play(
        "gspo",
        tmp_path / "run",
        f"train_dataset.path=harbor:{tmp_path}/tasks",
        "agent.command='python examples/agentic/tasks/loop.py {prompt}'",
        "agent.environment={OPENAI_BASE_URL: '{url}/v1', OPENAI_API_KEY: '{key}'}",
        "agent.workers=1",
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        "gconfig.max_tokens=2000",
        "saver.freq_steps=null",
        task="environment",
    )
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    assert all(sample["reward"] in {number / 8 for number in range(8)} for sample in played.samples(2))
    assert min(played.series("rollout/reward/files")) >= 1.0
