"""Translation of the keys of Open-Sora 1.0 to 1.3 configs of STDiT models.

``translate`` applies ``RULES``. A key without a rule has the same meaning here, or is refused as
unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from opensora_sp.models.registry import PRESETS

from .draft import Draft, Run, is_option, key_of, raise_together

DATASETS = {"VideoTextDataset": "VideoText", "VariableVideoTextDataset": "VariableVideoText"}
VAES_WITH_DTYPE = ("VideoAutoencoderKL", "OpenSoraVAE_V1_2", "OpenSoraVAE_V1_3")

AUTOENCODER = "use a trained autoencoder: vae=dict(type='OpenSoraVAE_V1_2', from_pretrained=...)"
OTHER_MODEL = "use an STDiT model, or parallelize a custom model (docs/custom_model.md)"
FAMILIES = {
    "DiT": OTHER_MODEL,
    "Latte": OTHER_MODEL,
    "PixArt": OTHER_MODEL,
    "VideoAutoencoder": AUTOENCODER,
    "OpenSoraVAE": AUTOENCODER,
    "VAE_Temporal": AUTOENCODER,
}
"""Prefix of ``model.type`` in configs of models that are not here -> what to do instead."""


@dataclass(frozen=True)
class Rule:
    """The translation of one key.

    Attributes:
        old: dotted key of Open-Sora.
        new: dotted key here; None if there is none, for the reason in ``note``.
        note: explanation for the log and the docs.
        run: the kind of config; None for both.
        value: computes the new value from the old one and the draft; or a table of values.
        inert: values without an effect, for which the key is dropped silently.
        refused: the reason for an error and what to write instead; in a table, by value.
        when: true if the rule applies to a draft.
        also: further keys that Open-Sora sets implicitly; values that are set already win.
        yields: a value of ``new`` wins over this one; otherwise having both is an error.
    """

    old: str
    new: str | None = None
    note: str = ""
    run: Run | None = None
    value: Callable[[Any, Draft], Any] | Mapping[Any, Any] | None = None
    inert: tuple[Any, ...] = (None, False)
    refused: str | Mapping[Any, str] | None = None
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


def _frozen_by_name(setting: Any, draft: Draft) -> tuple[str, ...]:
    known = {"text": ("y_embedder.*",), "not_temporal": ("*", "!*attn_temp.*")}
    if setting not in known:
        raise ValueError(f"neither of {list(known)}")
    return (*(draft.get("freeze") or ()), *known[setting])


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


RULES: tuple[Rule, ...] = (
    # data
    Rule("data_path", "dataset.manifest", run="train", also=_random_start,
         note="a file with the columns path,text; clips begin at a random frame, as in Open-Sora"),
    Rule("root", run="train",
         refused="write paths relative to the manifest, or absolute ones, into it"),
    Rule("use_image_transform", run="train", note="images are recognised by their file type"),
    Rule("frame_interval", "dataset.frame_interval", run="train"),
    Rule("batch_size", run="train", when=_is_bucketed,
         note="the buckets have batch sizes of their own"),
    Rule("batch_size", "batch_size", run="train"),
    Rule("dataset.num_frames", run="train", when=_is_bucketed,
         note="the buckets have lengths of their own"),
    Rule("dataset.image_size", run="train", when=_is_bucketed,
         inert=(None, (None, None), [None, None]), note="the buckets have sizes of their own"),
    Rule("dataset.num_frames", "num_frames", run="train"),
    Rule("dataset.image_size", "image_size", run="train", inert=(None, (None, None), [None, None])),
    Rule("dataset.data_path", "dataset.manifest", run="train",
         note="a file with the columns path,text"),
    Rule("dataset.transform_name", "dataset.transform", run="train",
         note="both crop at the centre",
         value={"center": "resize_center_crop", "resize_crop": "resize_center_crop"}),
    Rule("dataset.dummy_text_feature", run="train", refused="captions are encoded here; remove it"),
    Rule("dataset.type", "dataset.type", run="train", value=DATASETS, also=_random_start,
         note="clips begin at a random frame, as in Open-Sora",
         refused={"BatchFeatureDataset":
                  "features extracted by Open-Sora cannot be read; write dataset="
                  "dict(type='VideoTextDataset', data_path=...), whose clips are encoded in "
                  "training"}),
    Rule("num_bucket_build_workers", run="train", note="one process builds the buckets"),
    Rule("prefetch_factor", run="train", note="the loader uses its default"),
    Rule("bucket_config", "bucket_config", run="train", inert=(None,), value=_kept_clips,
         also=_default_length,
         note="a probability of None, of its evaluation script, is 1; epochs are 1000 by default"),
    Rule("num_eval_timesteps", run="train",
         note="of its evaluation script; opensora-sp eval has --bins"),
    Rule("load_text_features", run="train", refused="captions are encoded here; remove it"),
    Rule("mask_ratios", "mask_ratios", run="train", value=_masks,
         note="1 to 4 frames are quarter_*, 1 to a quarter of the frames"),
    # acceleration
    Rule("dtype", "precision", also=_vae_precision, note="also of the vae, as in Open-Sora"),
    Rule("plugin", "zero_stage", run="train", value={"zero1": 1, "zero2": 2, "zero2-seq": 2},
         also=lambda setting, draft: {"ema_decay": 0.9999, "ema_warmup": False},
         note="sp_size alone is the size of an SP group; ema_decay is 0.9999 by default, from the "
              "first step on, as in Open-Sora"),
    Rule("reduce_bucket_size_in_m", run="train", note="ColossalAI uses its default"),
    Rule("record_time", run="train", note="the log has step times"),
    # models
    Rule("model.qk_norm", "model.qk_norm", inert=(None,), also=_qk_norm,
         note="for STDiT2 it sets qk_norm_legacy=True, as in Open-Sora 1.1"),
    *(Rule(f"model.{key}", "model.attention", inert=(None,), value={True: "auto", False: "sdpa"})
      for key in ("enable_flash_attn", "enable_flashattn")),
    Rule("model.kernel_size", "model.kernel_size", inert=(None,), also=_implied_by_1_3,
         note="of Open-Sora 1.3, with conditioning frames, latents of its VAE and scores in words"),
    Rule("model.enable_layernorm_kernel", note="torch's layer norm is used; apex is not needed"),
    Rule("model.enable_sequence_parallelism", note="sp_size alone turns it on"),
    Rule("model.use_x_mask", note="every model takes frame masks"),
    Rule("model.no_temporal_pos_emb",
         refused="all models here have temporal position embeddings; remove it"),
    Rule("model.skip_temporal", "model.skip_temporal", also=_without_temporal,
         note="of weights with temporal blocks, these are left out, as in Open-Sora"),
    Rule("model.adapt_16ch", "convert", value=_converted("in_channels"),
         note="weights for 4 latent channels become weights for 16, as in Open-Sora"),
    Rule("model.force_huggingface", note="the format of weights is recognised"),
    Rule("model.freeze_y_embedder", "freeze", run="train", value=_frozen("y_embedder.*")),
    Rule("model.only_train_temporal", "freeze", run="train",
         value=_frozen("*", "!temporal_blocks.*")),
    Rule("model.freeze", "freeze", run="train", value=_frozen_by_name),
    *(Rule(f"model.{key}", run="sample", note="nothing is trained")
      for key in ("freeze_y_embedder", "only_train_temporal", "freeze")),
    Rule("load", "load", run="train", when=lambda draft: draft.foreign,
         note="initial weights, from step 0; --resume PATH resumes a run of opensora_sp"),
    Rule("start_from_scratch", run="train", note="load always begins at step 0"),
    Rule("model.from_pretrained", "load", run="train", yields=True),
    Rule("model.from_pretrained", "ckpt", run="sample"),
    # encoders
    Rule("vae.type", "vae.type", also=_implied_by_vae,
         note="OpenSoraVAE_V1_3 comes with 16 channels and conditioning frames",
         refused={"VideoAutoencoderPipeline":
                  "another one was released; write vae=dict(type='OpenSoraVAE_V1_2', "
                  "from_pretrained=...)"}),
    *(Rule(f"{part}.local_files_only", note="set HF_HUB_OFFLINE=1 in the environment instead")
      for part in ("model", "vae", "text_encoder")),
    *(Rule(f"{part}.cache_dir", refused="set HF_HOME=FOLDER in the environment")
      for part in ("vae", "text_encoder")),
    Rule("vae.force_huggingface", note="the format of weights is recognised"),
    *(Rule(f"vae.{key}", note="the autoencoder is never trained")
      for key in ("freeze_vae_2d", "cal_loss")),
    Rule("text_encoder.type", "text_encoder.type",
         refused=dict.fromkeys(
             ("clip", "classes"),
             "models here take T5 features; write text_encoder=dict(type='t5', ...)")),
    Rule("text_encoder.model_max_length", "text_encoder.max_length", also=_text,
         note="also of the model; captions are cleaned, as in Open-Sora"),
    Rule("text_encoder.shardformer", "text_encoder.dtype",
         value={True: "fp16"}, note="as with the release's shardformer, which calls .half()"),
    # diffusion
    Rule("scheduler.type", "scheduler.type", value={"iddpm-speed": "iddpm"},
         note="timesteps are drawn uniformly, which needs more steps to the same loss",
         refused={"dpm-solver": "this sampler is not supported; write scheduler=dict(type='iddpm', "
                  "num_sampling_steps=100, ...)"}),
    *(Rule(key, f"scheduler.{key}", run="sample", inert=(None,))
      for key in ("image_cfg_scale", "use_sdedit", "use_oscillation_guidance_for_text",
                  "use_oscillation_guidance_for_image")),
    Rule("drop_condition", "scheduler.drop_condition", run="train", yields=True),
    *(Rule(f"scheduler.{key}",
           refused="no sampler of Open-Sora calls the function that it names; remove it")
      for key in ("dynamic_thresholding", "thresholding")),
    # optimization
    Rule("use_cosine_scheduler", "lr_schedule", run="train", value={True: "cosine"},
         note="without warm-up"),
    Rule("warmup_steps", "warmup_steps", run="train", inert=(None,), when=_accumulates,
         value=lambda setting, draft: -(-setting // draft.get("accumulation_steps")),
         note="with accumulation_steps: micro-batches there, steps here"),
    Rule("ema_decay", "ema_decay", run="train", inert=(None,), when=_accumulates,
         value=lambda setting, draft: setting ** draft.get("accumulation_steps"),
         note="with accumulation_steps: after each micro-batch there, after each step here"),
    Rule("accumulation_steps", "accumulation_steps", run="train", inert=(None,)),
    Rule("lr", "optimizer.lr", run="train"),
    Rule("adam_eps", "optimizer.eps", run="train", inert=(None,)),
    Rule("weight_decay", "optimizer.weight_decay", run="train", inert=(None,)),
    Rule("warmup", run="train", note="Open-Sora reads warmup_steps alone"),
    *(Rule(key, key, run="train", inert=(None,)) for key in ("grad_clip", "epochs", "sp_size")),
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
    Rule("prompt_as_path", "skip_existing", run="sample",
         note="file names are the position and the prompt"),
    Rule("sample_name", run="sample", note="file names are the position and the prompt"),
    Rule("multi_resolution", run="sample", note="sizes are passed to every model that takes them"),
    Rule("align", run="sample",
         note="reference frames are always aligned to the chunks of the autoencoder"),
    Rule("verbose", run="sample", note="there is one log"),
    Rule("llm_refine", run="sample",
         refused="no external service is used; write the refined prompts"),
    Rule("watermark", run="sample", refused="watermarks are not supported; remove it"),
    Rule("start_index", run="sample", inert=(None, 0),
         refused="write only these prompts into prompts or prompt_path"),
    Rule("end_index", run="sample", refused="write only these prompts into prompts or prompt_path"),
    Rule("prompt_generator", run="sample", inert=(None, ""),
         refused="write the prompts into prompts or prompt_path"),
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
