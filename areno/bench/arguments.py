"""The command line of the benchmark. A wrong argument raises a ConfigError of one line that says what to change."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn, get_args

from areno.bench.work import Workload
from areno.config.optimizers import OptimizerType
from areno.config.teacher import SAMPLED, DivergenceKind
from areno.errors import ConfigError, Problem
from areno.specs.engine import SharePrefixes

Kind = Literal["rollout", "train", "step", "logprob"]
PLAIN = "plain"
"""Name of areno without the arguments `_OF_PLAIN`, for --against."""
_OF_PLAIN = "--exact, --deterministic, --share-prefixes, --kv-cache-dtype, --fp8, --teacher and --record"


class Settings(argparse.Namespace):
    """A parsed command line. The help texts describe the arguments. `with_derived_settings` sets missing values."""

    kind: Kind
    shape: str
    work: Workload
    device: str
    dtype: str
    world_size: int
    tp_size: int
    tokens_per_mb: int
    repeats: int
    optimizer: OptimizerType
    share_prefixes: SharePrefixes
    kv_cache_dtype: Literal["auto", "fp8"]
    old_logprobs: Literal["recompute", "rollout"]
    teacher: str | None
    lora_rank: int | None
    target_modules: list[str] | None
    fp8: str | None
    record: bool
    tokenizer: str | None

    def replaced(self, **changes: Any) -> Settings:
        return Settings(**{**vars(self), **changes})

    @property
    def devices(self) -> list[str]:
        """Names of the devices of all ranks, beginning with `device`."""
        if not self.device.startswith("cuda"):
            return [self.device] * self.world_size
        first = int(self.device.removeprefix("cuda:"))
        return [f"cuda:{index}" for index in range(first, first + self.world_size)]

    @property
    def n_replicas(self) -> int:
        """Number of copies of the model. In a rollout, each copy samples its share of the batch."""
        return self.world_size // self.tp_size

    @property
    def rolls_out(self) -> bool:
        return self.kind in ("rollout", "step")

    @property
    def trains(self) -> bool:
        return self.kind in ("train", "step")


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="python -m areno.bench")
    add_arguments(parser)
    return with_derived_settings(parser.parse_args(argv, Settings()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the benchmark. Does not import torch, which takes seconds, so that `--help` is fast."""
    parser.description = (
        "Measures the speed of rollout, training, a whole step or scoring on random prompts, and compares it with the "
        "limits of the device."
    )
    works = "rollout, train, step or logprob. step: rollout, then one GSPO step on its samples"
    parser.add_argument("kind", metavar="work", choices=get_args(Kind), help=works)
    add_work_arguments(parser)
    add_phase_arguments(parser, [PLAIN])


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a batch of work and an engine on one device."""
    add = parser.add_argument
    add("--shape", "--model", default="qwen3-0.6b", help="name of a model shape (random weights), or a model folder")
    add("--device", help="device (default: cuda:0, or cpu without a GPU)")
    types = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=types, help="data type (default: bfloat16 on a GPU that supports it, else float32)")
    add("--prompts", type=positive_int, help="number of prompts (default 32; with --uniform: 256)")
    add("--samples", type=positive_int, help="completions per prompt (default 8; with --uniform: 1)")
    add("--prompt-len", type=positive_int, default=256, help="tokens per prompt (default: %(default)s)")
    add("--new-tokens", type=positive_int, default=256, help="tokens per completion (default: %(default)s)")
    drawn = "draw the lengths of prompts and completions from LOW..HIGH"
    add("--uniform", type=positive_int, nargs=2, metavar=("LOW", "HIGH"), help=drawn)
    add("--at-once", type=positive_int, help="number of samples that are decoded at once (default: all of a step)")
    add("--tokens-per-mb", type=positive_int, default=32768, help="maximum number of tokens per micro-batch")
    add("--optimizer", choices=get_args(OptimizerType), default="adam")
    once = "as actor.share_prefixes (default: %(default)s, because the floors count a prompt for each of its samples)"
    add("--share-prefixes", choices=get_args(SharePrefixes), default="off", help=once)
    kept = "keep all activations (default: keep as many as fit into memory, and recompute the others)"
    add("--no-recompute", dest="recompute", action="store_false", help=kept)
    add("--offload", action="store_true", help="as actor.offload")
    add(
        "--max-prefill-tokens", type=positive_int, default=8192, help="maximum number of prompt tokens per decoder step"
    )
    add("--mem-fraction", type=_fraction, default=0.6, help="fraction of the free memory for the KV cache")
    add("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="as rollout.kv_cache_dtype")
    add("--attn-backend", choices=["auto", "flash", "native"], default="auto", help="as engine.attn_backend")
    add("--exact", action="store_true", help="as engine.exact")
    add("--deterministic", action="store_true", help="as engine.deterministic")
    add("--routing-replay", action="store_true", help="as actor.routing_replay")
    adapters = "train LoRA adapters of this rank on all linear layers, and decode with them"
    add("--lora-rank", type=positive_int, help=adapters)
    add("--target-modules", nargs="+", metavar="NAME", help="as actor.target_modules, with --lora-rank")
    in_fp8 = "as actor.fp8_config. dgrad (default), wgrad or both: which gradients are in FP8, too; none: neither. "
    in_fp8 += "int8: mode=int8, with --lora-rank"
    add("--fp8", choices=["dgrad", "wgrad", "both", "none", "int8"], nargs="?", const="dgrad", help=in_fp8)
    add("--eager-decode", action="store_true", help="decode without CUDA graphs")
    add("--repeats", type=positive_int, default=3, help="number of timed repeats after a warm-up")
    add("--json", action="store_true", help="print one line of JSON")
    one_device: dict[str, Any] = {"world_size": 1, "tp_size": 1, "cp_size": 1, "zero_stage": 1}
    parser.set_defaults(
        **one_device, updates=1, old_logprobs="recompute", teacher=None, tokenizer=None, against=None, record=False
    )


def add_phase_arguments(parser: argparse.ArgumentParser, others: Sequence[str]) -> None:
    """Add the arguments about devices, updates and comparisons. `others` are the names that --against takes."""
    add = parser.add_argument
    add(
        "--world-size",
        type=positive_int,
        default=1,
        help="number of devices, starting at --device. They share the batch",
    )
    add("--tp-size", type=positive_int, default=1, help="as engine.tp_size")
    add("--cp-size", type=positive_int, default=1, help="as engine.cp_size")
    add("--zero-stage", type=int, choices=[0, 1, 2], default=1, help="as engine.zero_stage")
    add("--updates", type=positive_int, default=1, help="step: optimizer steps per batch, as actor.ppo_n_minibatches")
    compared = "step: source of the ratio's denominator; rollout is actor.recompute_logprob=false"
    add("--old-logprobs", choices=["recompute", "rollout"], default="recompute", help=compared)
    losses = [SAMPLED, *get_args(DivergenceKind)]
    distilled = "step, train: add the loss of distillation from a teacher of the same shape, as teacher.loss_type"
    add("--teacher", choices=losses, metavar="LOSS_TYPE", help=f"{distilled} ({', '.join(losses)})")
    add("--record", action="store_true", help="step: record each step, as recorder.max_gib")
    against = f"also measure this. plain: areno without {_OF_PLAIN}"
    add("--against", choices=others, action="append", help=against)


def with_derived_settings(settings: Settings) -> Settings:
    """Set device, data type and batch, which depend on this machine or on other arguments, and check arguments."""
    import torch

    from areno.kernels.backend import default_dtype

    settings.device = settings.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    settings.against = list(dict.fromkeys(settings.against or ()))
    _check_settings(settings)
    settings.dtype = settings.dtype or str(default_dtype([settings.device])).removeprefix("torch.")
    if settings.uniform:
        settings.work = Workload.uniform(settings.prompts or 256, settings.samples or 1, *settings.uniform)
    else:
        lengths = settings.prompt_len, settings.new_tokens
        settings.work = Workload.fixed(settings.prompts or 32, settings.samples or 8, *lengths)
    return settings


def _check_settings(settings: Settings) -> None:
    import torch

    kind, device, world = settings.kind, settings.device, settings.world_size
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    cuda, shares = device.startswith("cuda"), settings.tp_size * settings.cp_size
    n_available = len(devices) - devices.index(device) if cuda and device in devices else world
    low, high = settings.uniform or (0, 0)
    differs = settings.exact or settings.deterministic or settings.teacher or settings.fp8
    differs = differs or settings.share_prefixes != "off" or settings.kv_cache_dtype != "auto" or settings.record
    nothing = f"plain is for {_OF_PLAIN}; without them there is nothing to compare"
    raise_problems(
        [
            (device not in devices, "--device", f"is {device!r}; here are {', '.join(devices)}"),
            (world > n_available, "--world-size", f"is {world}; from {device} on there are {n_available} devices here"),
            (world % shares, "--world-size", f"is {world}; a multiple of --tp-size x --cp-size, {shares}, is needed"),
            (settings.offload and not settings.trains, "--offload", f"is for train and step, not for {kind}"),
            (settings.offload and not cuda, "--offload", f"is for a CUDA device, and --device is {device}"),
            (settings.teacher and not settings.trains, "--teacher", f"is for step and train, not for {kind}"),
            (settings.record and kind != "step", "--record", f"is for step, not for {kind}"),
            (settings.fp8 == "int8" and not settings.lora_rank, "--fp8", "is int8, which needs --lora-rank"),
            (settings.target_modules and not settings.lora_rank, "--target-modules", "needs --lora-rank"),
            (PLAIN in settings.against and not differs, "--against", nothing),
            (low > high, "--uniform", f"is {low} {high}; the first must not be above the second"),
        ]
    )


def raise_problems(checks: Iterable[tuple[Any, str, str]]) -> None:
    """Raise a ConfigError with the first message of each wrong argument. A check is (is wrong, argument, message)."""
    messages = dict[str, str]()
    for is_wrong, option, message in checks:
        if is_wrong:
            messages.setdefault(option, message)
    if messages:
        raise ConfigError([Problem(*each) for each in messages.items()])


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError for a wrong argument, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; a whole number of at least 1 is needed")
    return int(text)


def _fraction(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"is {text!r}; a number above 0 and at most 1 is needed")
