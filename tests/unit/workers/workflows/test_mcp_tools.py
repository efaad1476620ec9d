"""Tools of an MCP server in a process of its own: what the policy reads of them, and what fails an episode."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from expect import raises_code
from redis_server import free_ports
from tiny_families import build

from embodrl import McpTools, ToolCall
from embodrl.config import load_config
from embodrl.errors import EnvError, WorkflowError
from embodrl.hybrid_engines.rollout.batched import BatchedEngine
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.common.chat import Conversation

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = Path(__file__).parents[3] / "helpers" / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_ports(1)[0]
    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # uvicorn's log
            if "running on" in line:
                break
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def used(tools: McpTools, *calls: ToolCall) -> list[str]:
    async def run() -> list[str]:
        async with tools:
            return [(await tools.call(call))["content"] for call in calls]

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["command", "url"])
def test_tools_are_listed_and_called(kind: str, url: str) -> None:
    tools = McpTools(COMMAND if kind == "command" else url)
    three, unknown, wrong, broken = used(
        tools,
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("fly", {}),
        ToolCall("add", {"a": "one"}),
        ToolCall("broken", {}),
    )
    assert three == "3"
    assert unknown.startswith("error:") and "fly" in unknown
    assert wrong.startswith("error:") and broken.startswith("error:")
    add = next(tool for tool in tools.list_tools() if tool.name == "add")
    assert add.description == "Add two numbers." and add.parameters["required"] == ["a", "b"]
    asked = Conversation.of([{"role": "user", "content": "1 + 2?"}], [vars(tool) for tool in tools.list_tools()])
    assert [tool["name"] for tool in asked.tools] == ["add", "long", "broken", "endless", "variable", "die"]


def test_results_are_bounded_in_size_and_time() -> None:
    tools = McpTools(COMMAND, max_chars=10)

    async def run() -> tuple[dict[str, str], ...]:
        async with tools:
            long = await tools.call(ToolCall("long", {"count": 5000}))
            tools.timeout_s = 0.05
            endless = await tools.call(ToolCall("endless", {}))
            tools.timeout_s = 30.0
            return long, endless, await tools.call(ToolCall("add", {"a": 2, "b": 2}))

    long, endless, four = asyncio.run(run())
    assert long == {"role": "tool", "content": "x" * 10 + "\n[cut: 5000 characters in all]"}
    assert endless["content"].startswith("error: no ")
    assert four["content"] == "4"  # the connection is still good


def test_a_command_gets_the_variables_that_are_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODRL_TOKEN", "secret")
    read = [ToolCall("variable", {"name": name}) for name in ("EMBODRL_TOKEN", "CITY")]
    assert used(McpTools(COMMAND, env={"CITY": "Riga"}), *read) == ["unset", "Riga"]


@pytest.mark.parametrize("ends", ["die", "missing", "mute"])
def test_a_server_that_is_lost_fails_the_episode(ends: str) -> None:
    commands = {"die": COMMAND, "missing": ["no-such-server"], "mute": [sys.executable, "-c", "pass"]}
    with raises_code("mcp-server", WorkflowError, "MCP server"):
        used(McpTools(commands[ends]), ToolCall("die", {}))


def test_what_an_episode_raises_stays_as_it_is() -> None:
    async def run() -> None:
        async with McpTools(COMMAND):
            raise EnvError("the simulator is beyond repair")

    with pytest.raises(EnvError, match="beyond repair"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: McpTools("server.py"), "no address"),
        (lambda: McpTools("http://localhost/mcp", env={"A": "b"}), "env means nothing"),
        (lambda: McpTools(COMMAND, headers={"A": "b"}), "headers means nothing"),
    ],
)
def test_what_means_nothing_is_refused(make: Callable[[], McpTools], said: str) -> None:
    with raises_code("mcp-server", WorkflowError, said):
        make()


def test_a_policy_calls_a_tool_and_reads_the_result() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_prompt_tokens": 600}
    policy = build("planner", num_action_chunks=1, planner=sizes)
    config = load_config(["env=toy", "model=mlp", "actor.precision=fp32"]).config
    engine = BatchedEngine(NativeRolloutEngine(policy, config.rollout, config.algorithm.sampling, 0), False, 1)
    messages: list[dict[str, str]] = [{"role": "user", "content": "fail"}]

    async def run() -> str:
        async with McpTools(COMMAND) as tools:
            offered = [tool for tool in tools.list_tools() if tool.name == "broken"]
            completion = await engine.for_episode(0).generate(messages, offered, tool_choice="required")
            messages.append({"role": "assistant", "content": completion.text})
            messages.extend([await tools.call(call) for call in completion.tool_calls])
            return (await engine.for_episode(0).generate(messages, offered)).text

    with closing(engine):
        asyncio.run(run())
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[-1]["content"].startswith("error:")
