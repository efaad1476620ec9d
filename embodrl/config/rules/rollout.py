"""Rollouts: workflows and backends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from embodrl.config.rules.base import Context, path_kind, rule
from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError
from embodrl.names import import_function, import_workflow, workflow_agents
from embodrl.rule_set import Finding

KEY = "rollout.workflow"
AGENT = "rollout.agent"
AGENT_CALL = "agent(base_url, api_key, task)"
AGENT_WORKFLOW = "embodrl.workers.workflows.agent:AgentWorkflow"
BACKEND = "rollout.backend"
NATIVE = "set rollout.backend=native"


def agents_played(config: Config) -> tuple[str, ...]:
    """Return the agents of the workflow; empty for one, or if ``workflow_exists`` refuses it."""
    try:
        return workflow_agents(config.rollout.workflow)
    except EmbodrlError:
        return ()


@rule(KEY)
def workflow_exists(context: Context) -> Iterator[Finding]:
    """The workflow can be imported and constructed."""
    path = context.config.rollout.workflow
    if path is not None:
        try:
            import_workflow(path)
        except EmbodrlError as error:
            hint = error.hint or "put the module's directory on PYTHONPATH, or correct the name"
            yield Finding(KEY, error.message, hint, "module:Class, or null")


@rule(AGENT, KEY)
def agents_have_their_workflow(context: Context) -> Iterator[Finding]:
    """An agent is called by the workflow that is made for it."""
    rollout = context.config.rollout
    try:
        needed = rollout.workflow is not None and getattr(import_workflow(rollout.workflow), "needs_agent", False)
    except EmbodrlError:  # see workflow_exists
        return
    if rollout.agent is None:
        if needed:
            message = f"is null, and {KEY}={rollout.workflow} calls an agent"
            yield Finding(AGENT, message, f"name a function {AGENT_CALL}", "module:function", others=(KEY,))
        return
    if not needed:
        message = f"calls no agent, but {AGENT} names one"
        yield Finding(KEY, message, f"set it to {AGENT_WORKFLOW}, or {AGENT}=null", AGENT_WORKFLOW, others=(AGENT,))
        return
    try:
        with suppress(ValueError):  # compiled code has no signature
            inspect.signature(import_function(rollout.agent)).bind("base_url", "api_key", "task")
    except EmbodrlError as error:
        hint = error.hint or "put the module's directory on PYTHONPATH, or correct the name"
        yield Finding(AGENT, error.message, hint, "module:function")
    except TypeError as error:
        yield Finding(AGENT, f"can't be called as {AGENT_CALL}: {error}", "give it these parameters")


@rule(KEY, AGENT, "reward", "algorithm.srpo.enabled")
def agents_have_rewards_of_their_own(context: Context) -> Iterator[Finding]:
    """What rewards or plays a whole episode can't tell the agents of a workflow from each other."""
    config = context.config
    agents = agents_played(config)
    if not agents:
        return
    hint = "leave it out: the workflow rewards each agent (Trajectory.add_reward)"
    message = f"judges episodes, and can't tell the agents {', '.join(agents)} from each other"
    for key in config.reward.judges:
        yield Finding(key, message, hint, "null", others=(KEY,))
    if config.algorithm.srpo.enabled:
        yield Finding("algorithm.srpo.enabled", message, hint, "false", others=(KEY,))
    if config.rollout.agent is not None:
        message = f"is one function, and {KEY}={config.rollout.workflow} has the agents {', '.join(agents)}"
        yield Finding(AGENT, message, "leave `agents` out of the workflow", "null", others=(KEY,))


@rule(KEY, "env.train.auto_reset", "rollout.pipeline_stages", "runner.max_staleness")
def workflows_play_single_episodes(context: Context) -> Iterator[Finding]:
    """A workflow starts and ends episodes itself, each in a waiting environment."""
    config = context.config
    if config.rollout.workflow is None or context.verb == "eval":  # which starts all episodes itself
        return
    if config.env.train.auto_reset:
        message = "a workflow starts episodes itself, but the environments would start the next ones on their own"
        yield Finding("env.train.auto_reset", message, "set env.train.auto_reset=false", "false", others=(KEY,))
    if config.rollout.pipeline_stages > 1 and config.runner.max_staleness == 0:
        message = f"{config.rollout.pipeline_stages} stages have no effect on workflow episodes without staleness"
        hint = "set rollout.pipeline_stages=1, or runner.max_staleness to 1 or more"
        yield Finding("rollout.pipeline_stages", message, hint, "1", others=(KEY, "runner.max_staleness"))


@rule("rollout.streaming", "rollout.workflow", "runner.max_staleness", "env.train.auto_reset")
def streams_are_of_single_episodes(context: Context) -> Iterator[Finding]:
    """Updates of an asynchronous run take episodes that are played from a reset to their end."""
    config = context.config
    key = "rollout.streaming"
    if not config.rollout.streaming:
        return
    if config.runner.max_staleness == 0:
        message = "is 0, so that every rollout waits for its update"
        yield Finding("runner.max_staleness", message, "set it to 1 or more", "1 or more", others=(key,))
    if config.env.train.auto_reset:
        message = "single episodes are taken, but the environments would start the next ones on their own"
        yield Finding("env.train.auto_reset", message, "set env.train.auto_reset=false", "false", others=(key,))
    if config.rollout.workflow is not None:
        message = "plays all environments of a stage until the last has ended"
        yield Finding(KEY, message, f"leave it out, or set {key}=false", "null", others=(key,))


@rule(
    "rollout.min_running_shards", "rollout", "runner.max_staleness", "env.train.total_num_envs", "algorithm.group_size"
)
def running_shards_can_adapt(context: Context) -> Iterator[Finding]:
    """A number of running shards that adapts is of an asynchronous run with several."""
    config = context.config
    key, low = "rollout.min_running_shards", config.rollout.min_running_shards
    if low is None:
        return
    if config.runner.max_staleness == 0:
        message = "a synchronous run plays all its rollouts at once"
        hint = "leave it out, or set runner.max_staleness to 1 or more"
        yield Finding(key, message, hint, "null", others=("runner.max_staleness",))
        return
    processes = 1 if context.deployment is None else max(1, len(context.deployment.of("rollout")))
    shards = processes * config.rollout.pipeline_stages
    if config.rollout.streaming:
        shards = config.env.train.total_num_envs // config.algorithm.group_size
    if low >= shards:
        message = f"is not below the number of shards that can run at once, {shards}"
        hint = "lower it, or raise rollout.pipeline_stages"
        yield Finding(key, message, hint, f"1 to {shards - 1}" if shards > 1 else "null")


@rule("rollout.replay", "algorithm.loss_type", "rollout.backend", "reward", "runner")
def rollouts_can_be_replayed(context: Context) -> Iterator[Finding]:
    """Saved rollouts are there for every iteration, and nothing else has to act in them."""
    config = context.config
    directory = config.rollout.replay
    key = "rollout.replay"
    if directory is None:
        return
    reward = config.reward
    rewards = {"reward.fn": reward.fn, "reward.model": reward.model, "reward.judge.url": reward.judge.url}
    if path_kind(directory) != "directory":
        message = f"no directory '{directory}'"
        yield Finding(key, message, "save one: runner.save_rollouts=true writes RUN/rollouts", "a directory, or null")
    else:
        judged = next((name for name, value in rewards.items() if value is not None), None)
        saved = {"rollouts": "iteration_??????.safetensors"}
        if judged is not None:
            saved[f"rewards of {judged}"] = "iteration_??????_rewards.json"
        for what, pattern in saved.items():
            there = sum(1 for _ in Path(directory).expanduser().glob(pattern))
            if there < config.runner.max_iterations:
                message = f"has {there} {what}, and runner.max_iterations is {config.runner.max_iterations}"
                hint = f"set runner.max_iterations={there}" if there else "name RUN/rollouts of a run that saved them"
                yield Finding(key, message, hint, others=("runner.max_iterations",))
    apart = {
        "algorithm.loss_type": (context.loss.offline, "has no rollouts"),
        "rollout.backend": (config.rollout.backend != "native", "acts elsewhere"),
        "runner.save_rollouts": (config.runner.save_rollouts, "saves what is saved already"),
    }
    for other, (given, what) in apart.items():
        if given:
            message = f"{what}, but rollout.replay trains on saved rollouts"
            yield Finding(other, message, "leave one of them out", others=(key,))
