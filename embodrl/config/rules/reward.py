"""Rewards that are made after the rollout: functions of the user's, SRPO."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from embodrl.config.rules.base import Context, Finding, note, path_kind, rule
from embodrl.errors import EmbodrlError
from embodrl.names import import_function

ENCODERS = ("pixels", "vjepa2")


@rule("reward.fn")
def reward_function_exists(context: Context) -> Iterator[Finding]:
    """The reward function can be imported."""
    path = context.config.reward.fn
    if path is not None:
        try:
            function = import_function(path)
        except EmbodrlError as error:
            hint = error.hint or "put its directory on PYTHONPATH, or correct the name"
            yield Finding("reward.fn", error.message, hint, "module:function, or null")
            return
        try:
            parameters = inspect.signature(function)
            parameters.bind(None)
        except TypeError as error:
            message = f"'{path}' can't be called with one argument, the episode: {error}"
            hint = "write `def my_reward(episode)`, or `async def`; other parameters need a default"
            yield Finding("reward.fn", message, hint, code="reward-signature")
        except ValueError:
            return  # written in C: what it takes can't be read


@note("reward.fn")
def reward_function_takes_an_episode(context: Context) -> Iterator[Finding]:
    """The parameter of a reward function is called episode, or typed Episode: another function may be meant."""
    path = context.config.reward.fn
    try:
        parameters = list(inspect.signature(import_function(path)).parameters.values()) if path else []
    except (EmbodrlError, TypeError, ValueError):
        return
    first = parameters[0] if parameters else None
    if first is not None and "episode" not in first.name.lower() and "Episode" not in str(first.annotation):
        message = f"'{path}' gets an embodrl.Episode, and its parameter is called '{first.name}'"
        yield Finding("reward.fn", message, "name it episode if this function is meant")


@rule("algorithm.srpo", "reward.fn")
def one_reward(context: Context) -> Iterator[Finding]:
    """SRPO's rewards and those of a function exclude each other."""
    if context.config.algorithm.srpo.enabled and context.config.reward.fn is not None:
        message = "SRPO replaces all rewards, those of reward.fn as well"
        yield Finding("reward.fn", message, "leave one of the two out", "null", others=("algorithm.srpo.enabled",))


@rule("algorithm.srpo")
def encoder_exists(context: Context) -> Iterator[Finding]:
    """SRPO's encoder is built in, has its weights, or can be imported."""
    srpo = context.config.algorithm.srpo
    if not srpo.enabled:
        return
    key = "algorithm.srpo.encoder"
    if srpo.encoder == "vjepa2":
        path = srpo.encoder_path
        if path is None or path_kind(path) != "directory" or not (Path(path).expanduser() / "config.json").is_file():
            message = "vjepa2 needs a directory with its config.json and model.safetensors"
            hint = "download the model and give its directory, or set algorithm.srpo.encoder=pixels"
            yield Finding("algorithm.srpo.encoder_path", message, hint, "a directory", others=(key,))
    elif srpo.encoder not in ENCODERS:
        try:
            import_function(srpo.encoder)
        except EmbodrlError as error:
            hint = error.hint or "put its directory on PYTHONPATH, or correct the name"
            yield Finding(key, error.message, hint, f"{', '.join(ENCODERS)}, module:function")


@note("reward")
def reward_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings that only matter with a function."""
    reward = context.config.reward
    for name in type(reward).model_fields:
        if name != "fn" and reward.fn is None and context.by_user(f"reward.{name}"):
            yield Finding(f"reward.{name}", "has no effect: reward.fn is null", "leave it out")
