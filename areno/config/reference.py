"""docs/reference/config.md from the dataclasses: `python -m areno.config.reference > docs/reference/config.md`."""

from __future__ import annotations

from collections.abc import Iterator

from areno.config.experiments import DPOConfig, GRPOConfig, GSPOConfig, PPOConfig, SFTConfig
from areno.config.fields import Section
from areno.config.help import Row, rows

RECIPES: dict[str, type[Section]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "grpo": GRPOConfig,
    "gspo": GSPOConfig,
    "ppo": PPOConfig,
}

_HEAD = """\
# Configuration reference

Every setting of every recipe. Set one on the command line (`actor.optimizer.lr=2e-6`) or in a YAML file; the types and
bounds are checked before anything starts, and all problems are reported at once. *Recipes* says which recipes have
the setting, where not all do; a default that differs between recipes is given for each. This page is
generated from `areno/config/`; a test keeps it current.
"""


def markdown() -> str:
    """The whole page."""
    merged: dict[str, dict[str, Row]] = {}
    for recipe, cls in RECIPES.items():
        for row in rows(cls):
            merged.setdefault(row.key, {})[recipe] = row
    sections = dict.fromkeys(key.rpartition(".")[0] for key in merged)
    return _HEAD + "".join(_section(name, merged) for name in sections)


def _section(name: str, merged: dict[str, dict[str, Row]]) -> str:
    lines = ["", f"## {name or 'Top level'}", ""]
    if name:
        by_recipe = merged[name]
        row = next(iter(by_recipe.values()))
        optional = f" Optional, default {row.default}." if row.setting.optional else ""
        lines += [f"{_sentence(row.setting.help)}{optional}{_recipes(by_recipe)}", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, by_recipe in merged.items():
        row = next(iter(by_recipe.values()))
        if key.rpartition(".")[0] == name and not row.setting.section:
            lines.append(f"| {' | '.join(_cells(row, by_recipe))} |")
    return "\n".join(lines) + "\n"


def _cells(row: Row, by_recipe: dict[str, Row]) -> Iterator[str]:
    yield f"`{row.key}`"
    yield _escape(row.setting.type_text)
    defaults = {recipe: other.default for recipe, other in by_recipe.items()}
    if len(set(defaults.values())) == 1:
        yield _escape(row.default)
    else:
        yield _escape(", ".join(f"{default} ({recipe})" for recipe, default in defaults.items()))
    inside = row.key.rpartition(".")[0]
    yield _escape(row.setting.help) + ("" if inside == "" else _recipes(by_recipe))


def _recipes(by_recipe: dict[str, Row]) -> str:
    return "" if len(by_recipe) == len(RECIPES) else f" *Recipes: {', '.join(by_recipe)}.*"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
