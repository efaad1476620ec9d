"""What follows from the name of a suite: its tasks and the step limit of published evaluations."""

from __future__ import annotations

from typing import Any

from embodrl.config.nodes import Node, Origin, from_plain, lookup
from embodrl.registry import ENVS


def fill_suite(tree: Node) -> None:
    """Add ``env.tasks`` and ``env.max_episode_steps`` where ``env.suite`` is known and they are not given."""
    env = lookup(tree, "env")
    suite, env_type = lookup(tree, "env.suite"), lookup(tree, "env.env_type")
    if env is None or suite is None or env_type is None or env_type.value not in ENVS:
        return
    suites: dict[str, Any] = ENVS.entry(str(env_type.value)).facts.get("suites", {})
    if not suites:
        return
    known = isinstance(suite.value, str) and suite.value in suites
    facts = suites[suite.value if known else next(iter(suites))]  # an unknown suite is one problem, not three
    origin = Origin("preset", f"follows from env.suite={suite.value}")
    for key, value in (("tasks", list(facts["tasks"])), ("max_episode_steps", facts["max_episode_steps"])):
        if key not in env.children:
            env.children[key] = from_plain(value, origin)
