"""The table of docs/configs.md: what each key of Open-Sora's configs becomes."""

from __future__ import annotations

from collections.abc import Mapping

from opensora_sp.config.legacy import RULES, Rule


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
