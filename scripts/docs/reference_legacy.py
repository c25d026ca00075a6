"""The reference page of Open-Sora's config keys: what each of them becomes."""

from __future__ import annotations

from collections.abc import Mapping

from opensora_sp.config.open_sora import RULES, Rule

INTRODUCTION = """\
# Open-Sora's config keys

Keys of Open-Sora's configs that have another name or meaning here, generated from the code.
`wandb`, `grad_clip`, `warmup_steps` and all keys that are not in the table keep their meaning.
An option of the command line replaces the result of a key, also by nothing: `convert=()`,
`freeze=()`, `load=None`. See [migrating from
Open-Sora](../configs.md#migrating-from-open-sora).
"""


def page() -> str:
    """The page as Markdown."""
    return f"{INTRODUCTION}\n{table()}"


def table() -> str:
    """The table as Markdown."""
    lines = ["| key of Open-Sora | run | here | |", "|---|---|---|---|"]
    for rule in RULES:
        explains = rule.value or rule.also or rule.refused or rule.note
        if rule.new == rule.old and not explains:
            continue
        run = {"train": "training", "sample": "sampling", None: "both"}[rule.run]
        lines.append(f"| `{rule.old}` | {run} | {_result(rule)} | {rule.note} |")
    return "\n".join(lines) + "\n"


def _result(rule: Rule) -> str:
    """The new key and its values, as a table cell."""
    if isinstance(rule.refused, str):
        return f"refused: {rule.refused}"
    new = "no effect" if rule.new is None else f"`{rule.new}`"
    if isinstance(rule.value, Mapping):
        new += ": " + ", ".join(f"`{old!r}` is `{value!r}`" for old, value in rule.value.items())
    if isinstance(rule.refused, Mapping):
        for value, instead in rule.refused.items():
            new += f"; `{value!r}` is refused: {instead}"
    return new
