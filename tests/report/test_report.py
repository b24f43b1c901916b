"""Reports and tables of runs say what the runs left. The page works in a real browser, without a network."""

from __future__ import annotations

import base64
import gzip
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areno.errors import ArenoError
from areno.report.page import packed_samples, page_contents, to_gzip_base64_json, write_report
from areno.report.verdict import differing_settings, short_names
from areno.tracking.reader import RunReader, Series, headlines, run_folders
from areno.tracking.run_folder import FORECAST
from tests.helpers.made_up_runs import make_run, sample


def unpacked(text: str):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_contents_are_what_the_runs_left(tmp_path):
    runs = [RunReader(make_run(tmp_path, name, seed, 5)) for seed, name in enumerate("ab")]
    found = page_contents(runs)
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert found["runs"][0]["series"]["rollout/rewards_mean"] == [[1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.4, 0.5]]
    assert found["runs"][0]["settings"]["actor.optimizer.lr"] == 0.1
    assert found["differences"] == {"seed": [0, 1]}
    assert found["headlines"][0] == {
        "name": "rollout/rewards_mean",
        "title": "reward",
        "unit": "reward",
        "counts": False,
        "runs": [[0.1, 0.5, 0.5, 5]] * 2,
    }
    assert [row["title"] for row in found["headlines"]] == ["reward", "seconds of a step"]
    assert [(chart["title"], chart["unit"]) for chart in found["charts"]["Learning"]] == [
        ("Reward", "reward"),
    ]
    assert [chart["title"] for chart in found["charts"]["Speed and memory"]] == ["Time of a step"]
    assert [chart["names"] for chart in found["charts"]["More"]] == [("odd/number",)]
    assert found["constant"] == {"time/train": 1.5}
    alone = page_contents(runs[:1])
    assert [chart["title"] for chart in alone["charts"]["Speed and memory"]] == ["Time of a step, by phase"]
    assert alone["constant"] == {"odd/number": 0.0, "time/step": 2.0}
    assert alone["runs"][0]["forecast"] == []
    assert alone["headlines"][0]["runs"] == [[0.1, 0.5, 0.5, 5]]


def test_the_column_of_prompts_shows_the_task(tmp_path):
    """Of an agent, the first message of the user; of a chat, what the row asks; else the end of the prompt."""
    run = make_run(tmp_path, "a", 1, 1, n_samples=1)
    template = "<|im_start|>system\nTools<|im_end|>\n<|im_start|>user\nGo up.<|im_end|>\n<|im_start|>assistant\n"
    plain = sample(1, 0) | {"prompt": f"{'an example ' * 20}2+2="}
    given = [{"type": "text", "text": "Go "}, {"type": "image_url"}, {"type": "text", "text": "up."}]

    def agent(*messages):
        return plain | {"prompt": template, "trajectory": {"turns": [{"messages": list(messages)}], "rows": []}}

    user, system = {"role": "user", "content": "Go up."}, {"role": "system", "content": "Tools"}
    lines = [
        agent(system, user, {"role": "user", "content": "again"}),
        agent({"role": "user", "content": given}),
        plain | {"prompt": template, "task": "Go up."},
        plain,
        agent(system) | {"prompt": "else"},
        agent({"role": "user", "content": None}) | {"prompt": "else"},
        agent({"role": "user"}, 7) | {"prompt": "else"},
        plain | {"trajectory": {"turns": []}, "prompt": "else"},
    ]
    (run / "rollouts/000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = [line[8] for line in unpacked(packed_samples(RunReader(run), 2**20)["index"])]
    assert shown == ["Go up.", "Go \n\nup.", "Go up.", str(plain["prompt"])[-120:]] + ["else"] * 4


def test_all_samples_can_be_read_back(tmp_path):
    packed = packed_samples(RunReader(make_run(tmp_path, "a", 0, 3, n_samples=4)), 2**20)
    assert packed["left_out"] == ""
    assert sorted(packed["steps"]) == [1, 2, 3]
    assert unpacked(packed["steps"][2])[3]["completion"] == "2+3</script><b>é"
    assert unpacked(packed["steps"][2])[3]["logprobs"] == [-0.1, -5.0, None, -1.0, 0.0]
    index = unpacked(packed["index"])
    assert len(index) == 12
    assert index[5][:4] == [2, 1, 0, 1]


def test_a_report_that_is_too_big_says_what_is_missing(tmp_path, monkeypatch):
    run = RunReader(make_run(tmp_path, "a", 0, 40, n_samples=10))
    whole = packed_samples(run, 2**30)
    size = sum(map(len, whole["steps"].values()))
    less = packed_samples(run, len(whole["index"]) + int(0.9 * size))
    assert len(less["steps"]) == 40
    assert less["left_out"].startswith("0 of 40 steps are without samples and ")
    least = packed_samples(run, len(whole["index"]) + size // 4)
    assert {1, 40} <= least["steps"].keys()
    assert sum(map(len, least["steps"].values())) <= size // 4
    monkeypatch.setattr("areno.report.page.MAX_STEPS", 3)
    few = packed_samples(run, 10**9)
    n_steps = len(run.sampled_steps())
    assert len(few["steps"]) <= 4
    assert {min(few["steps"]), max(few["steps"])} == {run.sampled_steps()[0], run.sampled_steps()[-1]}
    assert few["left_out"].startswith(f"{n_steps - len(few['steps'])} of {n_steps} steps are without samples and 0")
    assert {line[0] for line in unpacked(least["index"])} == set(least["steps"])


def test_differences():
    assert differing_settings([{"a": {"b": 1, "c": [1]}}, {"a": {"b": 2, "c": [1]}, "d": None}]) == {"a.b": [1, 2]}
    assert short_names([Path("/x/one/0"), Path("/x/two/0")]) == ["one/0", "two/0"]


def test_headlines():
    found = headlines(
        {"rollout/rewards_mean": Series([1, 2, 3, 4], [math.nan, 0.2, 0.6, 0.4]), "train/loss": Series([1], [math.nan])}
    )
    assert found == {"rollout/rewards_mean": ("reward", 0.2, 0.6, 0.4, 3)}


def test_what_is_0_by_construction_is_neither_first_nor_a_chart(tmp_path):
    """The loss of GRPO at the first update of a batch. A critic comes before it, and a policy that waits is named."""
    logs = make_run(tmp_path, "a", 0, 1) / "logs"
    common = {"rollout/rewards_mean": 0.5, "train/critic_loss": 0.2, "train/explained_variance": 0.1}
    losses = [{}, {"train/loss": 1.9e-9}, {"train/loss": -2e-9}]

    def write(n_lines):
        lines = [{"step": step, "time": step, **common, **loss} for step, loss in enumerate(losses[:n_lines], 1)]
        (logs / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return page_contents([RunReader(tmp_path / "a")])

    found = write(1)
    assert found["verdict"]["notes"][-1].startswith("Only the critic was trained so far")
    found = write(3)
    assert not any("critic" in note for note in found["verdict"]["notes"])
    assert [row["title"] for row in found["headlines"]] == ["reward", "critic: explained variance"]
    assert "train/loss" not in [name for of in found["charts"].values() for chart in of for name in chart["names"]]
    assert found["constant"]["train/loss"] == 0.0


def test_a_folder_stands_for_the_runs_below_it(tmp_path):
    runs = [make_run(tmp_path / "deep", name, 1, 2) for name in "ab"]
    other = make_run(tmp_path, "c", 1, 2)
    assert run_folders([tmp_path / "deep", other, runs[0]]) == [*runs, other]
    (tmp_path / "empty").mkdir()
    assert run_folders([tmp_path / "empty", tmp_path / "none"]) == [tmp_path / "empty", tmp_path / "none"]
    path = write_report(run_folders([tmp_path]), tmp_path / "all.html")
    assert path.read_text().count("rollout/rewards_mean")


def test_a_report_that_cannot_be_made(tmp_path):
    with pytest.raises(ArenoError, match="is not the folder of a run"):
        write_report([tmp_path], tmp_path / "report.html")
    (tmp_path / "file").touch()
    with pytest.raises(ArenoError, match="cannot be written"):
        write_report([make_run(tmp_path, "a", 0, 1)], tmp_path / "file" / "report.html")
    assert not list(tmp_path.glob("*.html*"))


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium to open a report in")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser, path: Path):
    """The page, and what its console and the network said."""
    page, said = browser.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None,
    )
    page.goto(path.as_uri())
    page.wait_for_selector("tr.sample")
    return page, said


def test_the_page_in_a_browser(tmp_path, browser):
    runs = [make_run(tmp_path, name, seed, 6, n_samples=4) for seed, name in enumerate("ab")]
    phases = [{"name": name, "seconds": [1.5, 1.25], "gib": [70.0, 70.3125]} for name in ("rollout", "step")]
    (runs[0] / FORECAST).write_text(json.dumps(phases))
    page, said = opened(browser, write_report(runs, tmp_path / "out" / "report.html"))
    page.locator("#curves").scroll_into_view_if_needed()
    page.wait_for_selector("#curves .js-plotly-plot")
    assert page.locator("tr.sample").count() == 4  # the last step
    page.select_option("#step", "")
    assert page.locator("tr.sample").count() == 24
    page.fill("#low", "1")
    assert page.locator("tr.sample").count() == 12
    page.fill("#find", "3+3</SCRIPT>")
    page.wait_for_function("document.querySelectorAll('tr.sample').length === 1")
    page.click("tr.sample")
    chosen = page.locator(".card.chosen .text-block")
    assert chosen.inner_text() == "3+3</script><b>é"
    assert page.locator(".group .card").count() == 3  # the prompt and the two samples of its group
    colours = chosen.locator("span").evaluate_all("spans => spans.map(one => one.style.background)")
    assert len(set(colours)) > 2
    page.select_option("#run", "1")
    page.wait_for_function("document.querySelector('#count').textContent.endsWith('of 24 samples')")
    assert "seed" in page.locator("#settings").inner_text()
    rows = page.locator("#numbers table").last.locator("tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["", "rollout", "step"]
    assert "1.5 / 1.25 s" in rows[1]
    assert "70 / 70.31 GiB" in rows[1]
    assert rows[1].rstrip()[-1] not in "sB"  # the second run has no forecast
    assert said == []


@pytest.mark.slow
def test_runs_share_one_legend_that_hides_them(tmp_path, browser):
    runs = [make_run(tmp_path, name, seed, 6, n_samples=4) for seed, name in enumerate("ab")]
    page, said = opened(browser, write_report(runs, tmp_path / "report.html"))
    page.locator("#curves").scroll_into_view_if_needed()
    page.wait_for_selector("#curves .js-plotly-plot")
    lines = "document.querySelector('#curves .js-plotly-plot').data.length"
    before = page.evaluate(lines)
    assert page.locator("#curves .js-plotly-plot .legend").count() == 0
    entries = page.locator("#curves > .legend button")
    assert entries.all_inner_texts() == ["a", "b"]
    entries.nth(1).click()
    assert page.evaluate(lines) == before / 2
    entries.nth(1).click()
    assert page.evaluate(lines) == before
    assert said == []


@pytest.mark.slow
def test_a_page_of_any_width_shows_prompts_and_completions(tmp_path, browser):
    run = make_run(tmp_path, "a", 0, 6, n_samples=4)
    path = write_report([run], tmp_path / "report.html")
    assert path.stat().st_size < 2.5 * 2**20
    page, said = opened(browser, path)
    for width in (480, 1280, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("prompt", "completion"):
            box = page.locator(f"th[data-key={name}]").bounding_box()
            assert box["x"] + box["width"] <= width
            assert width < 1280 or box["width"] > 120
        cut = page.evaluate(
            "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(document.getElementById('list'))"
        )
        assert width < 1280 or cut <= 0, "no column is cut off"
    assert said == []


def test_the_turns_of_an_agent_in_a_browser(tmp_path, browser):
    run = make_run(tmp_path, "a", 1, 1, n_samples=1)
    question, result = {"role": "user", "content": "2+2 <b>"}, {"role": "tool", "content": "4"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]}
    answer = {"role": "assistant", "content": "It is 4"}
    turns = [
        {"messages": [question], "message": call, "finish_reason": "tool_calls"},
        {"messages": [question, call, result], "message": answer, "finish_reason": "stop"},
        {"messages": [{"role": "system", "content": "judge"}], "message": answer, "finish_reason": "stop"},
    ]
    rows = [{"tokens": [1] * 9, "trained": [[0, 4], [1, 2], [0, 2], [1, 1]]}]
    of_agent = sample(1, 0) | {"trajectory": {"turns": turns, "rows": rows}}
    (run / "rollouts/000001.jsonl").write_text(json.dumps(of_agent) + "\n")
    page, said = opened(browser, write_report([run], tmp_path / "report.html"))
    page.click("tr.sample")
    assert page.locator("#colour-by").is_hidden(), "messages have no colours"
    assert page.locator("tr.sample td.text").first.inner_text() == "2+2 <b>"
    card = page.locator(".card.chosen")
    assert card.locator(".message").all_inner_texts() == [
        "user\n2+2 <b>",
        'assistant · sampled, ended by tool_calls\nadd({"a": 2})',
        "tool\n4",
        "assistant · sampled, ended by stop\nIt is 4",
        "system\njudge",
        "assistant · sampled, ended by stop\nIt is 4",
    ]
    assert "3 turns · row 0: 3 of 9 tokens trained" in card.inner_text()
    assert "another conversation" in card.inner_text()
    assert said == []


@pytest.mark.slow
def test_several_runs_on_the_screen_and_on_paper(tmp_path, browser):
    """Verdict and curves are on the first screen. On paper, every chart is drawn and nothing is folded away."""
    runs = [make_run(tmp_path, f"{seed}", seed, 6, n_samples=4) for seed in range(6)]
    page, said = opened(browser, write_report(runs, tmp_path / "report.html"))
    page.set_viewport_size({"width": 1440, "height": 900})
    assert page.locator("h2").all_inner_texts()[0].startswith("Verdict")
    assert page.locator(".verdict .big").bounding_box()["y"] < 200
    page.wait_for_selector("#curves .js-plotly-plot")
    first = page.locator("#curves .chart").first.bounding_box()
    assert first["y"] + first["height"] < 900
    assert page.locator("#numbers tbody tr").count() == 2
    assert page.locator("#numbers thead th").count() == 7
    assert page.locator("#numbers svg polyline").count() == 12
    assert page.locator("#numbers tbody tr").first.inner_text().count("best 0.6 at step 6") == 6

    page.emulate_media(color_scheme="dark")
    page.evaluate(
        """addEventListener("beforeprint", () => {
          window.lines = charts.map((one) => one.querySelectorAll(".scatterlayer .trace").length);
          window.folded = document.querySelectorAll("details:not([open])").length;
          window.columns = [...document.querySelectorAll("#numbers thead tr")].map((one) => one.children.length);
          window.ink = charts[0].plot.layout.font.color;
        })"""
    )
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("lines") == [6] * page.locator(".chart").count()
    assert page.evaluate("folded") == 0
    assert page.evaluate("columns") == [4, 4]  # the number, and three runs beside each other
    assert page.evaluate("ink") == "#1d2433", "dark on paper, whatever the screen"
    assert page.locator("details:not([open])").count() == 2
    assert page.locator("#numbers thead tr").count() == 1
    assert page.evaluate("charts[0].plot.layout.font.color") == "#e6e9f0"
    assert said == []


@pytest.mark.slow
def test_axes_have_units_and_colours_are_offered_where_there_are_some(tmp_path, browser):
    run = make_run(tmp_path, "a", 0, 2, n_samples=1)
    lines = [
        {"step": step, "train/loss": 2e-8 * (-1) ** step, "train/tokens_per_second": 9e3 * step} for step in (1, 2, 3)
    ]
    (run / "logs/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bare = {name: value for name, value in sample(2, 0).items() if name not in ("tokens", "logprobs", "advantage")}
    (run / "rollouts/000002.jsonl").write_text(json.dumps(bare) + "\n")
    page, said = opened(browser, write_report([run], tmp_path / "report.html"))
    page.evaluate("charts.forEach((node) => draw(node))")
    assert [page.locator(f".{axis}title").all_text_contents() for axis in "xy"] == [["step"] * 2, ["loss", "tokens/s"]]
    loss, speed = (page.locator(".chart").nth(place).locator(".ytick").all_text_contents() for place in range(2))
    assert any("\N{MULTIPLICATION SIGN}10" in tick for tick in loss)
    assert not any(letter in tick for letter in "nμ" for tick in loss)
    assert any(tick.endswith("k") for tick in speed)
    told = "[0, 5e-8, -2.345e-7, 0.5, 1234.567, 15954, 3e6].map((value) => told(value, value >= 1000))"
    assert page.evaluate(told) == ["0", "5e-8", "-2.34e-7", "0.5", "1235", "16k", "3M"]
    assert "-2e-8 → -2e-8" in page.locator("#numbers").inner_text()

    page.wait_for_selector(".card.chosen")
    assert page.locator("#colour-by").is_hidden()
    page.select_option("#step", "1")
    page.click("tr.sample")
    page.wait_for_selector("#colour-by", state="visible")
    assert page.locator("#colouring option").all_inner_texts() == ["log-probability", "advantage"]
    assert said == []


def test_names_are_no_markup(tmp_path, browser):
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    run = make_run(tmp_path, "a", 0, 2, n_samples=1)
    lines = [{"step": step, f"x/{evil}": step, "eval/accuracy": step / 2} for step in (1, 2)]
    (run / "logs/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "overrides.yaml").write_text(json.dumps([f"trial_name={evil}"]))
    (run / "config.yaml").write_text(json.dumps({"actor": {"path": evil}}))
    (run / "rollouts/000002.jsonl").write_text(json.dumps(sample(2, 0) | {"task": evil, "prompt": evil}) + "\n")
    other = make_run(tmp_path, "b", 0, 2)
    page, said = opened(browser, write_report([run, other], tmp_path / "report.html"))
    page.evaluate("toPaper()")
    assert page.locator("img").count() == 0
    assert page.locator("figcaption", has_text=evil).count() == 1
    assert page.locator(".ytitle", has_text="script>").count() == 1
    assert page.locator("#settings td", has_text=evil).count() == 2  # what differs, and all settings
    assert said == []


@pytest.mark.slow
def test_a_large_report_opens_fast_enough(tmp_path, browser):
    run = make_run(tmp_path, "large", 0, 2000, n_samples=10)
    path = write_report([run], tmp_path / "report.html")
    assert path.stat().st_size < 15 * 2**20
    page, said = opened(browser, path)
    taken = page.evaluate("performance.now()")
    assert taken < 30_000  # a bound for a busy machine; no measurement
    assert said == []


def test_the_extra_is_named(tmp_path):
    run = make_run(tmp_path, "a", 0, 1)
    code = "import sys; sys.modules['plotly'] = None\nfrom areno.report.page import write_report\n"
    code += f"write_report(['{run}'], 'x.html')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "pip install 'areno[report]'" in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_packing_keeps_odd_text():
    assert unpacked(to_gzip_base64_json({"a": "\ud800 </script>"}))
