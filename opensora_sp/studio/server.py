"""The studio's server: the page below a secret path, and videos of the chosen folders."""

from __future__ import annotations

import logging
import re
import secrets
import signal
import socket
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import uvicorn
from fastapi import FastAPI
from fastapi.requests import HTTPConnection
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opensora_sp.runtime.local_ranks import LocalRanks

from .folders import MEDIA, Folders
from .jobs import Queue
from .page import build
from .session import serve

# The browser asks no other host, and sends none the address.
POLICY = b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"
HEADERS = ((b"content-security-policy", POLICY), (b"referrer-policy", b"no-referrer"))


class Guard:
    """Passes on requests below the token's path that no page of another server has made.

    The token is in every address and nowhere else. A cookie would reach all ports of the host, and
    so the servers of its other users.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers, given = HTTPConnection(scope).headers, scope["path"][1:].partition("/")[0]
        origin = headers.get("origin")
        is_own = origin is None or urlsplit(origin).netloc == headers.get("host")
        if is_own and secrets.compare_digest(given.encode(), self.token.encode()):
            return await self.app(scope, receive, with_policy)
        refusal = "got no token; expected the one of this studio; open the address that it printed"
        await PlainTextResponse(refusal, 403)(scope, receive, send)


class Server(uvicorn.Server):
    """The server, which does not log the streams of open pages that its end cuts."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def run(folders: Folders, *, nproc: int, host: str, port: int, token: str | None) -> None:
    """Serve the page until Ctrl-C; its address with the token is printed.

    Raises:
        ValueError: if nothing can listen there, or the token is no part of an address.
    """
    token = token or secrets.token_urlsafe(24)
    if re.fullmatch(r"[A-Za-z0-9_-]{8,}", token) is None:
        raise ValueError(
            f"got --token of {len(token)} characters; expected at least 8 letters, digits, - and "
            "_, a part of the page's address; choose another, or leave it out"
        )
    try:
        listening = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"got --host {host} and --port {port} to listen on ({error}); expected an "
            "address of this machine and a free port; choose others"
        ) from None
    port = listening.getsockname()[1]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get(f"/{token}/media")
    def media(path: str) -> Response:
        try:
            file = folders.checked(path)
        except ValueError as error:
            return PlainTextResponse(str(error), 403)
        is_shown = file.suffix in MEDIA and file.is_file()
        return FileResponse(file) if is_shown else PlainTextResponse("no video there", 404)

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
        app.add_middleware(Guard, token=token)
        server = Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        # From here on Ctrl-C is noted: code that is not ours may swallow an exception.
        signal.signal(signal.SIGINT, server.handle_exit)
        sys.stdout.write(f"http://{host}:{port}/{token}/\n")
        sys.stdout.flush()
        server.run(sockets=[listening])
