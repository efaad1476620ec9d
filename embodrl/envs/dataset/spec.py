"""Demonstrations in place of a simulator, for fine-tuning to any robot: facts and rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, cast

from embodrl.config.rules.base import Context
from embodrl.config.schema import SftConfig
from embodrl.data.facts import data_directory, read_facts
from embodrl.errors import EmbodrlError, UsageError
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import SimulatorSpec

NAME = "dataset"
DATA_DIR = "sft.data_dir"
RULES = RuleSet()


def no_simulator(*_: object, **__: object) -> NoReturn:
    """Raise UsageError: a dataset has no environment to act in."""
    raise UsageError("env=dataset has no environment to act in", "name a simulator: `embodrl list envs`")


def fill(given: object) -> tuple[str, dict[str, object]]:
    """Return the settings that follow from the dataset in ``sft.data_dir``, if readable.

    Otherwise `embodrl sft` reports the reason before it starts anything.
    """
    tree = cast(dict[str, Any], given)
    sft: dict[str, Any] = tree.get("sft") or {}
    chosen = sft.get("cameras")
    try:
        facts = read_facts(data_directory(str(sft.get("data_dir") or SftConfig().data_dir)), _keys(sft))
    except EmbodrlError:
        return DATA_DIR, {}
    cameras = facts.env_cameras([str(name) for name in chosen] if isinstance(chosen, list) else None)
    chunk = (tree.get("model") or {}).get("num_action_chunks")
    values: dict[str, object] = {"env.include_state": facts.state_dim > 0}
    values |= {"model.action_dim": facts.action_dim} if facts.action_dim else {}
    values |= {"env.cameras": cameras} if cameras else {}
    if isinstance(chunk, int) and chunk > 0:  # there are no episodes, so rules about them hold
        values |= {"env.max_episode_steps": 100 * chunk, "env.train.max_steps_per_rollout_epoch": 100 * chunk}
    return DATA_DIR, values


def _keys(sft: dict[str, Any]) -> dict[str, str]:
    """Return ``sft.keys`` as given; an invalid mapping is reported with the configuration."""
    given = sft.get("keys")
    names = cast(dict[object, object], given) if isinstance(given, dict) else {}
    return {str(ours): str(theirs) for ours, theirs in names.items()}


@RULES.rule("env.env_type", "sft.data_dir", "model.action_dim")
def actions_are_those_of_the_data(context: Context) -> Iterator[Finding]:
    """The policy has as many action dimensions as the demonstrations."""
    config = context.config
    try:
        found = read_facts(data_directory(config.sft.data_dir), config.sft.keys).action_dim
    except EmbodrlError:  # reported by the command
        return
    if found != config.model.action_dim:
        message = f"actions in {config.sft.data_dir} have {found} dimensions, but it is {config.model.action_dim}"
        yield Finding("model.action_dim", message, "leave it out", str(found), others=(DATA_DIR,))


SPEC = SimulatorSpec(
    name=NAME,
    target="embodrl.envs.dataset.spec:no_simulator",
    description="no simulator: cameras, state and actions of the demonstrations in sft.data_dir; for `embodrl sft`",
    simulates=False,
    fill=fill,
    rules=(RULES,),
    actions="those of the data",
    camera_list="those of the data",
    expert_tasks=(),
    demonstrations="it consists of demonstrations",
    verified="everywhere",
)
