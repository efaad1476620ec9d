"""Robots and simulators in wall-clock time."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, rule
from embodrl.config.schema import DEVICES
from embodrl.errors import EmbodrlError
from embodrl.names import import_function
from embodrl.rule_set import Finding


@rule("env.real_time", "env.num_processes", "env.train.total_num_envs", "algorithm")
def robot_acts_alone(context: Context) -> Iterator[Finding]:
    """A clock drives a single environment, and training does not delay it."""
    env = context.config.env
    if env.real_time.control_hz is None:
        return
    # With a person who corrects the policy, the robot stands still between rollouts anyway.
    corrected = context.config.algorithm.off_policy.intervention_device is not None
    # Episodes that come from a store were made by another process, whose robot waits for no update.
    elsewhere = context.config.store_url is not None and context.loss.off_policy
    if context.verb in ("train", "plan") and not corrected and not elsewhere:
        yield Finding(
            "env.real_time.control_hz",
            "`embodrl train` would make the robot wait during policy updates",
            "collect in another process, `embodrl store collect`, and train from the store by an off-policy algorithm"
            " (store.url) or by imitation (`embodrl store train`): see docs/robots.md; or set it to null",
            "null",
            code="robot-would-wait",
        )
    for key, count in (
        ("env.num_processes", env.num_processes),
        ("env.train.total_num_envs", env.train.total_num_envs),
    ):
        if count != 1:
            hint = (
                "set it to 1; for several robots run several `embodrl store collect`, each with its own store.collector"
            )
            message = f"{count} can't share the one clock of env.real_time"
            yield Finding(key, message, hint, "1", others=("env.real_time.control_hz",), code="robot-not-alone")


def person_can_correct(context: Context, key: str, name: str) -> Iterator[Finding]:
    """A person at the device named by ``key`` needs a clock, and a way to stop the robot."""
    real_time = context.config.env.real_time
    if real_time.control_hz is None:
        message = f"a person at the {name} can't correct a policy without a clock"
        yield Finding(key, message, "set env.real_time.control_hz", others=("env.real_time.control_hz",))
    elif real_time.control_dir is None:
        message = "is not set, so the keys and buttons for pause and emergency stop would have no effect"
        hint = "set it, e.g. to outputs/robot"
        yield Finding("env.real_time.control_dir", message, hint, "a directory", others=(key,))


@rule("algorithm.off_policy", "env.real_time")
def device_of_interventions_is_there(context: Context) -> Iterator[Finding]:
    """The intervention device is one of embodrl's, or a function that makes one."""
    key = "algorithm.off_policy.intervention_device"
    off_policy = context.config.algorithm.off_policy
    name = off_policy.intervention_device
    if name is None or not off_policy.interventions:
        return
    if name in DEVICES:
        yield from person_can_correct(context, key, name)
        return
    if context.config.env.train.total_num_envs != 1:
        message = "a person can correct only one environment"
        yield Finding("env.train.total_num_envs", message, "set it to 1", "1", others=(key,))
    allowed = f"{', '.join(DEVICES)}, module:function, null"
    try:
        import_function(name)
    except EmbodrlError as error:
        yield Finding(key, error.message, error.hint, allowed)


@rule("env.real_time", "env.remote")
def clock_is_here(context: Context) -> Iterator[Finding]:
    """Real-time control does not run over a connection to another machine."""
    env = context.config.env
    if env.real_time.control_hz is not None and env.remote:
        message = "env servers do not support a clock yet"
        hint = "set it to null, or run the collector on the server's machine"
        yield Finding("env.real_time.control_hz", message, hint, "null", others=("env.remote",))


@rule("env.real_time", "env.eval.total_num_envs")
def robot_is_evaluated_alone(context: Context) -> Iterator[Finding]:
    """A clock drives a single environment in evaluations, too."""
    env = context.config.env
    if env.real_time.control_hz is not None and env.eval.total_num_envs != 1:
        key = "env.eval.total_num_envs"
        message = f"{env.eval.total_num_envs} can't share the one clock of env.real_time"
        others = ("env.real_time.control_hz",)
        yield Finding(key, message, "set it to 1", "1", others=others, code="robot-not-alone")


@rule("env.real_time", "model.action_dim")
def limits_fit_the_actions(context: Context) -> Iterator[Finding]:
    """Limits have one number, or one per dimension, and are ordered."""
    safety = context.config.env.real_time.safety
    wanted = context.config.model.action_dim
    for name in ("low", "high", "max_step", "max_velocity"):
        values = getattr(safety, name)
        if values is not None and len(values) not in (1, wanted):
            message = f"has {len(values)} numbers, but an action {wanted}"
            hint = f"give 1 or {wanted}"
            yield Finding(f"env.real_time.safety.{name}", message, hint, hint, others=("model.action_dim",))
            return
    low, high = ((v if len(v) > 1 else v * wanted) if v else None for v in (safety.low, safety.high))
    if low and high and any(lowest >= highest for lowest, highest in zip(low, high, strict=True)):
        message = "a lowest command is not below the highest command"
        yield Finding("env.real_time.safety.low", message, "exchange them", others=("env.real_time.safety.high",))


@rule("env.real_time")
def person_can_be_heard(context: Context) -> Iterator[Finding]:
    """A person signals through a directory, and takes longer than a simulator."""
    real_time = context.config.env.real_time
    if real_time.wait_for_person and real_time.control_dir is None:
        message = "a person has no way to signal that the scene is ready"
        hint = "set env.real_time.control_dir, where DIR/ready is the signal"
        yield Finding("env.real_time.wait_for_person", message, hint, "false", others=("env.real_time.control_dir",))


@rule("env.real_time", "env.reset_timeout_s", "env.step_timeout_s")
def person_has_time(context: Context) -> Iterator[Finding]:
    """Waiting for a person does not count as a hung simulator."""
    env = context.config.env
    least = 600
    if env.real_time.control_hz is None or env.real_time.control_dir is None:
        return
    for key, limit in (("env.reset_timeout_s", env.reset_timeout_s), ("env.step_timeout_s", env.step_timeout_s)):
        if limit < least:
            message = f"after {limit:g} s a robot waiting for a person would count as a hung simulator"
            yield Finding(key, message, "set it to 3600", f"at least {least}", others=("env.real_time.control_dir",))
