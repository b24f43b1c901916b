"""Rotary positions read from `config.json`, with the defaults of transformers.

Lengths are in tokens. `partial` is the share of a head that is rotated if the file does not set it. None: the whole
head must be rotated, and any other share in the file is a problem. `unused`: fields that do not affect the computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from areno.layers.config import RopeConfig
from areno.models.folder import RawConfig

HARMLESS_IN_ROPE = frozenset({"original_max_position_embeddings", "finetuned"})


def read_rope(
    raw: RawConfig,
    max_positions: int,
    *,
    partial: float | None = None,
    interleaved: bool = False,
    unused: Collection[str] = (),
) -> RopeConfig:
    """Read rotary positions from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (older).

    If a file has both `rope_parameters` and `rope_scaling`, transformers uses `rope_scaling` alone. Here, a
    contradiction between the two is reported as a problem. If `interleaved`, neighbouring elements of a head are
    rotated together, rather than elements half a head apart.
    """
    scaling, parameters = raw.section("rope_scaling"), raw.section("rope_parameters")
    how = raw, max_positions, partial, None, unused
    rope = _read_section(scaling if scaling.values else parameters, *how)
    if scaling.values and parameters.values:
        other = _read_section(parameters, *how)
        if other.theta != rope.theta or (other.kind != "default" and other != rope):
            expected = "expected one of them, with rope_theta in it"
            raw.add_problem(
                f"rope_scaling says {_rope_text(rope)}, and rope_parameters says {_rope_text(other)}; {expected}"
            )
    return replace(rope, interleaved=interleaved)


def read_two_ropes(raw: RawConfig, max_positions: int, local_theta: str) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary positions of layers without a window, and those of layers with a window.

    In transformers 5, `rope_parameters` has one section for each of the two. Before, `rope_theta` and `rope_scaling`
    described the layers without a window, and the field `local_theta` held the base of the layers with a window.
    """
    sections, scaling = raw.section("rope_parameters"), raw.section("rope_scaling")
    full, local = sections.section("full_attention"), sections.section("sliding_attention")
    sections.add_unknown_fields((), " beside full_attention and sliding_attention")
    if scaling.values:
        full = RawConfig({**full.values, **scaling.values}, scaling.origin, raw.problems)
    theta = raw.get(local_theta, float, 10000.0, gt=1)
    return _read_section(full, raw, max_positions, None), _read_section(local, raw, max_positions, None, theta)


def _read_section(
    params: RawConfig,
    raw: RawConfig,
    max_positions: int,
    partial: float | None,
    theta: float | None = None,
    unused: Collection[str] = (),
) -> RopeConfig:
    """Read the rotary positions in the section `params`. `theta` is the base if the section has no `rope_theta`."""
    theta = params.get("rope_theta", float, theta or raw.get("rope_theta", float, 10000.0, gt=1), gt=1)
    kind = params.get("rope_type", str, params.get("type", str, "default"))
    if kind not in _KINDS:
        *most, last = map(repr, _KINDS)
        params.add_unsupported(
            "rope_type" if params.values.get("rope_type") else "type", f"{', '.join(most)} or {last}"
        )
        return RopeConfig(theta)
    share = partial or 1.0
    for section in (raw, params):  # the field in the section takes precedence
        share = section.get("partial_rotary_factor", float, share, gt=0, le=1)
        if partial is None and share != 1.0:
            section.add_unsupported("partial_rotary_factor", "1.0")
            break
    name = "original_max_position_embeddings"
    original = params.get(name, int, max_positions, ge=1)
    original = raw.get(name, int, original, ge=1)  # the field outside of the section takes precedence
    rope = RopeConfig(theta, kind, partial=share, **_KINDS[kind](params, original, max_positions))  # type: ignore[arg-type]
    params.add_unknown_fields({*HARMLESS_IN_ROPE, *unused}, f" with rope_type {kind!r}")
    return rope


def _linear_scaling(params: RawConfig, original: int, max_positions: int) -> dict[str, Any]:
    """Return the arguments of `RopeConfig` for this kind of scaling. The functions below do the same for other kinds.

    `original` and `max_positions` are the context lengths before and after scaling.
    """
    return {"factor": params.get("factor", float, ge=1)}


def _llama3_scaling(params: RawConfig, original: int, max_positions: int) -> dict[str, Any]:
    low = params.get("low_freq_factor", float, gt=0, le=1e6)
    high = params.get("high_freq_factor", float, gt=low, le=1e6)
    factor = params.get("factor", float, ge=1)
    return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, "original_max_positions": original}


def _yarn_scaling(params: RawConfig, original: int, max_positions: int) -> dict[str, Any]:
    """Return the arguments of `RopeConfig`. An absent `factor` is max_positions / original, which must be above 1.

    An absent `attention_factor` is computed from `factor`.
    """
    factor = params.get("factor", float, max_positions / original if original < max_positions else None, ge=1)
    above, below = (params.get(name, float, 0.0, ge=0, le=1e3) for name in ("mscale", "mscale_all_dim"))
    if not (above and below):
        above, below = 1.0, 0.0
    attention_factor = (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
    fast = params.get("beta_fast", float, 32.0, ge=1e-6, le=1e6)
    return {
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": params.get("attention_factor", float, attention_factor, gt=0, le=1e3),
        "beta_fast": fast,
        "beta_slow": params.get("beta_slow", float, 1.0, ge=1e-6, le=fast),
        "truncate": params.get("truncate", bool, "truncate" not in params.values),
    }


def _longrope_scaling(params: RawConfig, original: int, max_positions: int) -> dict[str, Any]:
    """Return the arguments of `RopeConfig`. The context ends at `original`, so only `short_factor` is used.

    `long_factor` must be present anyway, since transformers requires it.
    """
    params.get("long_factor", list)
    factors = params.get("short_factor", list)
    if not all(type(each) in (int, float) and each > 0 for each in factors):
        params.add_unsupported("short_factor", "a number above 0 for each frequency")
    factor = params.get("factor", float, max(1.0, max_positions / original), ge=1)
    scale = math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    return {
        "original_max_positions": original,
        "attention_factor": params.get("attention_factor", float, scale, gt=0, le=1e3),
        "short_factors": tuple(factors),
    }


_KINDS: dict[str, Callable[[RawConfig, int, int], dict[str, Any]]] = {
    "default": lambda *_: {},
    "linear": _linear_scaling,
    "dynamic": _linear_scaling,
    "llama3": _llama3_scaling,
    "yarn": _yarn_scaling,
    "longrope": _longrope_scaling,
}


def _rope_text(rope: RopeConfig) -> str:
    return f"rope_type={rope.kind}, rope_theta={rope.theta}, factor={rope.factor}"
