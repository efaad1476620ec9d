"""Tools of a server of the Model Context Protocol (MCP), for the policy in a workflow."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import ModuleType, TracebackType
from typing import Any, Self

from embodrl.envs.environment import Tool
from embodrl.errors import MissingDependencyError, WorkflowError
from embodrl.models.common.chat import ToolCall

MAX_TOOLS = 1024
"""Largest number of tools that a server may list."""
_CUT = "\n[cut: {} characters in all]"

logger = logging.getLogger(__name__)


class McpTools:
    """The tools of one MCP server, inside ``async with``, for the tasks of one event loop.

    What a tool reports as an error, what the server refuses, and a call without a result in time become messages that
    the policy can read. A server that can't be reached, or is lost, raises WorkflowError (``mcp-server``), which fails
    the episode.

    Args:
        server: the URL of a server that speaks streamable HTTP, or a command with its arguments, which is started and
            speaks on stdin and stdout. It has all rights of the run.
        env: further variables of a command's environment, which by default has ``PATH``, ``HOME`` and few others.
        headers: HTTP headers of each request to a URL, such as ``Authorization``.
        timeout_s: the most seconds that connecting, or one call, may take.
        max_chars: the most characters of a result; what follows is cut, and the message says so. The server's answer
            is in memory as a whole before.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        max_chars: int = 4096,
    ) -> None:
        is_url = isinstance(server, str)
        if is_url and not server.startswith(("http://", "https://")):
            hint = "give its URL (http://, https://), or its command as a list, e.g. ['python', 'server.py']"
            raise WorkflowError(f"'{server:.60}' is no address of an MCP server", hint, code="mcp-server")
        if (env if is_url else headers) is not None:
            unused, kind = ("env", "a URL") if is_url else ("headers", "a command")
            raise WorkflowError(f"{unused} means nothing for {kind}", f"leave {unused} out", code="mcp-server")
        self.name = server if is_url else " ".join(server)
        self.timeout_s = timeout_s
        self.max_chars = max_chars
        self._mcp = _need("mcp")
        self._session = _Session(self._mcp, server, env, headers)

    async def __aenter__(self) -> Self:
        try:
            await self._session.open(self.timeout_s)
        except Exception as error:
            raise self._lost(error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def list_tools(self) -> list[Tool]:
        """Return the tools that the server listed, for ``engine.generate``."""
        return list(self._session.tools)

    async def call(self, call: ToolCall) -> dict[str, str]:
        """Call a tool; return its result as the message ``{"role": "tool", "content": text}``.

        Text and text resources stand as they are, links as their address, and other content as its media type alone.

        Raises:
            WorkflowError: the server is lost, or its answer has not the form of a result.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await self._session.client.call_tool(call.name, dict(call.arguments))
            text = _text_of(result)
            text = f"error: {text}" if result.is_error else text
        except TimeoutError:
            text = f"error: no result in {self.timeout_s:g} s"
        except self._mcp.MCPError as error:
            if error.code == _need("mcp_types").CONNECTION_CLOSED or self._session.is_closed:
                raise self._lost(error) from error
            text = f"error: {error.message}"
        except Exception as error:
            raise self._lost(error) from error
        if len(text) > self.max_chars:
            text = text[: self.max_chars] + _CUT.format(len(text))
        return {"role": "tool", "content": text}

    def _lost(self, error: BaseException) -> WorkflowError:
        while isinstance(error, BaseExceptionGroup):  # of the package's task groups
            error = error.exceptions[0]
        text = f"no answer in {self.timeout_s:g} s" if isinstance(error, TimeoutError) else f"{error!s:.300}"
        return WorkflowError(
            f"the MCP server '{self.name:.200}' can't be used: {type(error).__name__}: {text}",
            "start it by hand to see whether it answers",
            code="mcp-server",
        )


class _Session:
    """A connection in a task of its own: the package's task groups would wrap what the episode raises."""

    def __init__(
        self,
        mcp: ModuleType,
        server: str | Sequence[str],
        env: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.client: Any = None
        self.tools: tuple[Tool, ...] = ()
        self._mcp = mcp
        self._server = server
        self._given = dict((env if headers is None else headers) or {})
        self._stop = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    @property
    def is_closed(self) -> bool:
        return self._owner is None or self._owner.done()

    async def open(self, timeout_s: float) -> None:
        """Connect and list the tools; raises what the server does, and TimeoutError."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owner = self._owner = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([owner, ready], return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            owner.cancel()
            await asyncio.wait([owner])
            raise
        if not ready.done():
            owner.result()

    async def close(self) -> None:
        """End the connection, and the server's process if it was started; bounded in time by the package."""
        self._stop.set()
        assert self._owner is not None
        await asyncio.wait([self._owner])
        if not self._owner.cancelled() and (error := self._owner.exception()) is not None:
            logger.debug("an MCP server's connection ended with an error", exc_info=error)

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        async with AsyncExitStack() as stack:
            transport = await self._transport(stack)
            self.client = await stack.enter_async_context(self._mcp.Client(transport))
            self.tools = await self._listed()
            ready.set_result(None)
            await self._stop.wait()

    async def _transport(self, stack: AsyncExitStack) -> object:
        if not isinstance(self._server, str):
            command, *arguments = self._server
            return self._mcp.StdioServerParameters(command=command, args=arguments, env=self._given)
        http = _need("httpx2")
        # Calls are bounded by the caller; a server may hold a response open.
        client = http.AsyncClient(headers=self._given, timeout=http.Timeout(30.0, read=None))
        await stack.enter_async_context(client)
        return _need("mcp.client.streamable_http").streamable_http_client(self._server, http_client=client)

    async def _listed(self) -> tuple[Tool, ...]:
        tools: list[Tool] = []
        page = None
        while page is None or page.next_cursor:
            page = await self.client.list_tools(cursor=page and page.next_cursor)
            tools += [Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            if len(tools) > MAX_TOOLS:
                raise ValueError(f"it lists more than {MAX_TOOLS} tools")
        return tuple(tools)


def _text_of(result: Any) -> str:
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text_of_block, result.content))


def _text_of_block(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return str(block.uri)
    held = block.resource if block.type == "resource" else block
    return held.text if hasattr(held, "text") else f"[{held.mime_type or block.type}]"


def _need(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"tools of MCP servers need {name}: {error}", "pip install 'embodrl[mcp]'"
        ) from error
