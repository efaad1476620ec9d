"""A server of OpenAI's API with prepared answers, and none of the product's code."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"data": [{"id": "llm"}]}
Answer = tuple[int, Any]


@contextmanager
def foreign(*answers: Answer, models: Any = MODELS) -> Iterator[tuple[str, list[Any]]]:
    """Serve the answers to POSTs in turn, the last one again and again; yields the URL and the requests."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.give(200, models)

        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], content))
            self.give(*answers[min(len(asked), len(answers)) - 1])

        def give(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def says(content: str | None, calls: Any = None, reason: str = "stop") -> Answer:
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    return 200, {"choices": [{"message": message, "finish_reason": reason}], "usage": {"prompt_tokens": 7}}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
