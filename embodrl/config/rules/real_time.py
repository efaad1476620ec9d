"""Robots and simulators in wall-clock time, and who corrects what acts there."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, Finding, note, path_kind, rule

DEVICES = ("keyboard", "spacemouse")
EXPERT = "expert"


@rule("env.real_time", "env.num_processes", "env.train.total_num_envs")
def robot_acts_alone(context: Context) -> Iterator[Finding]:
    """One clock has one environment; what trains does not hold it up."""
    env = context.config.env
    if env.real_time.control_hz is None:
        return
    if context.verb in ("train", "plan"):
        yield Finding(
            "env.real_time.control_hz",
            "`embodrl train` would let the robot wait while the policy is updated",
            "collect and train in processes of their own, `embodrl store collect` and `embodrl store train`: see"
            " docs/robots.md; or set it to null",
            "null",
            code="robot-would-wait",
        )
    for key, count in (
        ("env.num_processes", env.num_processes),
        ("env.train.total_num_envs", env.train.total_num_envs),
    ):
        if count != 1:
            hint = "set it to 1; several robots are several `embodrl store collect`, each with its store.collector"
            message = f"{count} can't share the one clock of env.real_time"
            yield Finding(key, message, hint, "1", others=("env.real_time.control_hz",), code="robot-not-alone")


@rule("env.real_time", "env.remote")
def clock_is_here(context: Context) -> Iterator[Finding]:
    """A connection to another machine is part of no period."""
    env = context.config.env
    if env.real_time.control_hz is not None and env.remote:
        message = "simulators of an env server have no clock yet"
        hint = "set it to null, or run the collector on that machine"
        yield Finding("env.real_time.control_hz", message, hint, "null", others=("env.remote",))


@rule("env.real_time", "env.eval.total_num_envs")
def robot_is_evaluated_alone(context: Context) -> Iterator[Finding]:
    """The same of evaluations."""
    env = context.config.env
    if env.real_time.control_hz is not None and env.eval.total_num_envs != 1:
        key, message = (
            "env.eval.total_num_envs",
            f"{env.eval.total_num_envs} can't share the one clock of env.real_time",
        )
        others = ("env.real_time.control_hz",)
        yield Finding(key, message, "set it to 1", "1", others=others, code="robot-not-alone")


@rule("env.real_time", "model.action_dim")
def limits_fit_the_actions(context: Context) -> Iterator[Finding]:
    """Limits are one number, or one for each dimension, and in order."""
    safety, wanted = context.config.env.real_time.safety, context.config.model.action_dim
    for name in ("low", "high", "max_step", "max_velocity"):
        values = getattr(safety, name)
        if values is not None and len(values) not in (1, wanted):
            message = f"has {len(values)} numbers, and an action {wanted}"
            hint = f"give 1 or {wanted}"
            yield Finding(f"env.real_time.safety.{name}", message, hint, hint, others=("model.action_dim",))
            return
    low, high = ((v if len(v) > 1 else v * wanted) if v else None for v in (safety.low, safety.high))
    if low and high and any(lowest >= highest for lowest, highest in zip(low, high, strict=True)):
        message = "a lowest command is not below the highest one"
        yield Finding("env.real_time.safety.low", message, "exchange them", others=("env.real_time.safety.high",))


@rule("env.real_time")
def person_can_be_heard(context: Context) -> Iterator[Finding]:
    """A person says things through a directory, and takes longer than a simulator."""
    real_time = context.config.env.real_time
    if real_time.wait_for_person and real_time.control_dir is None:
        message = "a person has no way to say that the scene is ready"
        hint = "set env.real_time.control_dir, in which DIR/ready says so"
        yield Finding("env.real_time.wait_for_person", message, hint, "false", others=("env.real_time.control_dir",))


@rule("env.real_time", "env.reset_timeout_s", "env.step_timeout_s")
def person_has_time(context: Context) -> Iterator[Finding]:
    """Waiting for a person is not taken for a simulator that hangs."""
    env, least = context.config.env, 600
    if env.real_time.control_hz is None or env.real_time.control_dir is None:
        return
    for key, limit in (("env.reset_timeout_s", env.reset_timeout_s), ("env.step_timeout_s", env.step_timeout_s)):
        if limit < least:
            message = f"after {limit:g} s a robot that waits for a person would be taken for a hung simulator"
            yield Finding(key, message, "set it to 3600", f"at least {least}", others=("env.real_time.control_dir",))


@note("env.real_time")
def real_time_without_a_clock(context: Context) -> Iterator[Finding]:
    """Settings of a robot without a clock."""
    real_time = context.config.env.real_time
    if real_time.control_hz is None:
        for name in type(real_time).model_fields:
            if context.by_user(f"env.real_time.{name}"):
                yield Finding(
                    f"env.real_time.{name}", "has no effect: control_hz is null", "set env.real_time.control_hz"
                )


@rule("store.intervention", "env.real_time", "env.env_type", "env.tasks", "algorithm.dagger")
def intervention_is_possible(context: Context) -> Iterator[Finding]:
    """Who corrects a policy exists, and there is a rule by which a stand-in intervenes."""
    config, name = context.config, context.config.store.intervention
    if name is None or context.verb not in ("store", None):
        return
    key, spec = "store.intervention", context.simulator
    if name in DEVICES:
        if config.env.real_time.control_hz is None:
            message = f"a person at the {name} can't correct what has no clock"
            yield Finding(key, message, "set env.real_time.control_hz", others=("env.real_time.control_hz",))
        elif config.env.real_time.control_dir is None:
            message = "is not set, so that the keys and buttons for pause and emergency stop would do nothing"
            yield Finding(
                "env.real_time.control_dir", message, "set it, e.g. to outputs/robot", "a directory", others=(key,)
            )
        return
    if name == EXPERT:
        tasks = None if spec is None else spec.expert_tasks
        missing = [] if tasks is None else [task for task in config.env.tasks if task not in tasks]
        if missing:
            message = f"{config.env.env_type} has no scripted expert of {', '.join(missing)}"
            yield Finding(key, message, "name a policy, keyboard or spacemouse", others=("env.tasks",))
    elif path_kind(name) != "directory":
        allowed = f"{EXPERT}, {', '.join(DEVICES)}, or the directory of a policy"
        yield Finding(key, f"there is no directory {name}", "correct the name", allowed)
    if config.algorithm.dagger.gate_threshold is None:
        message = "there is no rule by which a stand-in for a person intervenes"
        hint = "add algorithm=hg_dagger, or set algorithm.dagger.gate_threshold"
        yield Finding("algorithm.dagger.gate_threshold", message, hint, "above 0", others=(key,))
