"""A page in a browser on this machine, on which a person sees the camera and drives with keys and buttons."""

from __future__ import annotations

import hmac
import logging
import secrets
import struct
import sys
import threading
import zlib
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.real_time.controls import Controls
from embodrl.envs.real_time.keyboard import AXES, HELP, Keyboard

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_KEYS = 32
"""Bytes of a request."""
_REQUESTS = 8  # at a time
_TIMEOUT_S = 2.0
_KEYS = "".join(up + down for up, down in AXES)
_PAGE = """<!doctype html><meta charset="utf-8"><title>embodrl</title>
<style>body{font-family:sans-serif} img{width:min(90vw,70vh);image-rendering:pixelated} button{margin:2px;padding:8px}
</style><img id="seen" alt="camera"><p id="keys"></p><p>HELP</p><script>
const held = new Set(), names = {" ": "stop", "\\n": "ready"};
const send = keys => fetch("keys", {method: "POST", body: keys}).catch(() => {});
const once = "gpcyn \\n", moving = "KEYS" + "h";
function down(key) {
  if (moving.includes(key)) held.add(key);
  if ((moving + once).includes(key)) send(key);
}
for (const key of moving + once) {
  const button = document.createElement("button");
  button.textContent = names[key] || key;
  button.onpointerdown = () => down(key);
  button.onpointerup = button.onpointerleave = () => held.delete(key);
  document.getElementById("keys").append(button);
}
const keyOf = event => event.key === "Enter" ? "\\n" : event.key;
addEventListener("keydown", event => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  down(keyOf(event)); event.preventDefault();
});
addEventListener("keyup", event => held.delete(keyOf(event)));
addEventListener("blur", () => held.clear());
setInterval(() => { if (held.size) send([...held].join("")); }, 100);
const seen = document.getElementById("seen");
const next = () => setTimeout(() => { seen.src = "picture?" + Date.now(); }, 100);
seen.onload = seen.onerror = next; next();
</script>"""


class Browser:
    """A keyboard whose keys come from a page at ``url``, which only this machine and those who know it can open.

    Keys and their effects are those of ``Keyboard``; held ones are repeated by the page.

    Attributes:
        url: address of the page, with a token.
    """

    def __init__(self, action_dim: int, controls: Controls) -> None:
        self._keyboard = Keyboard(action_dim, controls, lambda: "")
        self._lock = threading.Lock()
        self._picture: NDArray[np.uint8] = np.zeros((1, 1, 3), np.uint8)
        self._token = secrets.token_urlsafe(16)
        self._server = _Server((HOST, 0), _Handler)
        self._server.browser = self
        self.port: int = self._server.server_address[1]
        self.url = f"http://{HOST}:{self.port}/{self._token}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="browser", daemon=True)
        self._thread.start()
        logger.warning("open %s to correct the policy", self.url)

    def read(self) -> NDArray[np.float32] | None:
        with self._lock:
            return self._keyboard.read()

    def show(self, picture: NDArray[np.uint8]) -> None:
        """Show a picture ``uint8[H,W,3]`` from now on."""
        self._picture = picture.copy()

    def close(self) -> None:
        """End the page."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def press(self, keys: str) -> None:
        """Press keys, from any thread."""
        with self._lock:
            self._keyboard.press(keys)

    def png(self) -> bytes:
        """Return the picture."""
        return _png(self._picture)

    def place(self, path: str, host: str | None) -> str | None:
        """Return what a request asks for below the token; None if it may not."""
        # A page elsewhere whose name leads here (DNS rebinding) sends its own name.
        if host not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            return None
        _, _, rest = path.partition("/")
        token, slash, place = rest.partition("?")[0].partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())
        return place if known and slash else None


class _Server(ThreadingHTTPServer):
    """Serves few requests at a time; others are closed."""

    daemon_threads = True
    browser: Browser

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._room = threading.BoundedSemaphore(_REQUESTS)

    def process_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, such as a stop that could not be written; a browser may leave at any time."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            logger.exception("a key or picture of the page was lost")


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S

    @property
    def _browser(self) -> Browser:
        return cast("_Server", self.server).browser

    def do_GET(self) -> None:
        place = self._browser.place(self.path, self.headers.get("Host"))
        if place == "":
            self._answer(_PAGE.replace("HELP", HELP).replace("KEYS", _KEYS).encode(), "text/html; charset=utf-8")
        elif place == "picture":
            self._answer(self._browser.png(), "image/png")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self._browser.place(self.path, self.headers.get("Host")) != "keys":
            self.send_error(HTTPStatus.NOT_FOUND)
        elif not length.isdecimal() or len(length) > len(str(MAX_KEYS)) or int(length) > MAX_KEYS:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._browser.press(self.rfile.read(int(length)).decode("ascii", "replace"))
            self._answer(b"", "text/plain")

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: the paths have the token."""


def _png(picture: NDArray[np.uint8]) -> bytes:
    """Return ``uint8[H,W,3]`` as a PNG file (ISO/IEC 15948), each row with filter 0."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
