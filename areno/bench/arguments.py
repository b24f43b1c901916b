"""The command line of the benchmark.

`Settings` is one parsed command line. A wrong argument raises a ConfigError of one line that says what to change.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from areno.bench.work import Work
from areno.config.models import OptimizerType
from areno.config.teacher import SAMPLED, DivergenceKind
from areno.errors import ConfigError, Problem
from areno.specs.engine import SharePrefixes

Compared = Literal["rollout", "train", "step", "logprob"]
"""Kinds of work that take --against."""
Standalone = Literal[
    "sampling", "state", "agents", "serve", "driver", "host", "sft", "grid", "ahead", "speculation", "trl"
]
"""Kinds of work that do not."""
Kind = Literal[Compared, Standalone]

_TRAINS = ("train", "step", "state", "grid")
_WITH_TEXT = ("sampling", "agents", "serve", "driver", "sft", "grid")
PLAIN = "plain"
"""Name of areno without --exact, --deterministic, --share-prefixes and --teacher, for --against."""
_OF_PLAIN = "--exact, --deterministic, --share-prefixes and --teacher"
_STANDALONE = get_args(Standalone)
_OF_TRL = ("config", "algo", "seeds", "overrides")
_USED_BY_SPECULATION = ("config", "overrides")  # of those
_BATCHES = [8, 32, 256]
_USED_BY_TRL = ("work", "shape", "device", "steps", "folder", "json", *_OF_TRL)
_WORKS = (
    "step: rollout, then one GSPO step on its samples. sampling: the cost of sampling settings. state: the cost of "
    "saving the run state during a step. agents: the cost of a rollout by agents. serve: the speed that clients get "
    "over HTTP. driver: the time that simulated devices wait for the driver. host: the host time of a decoding step "
    "against the number of rows, without the device's work. sft: the share of a step of supervised fine-tuning that is "
    "not the device's work. grid: the settings that tune.enabled chooses against a grid of "
    "settings, with lengths that are drawn up to --prompt-len and --new-tokens. ahead: rollouts that do not wait for "
    "their longest samples against rollouts that do, with log-normal lengths. speculation: rollouts with drafts "
    "(rollout.speculation) against rollouts without, after rollouts of the same prompts that fill the index. trl: the "
    "training of a base model by areno and by GRPOTrainer of TRL, with the same settings: rewards, solve rates and the "
    "time of a step"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One parsed command line of the benchmark. The help texts in `add_arguments` describe the fields."""

    kind: Kind
    shape: str
    work: Work
    device: str
    world_size: int
    tp_size: int
    cp_size: int
    zero_stage: Literal[0, 1, 2]
    dtype: str
    repeats: int
    optimizer: OptimizerType
    recompute: bool
    share_prefixes: SharePrefixes
    offload: bool
    tokens_per_mb: int
    clients: int
    copies: tuple[int, ...]
    rows: int
    messages: bool
    steps: int
    config: str | None
    algo: str
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    limit_s: int
    at_once: int | None
    mean_tokens: int
    ahead: int
    max_head_offpolicyness: int
    equal_rewards: float
    batches: tuple[int, ...]
    turns: int
    max_prefill_tokens: int
    mem_fraction: float
    attn_backend: Literal["auto", "flash", "native"]
    exact: bool
    deterministic: bool
    updates: int
    old_logprobs: Literal["recompute", "rollout"]
    teacher: str | None
    routing_replay: bool
    lora_rank: int | None
    eager_decode: bool
    tokenizer: str | None
    folder: str | None
    against: tuple[str, ...]
    against_repeats: int
    profile: str | None
    json: bool

    @property
    def devices(self) -> list[str]:
        """Names of the devices of all ranks, beginning with `device`."""
        if not self.device.startswith("cuda"):
            return [self.device] * self.world_size
        first = int(self.device.removeprefix("cuda:"))
        return [f"cuda:{index}" for index in range(first, first + self.world_size)]

    @property
    def n_copies(self) -> int:
        """Number of copies of the model. In a rollout, each copy samples its share of the batch."""
        return self.world_size // self.tp_size

    @property
    def rolls_out(self) -> bool:
        return self.kind in ("rollout", "step", "state")

    @property
    def trains(self) -> bool:
        return self.kind in _TRAINS


def parse(argv: list[str] | None = None) -> Settings:
    parser = _Parser(prog="python -m areno.bench")
    add_arguments(parser)
    return settings_of(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the benchmark. Does not import torch, which takes seconds, so that `--help` is fast."""
    parser.description = (
        "Measures the speed of rollout, training, a whole step or scoring on random prompts, and compares it with the "
        "limits of the device."
    )
    add = parser.add_argument
    add("work", choices=get_args(Kind), help=_WORKS)
    add("--shape", "--model", default="qwen3-0.6b", help="name of a model shape (random weights), or a model folder")
    add("--device", help="device (default: cuda:0, or cpu without a GPU)")
    _add_engine_arguments(parser)
    add("--prompts", type=_positive, help="number of prompts (default 32; for serve, or with --uniform: 256)")
    add("--samples", type=_positive, help="completions per prompt (default 8; with --uniform: 1; for serve always 1)")
    add("--prompt-len", type=_positive, help="tokens per prompt (default 256; for sft: 20)")
    add("--new-tokens", type=_positive, help="tokens per completion (default 256; for sft: 30)")
    add(
        "--uniform",
        type=_positive,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="draw the lengths of prompts and completions from LOW..HIGH",
    )
    add("--clients", type=_positive, default=64, help="serve: number of clients that send requests at the same time")
    add(
        "--copies",
        type=_positive,
        nargs="+",
        default=[1, 2],
        help="driver: numbers of model copies; each copy gets all prompts",
    )
    add("--rows", type=_positive, default=1024, help="sft: number of rows per step")
    add("--messages", action="store_true", help="sft: rows are conversations, not a prompt and a response")
    of_steps = "grid: number of further steps with the chosen settings (default 0). trl: number of training steps "
    add("--steps", type=_positive, default=0, help=f"{of_steps}(default: total_train_steps of --config)")
    _add_arguments_of_runs(parser)
    add("--limit-s", type=_positive, help="grid: seconds after which no other point is measured (default 480)")
    add("--at-once", type=_positive, help="number of samples that are decoded at once (default: all of a step)")
    _add_ahead_arguments(parser)
    add("--updates", type=_positive, default=1, help="step: optimizer steps per batch, as actor.ppo_n_minibatches")
    compared = "step: source of the ratio's denominator; rollout is actor.recompute_logprob=false"
    add("--old-logprobs", choices=["recompute", "rollout"], default="recompute", help=compared)
    losses = [SAMPLED, *get_args(DivergenceKind)]
    distilled = "step, train: add the loss of distillation from a teacher of the same shape, as teacher.loss_type"
    add("--teacher", choices=losses, metavar="LOSS_TYPE", help=f"{distilled} ({', '.join(losses)})")
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="tokenizer folder. sampling: also measure stop strings. agents, serve, driver and sft need it",
    )
    kept = "trl: folder to keep the curves (curves.svg), the numbers (result.json) and the runs in"
    add("--folder", help=f"state: folder to write to (default: a temporary folder). {kept}")
    add("--repeats", type=_positive, default=3, help="number of timed repeats after a warm-up")
    others = f"also measure this library. plain: areno without {_OF_PLAIN}"
    add("--against", choices=["transformers", "vllm", PLAIN], action="append", help=others)
    add("--against-repeats", type=_positive, default=2)
    add(
        "--profile",
        metavar="FILE",
        help="write a trace of one more repeat: device time by kernel group, and idle time (CUDA)",
    )
    add("--json", action="store_true", help="print one line of JSON")


def _add_arguments_of_runs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    at_once = (
        "speculation: numbers of samples that are decoded at once, rounded up to whole prompts (default: 8 32 256)"
    )
    add("--batches", type=_positive, nargs="+", default=_BATCHES, metavar="N", help=at_once)
    turns = (
        "speculation: number of turns of each sample, a conversation with made-up tool results (default: %(default)s)"
    )
    add("--turns", type=_positive, default=1, help=turns)
    settings_of_runs = "trl, speculation: name of the YAML file with the settings of the runs"
    add("--config", metavar="NAME", help=f"{settings_of_runs}, as --config-name")
    add("--algo", choices=["grpo", "gspo"], default="grpo", help="trl: the algorithm (default: %(default)s)")
    add("--seeds", type=_seed, nargs="+", default=[1], metavar="N", help="trl: seed of each pair of runs (default: 1)")
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="key=value",
        help="trl, speculation: another setting of the runs, such as gconfig.n_samples=16. Repeat it for more settings",
    )


def _add_ahead_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mean-tokens", type=_positive, default=64, help="ahead: mean length of a sample (default: %(default)s)")
    add("--ahead", type=_positive, default=4, help="ahead: number of prompts ahead (default: %(default)s)")
    aged = "ahead: as rollout.max_head_offpolicyness (default: %(default)s)"
    add("--max-head-offpolicyness", type=int, choices=range(100), default=4, metavar="N", help=aged)
    equal = "ahead: share of prompts whose samples have equal rewards, and which are replaced (default: %(default)s)"
    add("--equal-rewards", type=_share, default=0.0, metavar="SHARE", help=equal)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world-size", type=_positive, default=1, help="number of devices, starting at --device. They share the batch")
    add("--tp-size", type=_positive, default=1, help="as engine.tp_size")
    add("--cp-size", type=_positive, default=1, help="as engine.cp_size")
    add("--zero-stage", type=int, choices=[0, 1, 2], default=1, help="as engine.zero_stage")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="data type (default: bfloat16 on a GPU that supports it, else float32)",
    )
    add("--tokens-per-mb", type=_positive, default=32768, help="maximum number of tokens per micro-batch")
    add("--optimizer", choices=get_args(OptimizerType), default="adam")
    once = "as actor.share_prefixes (default: %(default)s, because the floors count a prompt for each of its samples)"
    add("--share-prefixes", choices=get_args(SharePrefixes), default="off", help=once)
    kept = "keep all activations (default: keep as many as fit into memory, and recompute the others)"
    add("--no-recompute", dest="recompute", action="store_false", help=kept)
    add("--offload", action="store_true", help="as actor.offload")
    add("--max-prefill-tokens", type=_positive, default=8192, help="maximum number of prompt tokens per decoder step")
    add("--mem-fraction", type=_fraction, default=0.6, help="fraction of the free memory for the KV cache")
    add("--attn-backend", choices=["auto", "flash", "native"], default="auto", help="as engine.attn_backend")
    add("--exact", action="store_true", help="as engine.exact")
    add("--deterministic", action="store_true", help="as engine.deterministic")
    add("--routing-replay", action="store_true", help="as actor.routing_replay")
    add(
        "--lora-rank",
        type=_positive,
        help="train LoRA adapters of this rank on all linear layers, and decode with them",
    )
    add("--eager-decode", action="store_true", help="decode without CUDA graphs")


def settings_of(args: argparse.Namespace) -> Settings:
    import torch

    from areno.kernels.backend import default_dtype

    kind, against = args.work, tuple(dict.fromkeys(args.against or ()))
    _check_trl(args)
    device = args.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    _check(args, device, against)
    if args.uniform:
        work = Work.uniform(args.prompts or 256, args.samples or 1, *args.uniform)
    else:
        prompts, samples = {"serve": (256, 1), "sft": (args.rows, 1)}.get(kind, (32, 8))
        prompt_len, new_tokens = (20, 30) if kind == "sft" else (256, 256)
        lengths = args.prompt_len or prompt_len, args.new_tokens or new_tokens
        work = Work.fixed(args.prompts or prompts, args.samples or samples, *lengths)
    dtype = args.dtype or str(default_dtype([device])).removeprefix("torch.")
    values = vars(args) | {"kind": kind, "work": work, "device": device, "dtype": dtype, "against": against}
    values |= {
        "copies": tuple(args.copies),
        "batches": tuple(dict.fromkeys(args.batches)),
        "limit_s": args.limit_s or 480,
    }
    values |= {"seeds": tuple(dict.fromkeys(args.seeds)), "overrides": tuple(args.overrides)}
    return Settings(**{field.name: values[field.name] for field in dataclasses.fields(Settings)})


def _check(args: argparse.Namespace, device: str, against: tuple[str, ...]) -> None:
    import torch

    kind = args.work
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    cuda, with_vllm = device.startswith("cuda"), "vllm" in against
    world, shares = args.world_size, args.tp_size * args.cp_size
    n_available = len(devices) - devices.index(device) if cuda and device in devices else world
    low, high = args.uniform or (0, 0)
    checks = (
        (device not in devices, "--device", f"is {device!r}; here are {', '.join(devices)}"),
        (world > n_available, "--world-size", f"is {world}; from {device} on there are {n_available} devices here"),
        (world % shares, "--world-size", f"is {world}; a multiple of --tp-size x --cp-size, {shares}, is needed"),
        (
            world > 1 and (kind in _STANDALONE or {*against} - {PLAIN}),
            "--world-size",
            "is for areno's own rollout, train, step and logprob",
        ),
        *_problems_of_profile(args, device),
        (bool(against) and kind in _STANDALONE, "--against", f"is for other works; {kind} compares areno with itself"),
        (args.offload and kind not in _TRAINS, "--offload", f"is for {', '.join(_TRAINS)}, not for {kind}"),
        (args.offload and not cuda, "--offload", f"is for a CUDA device, and --device is {device}"),
        (args.folder and kind not in ("state", "trl"), "--folder", f"is for state and trl, not for {kind}"),
        (args.folder and not Path(args.folder).is_dir(), "--folder", f"{args.folder} is not a folder"),
        (args.tokenizer and kind not in _WITH_TEXT, "--tokenizer", f"is for {', '.join(_WITH_TEXT)}, not for {kind}"),
        (kind == "serve" and not args.tokenizer, "--tokenizer", "is missing; serve needs one, for texts"),
        (kind == "serve" and args.samples not in (None, 1), "--samples", "is for other works; serve has 1 for each"),
        (kind in ("driver", "sft") and not args.tokenizer, "--tokenizer", f"is missing; {kind} needs one, for texts"),
        (args.steps and kind not in ("grid", "trl"), "--steps", f"is for grid and trl, not for {kind}"),
        (args.limit_s and kind != "grid", "--limit-s", f"is for grid, not for {kind}"),
        *_problems_of_ahead(args),
        *_problems_of_speculation(args),
        (args.teacher and kind not in ("step", "train"), "--teacher", f"is for step and train, not for {kind}"),
        (args.messages and kind != "sft", "--messages", f"is for sft, not for {kind}"),
        (
            kind == "sft" and bool(args.uniform or args.prompts or args.samples),
            "--rows",
            "is the number of rows of sft; leave out --prompts, --samples and --uniform",
        ),
        (kind == "agents" and not args.tokenizer, "--tokenizer", "is missing; agents need one with a chat template"),
        (
            PLAIN in against and not (args.exact or args.deterministic or args.share_prefixes != "off" or args.teacher),
            "--against",
            f"plain is for {_OF_PLAIN}; without them there is nothing to compare",
        ),
        (with_vllm and kind != "rollout", "--against", f"vllm does rollout only, not {kind}"),
        (with_vllm and device != "cuda:0", "--against", f"vllm takes the first GPU, cuda:0, and --device is {device}"),
        *(
            (find_spec(name) is None, "--against", f"{name} is not installed here (pip install {name})")
            for name in against
            if name != PLAIN
        ),
        (low > high, "--uniform", f"is {low} {high}; the first must not be above the second"),
    )
    _raise_problems(checks)


def _raise_problems(checks: Iterable[tuple[Any, str, str]]) -> None:
    """Raise ConfigError with the first message of each wrong argument. A check is (is wrong, argument, message)."""
    messages = dict[str, str]()
    for is_wrong, option, message in checks:
        if is_wrong:
            messages.setdefault(option, message)
    if messages:
        raise ConfigError([Problem(*each) for each in messages.items()])


def _problems_of_ahead(args: argparse.Namespace) -> Iterator[tuple[bool, str, str]]:
    kind, equal = args.work, args.equal_rewards > 0
    most = max(1, args.max_head_offpolicyness) * (args.prompts or 32)
    yield equal and kind != "ahead", "--equal-rewards", f"is for ahead, not for {kind}"
    yield equal and not args.max_head_offpolicyness, "--equal-rewards", "needs --max-head-offpolicyness above 0"
    too_many = kind == "ahead" and args.ahead > most
    yield too_many, "--ahead", f"is {args.ahead}; samples get too old with more than {most}"


def _problems_of_profile(args: argparse.Namespace, device: str) -> Iterator[tuple[bool, str, str]]:
    if args.profile is not None:
        file, option = Path(args.profile), "--profile"
        yield args.world_size > 1, option, "traces one process, and --world-size starts several"
        yield not file.parent.is_dir(), option, f"the folder {file.parent} does not exist"
        yield file.is_dir(), option, f"{file} is a folder; expected the path of a file"
        yield not device.startswith("cuda"), option, f"traces a CUDA device, and --device is {device}"
        yield args.work in _STANDALONE, option, f"is for other works, not for {args.work}"


def _problems_of_speculation(args: argparse.Namespace) -> Iterator[tuple[bool, str, str]]:
    is_ours = args.work == "speculation"
    yield args.batches != _BATCHES and not is_ours, "--batches", f"is for speculation, not for {args.work}"
    yield args.turns != 1 and not is_ours, "--turns", f"is for speculation, not for {args.work}"
    taken = "--batches, --samples, --prompt-len and --new-tokens"
    yield is_ours and args.prompts is not None, "--prompts", f"is for other works; speculation takes {taken}"
    yield is_ours and args.uniform is not None, "--uniform", f"is for other works; speculation takes {taken}"
    is_twice = is_ours and args.config is not None and args.samples is not None
    yield is_twice, "--samples", "does not go with --config, which gives the number; use --set gconfig.n_samples=N"


def _check_trl(args: argparse.Namespace) -> None:
    """Raise ConfigError if arguments are missing for the work "trl", not used by it, or only for it."""
    parser = _Parser()
    add_arguments(parser)
    kind, is_trl = args.work, args.work == "trl"
    options = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    for name, option in options.items():
        if name in vars(args) and vars(args)[name] != parser.get_default(name):
            if is_trl and name not in _USED_BY_TRL:
                raise ConfigError([Problem(option, "is for other works; trl takes settings from --config and --set")])
            if not is_trl and name in _OF_TRL and not (kind == "speculation" and name in _USED_BY_SPECULATION):
                raise ConfigError([Problem(option, f"is for trl, not for {kind}")])
    if not is_trl:
        if args.overrides and not args.config:
            raise ConfigError([Problem("--set", "changes settings of --config, which is missing")])
        return
    model = Path(args.shape).expanduser()
    missing = [name for name in ("trl", "accelerate", "datasets") if find_spec(name) is None]
    checks = (
        (not args.config, "--config", "is missing; trl needs the name of a YAML file, such as countdown_cpu"),
        (
            not any(model.glob("*.safetensors")),
            "--model",
            f"is {args.shape}; trl needs the folder of a base model with weights, such as areno reproduce makes",
        ),
        (
            args.device not in (None, "cpu", "cuda:0"),
            "--device",
            f"is {args.device!r}; trl takes cpu or the first GPU, cuda:0",
        ),
        (bool(missing), "WORK", f"trl needs packages that are not installed here (pip install {' '.join(missing)})"),
    )
    _raise_problems(checks)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError for a wrong argument, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; a whole number of at least 1 is needed")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; a whole number of at least 0 is needed")
    return int(text)


def _share(text: str) -> float:
    return _number(text, lambda value: 0 <= value < 1, "of at least 0 and below 1")


def _fraction(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, "above 0 and at most 1")


def _number(text: str, fits: Callable[[float], bool], words: str) -> float:
    with suppress(ValueError):
        if fits(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"is {text!r}; a number {words} is needed")
