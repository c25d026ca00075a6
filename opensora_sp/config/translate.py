"""Translation of Open-Sora's keys to ours, by the rules in ``legacy.py``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from opensora_sp.models.registry import PRESETS

from .draft import Draft, Run, is_option, key_of
from .findings import raise_together
from .legacy import AUTOENCODER, FAMILIES, RULES, Rule

# Keys that only Open-Sora's configs have.
FOREIGN = {
    *("plugin", "dtype", "lr", "save_dir", "multi_resolution"),
    *("model.enable_flash_attn", "model.enable_flashattn", "model.enable_layernorm_kernel"),
}


def translate(draft: Draft, run: Run) -> None:
    """Replace the keys of Open-Sora in a draft by ours, with a line for each in ``draft.notes``.

    Raises:
        ValueError: with all keys that cannot be translated, each with what to write instead.
    """
    draft.run = run
    draft.foreign = any(key in draft and not is_option(draft.origin(key)) for key in FOREIGN)
    # Before translation: what it derives from an option has the option's origin.
    draft.overridden = frozenset(key for key, origin in draft.origins.items() if is_option(origin))
    raise_together(*(partial(_apply, rule, draft) for rule in RULES if rule.run in (None, run)))
    _move_into_prompts(draft)


def check_family(draft: Draft) -> None:
    """Raise ValueError if the config is for a model that is not supported."""
    name = str(draft.get("model.type"))
    for family, advice in FAMILIES.items():
        if name.startswith(family):
            is_model = advice is not AUTOENCODER
            kind = f"{family} is not supported" if is_model else "autoencoders are not trained"
            raise ValueError(
                f"got model.type = {name!r} ({kind} here); expected one of {list(PRESETS)}; "
                f"{advice} [{draft.origin('model.type')}]"
            )


def _apply(rule: Rule, draft: Draft) -> None:
    if rule.old not in draft or (rule.when is not None and not rule.when(draft)):
        return

    setting, origin = draft.get(rule.old), draft.origin(rule.old) or ""
    # Of the same type as well: 0 is not False.
    if repr(setting) in map(repr, rule.inert):
        draft.pop(rule.old)
        return

    _check_refused(rule, setting, origin)
    if rule.new is None:
        draft.pop(rule.old)
        draft.notes.append(f"{origin}: {rule.old} has no effect here: {rule.note}")
        return

    # A value outside the table is one of ours.
    if rule.new == rule.old and isinstance(rule.value, Mapping) and not _known(rule.value, setting):
        return
    _move(rule, rule.new, setting, origin, draft)


def _move(rule: Rule, new: str, setting: Any, origin: str, draft: Draft) -> None:
    """Replace ``rule.old`` by the new key, and by what Open-Sora sets implicitly."""
    changed = _changed(rule, setting, draft, origin)
    also = {} if rule.also is None else rule.also(changed, draft)
    also = {key: more for key, more in also.items() if _is_free(key, draft)}
    if new == rule.old and changed == setting and not also and rule.when is None:
        return

    draft.pop(rule.old)
    for key, more in also.items():
        draft.set(key, more, f"{origin} (as Open-Sora does with {rule.old})")

    if new == rule.old:
        draft.set(new, changed, origin)
    elif _may_move(rule, new, origin, draft):
        draft.pop(new)
        draft.set(new, changed, f"{origin} ({rule.old})")
    else:
        draft.notes.append(
            f"{origin}: {rule.old} = {setting!r} gives way to {new} [{draft.origin(new)}]"
        )
        return
    draft.notes.append(_note(rule, setting, changed, also, origin))


def _check_refused(rule: Rule, setting: Any, origin: str) -> None:
    refused = rule.refused
    instead = refused.get(str(setting)) if isinstance(refused, Mapping) else refused
    if instead is not None:
        raise ValueError(
            f"got {rule.old} = {setting!r} of Open-Sora; expected a key that can be translated; "
            f"{instead} [{origin}]"
        )


def _changed(rule: Rule, setting: Any, draft: Draft, origin: str) -> Any:
    if callable(rule.value):
        try:
            return rule.value(setting, draft)
        except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"got {rule.old} = {setting!r} ({error}); expected a value of Open-Sora's; correct "
                f"it [{origin}]"
            ) from None
    if rule.value is None:
        return setting
    if not _known(rule.value, setting):
        raise ValueError(
            f"got {rule.old} = {setting!r}; expected one of {list(rule.value)}; choose one, or set "
            f"{rule.new} instead [{origin}]"
        )
    return rule.value[setting]


def _known(table: Mapping[Any, Any], setting: Any) -> bool:
    return isinstance(setting, (str, bool, int)) and setting in table


def _may_move(rule: Rule, new: str, origin: str, draft: Draft) -> bool:
    """True if the value may be moved: the new key is free, or the old one is on the command line.

    Conversions and frozen parameters are added to others, but in a file not to an option's.

    Raises:
        ValueError: if both keys are set in the same place.
    """
    if _is_free(new, draft):
        return True
    if new in ("freeze", "convert"):
        return is_option(origin) or key_of(new) not in draft.overridden
    there = draft.origin(new)
    if is_option(origin) == is_option(there) and not rule.yields:
        raise ValueError(
            f"got both {rule.old} [{origin}] and {new} [{there}]; expected one of them; "
            f"remove {rule.old}"
        )
    return is_option(origin) and not is_option(there)


def _is_free(key: str, draft: Draft) -> bool:
    """True if nothing is set; on the command line, None is a value."""
    return draft.get(key) is None and key_of(key) not in draft.overridden


def _note(rule: Rule, setting: Any, changed: Any, also: dict[str, Any], origin: str) -> str:
    parts = [f"{rule.old} = {setting!r}"]
    if rule.new != rule.old:
        parts.append(f"is {rule.new} = {changed!r} here")
    elif changed != setting:
        parts.append(f"is {changed!r} here")
    if also:
        parts.append("with " + ", ".join(f"{key} = {more!r}" for key, more in also.items()))
    if rule.note:
        parts.append(f"({rule.note})")
    return f"{origin}: {' '.join(parts)}"


def _move_into_prompts(draft: Draft) -> None:
    """Move lists of references and mask strategies, with an entry per prompt, into the prompts."""
    for name in ("reference_path", "mask_strategy"):
        listed, origin = draft.get((name, "by prompt")), draft.origin(name)
        if listed is None:
            continue

        draft.pop(name)
        prompts = draft.get("prompts") or []
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
