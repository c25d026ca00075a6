"""The studio's server: the page behind a token, and videos of the chosen folders."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import warnings
from contextlib import closing
from typing import Any
from urllib.parse import quote

import gradio as gr
import uvicorn
from fastapi import FastAPI
from fastapi.requests import HTTPConnection
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opensora_sp.runtime.local_ranks import LocalRanks

from .folders import MEDIA, Folders
from .jobs import Queue
from .page import CSS, build
from .session import serve

# The browser asks no other host.
POLICY = b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"


class Guard:
    """Passes on requests with the token, in the address or then in a cookie."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY)]
            await send(message)

        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        asked = HTTPConnection(scope)
        if self._is_token(asked.query_params.get("token")):
            entered = RedirectResponse("/", 303)
            entered.set_cookie(self.cookie, self.token, httponly=True, samesite="lax")
            return await entered(scope, receive, send)
        if self._is_token(asked.cookies.get(self.cookie)):
            return await self.app(scope, receive, with_policy)
        refusal = "got no token; expected the one of this studio; open the address that it printed"
        await PlainTextResponse(refusal, 403)(scope, receive, send)

    def _is_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self.token.encode())


def run(folders: Folders, *, nproc: int, host: str, port: int, token: str | None) -> None:
    """Serve the page until Ctrl-C; its address with the token is printed.

    Raises:
        ValueError: if nothing can listen there.
    """
    try:
        listening = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"got --host {host} and --port {port} to listen on ({error}); expected an "
            "address of this machine and a free port; choose others"
        ) from None
    port, token = listening.getsockname()[1], token or secrets.token_urlsafe(24)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/media")
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
    options: dict[str, Any] = dict(max_file_size="1gb", theme=theme, css=CSS, footer_links=[])
    # Otherwise it would end this process before its ranks; Ctrl-C is an exception already.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # The end of Python would wait for ranks that live.
    with closing(LocalRanks(nproc, serve, folders.outputs / "ranks.log")) as ranks:
        gr.mount_gradio_app(app, build(folders, Queue(folders, ranks)), "/", **options)
        app.add_middleware(Guard, token=token, cookie=f"studio-{port}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        # From here on Ctrl-C is noted: code that is not ours may swallow an exception.
        signal.signal(signal.SIGINT, server.handle_exit)
        sys.stdout.write(f"http://{host}:{port}/?token={quote(token, safe='')}\n")
        sys.stdout.flush()
        server.run(sockets=[listening])
