"""`areno serve` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp import web
from openai import AuthenticationError, OpenAI, RateLimitError

from areno.cli.__main__ import main
from areno.cli.serve import _model_folder, _signals_handled
from areno.errors import ArenoError
from areno.server.threads import ServerThread, ThreadPool
from tests.helpers.agent_model import made, model_folder
from tests.helpers.served import BASE, Served
from tests.helpers.waiting import until

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    server = Served(*getattr(request, "param", ()))
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("served", [("--api-key", "secret", "--served-model-name", "mine")], indirect=True)
def test_a_folder_is_served_until_a_signal_and_answers_under_way_are_finished(served: Served) -> None:
    client = OpenAI(base_url=served.url, api_key="secret", max_retries=0)
    assert [model.id for model in client.models.list()] == ["mine"]
    with pytest.raises(AuthenticationError):
        client.with_options(api_key="other").models.list()
    answer: Any = client.chat.completions.create(model="mine", messages=HELLO, max_tokens=5)  # type: ignore[arg-type]
    assert "areno" not in answer.model_extra
    told = client.chat.completions.create(
        model="mine",
        messages=HELLO,
        max_tokens=5,
        extra_body={"return_token_ids": True},  # type: ignore[arg-type]
    )
    assert told.model_extra is not None
    assert len(told.model_extra["areno"]["choices"][0]["token_ids"]) <= 5
    given: Any = {"model": "mine", "prompt": "hello", "max_tokens": 5, "seed": 1, "logprobs": 0}
    cold: Any = client.completions.create(**given, temperature=0.5, extra_body={"return_token_ids": True})
    [prompt], own = cold.areno["prompt_token_ids"], cold.areno["choices"][0]
    whole: Any = client.completions.create(
        model="mine", prompt=prompt + own["token_ids"], echo=True, max_tokens=0, logprobs=0
    )
    raw = whole.choices[0].logprobs.token_logprobs[len(prompt) :]
    assert cold.choices[0].logprobs.token_logprobs == pytest.approx(raw, abs=1e-4)
    assert own["logprobs"] != pytest.approx(raw, abs=1e-3)
    stream = client.chat.completions.create(
        model="mine",
        messages=HELLO,
        max_tokens=1900,
        stream=True,
        extra_body={"ignore_eos": True},  # type: ignore[arg-type]
    )
    next(iter(stream))
    ending = ThreadPoolExecutor(1).submit(served.end)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert ending.result() == 0
    assert "closing: 1 samples in progress" in "".join(served.lines)


@pytest.mark.parametrize("served", [("--max-running", "1", "--max-waiting", "1", "--shutdown-s", "0.5")], indirect=True)
def test_too_many_requests_are_refused_and_a_second_signal_is_not_needed(served: Served) -> None:
    """What runs longer than --shutdown-s is ended, and its client sees the end of its connection."""
    client = OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0)
    how: Any = {"model": next(iter(client.models.list())).id, "messages": HELLO, "extra_body": {"ignore_eos": True}}
    streams = [client.chat.completions.create(max_tokens=2000, stream=True, **how) for _ in range(2)]
    next(iter(streams[0]))
    with pytest.raises(RateLimitError, match="2 samples are in progress"):
        client.chat.completions.create(**how)
    for stream in streams:
        stream.close()
    ends_at, last = time.monotonic() + 400, None
    while last is None:  # until a place is free again
        assert time.monotonic() < ends_at
        with contextlib.suppress(RateLimitError):
            last = client.chat.completions.create(max_tokens=2000, stream=True, **how)
    next(iter(last))
    while "areno_requests_aborted_total 2" not in (metrics := seen(served)):
        assert time.monotonic() < ends_at, metrics
    assert 'areno_requests_total{path="/v1/chat/completions",status="429"}' in metrics
    assert served.end() == 0


def seen(served: Served) -> str:
    return httpx2.get(f"{served.url.removesuffix('/v1')}/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize(
    "served", [("--allowed-hosts", "mine.example", "--allowed-origins", "http://page.example")], indirect=True
)
def test_only_named_hosts_and_pages_may_use_a_server_without_a_key(served: Served) -> None:
    def status(**headers: str) -> int:
        return httpx2.get(f"{served.url}/models", headers=headers).status_code

    assert status() == status(host="mine.example") == status(origin="http://page.example") == 200
    assert status(host="other.example") == status(origin="http://other.example") == 403


@pytest.mark.parametrize("served", [("--speculation", "on")], indirect=True)
def test_repeated_answers_are_drafted(served: Served) -> None:
    client = OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0)
    name = next(iter(client.models.list())).id
    how: Any = {
        "model": name,
        "messages": HELLO,
        "max_tokens": 60,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    first, second, third = (client.chat.completions.create(**how).choices[0].message.content for _ in range(3))
    assert first == second == third
    [drafted, accepted] = [
        int(line.split()[1]) for line in seen(served).splitlines() if line.startswith(("areno_drafted", "areno_acc"))
    ]
    assert drafted >= accepted > 50


@pytest.mark.slow
def test_an_evaluation_harness_scores_what_areno_saved(tmp_path: Path) -> None:
    """lm-eval over HTTP gives what it gives with the model of transformers in its own process."""
    lm_eval = pytest.importorskip("lm_eval", reason="pip install lm_eval tenacity")
    rows = [
        {"question": f"one {n} two", "choices": [" three", f" {n}", " hello world"], "gold": n % 3} for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "output_type": "multiple_choice",
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    }
    with made() as trainer:
        trainer.write_checkpoint(tmp_path / "model")
    folder = str(tmp_path / "model")

    def scores(kind: str, **arguments: Any) -> tuple[float, list[list[float]]]:
        found = lm_eval.simple_evaluate(
            model=kind, model_args=arguments, tasks=[task], bootstrap_iters=0, log_samples=True, batch_size=2
        )
        samples = sorted(found["samples"]["choices"], key=lambda sample: sample["doc_id"])
        likelihoods = [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in samples]
        return found["results"]["choices"]["acc,none"], likelihoods

    served = Served(folder=folder)
    try:
        url = f"{served.url}/completions"
        accuracy, found = scores(
            "local-completions", base_url=url, model=folder, tokenizer=folder, tokenizer_backend="huggingface"
        )
    finally:
        served.close()
    expected_accuracy, expected = scores("hf", pretrained=folder, device="cpu", dtype="float32")
    assert accuracy == expected_accuracy
    assert len(found) == len(rows)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.slow
def test_answers_can_be_constrained(served: Served) -> None:
    pytest.importorskip("llguidance")
    client = OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0)
    name = next(iter(client.models.list())).id
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "move", "parameters": schema}}
    without_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    how: Any = {"model": name, "messages": HELLO, "max_tokens": 300, "extra_body": without_thinking}
    for seed in range(5):
        answer = client.chat.completions.create(response_format=form, seed=seed, **how)
        assert json.loads(answer.choices[0].message.content or "")["a"] in ("x", "y")
        called = client.chat.completions.create(
            tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=seed, **how
        )
        [call, *_] = called.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments)["a"] in ("x", "y")
        assert called.choices[0].finish_reason == "tool_calls"
    broken: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"type": "strange"}}}
    with pytest.raises(Exception, match="400"):
        client.chat.completions.create(response_format=broken, **how)


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--host", "0.0.0.0"], "--api-key: is missing, but --host 0.0.0.0 can be reached", 2),
        (["--tp-size", "3"], "--tp-size", 2),
        (["--world-size", "9999"], "--world-size: is 9999", 2),
    ],
)
def test_what_cannot_be_served_is_said_by_the_names_of_the_options(
    arguments: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", model_folder(), "--random-weights", *BASE, *arguments]) == code
    assert message in capsys.readouterr().err


def test_of_a_run_its_newest_checkpoint_is_served(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs/metrics.jsonl").touch()
    with pytest.raises(ArenoError, match="has no checkpoint yet"):
        _model_folder(str(run))
    for step in (9, 10):
        (run / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    assert _model_folder(str(run)) == str(run / "checkpoints/step-000010")
    assert _model_folder("owner/name") == "owner/name"


def test_a_folder_that_is_no_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "nothing"), *BASE]) == 1
    assert "FOLDER" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "a", "--port", "70000"])
    with pytest.raises(SystemExit):
        main(["--version"])


def test_a_server_ends_although_a_thread_of_it_is_stuck() -> None:
    asked, go_on = threading.Event(), threading.Event()
    threads = ThreadPool(1, "stuck")

    async def wait(request: web.Request) -> web.Response:
        await threads.run(lambda: asked.set() or go_on.wait(60))
        return web.Response()

    def application() -> web.Application:
        app = web.Application()
        app.router.add_get("/wait", wait)
        return app

    server = ServerThread(application)
    host, port = server.start().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nHost: here\r\n\r\n")
        assert asked.wait(60)
        server.stop()
        assert client.recv(100) == b""
    [stuck] = [thread for thread in threading.enumerate() if thread.name == "stuck"]
    assert stuck.daemon  # so the process can end, too
    go_on.set()
    stuck.join(60)


def test_a_signal_ends_the_command_at_once_before_it_serves_and_in_time_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    others = set(threading.enumerate())  # timers of other tests

    def timers() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if isinstance(each, threading.Timer) and each not in others]

    monkeypatch.setattr("areno.cli.serve.GRACE_S", 0.01)
    monkeypatch.setattr(os, "_exit", ended.append)
    with _signals_handled() as stopping, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert stopping.asked.is_set()
    until(lambda: not timers())
    ended.clear()
    for number in (signal.SIGTERM, signal.SIGINT):
        with _signals_handled() as stopping:
            stopping.limit_s = 0.01
            os.kill(os.getpid(), number)
            assert stopping.asked.wait(60)
            until(lambda: 1 in ended)  # the process, if nothing else ends it
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                os.kill(os.getpid(), number)
                time.sleep(60)
        for timer in timers():
            timer.join(60)
        ended.clear()


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
def test_a_server_ends_when_its_time_is_over_whatever_is_under_way(grace_s: float) -> None:
    asked, ended = threading.Event(), []

    async def wait(request: web.Request) -> web.Response:
        asked.set()
        try:
            return web.Response(text=str(await asyncio.sleep(1000)))
        finally:
            ended.append(request.path)

    def application() -> web.Application:
        app = web.Application()
        app.router.add_get("/wait", wait)
        return app

    server = ServerThread(application, grace_s=grace_s)
    host, port = server.start().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nHost: here\r\n\r\n")
        assert asked.wait(60)
        begun = time.monotonic()
        stopping = threading.Thread(target=server.stop, daemon=True)
        stopping.start()
        stopping.join(60)
        assert not stopping.is_alive()
        assert time.monotonic() - begun >= grace_s
        assert (client.recv(100), silent.recv(100)) == (b"", b"")
    assert ended == ["/wait"]
    server.stop()  # of no effect
