"""A stub of an OpenAI-compatible server on the loopback interface, and a question to ask it."""

import http.server
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator

import pytest


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Answers every request as ``reply`` says: (status, body) or a number of seconds to drip bytes for; keeps what it was sent."""

    daemon_threads = True
    reply: Callable[[], tuple[int, str] | float]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.keys: list[str] = []

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def says(self, content: object, tokens: int = 321) -> None:
        """Answer with this text (or JSON document) as the message of the model."""
        text = content if isinstance(content, str) else json.dumps(content)
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "stub", "usage":
                {"prompt_tokens": tokens - 21, "completion_tokens": 21, "total_tokens": tokens},
                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]}
        self.reply = lambda: (200, json.dumps(body))


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    location = ""  # of a redirect

    def do_GET(self) -> None:  # what 301 and 302 turn a POST into
        self.server.keys.append(self.headers.get("Authorization", ""))
        self.send_error(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        self.server.keys.append(self.headers.get("Authorization", ""))
        reply = self.server.reply()
        if isinstance(reply, float):
            self._drip(reply)
            return
        status, text = reply
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        if 300 <= status < 400:
            self.send_header("Location", self.location)
        self.end_headers()
        self.wfile.write(text.encode())

    def _drip(self, seconds: float) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "100000")
        self.end_headers()
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    """The stub, serving."""
    stub = Server()
    thread = threading.Thread(target=stub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield stub
    stub.shutdown()
    stub.server_close()
