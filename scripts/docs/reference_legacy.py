"""The reference page of Open-Sora's config keys: what each of them becomes."""

from __future__ import annotations

from collections.abc import Mapping

from opensora_sp.config.open_sora import OFF_HERE, RULES, WITHOUT_EFFECT, Rule

INTRODUCTION = """\
# Open-Sora's config keys

Keys of Open-Sora's configs that have another name or meaning here, generated from the code.
`wandb`, `grad_clip`, `warmup_steps` and all keys that are not in the table keep their meaning.
An option of the command line replaces the result of a key, also by nothing: `convert=()`,
`freeze=()`, `load=None`. In place of `local_files_only`, set `HF_HUB_OFFLINE=1` in the environment.
See [migrating from Open-Sora](../configs.md#migrating-from-open-sora).
"""
RUNS = {"train": "training", "sample": "sampling", None: "both"}


def page() -> str:
    """The page as Markdown."""
    lines = [INTRODUCTION, "| key of Open-Sora | run | here | |", "|---|---|---|---|"]
    for rule in RULES:
        lines.append(f"| `{rule.old}` | {RUNS[rule.run]} | {_result(rule)} | {rule.note} |")
    for run, keys in WITHOUT_EFFECT.items():
        lines += [f"| `{key}` | {RUNS[run]} | no effect | |" for key in keys]
    lines += [f"| `{key}` | both | no effect if it is off, else refused | |" for key in OFF_HERE]
    return "\n".join(lines) + "\n"


def _result(rule: Rule) -> str:
    """The new key and its values, as a table cell."""
    new = f"`{rule.new}`"
    if isinstance(rule.value, Mapping):
        new += ": " + ", ".join(f"`{old!r}` is `{value!r}`" for old, value in rule.value.items())
    return new
