"""``opensora-sp convert``: weights in any layout to a Hugging Face folder of safetensors."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

from opensora_sp.console import add_allow_pickle, log_to_terminal

HELP = (
    "read weights in any layout, check them against their model, write config.json and safetensors"
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=HELP)
    parser.add_argument(
        "source",
        metavar="IN",
        help="a file, a Hugging Face or Booster folder, a run or its checkpoint",
    )
    parser.add_argument(
        "target", metavar="OUT", help="the folder to write, which must not be there yet"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="class or preset, for weights without config.json: STDiT3-XL/2",
    )
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the model that replace those of config.json or the preset, for example "
        "qk_norm=True",
    )
    add_allow_pickle(parser)

    parser.add_argument("--ema", action="store_true", help="convert the EMA weights")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="round to this (default: as stored)"
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest file, bytes or with a unit (default: 5GB)",
    )

    _add_conversions(parser.add_argument_group("conversions"))
    return parser


def _add_conversions(conversions: argparse._ArgumentGroup) -> None:
    conversions.add_argument(
        "--input-size",
        nargs=3,
        type=int,
        metavar=("T", "H", "W"),
        help="STDiT: compute the position tables for latents of this size",
    )

    conversions.add_argument(
        "--text-length",
        type=int,
        metavar="N",
        help="cut the null caption to N tokens, or repeat its last one",
    )

    conversions.add_argument(
        "--drop-sigma", action="store_true", help="remove the channels of the variance"
    )


def run(args: argparse.Namespace) -> None:
    """Convert, and print what was written."""
    from opensora_sp.checkpoint import check_vacant, from_pretrained, save_pretrained
    from opensora_sp.config import parse_override
    from opensora_sp.dtypes import DTYPES

    log_to_terminal()
    check_vacant(Path(args.target))

    options: dict[str, Any] = {}
    for keys, value in map(parse_override, args.options):
        options[".".join(keys)] = value
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

    model = from_pretrained(
        args.source,
        model=args.model,
        allow_pickle=args.allow_pickle,
        ema=args.ema,
        convert=convert,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        **options,
    )
    size = args.max_shard_size
    save_pretrained(model, args.target, max_shard_size=int(size) if size.isdigit() else size)

    millions = sum(p.numel() for p in model.parameters()) / 1e6
    files = len(list(Path(args.target).glob("*.safetensors")))
    sys.stdout.write(
        f"wrote {type(model).__name__}, {millions:.1f} M parameters, {model.dtype}, {files} files "
        f"to {args.target}\n"
    )
