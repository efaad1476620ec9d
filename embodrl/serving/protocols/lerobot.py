"""lerobot's async inference over gRPC: a robot streams observations and polls for action chunks.

Source: github.com/huggingface/lerobot 0.6.1, src/lerobot/transport/services.proto and
src/lerobot/async_inference/robot_client.py.
"""

from __future__ import annotations

import asyncio
import errno
import pickle
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.config.schema import section_in
from embodrl.errors import EmbodrlError, WireError
from embodrl.serving import door
from embodrl.serving.core import explain
from embodrl.serving.listener import CLOSE_S, Listener, Service
from embodrl.serving.protocols.pickled import MODULE, PickledRecord, read_pickle
from embodrl.serving.protocols.spec import LerobotServeConfig
from embodrl.serving.wire.codec import need
from embodrl.serving.wire.keys import WireMap
from embodrl.types import Observation

BEGIN = 1
MIDDLE = 2
END = 3
POLL_S = 2.0
"""Seconds a poll waits for an observation before it returns without actions, as in lerobot."""
PERIOD_S = 1 / 30
"""Seconds between two actions of a chunk: lerobot's default rate, which its client only logs."""
HINT = "see docs/serving.md for lerobot's protocol"
IDLE_S = 60.0
"""Clients poll continuously: one silent for this many seconds is dropped, since its address may be reused."""
MAX_CALLS = 16
"""Concurrent calls per connection: a client sends an observation and polls, each in its own call."""
VALUES = (str, bool, int, float, np.ndarray)


@dataclass(frozen=True)
class _Seen:
    """An observation ``[1]`` waiting for a poll."""

    observation: Observation
    timestamp: float
    timestep: int


@dataclass
class _Robot:
    """A client, identified by its connection.

    Attributes:
        num_actions: chunk length it requests.
        seen: newest observation, until a poll takes it.
        answered: last timestep it received actions for.
        heard: time of its last call, in seconds of the monotonic clock.
    """

    keys: WireMap
    num_actions: int
    seen: _Seen | None = None
    arrival: asyncio.Event = field(default_factory=asyncio.Event)
    answered: int = -1
    heard: float = field(default_factory=monotonic)


class LerobotListener(Listener):
    """Answers Ready, SendPolicyInstructions, SendObservations and GetActions.

    The served policy answers, whatever policy the instructions name. The token travels in ``pretrained_name_or_path``,
    the only text of lerobot's client that its user can set and this server does not need.

    Of several observations sent before a poll, the newest is used. As in lerobot, an observation whose timestep has
    been answered is skipped unless ``must_go`` is set, and the first action has the observation's timestep.
    """

    name = "lerobot"
    scheme = "grpc"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._grpc: Any = need("grpc")
        self._aio: Any = need("grpc.aio")
        self._messages = _messages()
        self._own_state = bool(section_in(service.settings, "lerobot", LerobotServeConfig).state)
        self.keys = service.wire_map(
            section_in(service.settings, "lerobot", LerobotServeConfig), "{}", "observation.state", "task"
        )
        self._robots: OrderedDict[str, _Robot] = OrderedDict()
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        size = self.service.max_bytes
        options = [
            ("grpc.max_receive_message_length", size),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", int(1000 * door.HELLO_S)),
            ("grpc.max_connection_idle_ms", int(1000 * IDLE_S)),
            ("grpc.max_concurrent_streams", MAX_CALLS),
        ]
        self._server = self._aio.server(
            options=options, maximum_concurrent_rpcs=2 * self.service.settings.max_connections
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        address = f"[{host}]" if ":" in host else host
        try:
            found = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, "the address is in use or does not belong to this machine") from error
        await self._server.start()
        return int(found)

    def _handlers(self) -> Any:
        grpc = self._grpc
        messages = self._messages

        def handler(make: Any, method: Any, request: str, response: str) -> Any:
            return make(
                method,
                request_deserializer=messages[request].FromString,
                response_serializer=messages[response].SerializeToString,
            )

        unary = grpc.unary_unary_rpc_method_handler
        stream = grpc.stream_unary_rpc_method_handler
        methods = {
            "Ready": handler(unary, self._ready, "Empty", "Empty"),
            "SendPolicyInstructions": handler(unary, self._instruct, "PolicySetup", "Empty"),
            "SendObservations": handler(stream, self._observe, "Observation", "Empty"),
            "GetActions": handler(unary, self._act, "Empty", "Actions"),
        }
        return grpc.method_handlers_generic_handler("transport.AsyncInference", methods)

    async def _ready(self, request: Any, context: Any) -> Any:
        self._robots.pop(context.peer(), None)
        return self._messages["Empty"]()

    async def _instruct(self, request: Any, context: Any) -> Any:
        try:
            setup = await asyncio.to_thread(_record, request.data, "RemotePolicyConfig")
            if not self.service.admits(setup.get("pretrained_name_or_path")):
                self.core.metrics.count("refused_total", self.name)
                text = "send the token that the server printed as pretrained_name_or_path [server-token]"
                await context.abort(self._grpc.StatusCode.UNAUTHENTICATED, text)
            self._admit(context.peer(), self._robot(setup))
        except Exception as error:  # noqa: BLE001 - reported to the client
            await self._fail(error, context)
        return self._messages["Empty"]()

    def _robot(self, setup: Mapping[str, object]) -> _Robot:
        features = setup.get("lerobot_features")
        number = setup.get("actions_per_chunk")
        if not isinstance(features, Mapping) or type(number) is not int or number < 1:
            raise WireError("the instructions lack lerobot_features or actions_per_chunk", HINT, code="wire-message")
        return _Robot(self.keys if self._own_state else replace(self.keys, state=_state_names(features)), number)

    def _admit(self, peer: str, robot: _Robot) -> None:
        if len(self._robots) >= self.service.settings.max_connections:
            self.core.forget(self._robots.popitem(last=False)[0])
        self._robots[peer] = robot

    async def _known(self, context: Any) -> _Robot:
        """Return the calling client; abort the call if the client has sent no instructions."""
        self._forget_silent()
        robot = self._robots.get(context.peer())
        if robot is None:
            text = "this connection has sent no policy instructions: start the client again [wire-message]"
            await context.abort(self._grpc.StatusCode.FAILED_PRECONDITION, text)
        assert robot is not None
        robot.heard = monotonic()
        self._robots.move_to_end(context.peer())
        return robot

    def _forget_silent(self) -> None:
        """Drop silent clients; they are ordered by their last call."""
        while self._robots and monotonic() - next(iter(self._robots.values())).heard > IDLE_S:
            self.core.forget(self._robots.popitem(last=False)[0])

    async def _observe(self, requests: AsyncIterator[Any], context: Any) -> Any:
        robot = await self._known(context)
        try:
            try:
                async with asyncio.timeout(door.BODY_S):
                    data = await self._collect(requests)
            except TimeoutError as error:
                text = f"the observation has not arrived within {door.BODY_S:g} s"
                raise WireError(
                    text, "send the observation without pauses, or send smaller images", code="wire-slow"
                ) from error
            seen, must_go = await asyncio.to_thread(_seen, data, robot.keys)
        except Exception as error:  # noqa: BLE001 - reported to the client
            await self._fail(error, context)
        else:
            if must_go or seen.timestep > robot.answered:
                robot.seen = seen
                robot.arrival.set()
        return self._messages["Empty"]()

    async def _collect(self, requests: AsyncIterator[Any]) -> bytes:
        """Return the bytes of a streamed message; raises WireError if it is too large or incomplete."""
        parts = list[bytes]()
        size = 0
        async for part in requests:
            if part.transfer_state == BEGIN:
                parts = []
                size = 0
            elif part.transfer_state not in (MIDDLE, END):
                raise WireError(f"unknown transfer state {part.transfer_state}", HINT, code="wire-message")
            parts.append(part.data)
            size += len(part.data)
            if size > self.service.max_bytes:
                raise WireError("the observation is too large (serve.max_message_mb)", HINT, code="wire-message")
            if part.transfer_state == END:
                return b"".join(parts)
        raise WireError("the observation has no end", HINT, code="wire-message")

    async def _act(self, request: Any, context: Any) -> Any:
        if context.peer() not in self._robots:  # lerobot's client polls again at once after any response
            await asyncio.sleep(POLL_S)
        robot = await self._known(context)
        try:
            async with asyncio.timeout(POLL_S):
                await robot.arrival.wait()
        except TimeoutError:
            return self._messages["Actions"]()
        seen = robot.seen
        robot.seen = None
        robot.arrival.clear()
        if seen is None:  # another poll of this client took it
            return self._messages["Actions"]()
        before = robot.answered
        robot.answered = max(robot.answered, seen.timestep)
        try:
            chunk = await self.core.act(seen.observation, context.peer(), self.name)
        except Exception as error:
            robot.answered = before
            await self._fail(error, context)
            raise
        actions = chunk.actions[: robot.num_actions]
        return self._messages["Actions"](data=_pickle_of(actions, seen.timestamp, seen.timestep))

    async def _fail(self, error: Exception, context: Any) -> None:
        if isinstance(error, self._aio.AbortError):
            raise error
        self.core.metrics.count("errors_total", self.name)
        status = self._grpc.StatusCode
        code = status.INVALID_ARGUMENT if isinstance(error, EmbodrlError) else status.INTERNAL
        if isinstance(error, EmbodrlError) and error.code in ("server-stopping", "server-model-hangs"):
            code = status.UNAVAILABLE
        await context.abort(code, explain(error))

    async def stop_accepting(self) -> None:
        """No-op: a stopped gRPC server aborts its polls, so it listens until closed while the core refuses requests."""

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(CLOSE_S)


def _messages() -> dict[str, Any]:
    """Return the message classes of the service, by name; an enum is an integer on the wire."""
    descriptors = need("google.protobuf.descriptor_pb2")
    file = descriptors.FileDescriptorProto(name="embodrl/lerobot.proto", package="transport", syntax="proto3")
    integer = descriptors.FieldDescriptorProto.TYPE_INT32
    data = descriptors.FieldDescriptorProto.TYPE_BYTES
    for name, fields in {
        "Empty": (),
        "PolicySetup": (("data", data),),
        "Observation": (("transfer_state", integer), ("data", data)),
        "Actions": (("data", data),),
    }.items():
        message = file.message_type.add(name=name)
        for number, (key, kind) in enumerate(fields, 1):
            label = descriptors.FieldDescriptorProto.LABEL_OPTIONAL
            message.field.add(name=key, number=number, type=kind, label=label)
    pool = need("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    classes = need("google.protobuf.message_factory").GetMessageClass
    return {kind.name: classes(pool.FindMessageTypeByName(f"transport.{kind.name}")) for kind in file.message_type}


def _record(data: bytes, name: str) -> dict[str, Any]:
    """Return the attributes of a pickled lerobot object; raises WireError."""
    found = read_pickle(data)
    if not isinstance(found, PickledRecord) or found.name != name:
        raise WireError(f"the data are no {name}", HINT, code="wire-message")
    return found.fields


def _state_names(features: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the joint names of the state in order; () if the robot has none."""
    state = features.get("observation.state")
    names = state.get("names") if isinstance(state, Mapping) else []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise WireError("observation.state has no list of names", HINT, code="wire-message")
    return tuple(names)


def _seen(data: bytes, keys: WireMap) -> tuple[_Seen, bool]:
    """Return a pickled observation, and whether it must be answered; raises WireError."""
    fields = _record(data, "TimedObservation")
    message, time, step = (fields.get(name) for name in ("observation", "timestamp", "timestep"))
    if not isinstance(message, dict) or type(time) is not float or type(step) is not int or not 0 <= step < 1 << 62:
        raise WireError("the observation lacks its values, timestamp or timestep", HINT, code="wire-message")
    for key, value in message.items():
        if not isinstance(value, VALUES):
            text = f"'{key[:40]}' is a {type(value).__name__}; a robot sends numbers, images and a text"
            raise WireError(text, HINT, code="wire-observation")
    return _Seen(keys.observation(message), time, step), fields.get("must_go") is True


def _pickle_of(actions: NDArray[np.float32], timestamp: float, timestep: int) -> bytes:
    """Return the pickle of ``list[TimedAction]``, one per row of ``actions`` ``[C,A]``, as torch tensors.

    lerobot may not be installed, so its class name is written as opcodes; protocol 3 has no frames, which would prevent
    joining the pieces.
    """
    pieces = [b"\x80\x03]("]
    for number, action in enumerate(actions):
        times = {"timestamp": timestamp + number * PERIOD_S, "timestep": timestep + number}
        fields = pickle.dumps({**times, "action": torch.from_numpy(action.copy())}, protocol=3)
        pieces.append(f"c{MODULE}\nTimedAction\n".encode() + b")\x81" + fields[2:-1] + b"b")
    return b"".join((*pieces, b"e."))
