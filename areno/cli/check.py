"""The command `areno check`, which tries each part of a run on this machine with a tiny model that areno includes.

With `-- COMMAND`, it checks the run of this command (check_run.py). With a model folder as its argument, it reports
whether areno supports the model, and which files and fields are wrong or missing, without reading weights.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areno.cli import check_run
from areno.errors import ArenoError, CheckpointError, ConfigError, Key, Problem

if TYPE_CHECKING:
    from areno.models.config import TransformerConfig


class Finding(NamedTuple):
    """One result of the check of a model folder."""

    part: str  # such as "weights"
    text: str
    is_wrong: bool = False  # areno cannot run the model because of it


def findings(path: Path) -> Iterator[Finding]:
    """Check a model folder, or a config.json alone, without reading weights."""
    from areno.models.adapters import is_adapter_folder

    folder = path.parent if path.name == "config.json" else path
    if not folder.is_dir():
        yield Finding("model", f"{folder} is no folder; expected a model folder in the Hugging Face format", True)
        return
    config: list[TransformerConfig] = []
    yield from _try_part("model", lambda: _check_model(folder, config))
    for read in config:
        yield from _describe_special_layers(read)
    if path is folder and not is_adapter_folder(folder):
        yield from _try_part("weights", lambda: _check_weights(folder, config))
        yield from _try_part("tokenizer", lambda: _check_tokenizer(folder))


def _try_part(part: str, work: Callable[[], str]) -> Iterator[Finding]:
    """Yield a Finding with the text that `work` returns, or one for each problem of the ArenoError that it raises."""
    try:
        yield Finding(part, work())
    except ArenoError as error:
        for problem in error.renamed({"actor.path": "FOLDER"}.get).problems:
            yield Finding(part, str(problem), True)


def _check_model(folder: Path, config: list[TransformerConfig]) -> str:
    """Return a description of a model, and append its configuration to `config`."""
    from areno.models.adapters import base_model_of, is_adapter_folder
    from areno.models.parameters import n_parameters
    from areno.models.registry import head_of, load_config

    if is_adapter_folder(folder):
        base = base_model_of(folder)
        raise CheckpointError("{} holds adapters and no model; check the one they are for: {}", folder, base)
    read = load_config(folder, head_of(folder))
    config.append(read)
    about = f"{read.family}, {read.num_layers} layers, {n_parameters(read) / 1e6:.1f}M parameters"
    return f"{about}, {read.max_position_embeddings} tokens of context"


def _describe_special_layers(config: TransformerConfig) -> Iterator[Finding]:
    """Yield a Finding if layers have sliding-window attention, and one if layers have a recurrent state."""
    from areno.cost.memory import state_bytes

    windows = sorted({kind.window for kind in config.kinds if kind.window is not None})
    if windows:
        sliding = [kind.window is not None for kind in config.kinds]
        text = f"of {windows[0]} tokens in {sum(sliding)} of {config.num_layers} layers"
        yield Finding("sliding window", f"{text}, which free the KV cache behind it")
    if config.delta is not None:
        text = f"in {len(config.delta.layers)} of {config.num_layers} layers"
        size = f"{state_bytes(config, 2) / 2**20:.1f} MiB of a sequence in bfloat16, whatever its length"
        yield Finding("recurrent state", f"{text}; {size}")


def _check_weights(folder: Path, config: list[TransformerConfig]) -> str:
    """Describe the weights by the headers of their files. Without a configuration, they are only counted."""
    import torch

    from areno.models.folder import tensor_files
    from areno.models.registry import build_model
    from areno.models.weights import check_weights

    if not config:
        return f"{len(tensor_files(folder))} tensors, which were not compared with config.json"
    return check_weights(build_model(config[0], dtype=torch.float32, device="meta"), folder)


def _check_tokenizer(folder: Path) -> str:
    from areno.models.folder import TOKENIZER
    from areno.plan.folders import load_tokenizer

    if not any((folder / name).is_file() for name in TOKENIZER):
        text = "{} has no tokenizer; download the model again, or set {} to a folder that has one"
        raise CheckpointError(text, folder, Key("tokenizer_path"))
    found = load_tokenizer(str(folder))
    return f"{len(found)} tokens, with{'' if found.chat_template else 'out'} a chat template"


_MODEL = "examples/quickstart/model"
AGREEMENT = {"float32": 1e-4, "bfloat16": 0.1}  # largest mean difference of log-probabilities, rollout to training
_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tries what a run needs: packages, devices, kernels, the reward processes, and a rollout, an optimizer step "
        "and a checkpoint of a tiny model on every device. Says what works and what does not. The exit code is 1 "
        "where something does not work. With FOLDER it only says whether areno supports the model there, and what is "
        "wrong or missing: fields of its config.json, weight files and their tensors, the tokenizer. No weights are "
        "read. With FOLDER/config.json it looks at this file alone. With -- COMMAND, the command of a run, it checks "
        "what this run would do with its data: areno check -- python -m areno.recipes.gspo --config-name=quickstart"
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="model folder in the Hugging Face format, or its config.json; default: check this installation",
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="device type (default: cuda if available)"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of devices (default: all visible ones)")
    parser.add_argument("--debug", action="store_true", help="print the traceback of each failed check")
    check_run.add_arguments(parser)


@dataclass
class _CheckReport:
    """Prints a line for each checked part of areno."""

    debug: bool
    failed: list[str] = field(default_factory=list)

    def print_line(self, mark: str, name: str, text: object) -> None:
        print(f"{mark:<5} {name:<18} {text}", flush=True)

    def attempt(self, name: str, work: Callable[[], str]) -> bool:
        """Call `work`, print its text or its error, and return whether it succeeded."""
        try:
            self.print_line("ok", name, work())
        except Exception as error:  # a broken installation may raise anything, and the user needs to see it
            if self.debug:
                traceback.print_exc()
            said = str(error) if isinstance(error, ArenoError) else f"{type(error).__name__}: {error}"
            self.print_line("FAIL", name, said)
            self.failed.append(name)
            return False
        return True


def run(arguments: argparse.Namespace) -> int:
    from areno.tracking.run_log import RunLog

    _refuse_mixed_options(arguments)
    if arguments.command is not None:
        return check_run.run(arguments)
    report = _CheckReport(arguments.debug)
    if arguments.folder is not None:
        if arguments.device != "auto" or arguments.world_size is not None:
            raise ConfigError("--device and --world-size are not for FOLDER, which is not run")
        return _check_folder(report, Path(arguments.folder))
    with RunLog(own_process=True, console="quiet"):
        _run_checks(report, arguments)
    print(f"\n{', '.join(report.failed)}: see above" if report.failed else "\neverything that a run needs works")
    return 1 if report.failed else 0


def _refuse_mixed_options(arguments: argparse.Namespace) -> None:
    """Raise an error for options of a check of the installation beside a COMMAND, or the reverse."""
    of_run = ("--only", "--json", "--html", "--device-kind", "--offline", "--calls", "--model")
    of_machine = ("FOLDER", "--device", "--world-size", "--debug")
    with_command = arguments.command is not None
    given = {name: vars(arguments)[name.strip("-").replace("-", "_").lower()] for name in (*of_run, *of_machine)}
    if wrong := [name for name in (of_machine if with_command else of_run) if given[name] not in (None, False, "auto")]:
        text = "is not for the check of a run; leave it out" if with_command else "is for a run; add -- COMMAND"
        raise ConfigError([Problem(name, text) for name in wrong])


def _check_folder(report: _CheckReport, path: Path) -> int:
    for part, text, is_wrong in findings(path):
        report.print_line("FAIL" if is_wrong else "ok", part, text)
        report.failed += [part] * is_wrong
    return 1 if report.failed else 0


def _run_checks(report: _CheckReport, arguments: argparse.Namespace) -> None:
    if report.attempt("packages", _check_packages):
        report.attempt("device", lambda: _check_device(arguments.device))
        report.attempt("kernels", lambda: _check_kernels(arguments.device))
        report.attempt("folder", _check_run_folder)
        report.attempt("reward processes", _check_rewards)
        _check_box(report)
        _check_model_of_areno(report, arguments)
    for name, missing in _missing_extras():
        report.print_line("-", f"extra {name}", f"is not installed; pip install 'areno[{name}]' brings {missing}")


def _check_box(report: _CheckReport) -> None:
    """Say by what the programs of a model and of agents are limited. Not every run needs a box, so nothing fails."""
    from areno.sandbox.box import network_problem, try_box

    problem, means = try_box()
    if problem:
        return report.print_line("-", "box", f"no program can run in one: {problem}")
    shown = "; ".join(f"{what} by {by}" for what, by in means.items())
    if missing := network_problem():
        shown += f"; agent.command needs agent.box=false: {missing}"
    report.print_line("ok", "box", f"limits {shown}")


def _check_packages() -> str:
    from areno.cli.env import installed_versions

    try:
        needed = installed_versions()
    except metadata.PackageNotFoundError:
        raise ArenoError("areno is not installed; use pip install -e . in its folder") from None
    if wrong := [text for text, found in needed.items() if not found]:
        raise ArenoError("missing, or here in another version: {}; pip install areno brings them", ", ".join(wrong))
    return f"areno {metadata.version('areno')}, torch {metadata.version('torch')}, {len(needed)} in all"


def _check_device(kind: str) -> str:
    import torch

    from areno.bench.device import device_name

    devices = _device_names(kind)
    for device in devices:
        product = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        if product.sum().item() != 64**3:
            raise ArenoError("{} multiplies wrongly", device)
    return ", ".join(f"{device}: {device_name(device)}{_free_memory_text(device)}" for device in devices)


def _device_names(kind: str) -> list[str]:
    import torch

    count = torch.cuda.device_count() if kind != "cpu" and torch.cuda.is_available() else 0
    if kind == "cuda" and not count:
        raise ArenoError("torch {} sees no CUDA device", torch.__version__)
    return [f"cuda:{index}" for index in range(count)] or ["cpu"]


def _free_memory_text(device: str) -> str:
    import torch

    if device == "cpu":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f", {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


def _check_kernels(kind: str) -> str:
    """Compare the kernel for log-probabilities with torch, and name the kernels in use."""
    import torch

    from areno.kernels.attention import BACKENDS, choose_backend
    from areno.kernels.backend import can_use_triton, default_dtype
    from areno.kernels.logprobs import selected_logprobs

    device = _device_names(kind)[0]
    dtype = default_dtype([device])
    hidden, head = torch.randn(8, 32, device=device).to(dtype), torch.randn(40, 32, device=device).to(dtype)
    targets = torch.arange(8, device=device)
    found, _ = selected_logprobs(hidden, head, targets)
    expected = (hidden.float() @ head.float().T).log_softmax(-1)[torch.arange(8, device=device), targets]
    if not torch.allclose(found, expected, atol=0.05):
        raise ArenoError("the kernel of log-probabilities is wrong by {}", (found - expected).abs().max().item())
    form = "Triton" if can_use_triton(hidden) else "plain torch"
    return f"{form}; attention by {BACKENDS[choose_backend('auto', device, dtype)]}"


def _check_run_folder() -> str:
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        file.write(b"areno")
    return f"{Path.cwd()} can be written, {free:.0f} GiB are free"


def _check_rewards() -> str:
    from areno.config.reward import RewardConfig
    from areno.scoring.pool import RewardPool
    from areno.types import RewardRecord

    with RewardPool(RewardConfig(fn="math", workers=1)) as pool:
        [right, wrong] = pool.score([RewardRecord(completion=text, solutions="4") for text in ("\\boxed{4}", "5")])
    if (right.value, wrong.value) != (1.0, 0.0):
        raise ArenoError("the built-in math reward gives {} and {}", right, wrong)
    return "score an answer by the built-in math reward"


def _check_model_of_areno(report: _CheckReport, arguments: argparse.Namespace) -> None:
    from areno.files.paths import find_file

    folder = find_file(_MODEL, "model")
    with _trainer(str(folder), arguments, report) as trainer:
        if trainer is None:
            return
        rows: list[Any] = []
        if report.attempt("rollout", lambda: _check_rollout(trainer, rows)):
            report.attempt("optimizer step", lambda: _check_step(trainer, rows))
        report.attempt("checkpoint", lambda: _check_checkpoint(trainer))


@contextmanager
def _trainer(folder: str, arguments: argparse.Namespace, report: _CheckReport) -> Iterator[Any]:
    """Yield an initialised Trainer of the model in `folder`, or None if the start failed."""
    from areno.api.trainer import Trainer
    from areno.plan.sdk_arguments import ArenoConfig

    made: list[Any] = []

    def start() -> str:
        world_size = arguments.world_size or len(_device_names(arguments.device))
        config = ArenoConfig(runtime={"device": arguments.device}, optimizer={"lr": 1e-4})
        trainer = Trainer(world_size, folder, custom_config=config)
        made.append(trainer)
        trainer.init()
        info = trainer.info
        return f"{info.n_params / 1e6:.1f}M parameters in {info.dtype} on {', '.join(trainer.engine.spec.devices)}"

    works = report.attempt("model", start)
    try:
        yield made[0] if works else None
    finally:
        for trainer in made:
            trainer.close()


def _check_rollout(trainer: Any, rows: list[Any]) -> str:
    from areno.types import SamplingParams, TrainSequence

    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with trainer.rollout_session(sampling_params=params, proxy=False):
        results = trainer.rollout_batch([f"{number}+{number}=" for number in range(10, 18)], 4, params, seed=1)
    for result in results:
        n_prompt = len(result.prompt_tokens)
        for number, sequence in enumerate(result.sequences):
            rows.append(
                TrainSequence(
                    prompt_mask=[True] * n_prompt + [False] * len(sequence.resp_tokens),
                    tokens=[*result.prompt_tokens, *sequence.resp_tokens],
                    logprobs=[0.0] * n_prompt + sequence.resp_logprobs,
                    advantages=[0.0] * n_prompt + [number - 1.5] * len(sequence.resp_tokens),
                )
            )
    return f"{len(rows)} samples of 8 tokens"


def _check_step(trainer: Any, rows: list[Any]) -> str:
    from areno.loss_fns import grpo_loss_fn

    stats = trainer.train(rows, grpo_loss_fn)
    difference = stats["logp_abs_diff_mean"]
    if not math.isfinite(stats["grad_norm"]):
        raise ArenoError("the norm of the gradient is {}", stats["grad_norm"])
    if difference > AGREEMENT[trainer.engine.spec.dtype]:
        raise ArenoError("log-probabilities of rollout and training differ by {:.2g}", difference)
    return f"gradient norm {stats['grad_norm']:.3g}; rollout and training agree to {difference:.1g}"


def _check_checkpoint(trainer: Any) -> str:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        saved = trainer.save_checkpoint(Path(folder) / "model")
        n_params = sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(saved).parameters())
    return f"transformers reads what areno saves ({n_params / 1e6:.1f}M parameters)"


def _missing_extras() -> Iterator[tuple[str, str]]:
    """Yield (extra, missing packages) for each extra that is not installed, except the extra for developers."""
    from areno.cli.env import missing_requirements

    for name, missing in missing_requirements().items():
        if missing and name != "dev":
            yield name, ", ".join(missing)
