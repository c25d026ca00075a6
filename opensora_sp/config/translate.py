"""From the keys of Open-Sora to ours, by the table in ``legacy.py``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from opensora_sp.models.registry import PRESETS

from .draft import Draft, Key
from .findings import together
from .legacy import AUTOENCODER, FAMILIES, RULES, Rule, Run

NO_EFFECT = "has no effect here"
OPTION = "--"  # how the origin of a value of the command line begins


def translate(draft: Draft, run: Run) -> None:
    """Replace the keys of Open-Sora in a draft by ours; a line for each goes into ``draft.notes``.

    Raises:
        ValueError: with all keys that cannot be honoured, each with what to write instead.
    """
    draft.foreign = _is_foreign(draft)
    together(*(partial(_apply, rule, draft) for rule in RULES if rule.run in (None, run)))
    together(lambda: _spread(draft))


def check_family(draft: Draft) -> None:
    """Raise ValueError if the config is for a model that is not here, whatever else is in it."""
    name = str(draft.get(("model", "type")))
    for family, advice in FAMILIES.items():
        if not name.startswith(family):
            continue
        kind = (
            "autoencoders are not trained"
            if advice is AUTOENCODER
            else f"{family} is not supported"
        )
        origin = draft.origin(("model", "type"))
        raise ValueError(
            f"got model.type = {name!r} ({kind} here); expected one of {list(PRESETS)}; {advice} "
            f"[{origin}]"
        )


def _is_foreign(draft: Draft) -> bool:
    """Whether a file has keys that no config of ours has."""
    marks = ("plugin", "dtype", "lr", "save_dir", "multi_resolution")
    of_model = ("enable_flash_attn", "enable_flashattn", "enable_layernorm_kernel")
    keys: list[Key] = [*((mark,) for mark in marks), *(("model", mark) for mark in of_model)]
    return any(key in draft and not (draft.origin(key) or "").startswith(OPTION) for key in keys)


def _apply(rule: Rule, draft: Draft) -> None:
    old: Key = tuple(rule.old.split("."))
    if old not in draft or (rule.when is not None and not rule.when(draft)):
        return
    value, origin = draft.get(old), draft.origin(old) or ""
    if any(value is one or (type(value) is type(one) and value == one) for one in rule.inert):
        draft.pop(old)
        return
    _check_refused(rule, value, origin)
    if rule.new == rule.old and isinstance(rule.value, Mapping) and not _known(rule.value, value):
        return  # a value of ours
    if rule.new is None:
        draft.pop(old)
        draft.notes.append(f"{origin}: {rule.old} {NO_EFFECT}: {rule.note}")
        return
    new: Key = tuple(rule.new.split("."))
    changed = _changed(rule, value, draft, origin)
    also = {} if rule.also is None else rule.also(changed, draft)
    also = {key: more for key, more in also.items() if draft.get(tuple(key.split("."))) is None}
    if new == old and changed == value and not also and rule.when is None:
        return
    draft.pop(old)
    for key, more in also.items():
        draft.set(tuple(key.split(".")), more, f"{origin} (as Open-Sora does with {rule.old})")
    if new != old and not _may_move(rule, new, origin, draft):
        draft.notes.append(
            f"{origin}: {rule.old} = {value!r} gives way to {rule.new} [{draft.origin(new)}]"
        )
        return
    if new in draft:
        draft.pop(new)
    draft.set(new, changed, origin if new == old else f"{origin} ({rule.old})")
    draft.notes.append(_note(rule, value, changed, also, origin))


def _check_refused(rule: Rule, value: Any, origin: str) -> None:
    if isinstance(rule.refused, Mapping):
        instead = rule.refused.get(value) if isinstance(value, str) else None
    else:
        instead = rule.refused
    if instead is not None:
        raise ValueError(
            f"got {rule.old} = {value!r} of Open-Sora; expected a key that can be honoured; "
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
    """Whether the new key is free, or the command line says the old one over it; an error where
    both are meant.
    """
    if draft.get(new) is None or rule.new == "freeze":
        return True
    there = draft.origin(new) or ""
    if origin.startswith(OPTION) == there.startswith(OPTION) and not rule.yields:
        raise ValueError(
            f"got both {rule.old} [{origin}] and {rule.new} [{there}]; expected one of them; "
            f"remove {rule.old}"
        )
    return origin.startswith(OPTION) and not there.startswith(OPTION)


def _note(rule: Rule, value: Any, changed: Any, also: dict[str, Any], origin: str) -> str:
    parts = [f"{rule.old} = {value!r}"]
    if rule.new != rule.old:
        parts.append(f"is {rule.new} = {changed!r} here")
    elif changed != value:
        parts.append(f"is {changed!r} here")
    if also:
        parts.append("with " + ", ".join(f"{key} = {more!r}" for key, more in also.items()))
    return f"{origin}: {' '.join(parts)}" + (f" ({rule.note})" if rule.note else "")


def _spread(draft: Draft) -> None:
    """Lists of references and mask strategies, an entry for each prompt, go into the prompts."""
    for name in ("reference_path", "mask_strategy"):
        listed = (
            (draft.get((name,)) or {}).get("by prompt")
            if isinstance(draft.get((name,)), dict)
            else None
        )
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
        said = [one if isinstance(one, dict) else {"prompt": one} for one in prompts]
        merged = [
            {**one, **({name: entry} if entry else {})}
            for one, entry in zip(said, listed, strict=True)
        ]
        draft.values["prompts"] = merged


def markdown() -> str:
    """The table of the docs."""
    lines = ["| key of Open-Sora | run | here | |", "|---|---|---|---|"]
    for rule in RULES:
        if (
            rule.new == rule.old
            and rule.value is None
            and rule.also is None
            and not rule.refused
            and not rule.note
        ):
            continue
        run = {"train": "training", "sample": "sampling", None: "both"}[rule.run]
        lines.append(f"| `{rule.old}` | {run} | {_told(rule)} | {rule.note} |")
    return "\n".join(lines) + "\n"


def _told(rule: Rule) -> str:
    if isinstance(rule.refused, str):
        return f"refused: {rule.refused}"
    new = "no effect" if rule.new is None else f"`{rule.new}`"
    if isinstance(rule.value, Mapping):
        new += ": " + ", ".join(f"`{old!r}` is `{value!r}`" for old, value in rule.value.items())
    if isinstance(rule.refused, Mapping):
        new += "; " + "; ".join(
            f"`{value!r}` is refused: {instead}" for value, instead in rule.refused.items()
        )
    return new
