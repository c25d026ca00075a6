"""``opensora-sp studio``: a page in the browser over the runs of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from opensora_sp.common.console import Parser


def parser() -> argparse.ArgumentParser:
    parser = Parser()
    add = parser.add_argument
    runs = "folders that hold runs; no others are read (default: outputs, if there is one)"
    add("runs", nargs="*", metavar="FOLDER", help=runs)
    outputs = "folder for sampled videos and uploads (default: studio)"
    add("--outputs", default="studio", metavar="DIR", help=outputs)
    add("--nproc", type=int, default=1, metavar="N", help="processes that sample (default: 1)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=7860, help="port; 0 takes a free one (default: 7860)")
    return parser


def run(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from opensora_sp.common.importing import check_extra
    from opensora_sp.studio import UPLOADS

    instead = "sample with opensora-sp sample"
    check_extra("studio", "gradio", setting="opensora-sp studio", instead=instead)
    if args.nproc < 1:
        raise ValueError(f"got --nproc {args.nproc}; expected at least 1; raise it")
    runs = args.runs or [path for path in ("outputs",) if Path(path).is_dir()]
    for folder in runs:
        if not Path(folder).is_dir():
            raise ValueError(
                f"got {folder!r}, which is no folder; expected one that holds runs; pass the "
                "outputs of trainings"
            )

    sys.stderr.write("starting: Gradio and torch take some seconds to import\n")
    # Before Gradio and torch are imported, here and in the ranks: nothing asks another machine.
    os.environ |= {
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_TEMP_DIR": str(Path(args.outputs, UPLOADS).absolute()),
        "HF_HUB_OFFLINE": "1",
    }
    if args.nproc > 1:
        # As torchrun does.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from opensora_sp.common.files import check_writable
    from opensora_sp.studio.folders import Folders
    from opensora_sp.studio.server import run as serve

    check_writable(Path(args.outputs), "--outputs")
    folders = Folders(runs, args.outputs)
    serve(folders, nproc=args.nproc, host=args.host, port=args.port)
