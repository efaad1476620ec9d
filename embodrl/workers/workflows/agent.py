"""Episodes of a user's agent, which knows nothing of embodrl: a URL, a key, and any client of OpenAI's API.

Shapes: V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from embodrl.envs.environment import Environment
from embodrl.errors import WorkflowError
from embodrl.hybrid_engines.rollout.batched import EpisodeEngine
from embodrl.serving.wire.codec import need
from embodrl.user_code import guard_user_code
from embodrl.workers.workflows.agent_server import MAX_REWARD, AgentServer, AgentSession
from embodrl.workers.workflows.workflow import EpisodeTask, RolloutWorkflow, Trajectory


@dataclass(frozen=True)
class AgentTask:
    """What an agent is to do.

    Attributes:
        name: task name, one of ``env.tasks``.
        instruction: the environment's words for it.
        seed: seed of the initial state; equal for the episodes of a group.
        max_messages: completions that it may ask for.
        iteration: iteration of the run; 0 in evaluations.
    """

    name: str
    instruction: str
    seed: int
    max_messages: int
    iteration: int


Agent = Callable[[str, str, AgentTask], object]
"""``agent(base_url, api_key, task)``, plain or async; returns None or a reward."""


class AgentWorkflow(RolloutWorkflow):
    """Calls ``rollout.agent`` for each episode; every completion that it asks for is a chunk of the trajectory.

    Each call has a thread of its own, in which an async agent gets an event loop. The server listens on 127.0.0.1 while
    episodes run, and knows each by its key. When the agent returns, the episode has ended; the number it returns is a
    reward of the last message. An agent that asks for more than ``max_chunks`` messages is refused, and the episode
    counts as truncated there, even if it raises then. ``run_episode`` raises WorkflowError if the agent raises, asks
    for nothing, or returns something else.
    """

    needs_agent = True

    def __init__(self, agent: Agent | None = None) -> None:
        need("aiohttp.web")
        self.agent = agent
        self._servers: dict[asyncio.AbstractEventLoop, AgentServer] = {}

    async def run_episode(self, engine: EpisodeEngine, env: Environment, task: EpisodeTask) -> Trajectory | None:
        """See RolloutWorkflow; None if a simulator fault ended the episode."""
        assert self.agent is not None
        seen = await env.initialize(task.name, task.seed)
        session = AgentSession(engine, env, Trajectory(task), seen)
        told = AgentTask(task.name, seen.instruction[0], task.seed, task.max_chunks, task.iteration)
        async with self._serving(session) as url:
            try:
                value = await _in_thread(self.agent, url, session.key, told)
            except WorkflowError:
                if session.cut is None and session.failure is None:
                    raise
                value = None
            finally:
                await session.close()
        if session.failure is not None:
            raise session.failure
        if session.is_lost:
            return None
        return await _ended(session, _reward(value))

    @asynccontextmanager
    async def _serving(self, session: AgentSession) -> AsyncIterator[str]:
        """Serve a session beside the others of this event loop; yields the base URL."""
        loop = asyncio.get_running_loop()
        server = self._servers.setdefault(loop, AgentServer())
        server.open(session)
        try:
            yield await server.url()
        finally:
            if not server.leave(session):
                del self._servers[loop]
                await server.close()


async def _ended(session: AgentSession, reward: float) -> Trajectory:
    trajectory = session.trajectory
    if not trajectory.chunks:
        hint = "let it ask for a chat completion at base_url, with api_key"
        raise WorkflowError("the agent asked for no completion", hint, code="agent-asks-nothing")
    trajectory.add_reward(reward)
    trajectory.chunks[-1].success = session.success
    if session.cut is None:
        trajectory.chunks[-1].terminated[:] = True
    else:
        await trajectory.finish(session.engine, session.cut)
    return trajectory


def _reward(value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_REWARD:
        raise WorkflowError(f"the agent returned {value!r:.60}", "return a reward, or nothing", code="agent-return")
    return float(value)


async def _in_thread(agent: Agent, url: str, key: str, task: AgentTask) -> object:
    """Return what the agent returns; raises WorkflowError if it raises."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            text = f"the agent raised {type(error).__name__}: {error!s:.500}"
            failure = WorkflowError(text, "see the cause in the log, or let the agent handle it", code="agent-raised")
            failure.__cause__ = error
            answer.set_exception(failure)

    def run() -> None:
        value, failure = None, None
        try:
            with guard_user_code("the agent"):
                value = agent(url, key, task)
                if inspect.isawaitable(value):
                    value = asyncio.run(_awaited(cast("Awaitable[object]", value)))
        except Exception as error:  # noqa: BLE001 - the episode fails by it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: the episode was cancelled long ago
            loop.call_soon_threadsafe(settle, value, failure)

    # Not ``asyncio.to_thread``, whose few threads would hold up the other episodes, and the end of the process.
    threading.Thread(target=run, name=f"agent-{task.seed}", daemon=True).start()
    return await answer


async def _awaited(value: Awaitable[object]) -> object:
    return await value
