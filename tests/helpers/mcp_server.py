"""A small MCP server for tests: on stdin and stdout, or with an argument on that port of this machine."""

from __future__ import annotations

import os
import sys

import anyio
from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def long(count: int) -> str:
    """Write a letter often."""
    return "x" * count


@server.tool()
def broken() -> str:
    """Fail."""
    raise RuntimeError("the drawer is stuck")


@server.tool()
async def endless() -> str:
    """Never answer."""
    await anyio.sleep_forever()
    return ""


@server.tool()
def variable(name: str) -> str:
    """Read a variable of the environment."""
    return os.environ.get(name, "unset")


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
