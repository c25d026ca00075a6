"""``opensora-sp convert``: weights in any layout to a Hugging Face folder of safetensors.

A model's weights are checked against the model; weights of a VAE or text encoder stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opensora_sp.checkpoint import from_pretrained, save_pretrained
from opensora_sp.checkpoint.hub import HubName, local_path
from opensora_sp.checkpoint.model_config import MAY_DIFFER, refuse_differing
from opensora_sp.checkpoint.pretrained import check_vacant, convert_encoder, is_encoder
from opensora_sp.common.console import add_allow_pickle, log_to_terminal
from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import load_inference_config
from opensora_sp.config.load import parse_override
from opensora_sp.encoders.loading import TOKENIZER_FILES
from opensora_sp.models.base import ConditionedModel

# Options that change weights or need to know the model.
OF_MODELS = (
    "model",
    "options",
    "no_ema",
    "dtype",
    "merge_lora",
    "license",
    "base_model",
    "input_size",
    "text_length",
    "drop_sigma",
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    source = (
        "a file, a Hugging Face or Booster folder, a run or its checkpoint, a VAE or T5; or the "
        "name of one on the Hugging Face hub"
    )
    add("source", metavar="IN", help=source)
    add("target", metavar="OUT", help="the folder to write, which must not be there yet")
    model = "class or preset of the model, for weights without config.json"
    add("--model", metavar="NAME", help=model)
    options = (
        "settings of the model, in place of config.json's or the preset's, for example qk_norm=True"
    )
    add("--options", nargs="+", default=[], metavar="KEY=VALUE", help=options)
    add_allow_pickle(parser)

    ema = "take the trained weights and adapters of runs, not their EMA"
    add("--no-ema", action="store_true", help=ema)
    dtype = "round to this (default: as stored)"
    add("--dtype", choices=("fp32", "bf16", "fp16"), help=dtype)
    size = "largest file, bytes or with a unit (default: 5GB)"
    add("--max-shard-size", default="5GB", metavar="SIZE", help=size)

    card = parser.add_argument_group("model card").add_argument
    card("--license", metavar="ID", help="as the hub names it (default: unknown)")
    base = "the model on the hub that this one was made of (default: IN, if it is a name there)"
    card("--base-model", metavar="NAME", help=base)

    _add_conversions(parser.add_argument_group("conversions").add_argument)
    pipelines = parser.add_argument_group("pipelines of diffusers").add_argument
    to = "diffusers: a folder for OpenSoraPipeline, with encoders and scheduler"
    pipelines("--to", choices=("folder", "diffusers"), default="folder", help=to)
    config = "of --to diffusers: the sampling config that has vae, text_encoder and scheduler"
    pipelines("--config", dest="sampling_config", metavar="CONFIG", help=config)
    return parser


def _add_conversions(add: Callable[..., Any]) -> None:
    size = "compute a model's position tables for latents of this size"
    add("--input-size", nargs=3, type=int, metavar=("T", "H", "W"), help=size)
    length = "cut the null caption to N tokens, or repeat its last one"
    add("--text-length", type=int, metavar="N", help=length)
    lora = "add LoRA adapters of a run, a checkpoint or peft's folder; repeatable"
    add("--merge-lora", action="append", default=[], metavar="PATH[:SCALE]", help=lora)
    add("--drop-sigma", action="store_true", help="remove the channels of the variance")


def run(args: argparse.Namespace) -> None:
    """Convert, and print what was written."""
    log_to_terminal()
    # Before weights are fetched, which may take minutes.
    check_vacant(Path(args.target))

    source = local_path(args.source, allow_pickle=args.allow_pickle, more=TOKENIZER_FILES)
    convert = _convert_encoder if is_encoder(source) else _convert
    _check_pipeline(args, is_model=convert is _convert)
    written = convert(source, args)
    files = len(list(Path(args.target).rglob("*.safetensors")))
    sys.stdout.write(f"wrote {written}, {files} files to {args.target}\n")


def _check_pipeline(args: argparse.Namespace, *, is_model: bool) -> None:
    """Raise ValueError unless there is a config for a pipeline of diffusers, and for that alone."""
    is_pipeline, config = args.to == "diffusers", args.sampling_config
    if is_pipeline != (config is not None) or (is_pipeline and not is_model):
        raise ValueError(
            f"got --to {args.to} with --config {config} for {args.source}; expected the "
            "weights of a model, and a config for --to diffusers alone; pass --config CONFIG, the "
            "sampling config that has the model's vae, text_encoder and scheduler"
        )


def _convert_encoder(source: Path, args: argparse.Namespace) -> str:
    """Rewrite a VAE or a T5; returns what was written."""
    for option in OF_MODELS:
        if getattr(args, option):
            name = option.replace("_", "-")
            raise ValueError(
                f"got --{name} for {args.source}, which is a VAE or text encoder; expected its "
                f"tensors to stay as they are; remove --{name}"
            )

    num_tensors = convert_encoder(
        source, Path(args.target), allow_pickle=args.allow_pickle, max_shard_size=_shard_size(args)
    )
    return f"{num_tensors} tensors of an encoder"


def _convert(source: Path, args: argparse.Namespace) -> str:
    """Convert the weights of a model; returns what was written."""
    options, convert = _model_options(args)
    model = from_pretrained(
        source,
        model=args.model,
        allow_pickle=args.allow_pickle,
        ema=not args.no_ema,
        convert=convert,
        lora=args.merge_lora,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        **options,
    )
    name = None if Path(args.source).exists() else HubName.parse(args.source)
    written: dict[str, Any] = dict(
        max_shard_size=_shard_size(args),
        license=args.license,
        base_model=args.base_model or (None if name is None else name.repository),
    )
    if args.to == "diffusers":
        _write_pipeline(model, args, written)
    else:
        save_pretrained(model, args.target, **written)

    millions = sum(p.numel() for p in model.parameters()) / 1e6
    kind = "trained weights" if args.no_ema else "EMA weights where there are any"
    return f"{type(model).__name__}, {millions:.1f} M parameters, {model.dtype}, {kind}"


def _write_pipeline(
    model: ConditionedModel, args: argparse.Namespace, written: dict[str, Any]
) -> None:
    """The model with the encoders and the scheduler of a sampling config."""
    from opensora_sp.integrations.diffusers import OpenSoraScheduler, write_pipeline

    cfg = load_inference_config(args.sampling_config)
    spec, given = cfg.model_spec, dataclasses.asdict(model.config)
    settings = {"_class_name": spec.model_class.__name__, **dataclasses.asdict(spec.config)}
    wanted = {key: settings[key] for key in settings if key not in MAY_DIFFER}
    refuse_differing(Path(args.source), wanted, type(model).__name__, given)
    if cfg.lora and not args.merge_lora:
        raise ValueError(
            f"got --config {args.sampling_config} with lora {list(cfg.lora)}; expected adapters to "
            "be merged into the pipeline's weights; pass them as --merge-lora, or a config without "
            "lora"
        )
    write_pipeline(
        args.target,
        model,
        vae=cfg.vae,
        text_encoder=cfg.text_encoder,
        scheduler=OpenSoraScheduler.of(cfg.scheduler),
        allow_pickle=args.allow_pickle,
        **written,
    )


def _model_options(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Settings in place of the model's, and the conversions.

    Raises:
        ValueError: if a setting is none of the model's.
    """

    options: dict[str, Any] = {}
    for keys, setting in map(parse_override, args.options):
        options[".".join(keys)] = setting
    reserved = sorted(options.keys() & inspect.signature(from_pretrained).parameters.keys())
    if reserved:
        raise ValueError(
            f"got --options {reserved[0]}=...; expected a setting of the model; remove it, or see "
            "--help"
        )

    convert = []
    if args.input_size:
        options["input_size"] = tuple(args.input_size)
        convert.append("pos_embed")
    if args.text_length:
        options["model_max_length"] = args.text_length
        convert.append("y_embedding")
    if args.drop_sigma:
        convert.append("pred_sigma")
    return options, convert


def _shard_size(args: argparse.Namespace) -> int | str:
    size: str = args.max_shard_size
    return int(size) if size.isdigit() else size
