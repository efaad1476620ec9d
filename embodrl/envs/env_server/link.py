"""Messages between a run and an env server over TCP: bounded, pickle-free, with mutual proof of the token.

A message is a header and a value of ``processes.codec``. Every request has a serial number that its answer repeats: a
client that reconnects resends its last request, and the server answers completed requests from memory. Both sides send
a keep-alive every ``PING_S``; a connection silent for ``SILENCE_S`` counts as cut.

The token itself is never sent: both sides draw a number and prove knowledge of the token by an HMAC of the two. Later
traffic is neither encrypted nor signed; use a tunnel across untrusted networks.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from embodrl.envs.pool.transport import ResultSlot
from embodrl.errors import EnvError, EnvProtocolError, MessageError
from embodrl.fields import Fields
from embodrl.processes.codec import decode, encode
from embodrl.processes.frames import Frame, Kind
from embodrl.types import EnvStep, Observation
from embodrl.version import __version__

PING_S = 2.0
SILENCE_S = 8.0
HANDSHAKE_S = 10.0
MAX_MESSAGE_BYTES = 512 << 20
_MAX_HELLO_BYTES = 64 << 10
_HEADER = struct.Struct("<BQQQQ")  # kind, serial, slot, argument, bytes of the value
_PING = _HEADER.pack(0, 0, 0, 0, 0)
_PIECE_BYTES = 1 << 20
_PER_STEP = ("reward", "valid", "terminated", "truncated", "success")
_PER_STEP += ("episode_return", "episode_length", "episode_seed", "final_mask")
_HINT = "run the same version of embodrl on both machines"


class LinkMessage(NamedTuple):
    """A frame with the serial number of its request."""

    serial: int
    frame: Frame

    def encode(self) -> bytes:
        """Return the encoded message."""
        kind = self.frame.kind
        number = self.frame.number
        argument = self.frame.argument
        value = self.frame.value
        body = b"" if value is None else encode(value)
        if len(body) > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message has {len(body) >> 20} MiB, at most {MAX_MESSAGE_BYTES >> 20} are read")
        return _HEADER.pack(kind, self.serial, number, argument, len(body)) + body


class Link:
    """One TCP connection; one thread receives, several may send. Takes over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self.max_bytes = _MAX_HELLO_BYTES

    def begin_pings(self) -> None:
        """Send keep-alives from a thread until the link is closed; from here on messages may be long."""
        self.max_bytes = MAX_MESSAGE_BYTES

        def ping() -> None:
            while not self._closed.wait(PING_S):
                try:
                    self.send(_PING)
                except OSError:
                    self.close()

        threading.Thread(target=ping, name="env-link", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send a whole message; OSError if the connection is cut, or nothing could be sent for ``SILENCE_S``."""
        rest = memoryview(data)
        with self._sending:
            while rest:
                rest = rest[self._sock.send(rest[:_PIECE_BYTES]) :]

    def receive(self) -> LinkMessage:
        """Return the next message; OSError if the connection is cut or silent, MessageError if the data is invalid."""
        while True:
            kind, serial, number, argument, length = _HEADER.unpack(self._take(_HEADER.size))
            if kind:
                break
        if kind not in set(Kind) or length > self.max_bytes:
            raise MessageError(f"kind {kind} with {length} bytes is not a message of an env server", _HINT)
        value = decode(self._take(length)) if length else None
        return LinkMessage(serial, Frame(Kind(kind), number, argument, value))

    def _take(self, count: int) -> bytearray:
        data = bytearray()  # grows with the received data: the announced size is not trusted
        while len(data) < count:
            piece = self._sock.recv(min(_PIECE_BYTES, count - len(data)))
            if not piece:
                raise ConnectionResetError("the connection was closed")
            data += piece
        return data

    def close(self) -> None:
        """Close the connection; blocked senders and receivers get an OSError."""
        self._closed.set()
        with contextlib.suppress(OSError):  # already cut
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def prove(token: str, role: str, server_nonce: str, client_nonce: str) -> str:
    """Return the proof that ``role`` knows the token: HMAC-SHA256 (RFC 2104) over both sides' random numbers."""
    return hmac.new(token.encode(), f"{role}:{server_nonce}:{client_nonce}".encode(), "sha256").hexdigest()


def host_and_port(address: str) -> tuple[str, int] | None:
    """Parse ``tcp://HOST:PORT``; None if the text has another form."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    whole = parts.scheme == "tcp" and parts.hostname and port and not (parts.path or parts.query or parts.username)
    return (str(parts.hostname), int(port or 0)) if whole else None


def connect(address: str, token: str | None, hello: Mapping[str, object], timeout_s: float = HANDSHAKE_S) -> Link:
    """Return a connection to an env server that has accepted ``hello``.

    Raises OSError if the server can't be reached, EnvError if it refuses, has another version, or does not know the
    token.
    """
    place = host_and_port(address)
    if place is None:
        raise EnvError(f"'{address}' is not tcp://HOST:PORT", "correct env.remote", code="env-remote-address")
    link = Link(socket.create_connection(place, timeout_s))
    try:
        _shake_hands(link, address, token, hello)
    except BaseException:
        link.close()
        raise
    link.begin_pings()
    return link


def _shake_hands(link: Link, address: str, token: str | None, hello: Mapping[str, object]) -> None:
    challenge = _fields(link.receive(), address)
    version = challenge.text("version")
    nonce = challenge.text("nonce")
    asks = challenge.flag("asks_token")
    if version != __version__:
        message = f"the env server {address} runs embodrl {version}, this machine {__version__}"
        raise EnvError(message, _HINT, code="env-remote-version")
    mine = secrets.token_hex(16)
    proof = prove(token or "", "client", nonce, mine)
    link.send(LinkMessage(0, Frame(Kind.ITEM, value={**hello, "nonce": mine, "proof": proof})).encode())
    answer = _fields(link.receive(), address)
    refused = answer.text("error", None)
    if refused is not None:
        raise EnvError(f"the env server {address} {refused}", answer.text("hint"), code=answer.text("code"))
    shown = answer.text("proof").encode()
    wanted = prove(token or "", "server", nonce, mine).encode()
    if (asks or token) and not (
        asks and hmac.compare_digest(shown, wanted)
    ):  # a server that asks for no token can't be authenticated
        message = f"the env server {address} does not know the token"
        raise EnvError(message, "check env.remote and EMBODRL_TOKEN", code="env-remote-token")


def _fields(message: LinkMessage, address: str) -> Fields:
    if message.frame.kind != Kind.ITEM or not isinstance(message.frame.value, dict):
        raise EnvProtocolError(f"{address} is no env server", "check the port in env.remote")
    return Fields(message.frame.value, f"a message of {address}", EnvProtocolError, _HINT)


def pack_observation(observation: Observation) -> dict[str, object]:
    """Encode an observation."""
    return {
        "images": observation.images,
        "state": observation.state,
        "instruction": list(observation.instruction),
        "task_id": observation.task_id,
    }


def pack_step(step: EnvStep) -> dict[str, object]:
    """Encode the outcome of a chunk; of a final observation only the valid rows."""
    packed: dict[str, object] = {name: getattr(step, name) for name in _PER_STEP}
    packed["observation"] = pack_observation(step.observation)
    final = step.final_observation
    rows = np.flatnonzero(step.final_mask)
    if final is not None and len(rows):
        instruction = [final.instruction[row] for row in rows.tolist()]
        part = Observation(final.images[rows], final.state[rows], instruction, final.task_id[rows])
        packed["final"] = pack_observation(part)
    return packed


def write_result(slot: ResultSlot, content: object, is_step: bool) -> None:
    """Write the output of ``pack_step`` or ``pack_observation`` to a slot, which checks shapes and dtypes.

    Raises EmbodrlError on a mismatch with the EnvSpec.
    """
    fields = Fields(_mapping(content), "an answer of the env server", EnvProtocolError, _HINT)
    if not is_step:
        slot.write_observation(_observation(fields))
        return
    arrays = {name: fields.content.get(name) for name in _PER_STEP}
    mask = arrays["final_mask"]
    final = None
    if "final" in fields and isinstance(mask, np.ndarray):
        final = _spread(_observation(fields.fields("final")), slot, np.flatnonzero(mask))
    observation = _observation(fields.fields("observation"))
    slot.write_step(EnvStep(observation=observation, **arrays, final_observation=final))  # pyright: ignore[reportArgumentType]  # checked there


def _mapping(content: object) -> dict[str, object]:
    if not isinstance(content, dict):
        raise EnvProtocolError(f"the env server sent a {type(content).__name__} as a result", _HINT)
    return content


def _observation(fields: Fields) -> Observation:
    images, state, task_id = (_array(fields, name) for name in ("images", "state", "task_id"))
    return Observation(images, state, fields.texts("instruction"), task_id)


def _array(fields: Fields, name: str) -> np.ndarray:
    value = fields.content.get(name)
    if not isinstance(value, np.ndarray):
        fields.refuse(f"'{name}' is no array")
    return value


def _spread(part: Observation, slot: ResultSlot, rows: np.ndarray) -> Observation:
    """Scatter the rows of a final observation to their places in the batch."""
    whole = {name: np.zeros_like(slot.arrays[f"final_{name}"]) for name in ("images", "state", "task_id")}
    instruction = [""] * len(whole["task_id"])
    try:
        for name, array in whole.items():
            array[rows] = getattr(part, name)
        for row, text in zip(rows.tolist(), part.instruction, strict=True):
            instruction[row] = text
    except (ValueError, IndexError) as error:
        raise EnvProtocolError(f"the env server sent a final observation that does not fit: {error}", _HINT) from error
    return Observation(**whole, instruction=instruction)
