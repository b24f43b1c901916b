"""The command `areno serve`: serve a model folder through an OpenAI-compatible API.

`add_arguments` declares the flags. `run` starts the engine and the HTTP server and waits for a signal to stop.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.config.fp8 import FP8Config
from areno.files.interrupts import signal_handlers

if TYPE_CHECKING:
    from areno.server.access import OriginGuard
    from areno.server.sampling import ServerLimits

logger = logging.getLogger("areno")

_NAMES = {
    "actor.path": "FOLDER",
    "actor.dtype": "--dtype",
    "actor.fp8_config": "--fp8",
    "tokenizer_path": "FOLDER",
    "engine.tp_size": "--tp-size",
    "engine.world_size": "--world-size",
    "engine.device": "--device",
    "rollout.mem_fraction": "--mem-fraction",
    "rollout.max_kv_tokens": "--max-kv-tokens",
    "rollout.kv_cache_dtype": "--kv-cache-dtype",
    "rollout.speculation": "--speculation",
    "rollout.max_concurrent_rollouts": "--max-running",
    "gconfig.max_tokens": "--max-model-len",
    "gconfig.max_new_tokens": "--max-model-len",
    "train_dataset.max_length": "--max-model-len",
}
_MAX_REMEMBERED_TOKENS = 8_000_000  # limit on the tokens of the conversations that the server keeps
GRACE_S = 10.0  # seconds that the shutdown may take after the time limit of the last answers
_POLL_S = 1.0  # seconds between two checks that the workers are alive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.description = (
        "Serves a Hugging Face folder, such as a checkpoint of a run, at http://HOST:PORT/v1: chat/completions, "
        "completions and models. The server also has /health and /metrics (Prometheus). After Ctrl-C or SIGTERM it "
        "finishes the answers in progress and ends."
    )
    add = parser.add_argument
    add(
        "folder",
        metavar="FOLDER",
        help="folder of a checkpoint, of a run (its last checkpoint is served) or of any model, or a hub id",
    )
    _add_access_arguments(parser)
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests; by default the path of the folder and the last part of the path",
    )
    add(
        "--max-model-len",
        type=_bounded_number_type(int, 2),
        help="maximum tokens of prompt plus answer; by default the model's context",
    )
    add(
        "--max-running",
        type=_bounded_number_type(int, 1),
        default=256,
        help="maximum number of answers that are sampled at the same time",
    )
    add(
        "--max-waiting",
        type=_bounded_number_type(int, 0),
        default=1024,
        help="maximum number of answers that wait; more requests get status 429",
    )
    add("--max-body-mb", type=_bounded_number_type(float, 0.001), default=16.0, help="maximum size of a request in MB")
    add(
        "--max-messages", type=_bounded_number_type(int, 1), default=10_000, help="maximum number of messages in a chat"
    )
    add(
        "--timeout-s",
        type=_bounded_number_type(float, 0.001),
        default=3600.0,
        help="time limit for one request in seconds",
    )
    add(
        "--shutdown-s",
        type=_bounded_number_type(float, 0),
        default=30.0,
        help="after SIGTERM, how many seconds the server waits for answers in progress",
    )
    _add_engine_arguments(parser)


def _add_access_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 listens on all addresses and needs --api-key"
    )
    add(
        "--port",
        type=_bounded_number_type(int, 0, 65535),
        default=8000,
        help="port to listen on; 0 chooses a free port",
    )
    add(
        "--api-key",
        default=os.environ.get("ARENO_API_KEY"),
        help="API key that requests must send; by default $ARENO_API_KEY. "
        "Without a key, every program on this machine can use the server, and web pages cannot",
    )
    add(
        "--allowed-hosts",
        nargs="+",
        default=[],
        type=_host_name,
        metavar="HOST",
        help="without --api-key: values of the header Host that are accepted beside localhost, 127.0.0.1 and [::1]",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        type=_web_origin,
        metavar="ORIGIN",
        help="without --api-key: origins of web pages that may use the server, such as https://example.com",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tp-size",
        type=_bounded_number_type(int, 1),
        default=1,
        help="number of devices that share one copy of the model (tensor parallel)",
    )
    add("--world-size", type=_bounded_number_type(int, 1), help="total number of devices; by default all visible ones")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device type")
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="data type of the weights")
    add(
        "--mem-fraction",
        type=_bounded_number_type(float, 0.01, 0.99),
        default=0.85,
        help="fraction of the free memory for the KV cache",
    )
    add("--max-kv-tokens", type=_bounded_number_type(int, 1), help="size of the KV cache in tokens")
    add(
        "--max-prefill-tokens",
        type=_bounded_number_type(int, 1),
        default=8192,
        help="maximum number of prompt tokens per forward pass",
    )
    add(
        "--kv-cache-dtype",
        choices=["auto", "fp8"],
        default="auto",
        help="data type of keys and values; for a model trained with rollout.kv_cache_dtype=fp8, the same one",
    )
    add("--fp8", action="store_true", help="compute linear layers in FP8, as actor.fp8_config with its defaults")
    add("--eager-decode", action="store_true", help="decode and prefill without CUDA graphs")
    add(
        "--speculation",
        choices=["auto", "on", "off"],
        default="off",
        help="on: where faster, draft the next tokens of an answer and verify several in one step; a draft is the text "
        "that followed the same tokens before, in the conversation or in others with the same first messages. auto: on "
        "for GPUs (default: %(default)s)",
    )
    add(
        "--logprobs-mode",
        choices=["raw_logprobs", "processed_logprobs"],
        default="raw_logprobs",
        help="log-probabilities in answers: those of softmax(logits), or of softmax(logits / temperature), from which "
        "the answer is sampled. The extra field areno always has the latter (default: %(default)s)",
    )
    add("--disable-thinking", action="store_true", help="pass enable_thinking=false to the chat template")
    add(
        "--allow-control-tokens",
        action="store_true",
        help="text in system, user and tool messages that spells a control token (turn marker, bos, eos, pad) "
        "becomes this token; by default it is tokenized as ordinary text",
    )
    add("--random-weights", action="store_true", help="serve random weights, for benchmarks; needs no weight files")


def _bounded_number_type(kind: type, least: float, most: float = float("inf")) -> Any:

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            bound = f"at least {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"is {text}; a number {bound} is expected")
        return value

    read.__name__ = kind.__name__  # argparse prints it, as in `invalid int value`
    return read


def _host_name(text: str) -> str:
    if not text or "/" in text:
        raise argparse.ArgumentTypeError(f"is {text}; a name such as example.com is expected")
    return text.lower()


def _web_origin(text: str) -> str:
    scheme, _, host = text.partition("://")
    if text != "null" and (not scheme or not host or "/" in host):
        raise argparse.ArgumentTypeError(f"is {text}; an origin such as https://example.com is expected")
    return text


def run(arguments: argparse.Namespace) -> int:
    from areno.errors import ConfigError, Problem, keys_renamed
    from areno.tracking.run_log import RunLog

    local = arguments.host in ("127.0.0.1", "localhost", "::1")
    if not arguments.api_key and not local:
        text = f"is missing, but --host {arguments.host} can be reached from other machines; set a key"
        raise ConfigError([Problem("--api-key", f"{text}, such as {secrets.token_urlsafe(24)}")])
    given = {"--allowed-hosts": arguments.allowed_hosts, "--allowed-origins": arguments.allowed_origins}
    if arguments.api_key and any(given.values()):
        text = "is for a server without --api-key; with a key, no page can use the server that does not know it"
        raise ConfigError([Problem(flag, text) for flag, values in given.items() if values])
    with RunLog(own_process=True), _signals_handled() as shutdown, keys_renamed(_NAMES.get):
        return _run_server(arguments, shutdown)


def _model_folder(named: str) -> str:
    """Return a model folder, or the newest checkpoint of a run's folder."""
    from areno.errors import ArenoError
    from areno.tracking.reader import RunReader, is_run

    folder = Path(named).expanduser()
    if not is_run(folder):
        return named
    latest = RunReader(folder).latest_checkpoint()
    if latest is None:
        raise ArenoError("{} has no checkpoint yet; name a model folder", folder)
    return str(latest)


@dataclass
class _Shutdown:
    """State of the shutdown, shared by the signal handler and the serving loop."""

    asked: threading.Event = field(default_factory=threading.Event)  # set by a signal
    limit_s: float | None = None  # None before the server accepts requests


def _server_limits(arguments: argparse.Namespace) -> ServerLimits:
    from areno.server.sampling import ServerLimits

    return ServerLimits(
        max_body=int(arguments.max_body_mb * 2**20),
        max_samples=arguments.max_running + arguments.max_waiting,
        timeout_s=arguments.timeout_s,
        shutdown_s=arguments.shutdown_s,
        max_messages=arguments.max_messages,
        max_remembered=_MAX_REMEMBERED_TOKENS,
    )


def _page_guard(arguments: argparse.Namespace) -> OriginGuard | None:
    """Return the guard against requests of web pages. It is None for a server with an API key, which needs no guard."""
    from areno.server.access import OriginGuard

    if arguments.api_key:
        return None
    return OriginGuard(frozenset(arguments.allowed_hosts), frozenset(arguments.allowed_origins))


def _run_server(arguments: argparse.Namespace, shutdown: _Shutdown) -> int:
    from areno.config.experiments import ExperimentConfig
    from areno.config.models import ModelConfig
    from areno.config.rollout import DecoderConfig
    from areno.config.run import EngineConfig
    from areno.engine.engine import Engine
    from areno.plan.devices import find_devices
    from areno.plan.lora import folder_with_tokenizer, with_model
    from areno.plan.plan import plan_of_actor
    from areno.server.app import build_server
    from areno.server.sampling import EngineClient
    from areno.server.threads import ServerThread
    from areno.specs.rollout import RolloutSpec
    from areno.types import SamplingParams

    engine_config = EngineConfig.of(arguments, dummy_load=arguments.random_weights)
    path = _model_folder(arguments.folder)
    actor = ModelConfig(path=path, dtype=arguments.dtype, fp8_config=FP8Config() if arguments.fp8 else None)
    config = ExperimentConfig(
        experiment_name="serve",
        actor=with_model(actor, path),
        engine=engine_config,
        tokenizer_path=folder_with_tokenizer(path),
        allow_control_tokens=arguments.allow_control_tokens,
    )
    decoder = DecoderConfig.of(arguments)
    plan = plan_of_actor(config, partial(find_devices, engine_config), decoder)
    limits = _server_limits(arguments)
    with Engine(plan.spec.without_optimizer(), plan.workers) as engine:
        context = min(arguments.max_model_len or engine.info.context_len, engine.info.context_len)
        room = engine.begin_rollout(RolloutSpec(max_running=arguments.max_running, max_len=context, decoder=decoder))
        names = arguments.served_model_name or [arguments.folder, Path(plan.spec.actor.path).name]
        sampler = EngineClient(
            engine,
            replace(room, context_len=context),
            SamplingParams(max_new_tokens=context, max_context_len=context),
            limits,
            secrets.randbits(63),
            raw_logprobs=arguments.logprobs_mode == "raw_logprobs",
        )
        server = build_server(
            sampler,
            plan.tokenizer,
            models=list(dict.fromkeys(names)),
            keys=[arguments.api_key] if arguments.api_key else [],
            thinking=False if arguments.disable_thinking else None,
            guard=_page_guard(arguments),
        )
        thread = ServerThread(server.application, arguments.host, arguments.port, limits.shutdown_s)
        gc.freeze()  # otherwise garbage collection scans all imported modules and stops the server for 300 ms
        url = thread.start()
        try:
            logger.info("serving %s at %s/v1 (context %d tokens)", ", ".join(server.models), url, context)
            shutdown.limit_s = limits.shutdown_s + GRACE_S
            while not shutdown.asked.wait(_POLL_S):
                engine.poll(0.0)  # raises if a worker has died
            logger.info("closing: %d samples in progress", server.sampler.n_samples)
        finally:
            thread.stop()
    return 0


@contextmanager
def _signals_handled() -> Iterator[_Shutdown]:
    """Let SIGINT and SIGTERM stop the server within a `with` block.

    The first signal sets the event `asked` of the yielded state, and requests in progress can finish. A second signal,
    or a signal before the server accepts requests, raises KeyboardInterrupt at once. If the process still runs after
    the time limit of the shutdown, for example because a thread hangs, the process is killed. The caller sets `limit_s`
    when the server accepts requests.
    """
    shutdown, timers = _Shutdown(), list[threading.Timer]()

    def end() -> None:
        logger.error("the server did not stop in time and is killed")
        os._exit(1)

    def stop(number: int, frame: object) -> None:
        is_first = not shutdown.asked.is_set()
        timers.append(threading.Timer(shutdown.limit_s if is_first and shutdown.limit_s is not None else GRACE_S, end))
        timers[-1].daemon = True
        timers[-1].start()
        shutdown.asked.set()
        if not is_first or shutdown.limit_s is None:
            raise KeyboardInterrupt

    try:
        with signal_handlers(stop, signal.SIGINT, signal.SIGTERM):
            yield shutdown
    finally:
        for timer in timers:
            timer.cancel()
