"""A server that answers as the Hugging Face hub does, with repositories in memory."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Files = Mapping[str, bytes]


def commit_of(files: Files) -> str:
    named = b"".join(name.encode() + files[name] for name in sorted(files))
    return hashlib.sha1(named).hexdigest()


class FakeHub:
    """``repositories``: for each name the files of each revision. ``fetched`` counts downloads."""

    def __init__(self, repositories: Mapping[str, Mapping[str, Files]]) -> None:
        self.repositories = repositories
        self.fetched: Counter[str] = Counter()

    def files(self, name: str, revision: str) -> Files | None:
        revisions = self.repositories.get(name, {})
        by_commit = {commit_of(files): files for files in revisions.values()}
        return revisions.get(revision) or by_commit.get(revision)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        parts = path.strip("/").split("/")
        as_json = {"Content-Type": "application/json"}
        if parts[:2] == ["api", "models"]:
            name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
            if name not in self.repositories:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            files = self.files(name, revision)
            if files is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            if parts[4] == "tree":
                listed = [
                    dict(type="file", path=file, size=len(content), oid="0")
                    for file, content in files.items()
                ]
                return 200, as_json, json.dumps(listed).encode()
            siblings = [{"rfilename": file} for file in files]
            about = dict(id=name, sha=commit_of(files), siblings=siblings, tags=[], private=False)
            return 200, as_json, json.dumps(about).encode()

        if len(parts) > 4 and parts[2] == "resolve":
            files = self.files("/".join(parts[:2]), parts[3]) or {}
            content = files.get("/".join(parts[4:]))
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            etag = hashlib.sha256(content).hexdigest()
            return 200, {"X-Repo-Commit": commit_of(files), "ETag": f'"{etag}"'}, content
        return 200, {}, b""

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The address of the server, which runs in a thread."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._send(with_body=False)

            def do_GET(self) -> None:
                if "/resolve/" in self.path:
                    hub.fetched[self.path.rpartition("/")[2]] += 1
                self._send(with_body=True)

            def _send(self, *, with_body: bool) -> None:
                status, headers, body = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def use_hub(address: str, cache: Path) -> None:
    """Let this process, which is a fork, take that hub and an own cache."""
    os.environ.update(
        HF_ENDPOINT=address, HF_HUB_CACHE=str(cache), HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    os.environ.pop("HF_HUB_OFFLINE", None)
    # Both are read at import.
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
