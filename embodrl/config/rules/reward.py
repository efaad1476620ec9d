"""Rewards computed after the rollout: user functions, trained models, SRPO."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
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
            hint = error.hint or "put the module's directory on PYTHONPATH, or correct the name"
            yield Finding("reward.fn", error.message, hint, "module:function, or null")
            return
        try:
            parameters = inspect.signature(function)
            parameters.bind(None)
        except TypeError as error:
            message = f"'{path}' can't be called with the episode as its only argument: {error}"
            hint = "write `def my_reward(episode)`, or `async def`; further parameters need defaults"
            yield Finding("reward.fn", message, hint, code="reward-signature")
        except ValueError:
            return  # implemented in C: its signature is not available


@note("reward.fn")
def reward_function_takes_an_episode(context: Context) -> Iterator[Finding]:
    """The parameter of a reward function is called episode, or typed Episode; otherwise the wrong function may be
    named.
    """
    path = context.config.reward.fn
    try:
        parameters = list(inspect.signature(import_function(path)).parameters.values()) if path else []
    except (EmbodrlError, TypeError, ValueError):
        return
    first = parameters[0] if parameters else None
    if first is not None and "episode" not in first.name.lower() and "Episode" not in str(first.annotation):
        message = f"'{path}' receives an embodrl.Episode, but its parameter is called '{first.name}'"
        yield Finding("reward.fn", message, "rename it to episode if this is the intended function")


@rule("algorithm.srpo", "reward.fn", "reward.model", "reward.judge")
def one_reward(context: Context) -> Iterator[Finding]:
    """SRPO's rewards, a function's, a model's and a judge's exclude each other."""
    srpo = context.config.algorithm.srpo.enabled
    keys = context.config.reward.judges
    for key in keys if srpo else ():
        message = f"SRPO replaces all rewards, so {key} would have no effect"
        yield Finding(key, message, "remove one of them", "null", others=("algorithm.srpo.enabled",))
    if len(keys) > 1:
        message = f"{' and '.join(keys)} can't all reward an episode"
        yield Finding(keys[0], message, "keep one of them", "null", others=tuple(keys[1:]))


@rule("reward.judge", "env.include_images")
def judge_can_be_asked(context: Context) -> Iterator[Finding]:
    """The judge has an address without a password, a name, and pictures."""
    judge = context.config.reward.judge
    if judge.url is None:
        return
    key = "reward.judge.url"
    if not judge.url.startswith(("http://", "https://")) or "@" in judge.url:
        hint = "give the server's address; its token is read from EMBODRL_JUDGE_TOKEN"
        yield Finding(key, "is no http:// or https:// address, or has a password in it", hint, "http://HOST:PORT/v1")
    if not judge.model:
        message, hint = "is missing: servers know their models by name", "see the server's /v1/models"
        yield Finding("reward.judge.model", message, hint, "a name", others=(key,))
    if not context.config.env.include_images:
        message = "the judge sees pictures, which env.include_images=false omits"
        yield Finding("env.include_images", message, "set it to true", "true", others=(key,))
    if find_spec("aiohttp") is None or find_spec("PIL") is None:
        hint = "pip install 'embodrl[serve]'"
        yield Finding(key, "the judge needs aiohttp and Pillow, which are not installed", hint, "null")


@rule("reward.model", "env", "algorithm.loss_type", "rollout.workflow")
def reward_model_can_judge(context: Context) -> Iterator[Finding]:
    """The reward model exists, and sees whole episodes with its inputs."""
    config = context.config
    key = "reward.model"
    path = config.reward.model
    if path is None:
        return
    if path_kind(path) != "directory":
        yield Finding(key, f"no directory '{path}'", "make it: embodrl reward train", "a directory")
    else:
        yield from _looks(context, Path(path).expanduser() / "config.json")
    if config.rollout.workflow is not None:
        message = "a reward model judges the rollout's images, but a workflow keeps only the first camera"
        hint = "set it to null, use reward.fn, or add rewards in the workflow (Trajectory.add_reward)"
        yield Finding("rollout.workflow", message, hint, "null", others=(key,))


def _looks(context: Context, path: Path) -> Iterator[Finding]:
    """Compare the inputs of a reward model with the environment's observations."""
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
        yield Finding(key, f"{path.parent} is not a reward model", "give a directory of `embodrl reward train`")
    for name, wanted, shown in (("state", state, env.include_state), ("images", cameras, env.include_images)):
        if wanted and not shown:
            message = f"the reward model reads the {name}, which env.include_{name}=false omits"
            yield Finding(f"env.include_{name}", message, "set it to true", "true", others=(key,))


@rule("reward.fn", "reward.judge", "algorithm.off_policy.demos", "algorithm.loss_type")
def demonstrations_have_these_rewards(context: Context) -> Iterator[Finding]:
    """Demonstrations have the environment's rewards, not a function's or a judge's."""
    config = context.config
    reads_rewards = context.loss.off_policy and not context.loss.imitates
    others = [key for key in config.reward.judges if key != "reward.model"]
    if others and config.algorithm.off_policy.demos is not None and reads_rewards:
        message = "demonstrations have the environment's rewards, not those of this setting"
        hint = "set it to null, train a reward model (reward.model also rewards demonstrations), or remove the demos"
        yield Finding(others[0], message, hint, "null", others=("algorithm.off_policy.demos",))


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
            hint = error.hint or "put the module's directory on PYTHONPATH, or correct the name"
            yield Finding(key, error.message, hint, f"{', '.join(ENCODERS)}, module:function")
