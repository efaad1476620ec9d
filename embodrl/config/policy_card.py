"""Policy card, ``embodrl.json`` next to a policy: its training setup. Configuration rules read it, so torch is not
imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from embodrl.config.schema import Config, ModelConfig
from embodrl.fields import MAX_JSON_BYTES, read_regular_file
from embodrl.hub import MODEL_FACTS, cached, parse
from embodrl.interface import ZERO_CLOSES
from embodrl.specs import ENVS, MODELS

CARD_FILE = "embodrl.json"
ADAPTER_CONFIG = "adapter_config.json"
"""Adapter settings in peft's layout."""
BUILTIN = "builtin"
ASSETS = Path(__file__).parents[1] / "assets"
CAMERA_KEYS = ("name", "height", "width", "fov_rad", "eye", "target")


def without_weights(model: ModelConfig) -> str:
    """Return why this model section would give a random policy; "" if it names weights or a server that has them."""
    family = MODELS.entry(model.model_type) if model.model_type in MODELS else None
    if model.model_path is not None or model.warm_start is not None or (family is not None and family.only_acts):
        return ""
    return f"random weights: model.model_path and model.warm_start of this {model.model_type} are null"


def policy_card(config: Config, **facts: Any) -> dict[str, Any]:
    """Return the card of a policy trained with ``config``; ``facts`` are further entries, e.g. ``iteration``."""
    env = config.env
    settings = config.env.model_dump(mode="json")
    return {
        "model_type": config.model.model_type,
        "env_type": env.env_type,
        "env_id": settings.get("id"),
        "tasks": list(env.tasks),
        "instructions": known_instructions(config),
        "cameras": [{key: view.get(key) for key in CAMERA_KEYS} for view in settings["cameras"]],
        "interface": _interface(config),
        "num_action_chunks": config.model.num_action_chunks,
        "action_dim": config.model.action_dim,
        "condition": config.model.condition,
        "rtc_max_delay": trained_delay(config.model),
        "seed": config.runner.seed,
        **facts,
    }


def known_instructions(config: Config) -> dict[str, str]:
    """Return task -> instruction, as far as it is known without the simulator, else ""."""
    env = config.env
    known = ENVS.entry(env.env_type).instructions() if env.env_type in ENVS else {}
    return {task: env.model_dump().get("instruction") or known.get(task, "") for task in env.tasks}


def _interface(config: Config) -> dict[str, object] | None:
    """Return the meaning of actions and observations in training: the environment's interface with the policy's
    gripper.

    Cameras are compared separately. With ``model.gripper`` the policy's own convention is 0 to 1.
    """
    spec = ENVS.entry(config.env.env_type) if config.env.env_type in ENVS else None
    if spec is None or spec.interface is None:
        return None
    found = replace(spec.interface(config.env), cameras=None)
    return asdict(found if config.model.gripper == "as_is" else replace(found, gripper=ZERO_CLOSES))


def shipped_policy(family: str) -> Path | None:
    """Return the directory of a family's weights that come with embodrl, which have its tiny size; None without any."""
    ships = family in MODELS and MODELS.entry(family).builtin_warm_start
    return ASSETS / f"{family}_tiny" if ships else None


def policy_directory(model: ModelConfig) -> Path | None:
    """Return the local directory of the weights that a configuration names; None for random weights.

    For a hub repository this is its directory in the hub cache, which may lack the weights; None if it was not fetched.
    """
    if model.model_path is None and model.warm_start == BUILTIN:
        return shipped_policy(model.model_type)
    name = model.model_path or model.warm_start
    try:
        path = None if name is None else Path(name).expanduser()
        if path is not None and path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError):  # not a path at all; a rule reports it
        return None
    on_hub = None if model.model_path is None else parse(model.model_path)
    return None if on_hub is None else cached(on_hub, MODEL_FACTS)


def checkpoint_name(model: ModelConfig) -> str:
    """Return the directory or repository name of a checkpoint, which hints at its training data."""
    directory = policy_directory(model)
    on_hub = directory is None or directory.parent.name == "snapshots"
    return str(model.model_path) if on_hub or directory is None else directory.name


def read_card(directory: Path) -> dict[str, Any] | None:
    """Return the card of a policy; None if it has none (e.g. a published checkpoint) or it is unreadable."""
    try:
        card = json.loads(read_regular_file(directory / CARD_FILE, MAX_JSON_BYTES, follow_links=True))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(card, dict):
        return None
    found = cast(dict[str, Any], card)
    tasks = cast(object, found.get("tasks", []))
    valid = isinstance(tasks, list) and all(isinstance(task, str) for task in cast(list[object], tasks))
    return found if valid else None


def trained_delay(model: ModelConfig) -> int:
    """Return ``model.flow.rtc_max_delay``, falling back to the policy card, then to 0."""
    flow = getattr(model, "flow", None)
    if flow is None or flow.rtc_max_delay is not None:
        return 0 if flow is None else flow.rtc_max_delay
    directory = policy_directory(model)
    card = None if directory is None else read_card(directory)
    recorded = None if card is None else card.get("rtc_max_delay")
    return recorded if type(recorded) is int and recorded > 0 else 0


def trained_state_dim(config: Config) -> int | None:
    """Return the state dimension that a policy was trained on, from its card; None if unknown."""
    directory = policy_directory(config.model)
    card = None if directory is None else read_card(directory)
    recorded = None if card is None else card.get("state_dim")
    return recorded if type(recorded) is int and recorded >= 0 else None


def reads_state(config: Config) -> bool | None:
    """Return whether a policy reads the robot's state, from its family and settings; None if unknown."""
    family = MODELS.entry(config.model.model_type) if config.model.model_type in MODELS else None
    uses = None if family is None else family.uses_state
    if isinstance(uses, str):
        value: object = config
        for name in uses.split("."):
            value = getattr(value, name, None)
        uses = value if isinstance(value, bool) else None
    return uses if config.env.include_state else False


def card_differences(card: dict[str, Any], config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for every requirement of a configuration that the policy was not trained for."""
    env = config.env
    trained = f"{card.get('env_type')} ({', '.join(card.get('tasks', []))})"
    env_id = env.model_dump().get("id")
    trained_in = card.get("env_type")
    if (
        isinstance(trained_in, str) and trained_in in ENVS and not ENVS.entry(trained_in).simulates
    ):  # data do not record their simulator
        return
    if card.get("env_type") != env.env_type or card.get("env_id") != env_id:
        here = f"{env.env_type} {env_id}" if env_id else env.env_type
        yield "env.env_type", f"the policy was trained in {trained}, not in {here}"
        return
    unknown = [task for task in env.tasks if task not in card.get("tasks", [])]
    if unknown:
        some = "" if len(unknown) == len(env.tasks) else f" of {len(env.tasks)} tasks"
        yield "env.tasks", f"the policy was trained in {trained}, not on {', '.join(unknown[:4])}{some}"
    here = policy_card(config)
    if card.get("condition") not in (None, here["condition"]):
        yield "model.condition", f"the policy was trained to act with model.condition={card['condition']}"
    for index, (there, view) in enumerate(zip(card.get("cameras", []), here["cameras"], strict=False)):
        # A pose of null is the simulator's own, which may equal an explicit pose.
        posed = [key for key in ("eye", "target") if there.get(key) is None or view[key] is None]
        other = [key for key in there if key in view and key not in posed and there[key] != view[key]]
        if other:
            pairs = ", ".join(f"{key} {there.get(key)} -> {view[key]}" for key in other)
            yield f"env.cameras.{index}", f"the policy was trained with another camera: {pairs}"
    if len(card.get("cameras", [])) != len(here["cameras"]):
        yield "env.cameras", f"the policy was trained with {len(card.get('cameras', []))} cameras"
