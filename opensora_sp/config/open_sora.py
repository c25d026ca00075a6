"""Translation of the keys of Open-Sora 1.0 to 1.3 configs of STDiT models.

``translate`` drops the keys of ``WITHOUT_EFFECT``, and of ``OFF_HERE`` if they are off, and applies
``RULES``. Any other key has the same meaning here, or is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .draft import Draft, Run, is_option, key_of, raise_together

DATASETS = {"VideoTextDataset": "VideoText", "VariableVideoTextDataset": "VariableVideoText"}
VAES_WITH_DTYPE = ("VideoAutoencoderKL", "OpenSoraVAE_V1_2", "OpenSoraVAE_V1_3")
OFF = (None, False)


@dataclass(frozen=True)
class Rule:
    """The translation of one key.

    Attributes:
        old: dotted key of Open-Sora.
        new: dotted key here.
        note: explanation for the log and the docs.
        run: the kind of config; None for both.
        value: computes the new value from the old one and the draft; or a table of values.
        inert: values without an effect, for which the key is dropped silently.
        when: true if the rule applies to a draft.
        also: further keys that Open-Sora sets implicitly; values that are set already win.
        yields: a value of ``new`` wins over this one; otherwise having both is an error.
    """

    old: str
    new: str
    note: str = ""
    run: Run | None = None
    value: Callable[[Any, Draft], Any] | Mapping[Any, Any] | None = None
    inert: tuple[Any, ...] = (None,)
    when: Callable[[Draft], bool] | None = None
    also: Callable[[Any, Draft], dict[str, Any]] | None = None
    yields: bool = False


def _is_bucketed(draft: Draft) -> bool:
    is_variable = str(draft.get("dataset.type")).startswith("Variable")
    return bool(draft.get("bucket_config")) and is_variable


def _vae_precision(setting: Any, draft: Draft) -> dict[str, Any]:
    return {"vae.dtype": setting} if draft.get("vae.type") in VAES_WITH_DTYPE else {}


def _random_start(setting: Any, draft: Draft) -> dict[str, Any]:
    return {"dataset.clip_start": "random"}


def _text(setting: Any, draft: Draft) -> dict[str, Any]:
    return {"text_encoder.clean_captions": True, "model.model_max_length": setting}


def _qk_norm(setting: Any, draft: Draft) -> dict[str, Any]:
    is_1_1 = str(draft.get("model.type")).startswith("STDiT2") and draft.foreign
    return {"model.qk_norm_legacy": True} if is_1_1 and setting else {}


def _implied_by_1_3(is_1_3: Any, draft: Draft) -> dict[str, Any]:
    """Settings in the code of Open-Sora 1.3."""
    if not (draft.foreign and is_1_3):
        return {}
    implied = {
        "model.use_cond": True,
        "model.in_channels": 16,
        "scheduler.legacy_frame_count": "v1.3",
    }
    return implied | ({"score_style": "words"} if draft.run == "sample" else {})


def _implied_by_vae(name: Any, draft: Draft) -> dict[str, Any]:
    return _implied_by_1_3(name == "OpenSoraVAE_V1_3", draft)


def _accumulates(draft: Draft) -> bool:
    """True if a step is several micro-batches of Open-Sora, which counts each as a step."""
    steps = draft.get("accumulation_steps")
    return draft.foreign and isinstance(steps, int) and steps > 1


def _frozen(*patterns: str) -> Callable[[Any, Draft], tuple[str, ...]]:
    return lambda setting, draft: (*(draft.get("freeze") or ()), *patterns)


def _converted(name: str) -> Callable[[Any, Draft], tuple[str, ...]]:
    return lambda setting, draft: (*(draft.get("convert") or ()), name)


def _without_temporal(setting: Any, draft: Draft) -> dict[str, Any]:
    return {"convert": ("temporal_blocks",)} if draft.foreign else {}


def _kept_clips(setting: Any, draft: Draft) -> Any:
    """Buckets of a config of the evaluation script, which ignores probabilities."""
    if not isinstance(setting, dict) or not draft.foreign:
        return setting
    changed: dict[Any, Any] = {}
    for resolution, entries in setting.items():
        changed[resolution] = entries
        if isinstance(entries, dict):
            changed[resolution] = {frames: _kept(entry) for frames, entry in entries.items()}
    return changed


def _default_length(setting: Any, draft: Draft) -> dict[str, Any]:
    has_length = any(draft.get(key) is not None for key in ("epochs", "max_steps"))
    return {} if has_length or not draft.foreign else {"epochs": 1000}


def _kept(entry: Any) -> Any:
    is_unset = isinstance(entry, (list, tuple)) and len(entry) == 2 and entry[0] is None
    return (1.0, entry[1]) if is_unset else entry


def _masks(setting: Any, draft: Draft) -> Any:
    """Mask ratios of older versions.

    Version 1.0 has a list of five ratios. Names before 1.1 have neither image nor quarter, and
    stand for 1 to 4 frames, a quarter of 16.
    """
    names = ("identity", "quarter_random", "quarter_head", "quarter_tail", "quarter_head_tail")
    if isinstance(setting, (list, tuple)):
        return dict(zip(names, setting)) if len(setting) == len(names) else setting
    if not isinstance(setting, dict):
        return setting

    renamed = {f"mask_{where}": f"quarter_{where}" for where in ("head", "tail", "head_tail")}
    return {renamed.get(name, name): ratio for name, ratio in setting.items()}


def _one_by_one(setting: Any, draft: Draft) -> Any:
    """Mark a list with an entry per prompt, which ``translate`` moves into the prompts."""
    if isinstance(setting, str):
        return setting
    return {"by prompt": setting} if any(setting) else None


WITHOUT_EFFECT: dict[Run | None, tuple[str, ...]] = {
    None: (
        *("model.enable_layernorm_kernel", "model.enable_sequence_parallelism"),
        *("model.use_x_mask", "model.force_huggingface", "vae.force_huggingface"),
        *("vae.freeze_vae_2d", "vae.cal_loss"),
        *("model.local_files_only", "vae.local_files_only", "text_encoder.local_files_only"),
    ),
    "train": (
        *("use_image_transform", "num_bucket_build_workers", "prefetch_factor"),
        *("num_eval_timesteps", "reduce_bucket_size_in_m", "record_time"),
        *("start_from_scratch", "warmup"),
    ),
    "sample": (
        *("model.freeze_y_embedder", "model.only_train_temporal"),
        *("sample_name", "multi_resolution", "align", "verbose"),
    ),
}
"""Keys that nothing here needs, by the kind of config; None for both."""

SIZES_OF_BUCKETS = ("batch_size", "dataset.num_frames", "dataset.image_size")
"""Without effect in a training with buckets, which have sizes of their own."""

OFF_HERE = (
    *("root", "dataset.dummy_text_feature", "load_text_features", "model.no_temporal_pos_emb"),
    *("vae.cache_dir", "text_encoder.cache_dir", "llm_refine", "watermark"),
    *("scheduler.dynamic_thresholding", "scheduler.thresholding"),
    *("start_index", "end_index", "prompt_generator"),
)
"""Open-Sora's keys of features that are not here: ignored where off, else unknown keys."""

# None stands for the default here, too.
OPTIONAL = (
    *("batch_size", "grad_clip", "epochs", "sp_size"),
    *("accumulation_steps", "warmup_steps", "ema_decay"),
)

RULES: tuple[Rule, ...] = (
    # data
    Rule("data_path", "dataset.manifest", run="train", also=_random_start,
         note="a file with the columns path,text; clips begin at a random frame, as in Open-Sora"),
    Rule("frame_interval", "dataset.frame_interval", run="train"),
    Rule("dataset.num_frames", "num_frames", run="train"),
    Rule("dataset.image_size", "image_size", run="train", inert=(None, (None, None), [None, None])),
    Rule("dataset.data_path", "dataset.manifest", run="train",
         note="a file with the columns path,text"),
    Rule("dataset.transform_name", "dataset.transform", run="train",
         note="both crop at the centre",
         value={"center": "resize_center_crop", "resize_crop": "resize_center_crop"}),
    Rule("dataset.type", "dataset.type", run="train", value=DATASETS, also=_random_start,
         note="clips begin at a random frame, as in Open-Sora"),
    Rule("bucket_config", "bucket_config", run="train", value=_kept_clips, also=_default_length,
         note="a probability of None, of its evaluation script, is 1; epochs are 1000 by default"),
    Rule("mask_ratios", "mask_ratios", run="train", value=_masks,
         note="1 to 4 frames are quarter_*, 1 to a quarter of the frames"),
    # acceleration
    Rule("dtype", "precision", also=_vae_precision, note="also of the vae, as in Open-Sora"),
    Rule("plugin", "zero_stage", run="train", value={"zero1": 1, "zero2": 2, "zero2-seq": 2},
         also=lambda setting, draft: {"ema_decay": 0.9999, "ema_warmup": False},
         note="sp_size alone is the size of an SP group; ema_decay is 0.9999 by default, from the "
              "first step on, as in Open-Sora"),
    # models
    Rule("model.qk_norm", "model.qk_norm", also=_qk_norm,
         note="for STDiT2 it sets qk_norm_legacy=True, as in Open-Sora 1.1"),
    *(Rule(f"model.{key}", "model.attention", value={True: "auto", False: "sdpa"})
      for key in ("enable_flash_attn", "enable_flashattn")),
    Rule("model.kernel_size", "model.kernel_size", also=_implied_by_1_3,
         note="of Open-Sora 1.3, with conditioning frames, latents of its VAE and scores in words"),
    Rule("model.skip_temporal", "model.skip_temporal", inert=OFF, also=_without_temporal,
         note="of weights with temporal blocks, these are left out, as in Open-Sora"),
    Rule("model.adapt_16ch", "convert", inert=OFF, value=_converted("in_channels"),
         note="weights for 4 latent channels become weights for 16, as in Open-Sora"),
    Rule("model.freeze_y_embedder", "freeze", run="train", inert=OFF,
         value=_frozen("y_embedder.*")),
    Rule("model.only_train_temporal", "freeze", run="train", inert=OFF,
         value=_frozen("*", "!temporal_blocks.*")),
    Rule("model.from_pretrained", "load", run="train", yields=True),
    Rule("model.from_pretrained", "ckpt", run="sample"),
    # encoders
    Rule("vae.type", "vae.type", also=_implied_by_vae,
         note="OpenSoraVAE_V1_3 comes with 16 channels and conditioning frames"),
    Rule("text_encoder.model_max_length", "text_encoder.max_length", also=_text,
         note="also of the model; captions are cleaned, as in Open-Sora"),
    Rule("text_encoder.shardformer", "text_encoder.dtype", inert=OFF, value={True: "fp16"},
         note="as with the release's shardformer, which calls .half()"),
    # diffusion
    Rule("scheduler.type", "scheduler.type", value={"iddpm-speed": "iddpm"},
         note="timesteps are drawn uniformly, which needs more steps to the same loss"),
    *(Rule(key, f"scheduler.{key}", run="sample")
      for key in ("image_cfg_scale", "use_sdedit", "use_oscillation_guidance_for_text",
                  "use_oscillation_guidance_for_image")),
    Rule("drop_condition", "scheduler.drop_condition", run="train", yields=True),
    # optimization
    Rule("use_cosine_scheduler", "lr_schedule", run="train", inert=OFF, value={True: "cosine"},
         note="without warm-up"),
    Rule("warmup_steps", "warmup_steps", run="train", when=_accumulates,
         value=lambda setting, draft: -(-setting // draft.get("accumulation_steps")),
         note="with accumulation_steps: micro-batches there, steps here"),
    Rule("ema_decay", "ema_decay", run="train", when=_accumulates,
         value=lambda setting, draft: setting ** draft.get("accumulation_steps"),
         note="with accumulation_steps: after each micro-batch there, after each step here"),
    Rule("lr", "optimizer.lr", run="train"),
    Rule("adam_eps", "optimizer.eps", run="train"),
    Rule("weight_decay", "optimizer.weight_decay", run="train"),
    # sampling
    Rule("prompt", "prompts", run="sample",
         value=lambda setting, draft: [setting] if isinstance(setting, str) else setting),
    *(Rule(key, key, run="sample", value=_one_by_one, note="one entry for each prompt")
      for key in ("reference_path", "mask_strategy")),
    Rule("frame_interval", "save_fps", run="sample", inert=(None, 1), yields=True,
         value=lambda setting, draft: draft.get("fps", 24) / setting,
         note="the files have fps / frame_interval"),
    Rule("save_dir", "outputs", run="sample"),
    Rule("num_sample", "num_samples", run="sample"),
    Rule("prompt_as_path", "skip_existing", run="sample", inert=OFF,
         note="file names are the position and the prompt"),
)  # fmt: skip


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

    _drop(draft, run)
    rules = (partial(_apply, rule, draft) for rule in RULES if rule.run in (None, run))
    raise_together(*rules)
    _move_into_prompts(draft)


def _drop(draft: Draft, run: Run) -> None:
    dropped = [*WITHOUT_EFFECT[None], *WITHOUT_EFFECT[run]]
    if run == "train":
        dropped += SIZES_OF_BUCKETS if _is_bucketed(draft) else ()
        dropped += [key for key in OPTIONAL if draft.get(key) is None]
    for key in dropped:
        if draft.get(key):
            draft.notes.append(f"{draft.origin(key)}: {key} has no effect here")
        draft.pop(key)
    for key in OFF_HERE:
        if not draft.get(key):
            draft.pop(key)


def _apply(rule: Rule, draft: Draft) -> None:
    if rule.old not in draft or (rule.when is not None and not rule.when(draft)):
        return

    setting, origin = draft.get(rule.old), draft.origin(rule.old) or ""
    # Of the same type as well: 0 is not False.
    if repr(setting) in map(repr, rule.inert):
        draft.pop(rule.old)
        return

    # A value outside the table is one of ours.
    if rule.new == rule.old and isinstance(rule.value, Mapping) and not _known(rule.value, setting):
        return
    _move(rule, setting, origin, draft)


def _move(rule: Rule, setting: Any, origin: str, draft: Draft) -> None:
    """Replace ``rule.old`` by the new key, and by what Open-Sora sets implicitly."""
    new, changed = rule.new, _changed(rule, setting, draft, origin)
    also = {} if rule.also is None else rule.also(changed, draft)
    also = {key: more for key, more in also.items() if _is_free(key, draft)}
    if new == rule.old and changed == setting and not also:
        return

    draft.pop(rule.old)
    for key, more in also.items():
        draft.set(key, more, f"{origin} (as Open-Sora does with {rule.old})")

    if new == rule.old:
        draft.set(new, changed, origin)
    elif _may_move(rule, origin, draft):
        draft.pop(new)
        draft.set(new, changed, f"{origin} ({rule.old})")
    else:
        draft.notes.append(
            f"{origin}: {rule.old} = {setting!r} gives way to {new} [{draft.origin(new)}]"
        )
        return

    settings = ", ".join(f"{key} = {more!r}" for key, more in {new: changed, **also}.items())
    note = f" ({rule.note})" if rule.note else ""
    draft.notes.append(f"{origin}: {rule.old} = {setting!r} is {settings} here{note}")


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


def _may_move(rule: Rule, origin: str, draft: Draft) -> bool:
    """True if the value may be moved: the new key is free, or the old one is on the command line.

    Conversions and frozen parameters are added to others, but in a file not to an option's.

    Raises:
        ValueError: if both keys are set in the same place.
    """
    new = rule.new
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
