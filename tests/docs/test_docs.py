"""Everything that the docs show is run: commands, code blocks, links and error messages.

The first line of a code block says how it is tested:

    bash              each `python -m areno...`, `python examples/...` and `areno train` composes its configuration
                      (--cfg job); the arguments of `areno bench` and `python -m benchmarks` are parsed
    bash run          each line runs to its end, in a folder with the files of the page
    bash fails        exits with code 2 and writes nothing; the text block after it is the error message
    KIND file=NAME    becomes a file
    python            all of a page form one script, which runs after the commands; a text block after one is its output
    json ROWKIND      each line is a row of this kind

`bash run` and the kinds below it are tested on the pages in GUIDES. docs/sdk.md, agents.md, serving.md, families.md
and those in coming_from/ have tests of their own. Blocks of other kinds are not run: `py` and `sh` are of other tools.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areno.api import get_algorithm
from areno.bench.arguments import Parser, Settings, add_arguments
from areno.data.row_schema import row_problem
from areno.tracking.reader import RunReader
from benchmarks.__main__ import parser as benchmarks_parser
from tests.helpers import warm_python
from tests.helpers.agent_runs import run as agent_run
from tests.helpers.moe_models import quickstart_with_experts
from tests.helpers.pages import ROOT, blocks, documented_metrics, run_here

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
    ROOT / "benchmarks/README.md",
]
GUIDES = ["quickstart.md", "recipes.md", "data.md", "evaluation.md", "runs.md", "resuming.md", "reference/cli.md"]
GUIDES += [
    "replay.md",
    "adapters.md",
    "check.md",
    "distillation.md",
    "exact.md",
    "judges.md",
    "tracing.md",
    "../README.md",
]


COMMAND = re.compile(r"(python (-m (areno\.|benchmarks)|examples/)|areno (train|bench) ).*")


def commands(kind: str) -> list[tuple[str, str]]:
    """(page, command) of every line with a command of ours in blocks that begin with ```<kind>."""
    found = []
    for page in PAGES:
        for info, text in blocks(page):
            if info.split(" file=")[0].strip() == kind:
                for line in text.splitlines():
                    if command := COMMAND.search(line):
                        found.append((page.name, command[0]))
    return found


def parse_benchmark(command: str) -> None:
    """Raise ConfigError for a benchmark or an argument that does not exist."""
    words, parser = shlex.split(command), benchmarks_parser()
    if words[:2] == ["areno", "bench"]:
        parser = Parser()
        add_arguments(parser)
    parser.parse_args(words[2:] if words[0] == "areno" else words[3:], Settings())


def test_the_commands_of_measured_figures_exist() -> None:
    """Also those in tables, whose head says `arguments of ...`."""
    found = []
    for page in PAGES:
        before = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            codes = re.findall(r"`([^`]+)`", line)
            if line.startswith("| arguments of `"):
                before = codes[0]
            elif not line.startswith("|"):
                before = ""
            found += [code for code in codes if re.match(r"(areno bench|python -m benchmarks) [a-z]+ --", code)]
            if before and codes and re.match(r"\| `(--|\w+ --)", line):
                tokenizer = " --tokenizer T" if re.match("(agents|serve)", codes[0]) else ""
                found.append(f"{before} {codes[0]}{tokenizer}")
    assert len(found) > 40
    for command in found:
        parse_benchmark(re.sub(r"\b[A-Z]{4,}\b", "x", command))


def run(command: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command, comments=True)]
    if words[0] == "areno":
        words[:1] = ["python", "-m", "areno.cli"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    return warm_python.commands().run([*words[1:], *more], folder, environment, timeout=200)


@pytest.mark.parametrize(("page", "command"), commands("bash"))
def test_commands_in_the_documents_compose(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "bench" in command:
        parse_benchmark(command)
        return
    if "--help" in command or "areno.cli.reference" in command:
        done = run(command.split(">")[0], tmp_path)
    elif "hydra/sweeper=optuna" in command:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the sweep extra")
        done = run(command, tmp_path, "hydra.sweeper.n_trials=1", "total_train_steps=1", "valid_dataset=null")
    else:
        words = shlex.split(command, comments=True)
        start = 3 if words[1] == "-m" else 2  # `areno train` has two words, too
        given = words[start:]
        if "-m" in given:  # --cfg shows one run; the first of each list of values stands for all
            of_run = [word for word in given if word != "-m" and not word.startswith("hydra.launcher.")]
            given = [re.sub(r"=([^,]*),.*", r"=\1", word) for word in of_run]
        line = shlex.join([*words[:start], *given])
        if not words[1].startswith("examples/"):
            assert run_here(line, "--cfg", "job") == 0
            assert capsys.readouterr().out
            return
        done = run(line, tmp_path, "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert done.stdout


# Runs commands of recipes one after another in one process: torch is imported once.
RUN_ALL = """
import shlex, sys
from areno.api import get_algorithm
from areno.bench.arguments import Parser, Settings, add_arguments
from areno.launch.command import run

for line in sys.argv[1:]:
    module, *words = shlex.split(line)[2:]
    if run(get_algorithm(module.rpartition(".")[2]), module, words):
        sys.exit(f"failed: {line}")
"""


def test_the_readme_links_each_page() -> None:
    pages = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page for page in pages if f"(docs/{page})" not in text] == ["index.md", "reference/sdk.md"]


def test_no_reward_of_the_pages_looks_for_the_answer_anywhere_in_a_text() -> None:
    """A list of all answers would be right, as `reward-wrong` says."""
    for page in PAGES:
        assert not re.findall(r"float\(.* in [\w.]+\)+$", page.read_text(encoding="utf-8"), re.MULTILINE), page


def test_asynchronous_rollout_is_found_by_the_words_of_other_tools() -> None:
    page = (ROOT / "docs/rollout_ahead.md").read_text(encoding="utf-8").lower()
    assert all(word in page for word in ("asynchronous", "off-policy", "partial rollout", "staleness"))
    for name in ("README.md", "docs/index.md", *(f"docs/coming_from/{tool}.md" for tool in ("trl", "verl", "areal"))):
        assert "rollout_ahead.md" in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_the_guide_runs(guide: str, tmp_path: Path) -> None:
    """Files are written, commands and the script run in an empty folder, and what they say is what is shown."""
    lines, script, shown = [], [], []
    previous = failed = ""
    for info, text in blocks(ROOT / "docs" / guide):
        kind, _, file = info.partition(" file=")
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        elif kind == "bash run":
            lines += text.splitlines()
        elif kind == "bash fails":
            before = set(tmp_path.iterdir())
            done = run(text.strip(), tmp_path)
            assert (done.returncode, set(tmp_path.iterdir())) == (2, before)
            failed = done.stderr
        elif kind == "python":
            script.append(text)
        elif kind == "text" and previous == "bash fails":
            assert text == failed
        elif kind == "text" and previous == "python":
            shown.append(text)
        elif kind.startswith("json "):
            for line in text.splitlines():
                assert row_problem(json.loads(line), kind.removeprefix("json ")) is None, line  # type: ignore[arg-type]
        previous = kind
    of_recipes = [line for line in lines if line.startswith("python -m areno.recipes.")]
    (tmp_path / "guide.py").write_text("\n\n".join(script), encoding="utf-8")
    run_all = shlex.join(["python", "-c", RUN_ALL, *of_recipes])
    for line in [run_all, *(line for line in lines if line not in of_recipes), "python guide.py"]:
        done = run(line, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "".join(shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
                anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


@pytest.mark.slow
def test_metric_names_on_the_page_are_those_recorded(tmp_path: Path) -> None:
    """Every scalar of short runs has its row in docs/runs.md, and every row names what one of these runs records."""
    from areno.launch.compose import load

    sums = [{"prompt": f"{a}+9=", "solutions": str(a + 9)} for a in range(11, 31)]
    pairs = [{"prompt": f"{a}+9=", "chosen": str(a + 9), "rejected": str(a - 1)} for a in range(11, 31)]
    pairs += [{"prompt": "1+1=", "chosen": "2", "rejected": "2"}] * 20
    answers = [{"prompt": f"{a}+9=", "response": str(a + 9)} for a in range(11, 31)]
    steps = [{"prompt": f"{a}+9=", "completions": [str(a + 9)], "labels": [a % 2 == 0]} for a in range(11, 31)]
    labels = [{**row, "label": number % 2 == 0} for number, row in enumerate(answers)]
    decoupled = ["variant=decoupled", "actor.prox_logp_method=metrics", "actor.m2_threshold=0.04"]
    sparse = quickstart_with_experts(tmp_path / "sparse")
    replayed = ["actor.init_from_scratch=true", "actor.routing_replay=true"]
    runs = {
        "gspo": ("gspo", "quickstart", []),
        "experts": ("gspo", "quickstart", [f"actor.path={sparse}", *replayed]),
        "sapo": ("grpo", "quickstart", ["variant=sapo"]),
        "dapo": ("grpo", "quickstart", ["variant=dapo", "eval_gconfig.greedy=false", "eval_gconfig.n_samples=4"]),
        "ppo": ("ppo", "quickstart_ppo", ["critic.warmup_steps=0", *decoupled]),
        "kl": ("grpo", "quickstart", ["variant=reinforce_pp", "ref=default", "actor.kl_ctl=0.1"]),
        "dpo": ("dpo", "quickstart_dpo", []),
        "orpo": ("dpo", "quickstart_dpo", ["actor.loss_type=orpo", "actor.label_smoothing=0"]),
        "kto": ("kto", "quickstart_kto", []),
        "online_dpo": ("online_dpo", "quickstart_online_dpo", []),
        "rw": ("rw", "quickstart_rw", []),
        "prm": ("prm", "quickstart_prm", []),
        "teacher": ("grpo", "quickstart", ["teacher=default"]),
        "ahead": ("grpo", "quickstart", ["rollout.max_head_offpolicyness=1", "variant=decoupled"]),
        "postponed": ("grpo", "quickstart", ["rollout.prompts_ahead=4"]),
        "sft": ("sft", "quickstart_base", ["actor.init_from_scratch=false"]),
        **{name: ("grpo", "quickstart", [f"variant={name}"]) for name in ("dppo_tv", "fipo", "vespo", "clip_cov")},
        "entropy": ("grpo", "quickstart", ["variant=adaptive_entropy"]),
    }
    recorded = set()
    for name, (recipe, task, settings) in runs.items():
        algorithm = get_algorithm(recipe)
        n_steps = 2 if name == "ahead" else 1  # the lengths of the samples that a step begins are known later
        settings = [*settings, f"total_train_steps={n_steps}", "train_dataset.batch_size=16", "engine.device=cpu"]
        settings += ["gconfig.n_samples=2"] if recipe in ("grpo", "gspo") else []
        rows: Any = {"dpo": pairs, "rw": pairs, "prm": steps, "kto": labels, "sft": answers}.get(recipe, sums)
        given = {"train_dataset": rows, "valid_dataset": rows[:5]}
        with algorithm.trainer(load(algorithm.config, task, settings), tmp_path / name, **given) as trainer:
            trainer.fit()
        recorded |= RunReader(tmp_path / name).metrics().keys()
    recorded |= agent_run(tmp_path / "agents", "recorded_turns.py", "total_train_steps=1").names()
    documented = {name for name in documented_metrics() if "<source>" not in name}  # tests/trainers/test_sources.py
    assert recorded == documented, recorded ^ documented


@pytest.mark.slow
def test_the_sdk_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, in order; what they show, and every number and key they could return, is what the page says."""
    from areno.plan.sdk_arguments import RuntimeConfig
    from areno.schema.fields import settings

    page = ROOT / "docs" / "sdk.md"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    returned: set[str] = set()
    for info, text in blocks(page):
        if info == "python":
            exec(compile(text, str(page), "exec"), names)
            returned |= {*names.get("stats", {}), *names.get("critic_stats", {})}
        elif info == "text":
            assert text == names["message"] + "\n"
    mean_rewards = names["mean_rewards"]
    assert sum(mean_rewards[-8:]) > sum(mean_rewards[:8]) + 1.2, mean_rewards
    assert (tmp_path / "checkpoints" / "addition" / "model.safetensors").exists()
    text = page.read_text(encoding="utf-8")
    keys = {key for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.M) for key in re.findall(r"`(\w+)`", cell)}
    assert returned - {"surprise_mean", "surprise_std", "surprise_max"} <= keys
    for name, setting in settings(RuntimeConfig).items():
        assert f"| `{name}` | {setting.default()} |" in text
