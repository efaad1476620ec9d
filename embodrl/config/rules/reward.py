"""Rewards that are made after the rollout: functions of the user's, trained models, SRPO."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from embodrl.config.rules.base import Context, note, path_kind, rule
from embodrl.errors import EmbodrlError, PolicyFileError
from embodrl.fields import read_fields
from embodrl.names import import_function
from embodrl.rule_set import Finding

ENCODERS = ("pixels", "vjepa2")
REWARD_MODEL = "embodrl_observation_model"
"""``model_type`` in the config.json of reward models and value functions."""


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


@rule("algorithm.srpo", "reward.fn", "reward.model")
def one_reward(context: Context) -> Iterator[Finding]:
    """SRPO's rewards, those of a function and those of a model exclude each other."""
    reward = context.config.reward
    srpo = context.config.algorithm.srpo.enabled
    keys = [key for key, there in (("reward.fn", reward.fn), ("reward.model", reward.model)) if there is not None]
    for key in keys if srpo else ():
        message = f"SRPO replaces all rewards, those of {key} as well"
        yield Finding(key, message, "leave one of the two out", "null", others=("algorithm.srpo.enabled",))
    if len(keys) == 2:
        message = "a function and a model can't both pay an episode"
        yield Finding("reward.fn", message, "leave one of the two out", "null", others=("reward.model",))


@rule("reward.model", "env", "algorithm.loss_type", "rollout.workflow")
def reward_model_can_judge(context: Context) -> Iterator[Finding]:
    """The model is there, and gets to see whole episodes, with what it looks at."""
    config = context.config
    key = "reward.model"
    path = config.reward.model
    if path is None:
        return
    if path_kind(path) != "directory":
        yield Finding(key, f"there is no directory '{path}'", "make it: embodrl reward train", "a directory")
    else:
        yield from _looks(context, Path(path).expanduser() / "config.json")
    if config.rollout.workflow is not None:
        message = "a reward model judges what the rollout sees, and a workflow keeps only the first camera"
        hint = "set it to null, use reward.fn, or add rewards in the workflow (Trajectory.add_reward)"
        yield Finding("rollout.workflow", message, hint, "null", others=(key,))


def _looks(context: Context, path: Path) -> Iterator[Finding]:
    """Compare what a model looks at with what the environment shows."""
    key = "reward.model"
    env = context.config.env
    hint = "fetch or train it again"
    try:
        fields = read_fields(path, PolicyFileError, hint)
        kind = fields.text("model_type", "")
        state = fields.integer("state_dim", 0)
        cameras = fields.integer("num_cameras", 0)
    except PolicyFileError as error:
        yield Finding(key, error.message, hint)
        return
    if kind != REWARD_MODEL:
        yield Finding(key, f"{path.parent} is no reward model", "give a directory of `embodrl reward train`")
    for name, wanted, shown in (("state", state, env.include_state), ("images", cameras, env.include_images)):
        if wanted and not shown:
            message = f"the reward model looks at the {name}, which env.include_{name}=false leaves out"
            yield Finding(f"env.include_{name}", message, "set it to true", "true", others=(key,))


@rule("reward.fn", "algorithm.off_policy.demos", "algorithm.loss_type")
def demonstrations_have_these_rewards(context: Context) -> Iterator[Finding]:
    """Demonstrations have the rewards of the environment, and not those of a function."""
    config = context.config
    reads_rewards = context.loss.off_policy and not context.loss.imitates
    if config.reward.fn is not None and config.algorithm.off_policy.demos is not None and reads_rewards:
        message = "demonstrations have the environment's rewards, not those of this function"
        hint = "set it to null, train a reward model (reward.model pays demonstrations, too), or leave the demos out"
        yield Finding("reward.fn", message, hint, "null", others=("algorithm.off_policy.demos",))


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
