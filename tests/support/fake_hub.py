"""A model hub on this machine that answers the requests of a download."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from threading import Thread
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPEN, GATED = "someone/open", "someone/gated"


class _Answers(BaseHTTPRequestHandler):
    folder: Path
    requests: list[str]  # paths of the requests
    sent: list[int]  # bytes of each answer
    drops: list[int]  # number of bytes after which the connections of the next ranges drop, last first

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path = self.path.split("?")[0]
        if OPEN not in path and GATED not in path:
            self._refuse(401, "RepoNotFound")
        elif "nosuch" in path:
            self._refuse(404, "RevisionNotFound")
        elif path.startswith("/api/models/"):
            self._describe(path)
        elif GATED in path:
            self._refuse(403, "GatedRepo")
        else:
            self._hand_out(self.folder / path.rsplit("/", 1)[1])

    do_HEAD = do_GET  # noqa: N815  # http.server looks it up by this name

    def _describe(self, path: str) -> None:
        files = sorted(file for file in self.folder.iterdir() if file.is_file())
        if "/tree/" in path:
            entries = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)} for f in files]
            self._send(json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": file.name} for file in files]
            self._send(json.dumps({"id": OPEN, "sha": COMMIT, "siblings": siblings}).encode())

    def _hand_out(self, file: Path) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT}
        body, span = file.read_bytes(), self.headers.get("Range")
        if span is None:
            return self._send(body, headers)
        first, _, last = span.removeprefix("bytes=").partition("-")
        part = body[int(first) : int(last) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
        return self._send(part, headers, 206)

    def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self._head(status, {"Content-Length": str(len(body)), "Content-Type": "application/json"} | (headers or {}))
        if self.command == "GET":
            end = self.drops.pop() if status == 206 and self.drops else len(body)
            self.wfile.write(body[:end])
            self.sent.append(min(end, len(body)))
            if end < len(body):
                self.wfile.flush()
                self.connection.shutdown(SHUT_RDWR)

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, {"X-Error-Code": code, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, type[_Answers]]]:
    """Serve `folder` under two names, one of them gated; yield the address, and the requests, answers and drops."""
    answers = type("Answers", (_Answers,), {"folder": folder, "requests": [], "sent": [], "drops": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # seconds until a shutdown is noticed
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", answers
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def connect(address: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub use the hub at this address, and this folder as its cache."""
    from huggingface_hub import constants

    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    values = {"HF_HUB_CACHE": str(cache), "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    for name, value in values.items():
        patch.setattr(constants, name, value)
