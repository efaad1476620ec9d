"""``protocol=NAME``: settings of a published evaluation, which replace presets and defaults. Imports no torch."""

from __future__ import annotations

from typing import Any, TypedDict, cast

from embodrl.config.nodes import Node, Origin, from_plain, lookup, put
from embodrl.config.schema import Config
from embodrl.specs import PROTOCOLS, ProtocolSpec


def protocol_settings(
    spec: ProtocolSpec, model_type: object, suite: object, num_tasks: int, num_cameras: int
) -> dict[str, object]:
    """Return a protocol's settings for a model family, suite, tasks and cameras: dotted key -> value."""
    limits = spec.step_limits.get(str(model_type), spec.step_limits[""])
    found = {**spec.settings, **spec.models.get(str(model_type), {})}
    found |= {"env.eval.num_episodes": spec.episodes_per_task * num_tasks}
    if suite in limits:
        found["env.max_episode_steps"] = limits[str(suite)]
    for index in range(num_cameras):
        found |= dict.fromkeys((f"env.cameras.{index}.height", f"env.cameras.{index}.width"), spec.camera_px)
    return found


def fill_protocol(tree: Node) -> None:
    """Apply the settings of ``protocol`` where the user gave none; the settings in a run's file take precedence.

    An unknown protocol, or one of another environment, changes nothing; rules report it.
    """
    chosen = lookup(tree, "protocol")
    name = None if chosen is None or chosen.origin.kind == "run" else chosen.value
    if not isinstance(name, str) or name not in PROTOCOLS:
        return
    spec = PROTOCOLS.entry(name)
    if _plain(tree, "env.env_type") != spec.env_type:
        return
    sizes = [len(cast(list[object], _plain(tree, key) or ())) for key in ("env.tasks", "env.cameras")]
    settings = protocol_settings(spec, _plain(tree, "model.model_type"), _plain(tree, "env.suite"), *sizes)
    origin = Origin("preset", f"protocol={spec.name}")
    for key, value in settings.items():
        given = lookup(tree, key)
        if given is None or not given.origin.by_user:
            put(tree, key, from_plain(value, origin))


class ProtocolReport(TypedDict):
    """Entry of the protocol in eval.json: its settings, and the run's deviations from them."""

    name: str
    source: str
    settings: dict[str, object]
    changed: dict[str, object]
    covers_model: bool
    differs: str


def protocol_of(config: Config) -> ProtocolReport | None:
    """Return the protocol of a valid configuration and the deviations from it; None if it has no protocol."""
    if config.protocol is None:
        return None
    spec = PROTOCOLS.entry(config.protocol)
    env = config.env
    settings = protocol_settings(
        spec, config.model.model_type, getattr(env, "suite", None), len(env.tasks), len(env.cameras)
    )
    used = {key: _used(config, key) for key in settings}
    changed = {key: used[key] for key, value in settings.items() if used[key] != value}
    return {
        "name": spec.name,
        "source": spec.source,
        "settings": settings,
        "changed": changed,
        "covers_model": config.model.model_type in spec.models,
        "differs": spec.differs,
    }


def _used(config: Config, key: str) -> object:
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def _plain(tree: Node, key: str) -> object:
    node = lookup(tree, key)
    return None if node is None else node.plain()
