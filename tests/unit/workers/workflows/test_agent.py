"""Agents that know a URL and a key: what they may ask, and what becomes of their episodes."""

from __future__ import annotations

import base64
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from expect import raises_code
from tiny_families import build

from embodrl.config import load_config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, WorkflowError
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.types import TOKEN_MASK
from embodrl.workers.env import make_pool
from embodrl.workers.workflows.agent import AgentTask, AgentWorkflow
from embodrl.workers.workflows.agent_server import AgentServer, AgentSession
from embodrl.workers.workflows.runner import WorkflowCollector

NUM_ENVS = 4
SETTINGS = [
    *("env=toy", "env.tasks=[reach-red,reach-green]", "env.max_episode_steps=12", "env.pin_cpus=false"),
    *(f"env.train.total_num_envs={NUM_ENVS}", "env.train.max_steps_per_rollout_epoch=2", "env.train.auto_reset=false"),
    *("model=planner", "algorithm=grpo", "algorithm.group_size=2", "algorithm.rollout_epoch=1"),
    *("actor.global_batch_size=4", "actor.micro_batch_size=4", "actor.precision=fp32"),
    *("rollout.workflow=embodrl.workers.workflows.agent:AgentWorkflow", "rollout.agent=builtins:slice"),
]
CONFIG = load_config(SETTINGS).config
SIDE = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SIDE}}
ASK = {"messages": [{"role": "user", "content": "where?"}], "tools": [LOOK], "tool_choice": "required"}
Talk = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with make_pool(CONFIG, NUM_ENVS) as made:
        yield made


@pytest.fixture(scope="module")
def engine() -> NativeRolloutEngine:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_prompt_tokens": 300}
    policy = build("planner", num_action_chunks=1, planner=sizes)
    return NativeRolloutEngine(policy, CONFIG.rollout, CONFIG.algorithm.sampling, 0)


def talker(url: str, key: str) -> Talk:
    """Return a client that is none of the product's: ``talk(path, content)`` gives the status and the answer."""

    def talk(path: str, content: Any = None, token: str = key) -> tuple[int, Any]:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(url + path, data, {"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return talk


def played(
    pool: EnvPool, engine: NativeRolloutEngine, agent: Callable[[Talk, AgentTask], object]
) -> tuple[TrajectoryBatch, dict[str, Any]]:
    def called(url: str, key: str, task: AgentTask) -> object:
        return agent(talker(url, key), task)

    workflow = AgentWorkflow(called)
    batch, found = WorkflowCollector(CONFIG, pool, engine, lambda: False, workflow=workflow).gather(1)
    assert not workflow._servers
    return batch, found


def completed(talk: Talk) -> Any:
    status, found = talk("/chat/completions", ASK)
    assert status == 200
    return found


def test_completions_and_rewards_become_a_trajectory(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    tasks: list[AgentTask] = []

    def agent(talk: Talk, task: AgentTask) -> float:
        tasks.append(task)
        first = completed(talk)
        (call,) = first["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "look" and first["model"] == "policy"
        completed(talk)
        assert talk("/rewards", {"reward": 0.25, "completion_id": first["id"]})[1]["reward"] == 0.25
        assert talk("/rewards", {"reward": 0.5, "success": True})[0] == 200
        return 2

    batch, _ = played(pool, engine, agent)
    assert {task.name for task in tasks} == {"reach-red", "reach-green"} and tasks[0].instruction
    assert batch.batch_size == (2, NUM_ENVS) and batch.valid.all() and batch["success"][1].all()
    np.testing.assert_allclose(batch.rewards[..., 0], [[0.25] * NUM_ENVS, [2.5] * NUM_ENVS])
    assert batch.terminated[1].all() and not batch.terminated[0].any() and not batch.truncated.any()
    inputs = {name: batch["forward_inputs"][name].flatten(0, 1) for name in batch["forward_inputs"].keys()}  # noqa: SIM118
    again = engine.policy.evaluate_actions(inputs, engine.sampling)
    np.testing.assert_allclose(again.logprobs.detach(), batch.logprobs.flatten(0, 1), rtol=0, atol=1e-5)


def test_a_streamed_message_is_a_chunk_of_the_trajectory(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    def agent(url: str, key: str, task: AgentTask) -> float:
        body = json.dumps({**ASK, "stream": True, "stream_options": {"include_usage": True}}).encode()
        request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            *lines, done = answer.read().decode().strip().split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        (head, rest) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert head["function"]["name"] == "look" and json.loads(rest["function"]["arguments"])["side"]
        assert done == "data: [DONE]" and chunks[-1]["usage"]["completion_tokens"] > 1
        named = {"reward": 0.5, "completion_id": chunks[0]["id"]}
        assert talker(url, key)("/rewards", named)[0] == 200
        return 1.0

    workflow = AgentWorkflow(agent)
    batch, _ = WorkflowCollector(CONFIG, pool, engine, lambda: False, workflow=workflow).gather(1)
    assert batch.valid[0].all() and not batch.valid[1].any() and batch.rewards[0].eq(1.5).all()


def test_a_message_cut_by_its_agent_trains_the_tokens_that_are_left(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    def agent(talk: Talk, task: AgentTask) -> None:
        free = {"messages": ASK["messages"], "max_tokens": 3, "temperature": engine.sampling.temperature}
        found = talk("/chat/completions", free)[1]
        assert found["usage"]["completion_tokens"] <= 3 and found["choices"][0]["message"]["content"] is not None

    batch, _ = played(pool, engine, agent)
    inputs = {name: batch["forward_inputs"][name].flatten(0, 1) for name in batch["forward_inputs"].keys()}  # noqa: SIM118
    assert (inputs[TOKEN_MASK][:NUM_ENVS].sum(dim=1) <= 3).all()
    again = engine.policy.evaluate_actions(inputs, engine.sampling)
    np.testing.assert_allclose(again.logprobs.detach()[:NUM_ENVS], batch.logprobs[0], rtol=0, atol=1e-5)


def test_the_environment_is_reached_over_the_server(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    def agent(talk: Talk, task: AgentTask) -> float:
        completed(talk)
        _, found = talk("/environment")
        assert found["task"] == task.name and found["tools"][0]["function"]["name"] == "act"
        picture = found["observation"]["images"]
        assert len(base64.b64decode(picture["__numpy__"])) == np.prod(picture["shape"])
        for wrong in ({"actions": [[0.0]]}, {"actions": "up"}, {}):
            assert talk("/environment/act", wrong)[0] == 400
        assert talk("/environment/fly", {})[1]["error"]["code"] == "tool-unknown"
        for _ in range(12):
            status, found = talk("/environment/act", {"actions": [[1.0] + [0.0] * 6]})
            assert status == 200
            if found["done"]:
                break
        assert found["done"] and not found["lost"]
        assert talk("/environment/act", {"actions": [[0.0] * 7]})[0] == 400
        return found["reward"]

    batch, found = played(pool, engine, agent)
    assert batch.terminated[0].all() and batch.batch_size == (2, NUM_ENVS)
    assert found["rollout/episodes"] == NUM_ENVS


def test_an_agent_that_asks_for_too_many_messages_is_cut_off(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    def agent(talk: Talk, task: AgentTask) -> None:
        for _ in range(task.max_messages):
            completed(talk)
        assert talk("/chat/completions", ASK | {"messages": []})[1]["error"]["code"] == "chat-request"
        status, found = talk("/chat/completions", ASK)
        assert status == 400 and found["error"]["code"] == "agent-too-many-messages"
        raise RuntimeError(found["error"]["message"])

    batch, found = played(pool, engine, agent)
    assert batch.valid.all() and not batch.terminated.any() and found["workflow/failed_episodes"] == 0


def test_each_episode_has_its_key_and_an_end(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    def agent(talk: Talk, task: AgentTask) -> None:
        assert talk("/models", token="another")[1]["error"]["code"] == "agent-key"
        assert talk("/models")[1]["data"][0]["id"] == "policy"
        assert talk("/files")[0] == 404
        assert talk("/rewards", {"reward": 1})[0] == 400  # no message yet
        completed(talk)
        big = ({"reward": 1e300}, {"reward": -(10**400)}, {"reward": float("nan")})
        wrong = (*big, {"reward": "1"}, {"rewards": 1}, {"success": 1}, {"completion_id": "x"})
        assert {talk("/rewards", one)[0] for one in wrong} == {400}
        beyond = ({"n": 2}, {"stop": "."}, {"top_p": 0.5}, {"presence_penalty": 1}, {"frequency_penalty": 1})
        for more in ({"temperature": 0.3}, {"seed": 3}, {"stream": "yes"}, {"messages": []}, *beyond):
            assert talk("/chat/completions", ASK | more)[1]["error"]["code"] == "chat-request"
        assert talk("/rewards", {"reward": 1.0, "done": True})[0] == 200
        status, found = talk("/chat/completions", ASK)
        assert status == 410 and found["error"]["code"] == "agent-episode-ended"

    batch, found = played(pool, engine, agent)
    assert batch.rewards.sum() == NUM_ENVS and found["workflow/failed_episodes"] == 0


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        (lambda talk, task: None, "agent-asks-nothing"),
        (lambda talk, task: str(completed(talk)), "agent-return"),
        (lambda talk, task: bool(completed(talk)), "agent-return"),
        (lambda talk, task: 10**400 * bool(completed(talk)), "agent-return"),
        (lambda talk, task: talk(3), "agent-raised"),
        (lambda talk, task: exit(3), "agent-raised"),
    ],
)
def test_agents_that_fail(pool: EnvPool, engine: NativeRolloutEngine, agent: Any, code: str) -> None:
    with raises_code("workflow", WorkflowError) as caught:
        played(pool, engine, agent)
    assert isinstance(caught.value.__cause__, EmbodrlError) and caught.value.__cause__.code == code


def test_async_agents_and_a_policy_that_fails(
    pool: EnvPool, engine: NativeRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(url: str, key: str, task: AgentTask) -> float:
        """Blocks its own event loop, which holds up nobody else."""
        completed(talker(url, key))
        return 1.0

    collector = WorkflowCollector(CONFIG, pool, engine, lambda: False, workflow=AgentWorkflow(agent))
    assert collector.gather(1)[0].rewards.sum() == NUM_ENVS
    monkeypatch.setattr(engine.policy, "predict_action_batch", lambda *_: 1 / 0)

    def survives(talk: Talk, task: AgentTask) -> None:
        assert talk("/chat/completions", ASK)[0] == 500

    with raises_code("workflow", WorkflowError) as caught:
        played(pool, engine, survives)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_request_without_its_body_does_not_hold_up_the_end(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    left: list[socket.socket] = []

    def agent(url: str, key: str, task: AgentTask) -> None:
        talk = talker(url, key)
        completed(talk)
        place = urllib.parse.urlsplit(url)
        assert place.hostname is not None and place.port is not None
        left.append(socket.create_connection((place.hostname, place.port)))
        head = f"POST /v1/rewards HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 99\r\n\r\n"
        left[-1].sendall(head.encode())
        talk("/models")  # the server has seen the head

    config = load_config([*SETTINGS, "rollout.episode_timeout_s=20"]).config
    collector = WorkflowCollector(config, pool, engine, lambda: False, workflow=AgentWorkflow(agent))
    assert collector.gather(1)[1]["workflow/failed_episodes"] == 0
    for one in left:
        one.close()


def test_a_server_keeps_no_episodes_that_have_ended(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    """It goes on while others run, as episodes of a session do."""
    server = AgentServer()
    sessions = [AgentSession(*cast("Any", (None, None, None, None))) for _ in range(2)]
    for session in sessions:
        server.open(session)
    gone = weakref.ref(sessions.pop())
    session = gone()
    assert session is not None and server.leave(session) == 1
    del session
    assert gone() is None


def test_an_agent_that_never_ends_is_left_alone_after_the_limit(pool: EnvPool, engine: NativeRolloutEngine) -> None:
    config = load_config([*SETTINGS, "rollout.episode_timeout_s=0.5"]).config
    free = threading.Event()
    workflow = AgentWorkflow(lambda url, key, task: free.wait())
    with raises_code("workflow", WorkflowError) as caught:
        WorkflowCollector(config, pool, engine, lambda: False, workflow=workflow).gather(1)
    free.set()
    assert isinstance(caught.value.__cause__, EmbodrlError) and caught.value.__cause__.code == "episode-timeout"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["rollout.agent=null"], "agents-have-their-workflow"),
        (["rollout.agent=math:sqrt"], "agents-have-their-workflow"),
        (["rollout.agent=math:pi"], "agents-have-their-workflow"),
        (["rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow"], "agents-have-their-workflow"),
    ],
)
def test_settings_that_do_not_fit(settings: list[str], code: str) -> None:
    with raises_code(code):
        load_config([*SETTINGS, *settings])
