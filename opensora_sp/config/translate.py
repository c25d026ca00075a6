"""Translation of Open-Sora's keys to ours, by the rules in ``legacy.py``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from opensora_sp.models.registry import PRESETS

from .draft import Draft, Key
from .findings import raise_together
from .legacy import AUTOENCODER, FAMILIES, RULES, Rule, Run

NO_EFFECT = "has no effect here"
OPTION = "--"  # prefix of the origins on the command line


def translate(draft: Draft, run: Run) -> None:
    """Replace the keys of Open-Sora in a draft by ours, with a line for each in ``draft.notes``.

    Raises:
        ValueError: with all keys that cannot be translated, each with what to write instead.
    """
    draft.foreign = _is_foreign(draft)
    raise_together(*(partial(_apply, rule, draft) for rule in RULES if rule.run in (None, run)))
    raise_together(lambda: _move_into_prompts(draft))


def check_family(draft: Draft) -> None:
    """Raise ValueError if the config is for a model that is not supported."""
    name = str(draft.get(("model", "type")))
    for family, advice in FAMILIES.items():
        if not name.startswith(family):
            continue
        kind = f"{family} is not supported"
        if advice is AUTOENCODER:
            kind = "autoencoders are not trained"
        origin = draft.origin(("model", "type"))
        raise ValueError(
            f"got model.type = {name!r} ({kind} here); expected one of {list(PRESETS)}; {advice} "
            f"[{origin}]"
        )


def _is_foreign(draft: Draft) -> bool:
    """Whether a file has keys that only Open-Sora's configs have."""
    marks = ("plugin", "dtype", "lr", "save_dir", "multi_resolution")
    of_model = ("enable_flash_attn", "enable_flashattn", "enable_layernorm_kernel")
    keys: list[Key] = [(mark,) for mark in marks]
    keys += [("model", mark) for mark in of_model]
    return any(key in draft and not _is_option(draft.origin(key)) for key in keys)


def _is_option(origin: str | None) -> bool:
    """Whether a value was set on the command line."""
    return (origin or "").startswith(OPTION)


def _apply(rule: Rule, draft: Draft) -> None:
    old = _key(rule.old)
    if old not in draft or (rule.when is not None and not rule.when(draft)):
        return

    value, origin = draft.get(old), draft.origin(old) or ""
    if any(value is one or (type(value) is type(one) and value == one) for one in rule.inert):
        draft.pop(old)
        return

    _check_refused(rule, value, origin)
    if rule.new is None:
        draft.pop(old)
        draft.notes.append(f"{origin}: {rule.old} {NO_EFFECT}: {rule.note}")
        return

    # A value outside the table is one of ours.
    if rule.new == rule.old and isinstance(rule.value, Mapping) and not _known(rule.value, value):
        return
    _move(rule, rule.new, value, origin, draft)


def _move(rule: Rule, new_name: str, value: Any, origin: str, draft: Draft) -> None:
    """Replace ``rule.old`` by the new key and its value, and by what Open-Sora sets implicitly."""
    old, new = _key(rule.old), _key(new_name)
    changed = _changed(rule, value, draft, origin)
    also = {} if rule.also is None else rule.also(changed, draft)
    also = {key: more for key, more in also.items() if draft.get(_key(key)) is None}
    if new == old and changed == value and not also and rule.when is None:
        return

    draft.pop(old)
    for key, more in also.items():
        draft.set(_key(key), more, f"{origin} (as Open-Sora does with {rule.old})")

    if new != old and not _may_move(rule, new, origin, draft):
        draft.notes.append(
            f"{origin}: {rule.old} = {value!r} gives way to {rule.new} [{draft.origin(new)}]"
        )
        return

    if new in draft:
        draft.pop(new)
    draft.set(new, changed, origin if new == old else f"{origin} ({rule.old})")
    draft.notes.append(_note(rule, value, changed, also, origin))


def _key(name: str) -> Key:
    return tuple(name.split("."))


def _check_refused(rule: Rule, value: Any, origin: str) -> None:
    if isinstance(rule.refused, Mapping):
        instead = rule.refused.get(value) if isinstance(value, str) else None
    else:
        instead = rule.refused
    if instead is not None:
        raise ValueError(
            f"got {rule.old} = {value!r} of Open-Sora; expected a key that can be translated; "
            f"{instead} [{origin}]"
        )


def _changed(rule: Rule, value: Any, draft: Draft, origin: str) -> Any:
    if callable(rule.value):
        try:
            return rule.value(value, draft)
        except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"got {rule.old} = {value!r} ({error}); expected a value of Open-Sora's; correct "
                f"it [{origin}]"
            ) from None
    if rule.value is None:
        return value
    if not _known(rule.value, value):
        raise ValueError(
            f"got {rule.old} = {value!r}; expected one of {list(rule.value)}; choose one, or set "
            f"{rule.new} instead [{origin}]"
        )
    return rule.value[value]


def _known(table: Mapping[Any, Any], value: Any) -> bool:
    return isinstance(value, (str, bool, int)) and value in table


def _may_move(rule: Rule, new: Key, origin: str, draft: Draft) -> bool:
    """Whether the value may be moved: the new key is free, or the old one is on the command line.

    Raises:
        ValueError: if both keys are set in the same place.
    """
    if draft.get(new) is None or rule.new == "freeze":
        return True
    there = draft.origin(new)
    if _is_option(origin) == _is_option(there) and not rule.yields:
        raise ValueError(
            f"got both {rule.old} [{origin}] and {rule.new} [{there}]; expected one of them; "
            f"remove {rule.old}"
        )
    return _is_option(origin) and not _is_option(there)


def _note(rule: Rule, value: Any, changed: Any, also: dict[str, Any], origin: str) -> str:
    parts = [f"{rule.old} = {value!r}"]
    if rule.new != rule.old:
        parts.append(f"is {rule.new} = {changed!r} here")
    elif changed != value:
        parts.append(f"is {changed!r} here")
    if also:
        parts.append("with " + ", ".join(f"{key} = {more!r}" for key, more in also.items()))
    if rule.note:
        parts.append(f"({rule.note})")
    return f"{origin}: {' '.join(parts)}"


def _move_into_prompts(draft: Draft) -> None:
    """Move lists of references and mask strategies, with an entry per prompt, into the prompts."""
    for name in ("reference_path", "mask_strategy"):
        listed = draft.get((name, "by prompt"))
        if listed is None:
            continue

        origin = draft.origin((name,)) or ""
        draft.pop((name,))
        prompts = draft.get(("prompts",)) or []
        if len(prompts) != len(listed):
            raise ValueError(
                f"got {len(listed)} entries of {name} for {len(prompts)} prompts; expected one for "
                f"each; write prompts = [dict(prompt=..., {name}=...), ...] [{origin}]"
            )

        merged = []
        for prompt, entry in zip(prompts, listed, strict=True):
            options = prompt if isinstance(prompt, dict) else {"prompt": prompt}
            merged.append({**options, name: entry} if entry else options)
        draft.values["prompts"] = merged


def markdown() -> str:
    """The table of the docs."""
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
