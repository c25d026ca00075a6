"""The studio's server: the page below a secret path, and videos of the chosen folders."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import warnings
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response

from opensora_sp.runtime.local_ranks import LocalRanks

from .folders import MEDIA, Folders
from .jobs import Queue
from .page import build
from .session import serve

# The browser asks no other host, and sends none the address.
POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
REFUSAL = "got no token; expected the one of this studio; open the address that it printed"


def run(folders: Folders, *, nproc: int, host: str, port: int) -> None:
    """Serve the page until Ctrl-C; its address with the token is printed.

    Raises:
        ValueError: if nothing can listen there.
    """
    token = secrets.token_urlsafe(24)
    try:
        listening = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"got --host {host} and --port {port} to listen on ({error}); expected an "
            "address of this machine and a free port; choose others"
        ) from None
    port = listening.getsockname()[1]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, passed_on: Any) -> Response:
        """Answer below the token's path, and no page of another server.

        The token is in every address and nowhere else. A cookie would reach all ports of the host,
        and so the servers of its other users.
        """
        given, origin = request.url.path[1:].partition("/")[0], request.headers.get("origin")
        is_own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
        if not (is_own and secrets.compare_digest(given.encode(), token.encode())):
            return PlainTextResponse(REFUSAL, 403)
        response: Response = await passed_on(request)
        response.headers.update(HEADERS)
        return response

    @app.get(f"/{token}/media")
    def media(path: str) -> Response:
        with suppress(ValueError):
            file = folders.checked(path)
            if file.suffix in MEDIA and file.is_file():
                return FileResponse(file)
        return PlainTextResponse("no video of these folders", 404)

    # Of Gradio's own calls of Starlette.
    warnings.filterwarnings("ignore", module="gradio")
    theme = gr.themes.Default(primary_hue="blue", font="system-ui", font_mono="monospace")
    options: dict[str, Any] = dict(max_file_size="1gb", theme=theme, footer_links=[])
    files = Path(__file__).parent
    options |= dict(css_paths=files / "studio.css", js=(files / "studio.js").read_text())
    # Otherwise it would end this process before its ranks; Ctrl-C is an exception already.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # The end of Python would wait for ranks that live.
    with closing(LocalRanks(nproc, serve, folders.outputs / "ranks.log")) as ranks:
        gr.mount_gradio_app(app, build(folders, Queue(folders, ranks)), f"/{token}", **options)
        # At the end uvicorn would log the streams of open pages, which it cuts, as errors.
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        # From here on Ctrl-C is noted: code that is not ours may swallow an exception.
        signal.signal(signal.SIGINT, server.handle_exit)
        sys.stdout.write(f"http://{host}:{port}/{token}/\n")
        sys.stdout.flush()
        server.run(sockets=[listening])
