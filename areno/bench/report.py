"""Format the results of a benchmark, as a record for `--json` and as a page of text."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from areno.bench.arguments import PLAIN, Settings
from areno.bench.device import device_name, phase_floors
from areno.cost.flops import TokenCost
from areno.cost.time import Rates

_PHASES = ("rollout", "train", "logprob", "step")
_SHOWN = [
    "world_size",
    "tp_size",
    "cp_size",
    "zero_stage",
    "tokens_per_mb",
    "recompute",
    "share_prefixes",
    "optimizer",
    "max_prefill_tokens",
    "mem_fraction",
    "kv_cache_dtype",
    "fp8",
    "eager_decode",
    "exact",
    "teacher",
    "record",
    "deterministic",
    "repeats",
]


def result_record(
    settings: Settings, cost: TokenCost, rates: Rates, results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return all results of a benchmark as one object for JSON.

    areno's figures include comparisons with the floor, the least time that the devices need. `ratio` has, for each
    other library and phase, areno's tokens per second divided by those of the library.
    """
    rates = rates.for_devices(settings.world_size)
    floor = phase_floors(cost, settings.work, rates, settings.kind, settings.n_replicas)
    ours = results["areno"] = {**results["areno"], **_compare_with_floor(results["areno"], floor, rates)}
    tok_s = [f"{phase}_tok_s" for phase in _PHASES]
    values = vars(settings)
    return {
        "kind": settings.kind,
        "shape": settings.shape,
        "work": settings.work.name,
        "device": settings.device,
        "device_name": f"{settings.world_size} x " * (settings.world_size > 1) + device_name(settings.device),
        "dtype": settings.dtype,
        "settings": {name: values[name] for name in _SHOWN},
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("areno", "torch", "triton", *settings.against) if name != PLAIN},
        "params": cost.n_params,
        "active_params": cost.active_params,
        "kv_bytes_per_token": cost.kv_bytes,
        "state_bytes_per_sequence": cost.state_bytes,
        "rates": {"copy_gb_s": rates.copy_bytes_s / 1e9, "matmul_tflop_s": rates.matmul_flops_s / 1e12},
        "floors": floor,
        **results,
        "ratio": {
            name: {key.removesuffix("_tok_s"): ours[key] / results[name][key] for key in tok_s if key in results[name]}
            for name in settings.against
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _compare_with_floor(ours: dict[str, Any], floor: dict[str, float], rates: Rates) -> dict[str, float]:
    """Compare areno's figures with the floor.

    `percent_of` is the speed in percent of the floor's speed. `mfu` is the share of the device's measured FLOPs per
    second that training uses, at 6 FLOPs for each parameter and token. `needed_mfu` counts the FLOPs of the LM head
    only for trained tokens.
    """
    out: dict[str, float] = {}
    if "rollout_s" in ours:
        for name in ("ordinary", "shared"):
            out[f"rollout_percent_of_{name}_floor"] = 100 * floor[f"rollout_{name}_s"] / ours["rollout_s"]
    if "train_s" in ours:
        out["train_tflop_s"] = floor["train_flops"] / ours["train_s"] / 1e12
        out["mfu"] = floor["train_flops"] / ours["train_s"] / rates.matmul_flops_s
        out["needed_mfu"] = floor["train_needed_flops"] / ours["train_s"] / rates.matmul_flops_s
    for phase in ("train", "logprob", "step"):
        if f"{phase}_s" in ours:
            out[f"{phase}_percent_of_floor"] = 100 * floor[f"{phase}_s"] / ours[f"{phase}_s"]
    return out


def text_page(found: dict[str, Any]) -> str:
    floor, rates = found["floors"], found["rates"]
    what = f"{found['shape']} ({found['params'] / 1e6:,.1f} M parameters, {found['dtype']})"
    speed = f"copies {rates['copy_gb_s']:,.1f} GB/s, multiplies {rates['matmul_tflop_s']:,.2f} TFLOP/s, as measured"
    lines = [
        f"{found['kind']} of {what}: {found['work']}",
        _labelled_line("device", f"{found['device_name']}: {speed}"),
    ]
    for name, how in (("ordinary", "every sample reads its prompt"), ("shared", "samples read a prompt together")):
        if f"rollout_{name}_s" in floor:
            text = f"{floor[f'rollout_{name}_tok_s']:,.0f} tokens/s: decode {floor[f'decode_{name}_s']:.3f} s ({how})"
            lines.append(_labelled_line(f"floor, {name}", f"{text}, prefill {floor['prefill_s']:.3f} s"))
    for phase in ("train", "logprob"):
        if f"{phase}_s" in floor:
            lines.append(_labelled_line(f"floor, {phase}", _speed_text(phase, floor)))
    for name in ("areno", *found["ratio"]):
        lines += ["", name, *_contender_lines(found[name])]
        if name in found["ratio"]:
            ratio = ", ".join(f"{phase} {value:,.2f}" for phase, value in found["ratio"][name].items())
            lines.append(_labelled_line("ratio", f"{ratio} (tokens/s of areno by those of {name})"))
    return "\n".join(lines)


def _contender_lines(figures: dict[str, Any]) -> list[str]:
    lines = [_phase_text(phase, figures) for phase in _PHASES if f"{phase}_s" in figures]
    start = f"{figures['start_s']:.1f} s, warm-up {figures['warm_up_s']:.1f} s"
    if "first_token_s" in figures:
        start += f"; from the start to the first token of all {figures['first_token_s']:.1f} s"
        start += f", to the second {figures['second_token_s']:.1f} s"
    lines.append(_labelled_line("start", start))
    if "peak_memory_gib" in figures:
        memory = f"{figures['peak_memory_gib']:.2f} GiB at the peak"
        if "kv_cache_gib" in figures:
            memory += f", {figures['peak_apart_from_kv_gib']:.2f} apart from the KV cache"
            memory += f" ({figures['kv_cache_gib']:.2f})"
        if "peak_device_gib" in figures:
            memory += f"; of the whole device {figures['peak_device_gib']:.2f}"
        lines.append(_labelled_line("memory", memory))
    if "record_s" in figures:
        share, written = figures["record_s"] / figures["step_s"], figures["record_written_s"]
        text = f"{figures['record_s']:.4f} s of the step ({100 * share:.2f} %); {figures['record_mib']:.2f} MiB, "
        lines.append(_labelled_line("recorder", f"{text}written in {written:.3f} s during the next step"))
    if figures.get("tp_sums"):
        lines.append(_labelled_line("tensor parallel", f"decoding sums by {figures['tp_sums']}"))
    if "logp_abs_diff_mean" in figures:
        mean, most = figures["logp_abs_diff_mean"], figures["logp_abs_diff_max"]
        text = f"rollout against training: logp_abs_diff_mean {mean:.2e}, max {most:.2e}"
        lines.append(_labelled_line("log-probabilities", text))
    if "clip_frac" in figures:
        text = f"{100 * figures['clip_frac']:.1f} % clipped, standard deviation {figures['ratio_std']:.2e}"
        lines.append(_labelled_line("sequence ratios", text))
    idle = [f"{name.removesuffix('_idle_share')} {100 * figures[name]:.1f} %" for name in figures if "_idle" in name]
    if idle:
        lines.append(_labelled_line("device idle", ", ".join(idle)))
    if figures.get("parts", 1) > 1:
        lines.append(
            _labelled_line("memory ran out", f"so the rollout was done in {figures['parts']} parts, one after another")
        )
    return lines


def _phase_text(phase: str, figures: dict[str, Any]) -> str:
    text = f"{_speed_text(phase, figures)} (spread {100 * figures[f'{phase}_spread']:.1f} %)"
    if phase == "rollout":
        text += f": prefill {figures['prefill_s']:.3f} s, decode {figures['decode_s']:.3f} s"
    if "mfu" in figures and phase == "train":
        text += f"; MFU {100 * figures['mfu']:.1f} % ({figures['train_tflop_s']:,.2f} TFLOP/s)"
        text += f", {100 * figures['needed_mfu']:.1f} % without the head on prompts"
        if "computed_share" in figures:
            text += f"; {100 * figures['computed_share']:.1f} % of the tokens computed, as rows share prefixes"
    elif f"{phase}_percent_of_floor" in figures:
        text += f"; {figures[f'{phase}_percent_of_floor']:.1f} % of the floor"
    elif f"{phase}_percent_of_ordinary_floor" in figures:
        text += f"; {figures[f'{phase}_percent_of_ordinary_floor']:.1f} % of the ordinary floor, "
        text += f"{figures[f'{phase}_percent_of_shared_floor']:.1f} % of the shared"
    return _labelled_line(phase, text)


def _speed_text(phase: str, figures: dict[str, Any]) -> str:
    return f"{figures[f'{phase}_tok_s']:,.0f} tokens/s, {figures[f'{phase}_s']:.3f} s"


def _labelled_line(name: str, text: str) -> str:
    return f"  {name:18} {text}"
