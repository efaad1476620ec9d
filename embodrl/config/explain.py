"""The summary of a configuration, and the differences between two."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from embodrl.config.load import leaf_keys, load_config, load_run
from embodrl.config.schema import Config
from embodrl.config.yaml_text import flow
from embodrl.errors import UsageError
from embodrl.names import workflow_agents


def summary(config: Config) -> str:
    """Return the arithmetic of a run in a few lines."""
    train = config.env.train
    runner = config.runner
    algorithm = config.algorithm
    actor = config.actor
    chunks_an_env = config.rollout_chunks * algorithm.rollout_epoch
    agents = len(workflow_agents(config.rollout.workflow)) or 1
    chunks = train.total_num_envs * chunks_an_env * agents
    steps = chunks * config.model.num_action_chunks
    updates = -(-chunks // actor.global_batch_size) * algorithm.update_epoch
    stages = config.rollout.pipeline_stages
    of_each = f" and each of {agents} agents" if agents > 1 else ""
    processes = config.env.num_processes
    return "\n".join(
        [
            f"environments: {train.total_num_envs} in {processes} processes, {stages} pipeline stage(s)",
            f"rollout:      {chunks_an_env} chunks of {config.model.num_action_chunks} actions per environment{of_each}"
            f" = {chunks} chunks, {steps} environment steps",
            f"update:       {updates} optimizer steps of up to {actor.global_batch_size} chunks",
            f"run:          {runner.max_iterations} iterations, {steps * runner.max_iterations} environment steps",
        ]
    )


MISSING = "-"


def side(text: str, trust: bool = False) -> dict[str, object]:
    """Return the values of a run, of a YAML file, or of settings separated by spaces ("" is the defaults).

    Raises:
        ConfigError: the configuration is invalid, or another user's run names code and ``trust`` is not set.
        UsageError: the run or file does not exist.
    """
    path = Path(text).expanduser()
    if text and "=" not in text and not path.exists():
        raise UsageError(
            f"{text} is not a run, a YAML file or settings",
            'write settings as key=value, and quote several together: "env=NAME runner.seed=3"',
            code="config-diff-side",
        )
    if text and "=" not in text and (path / "config.yaml").is_file():
        return load_run(path / "config.yaml", resuming=True, trust=trust).config.model_dump(mode="json")
    if text and "=" not in text:
        return load_config([], path, trust=trust).config.model_dump(mode="json")
    return load_config(shlex.split(text)).config.model_dump(mode="json")


def differences(one: Mapping[str, object], other: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return ``(key, value of one, value of other)`` of every setting that differs; "-" marks a missing key."""
    keys = dict.fromkeys([*leaf_keys(one), *leaf_keys(other)])
    rows = [(key, _value(one, key), _value(other, key)) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def _value(values: object, key: str) -> str:
    found: object = values
    for part in key.split("."):
        if isinstance(found, list):
            items = cast(list[object], found)
            found = items[int(part)] if part.isdigit() and int(part) < len(items) else MISSING
        elif isinstance(found, dict):
            found = cast(dict[str, object], found).get(part, MISSING)
        else:
            return MISSING
    return MISSING if found is MISSING else flow(found)
