"""The server that agents ask: OpenAI's chat completions, rewards, and the episode's environment.

Shapes: V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from embodrl.envs.environment import Environment, ToolResult
from embodrl.errors import EmbodrlError, WireError, WorkflowError
from embodrl.hybrid_engines.rollout.batched import Completion, EpisodeEngine, conversation
from embodrl.models.common.chat import Message, TokenRules
from embodrl.serving.wire.chat_api import (
    STREAM_TYPE,
    ChatChoice,
    ChatRequest,
    ChatStream,
    completion_body,
    completion_head,
    error_body,
    model_body,
    read_object,
    refused,
)
from embodrl.serving.wire.codec import need, write_json
from embodrl.types import Observation
from embodrl.workers.workflows.workflow import BEYOND_REPAIR, Trajectory

if TYPE_CHECKING:
    from aiohttp.web import AppRunner, Request, Response

HOST = "127.0.0.1"
MODEL = "policy"
"""The only model of ``GET /v1/models``; completions are given under any name."""
MAX_BYTES = 16 << 20
MAX_REWARD = 1e30
"""So that sums of rewards are finite in float32."""
CLOSE_S = 1.0
_STATUS = {"agent-episode-ended": 410, "agent-key": 401, "agent-path": 404, "wire-too-large": 413}


def check_trainable(engine: EpisodeEngine, asked: ChatRequest) -> None:
    """Raise WireError if a request would choose messages otherwise than the run is trained."""
    if asked.temperature not in (None, engine.temperature) or asked.seed is not None:
        given = f"temperature={asked.temperature:g}" if asked.temperature is not None else f"seed={asked.seed}"
        own = f"the run's temperature is {engine.temperature:g} (algorithm.sampling.temperature)"
        raise refused(f"{given}, but the run says how messages are chosen", f"leave it out; {own}")
    if asked.count > 1 or asked.stops or asked.rules != TokenRules():
        # Training needs log-probs under the run's own distribution, and an episode has one next message.
        hint = "leave out n, stop, top_p, presence_penalty and frequency_penalty"
        raise refused("an episode's messages are chosen as the run is trained", hint)


async def write(engine: EpisodeEngine, asked: ChatRequest) -> Completion:
    """Write the message of a request within an episode; raises as ``check_trainable`` and ``generate``."""
    check_trainable(engine, asked)
    return await engine.generate(asked.messages, asked.tools, asked.choice, asked.max_tokens, asked.parallel_calls)


class AgentSession:
    """One episode, as its agent sees it: one request is answered at a time.

    Attributes:
        key: its API key.
        cut: the conversation of the first request beyond ``task.max_chunks``; None before.
        failure: the error that ends the episode, and perhaps the run, whatever the agent makes of it.
        is_lost: a simulator fault ended the episode.
        success: the environment, or the agent's last word on it, says that the task is solved.
    """

    def __init__(self, engine: EpisodeEngine, env: Environment, trajectory: Trajectory, seen: Observation) -> None:
        self.key = secrets.token_urlsafe(24)
        self.engine = engine
        self.trajectory = trajectory
        self.cut: Sequence[Message] | None = None
        self.failure: Exception | None = None
        self.is_lost = False
        self.success = False
        self.lock = asyncio.Lock()
        self._env = env
        self._seen = seen
        self._names: list[str] = []
        self._is_over = False

    async def close(self) -> None:
        """End the episode; a request under way is answered first."""
        async with self.lock:
            self._is_over = True

    def check_open(self) -> None:
        """Raise WireError after the end."""
        if self._is_over:
            raise _ended()

    async def complete(self, body: bytes) -> dict[str, Any] | bytes:
        """Answer ``POST /v1/chat/completions``, by events if asked; the message becomes a chunk of the trajectory."""
        asked = ChatRequest.read(body)
        check_trainable(self.engine, asked)
        most = self.trajectory.task.max_chunks
        if len(self._names) >= most:
            conversation(asked.messages, None, "auto")  # raises for what has no value
            self.cut = self.cut or asked.messages
            hint = "return from the agent, or raise env.train.max_steps_per_rollout_epoch"
            raise WireError(f"the episode has its {most} messages", hint, code="agent-too-many-messages")
        found = await write(self.engine, asked)
        self.trajectory.add_message(found, success=self.success, observation=self._seen)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        self._names.append(name)
        logprobs = found.output.logprobs[0, :, 0].tolist() if asked.logprobs else None
        calls = found.tool_calls if asked.tools else ()
        model, version = asked.model or MODEL, found.output.version
        head = completion_head(name, model, int(time.time()), version)
        choices = [ChatChoice(found.written, calls, logprobs)]
        return ChatStream(head, asked).finish(choices) if asked.stream else completion_body(head, choices)

    async def reward(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v1/rewards``, by adding to the reward of the last message or of the named one."""
        content = read_object(body)
        value, name = content.pop("reward", 0.0), content.pop("completion_id", None)
        flags = {key: content.pop(key) for key in ("success", "done") if key in content}
        if content:
            raise refused(
                f"'{next(iter(content))}' is no part of a reward", "send reward, completion_id, success, done"
            )
        if type(value) not in (int, float) or not abs(value) <= MAX_REWARD:
            raise refused(f"the reward is {value!r:.40}", f"send a number of at most {MAX_REWARD:g}")
        if any(type(flag) is not bool for flag in flags.values()):
            raise refused("success and done are true or false", "send JSON's true or false")
        if not self._names or (name is not None and name not in self._names):
            raise refused(f"there is no completion {name!r:.60}", "name one of this episode; by default its last")
        chunk = self.trajectory.chunks[-1 if name is None else self._names.index(name)]
        chunk.rewards[0] += value
        self.success = flags.get("success", self.success)
        self._is_over = flags.get("done", False)
        return {"object": "reward", "completion_id": name or self._names[-1], "reward": float(chunk.rewards[0])}

    def environment(self) -> dict[str, Any]:
        """Answer ``GET /v1/environment``."""
        tools = [{"type": "function", "function": vars(tool)} for tool in self._env.list_tools()]
        task = self.trajectory.task
        return {"object": "environment", "task": task.name, "tools": tools, "observation": _observation(self._seen)}

    async def use(self, tool: str, body: bytes) -> dict[str, Any]:
        """Answer ``POST /v1/environment/TOOL``, whose body is the tool's arguments."""
        arguments = read_object(body)
        try:
            result: ToolResult = await self._env.execute(tool, arguments)
        except (TypeError, ValueError) as error:
            raise refused(f"the arguments of '{tool}' can't be read: {error!s:.200}", "see GET environment") from error
        self._seen = result.observation
        self.is_lost = self.is_lost or result.lost
        self.success = self.success or result.success
        return {
            "object": "environment.result",
            "observation": _observation(result.observation),
            "reward": float(result.reward.sum()),
            "success": result.success,
            "done": result.done,
            "lost": result.lost,
            "value": result.value,
        }


def _ended() -> WireError:
    return WireError("the episode has ended", "ask no more: its key is void", code="agent-episode-ended")


def _unknown_key() -> WireError:
    return WireError("no episode has this key", "use the agent's api_key", code="agent-key")


def _observation(seen: Observation) -> dict[str, Any]:
    """Return images ``uint8[V,H,W,3]`` and state ``float32[S]`` as arrays of json_numpy, and the instruction."""
    return {"images": seen.images[0], "state": seen.state[0], "instruction": seen.instruction[0]}


Answer = Callable[[AgentSession, "Request"], Awaitable[dict[str, Any] | bytes]]
"""Returns JSON, or events."""


class AgentServer:
    """Listens on this machine alone, and answers whoever has the key of an episode. Belongs to one event loop."""

    def __init__(self) -> None:
        self._web = need("aiohttp.web")
        self._sessions: dict[str, AgentSession | None] = {}  # None: the episode has ended
        self._open = 0
        self._starting: asyncio.Task[str] | None = None
        self._runner: AppRunner | None = None

    def open(self, session: AgentSession) -> None:
        """Take a session; its key is known until the server closes, the session until ``leave``."""
        self._sessions[session.key] = session
        self._open += 1

    def leave(self, session: AgentSession) -> int:
        """Forget a session; return how many are left."""
        self._sessions[session.key] = None
        self._open -= 1
        return self._open

    async def url(self) -> str:
        """Return the base URL of clients, listening from the first call on."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> str:
        app = self._web.Application(client_max_size=MAX_BYTES)
        routes: tuple[tuple[str, str, Answer], ...] = (
            ("POST", "/v1/chat/completions", _complete),
            ("POST", "/v1/rewards", _reward),
            ("GET", "/v1/environment", _environment),
            ("POST", "/v1/environment/{tool}", _use),
            ("GET", "/v1/models", _models),
            ("*", "/{path:.*}", _unknown),
        )
        for method, path, answer in routes:
            app.router.add_route(method, path, self._answering(answer))
        self._runner = runner = self._web.AppRunner(
            app, access_log=None, shutdown_timeout=CLOSE_S, handle_signals=False
        )
        await runner.setup()
        await self._web.TCPSite(runner, HOST, 0).start()
        return f"http://{HOST}:{runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._runner is not None:
            await self._runner.cleanup()

    def _answering(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
            session = self._sessions.get(key)
            try:
                if session is None:
                    raise _ended() if key in self._sessions else _unknown_key()
                await request.read()  # before the lock, which the end of the episode waits for
                async with session.lock:
                    session.check_open()
                    content = await answer(session, request)
                if isinstance(content, bytes):
                    return self._web.Response(body=content, content_type=STREAM_TYPE)
                return self._web.json_response(text=write_json(content))
            except self._web.HTTPRequestEntityTooLarge:
                error = WireError(f"the body has more than {MAX_BYTES >> 20} MB", "send less", code="wire-too-large")
                return self._failed(error)
            except Exception as error:  # noqa: BLE001 - reported to the client; fails the episode unless the client erred
                is_mistake = isinstance(error, EmbodrlError) and not isinstance(error, BEYOND_REPAIR)
                if session is not None and not is_mistake:
                    session.failure = session.failure or error
                return self._failed(error)

        return handle

    def _failed(self, error: Exception) -> Response:
        status = 500
        if not isinstance(error, EmbodrlError):
            text = f"the episode can't go on: {type(error).__name__}"
            error = WorkflowError(text, "see the run's log", code="agent-failed")
        elif not isinstance(error, BEYOND_REPAIR):
            status = _STATUS.get(error.code, 400)
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        # OpenAI's clients would repeat what has failed for good.
        headers = {"x-should-retry": "false"}
        return self._web.json_response(error_body(text, error.code, status), status=status, headers=headers)


async def _complete(session: AgentSession, request: Request) -> dict[str, Any] | bytes:
    return await session.complete(await request.read())


async def _reward(session: AgentSession, request: Request) -> dict[str, Any]:
    return await session.reward(await request.read())


async def _environment(session: AgentSession, request: Request) -> dict[str, Any]:
    return session.environment()


async def _use(session: AgentSession, request: Request) -> dict[str, Any]:
    return await session.use(request.match_info["tool"], await request.read())


async def _models(session: AgentSession, request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [model_body(MODEL, 0)]}


async def _unknown(session: AgentSession, request: Request) -> dict[str, Any]:
    raise WireError(f"{request.method} {request.path[:60]} is not served", "see docs/workflows.md", code="agent-path")
