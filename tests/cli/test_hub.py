"""Tests that what stands in the place of a model hub is named: a login page, a bad proxy, silence."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from attnlens.errors import ModelError
from attnlens.models.loading.locate import Hub, reachable


class Answers(BaseHTTPRequestHandler):
    """Each request gets the next of the bodies."""

    bodies = (b"<html>Log in</html>", b"[]", b'{"id": "a", "siblings": 5}', b'{"id": "a"}', b"\xff")

    def do_GET(self):
        body = self.bodies[int(self.path.split("/")[1])]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Keep the test's output clean."""


def test_answers_that_no_hub_gives_are_named(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        for number in range(len(Answers.bodies)):
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}/{number}")
            with pytest.raises(ModelError, match="not a model hub"):
                Hub("org/name", None).fetch(lambda _names: [])
    finally:
        server.shutdown()
        server.server_close()


def test_a_proxy_that_is_no_address_is_named_and_not_repeated_and_a_silent_hub_left_alone(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    for proxy in ("http://x:99999", "http://secret@x:port", "http://[::1"):
        monkeypatch.setenv("https_proxy", proxy)
        with pytest.raises(ModelError, match="https_proxy is not a valid address") as error:
            reachable("https://huggingface.co")
        assert "secret" not in str(error.value)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        assert not reachable(f"http://127.0.0.1:{silent.getsockname()[1]}")
