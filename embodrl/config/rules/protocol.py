"""Evaluations: protocol and axes exist and fit the environment, and deviations from a protocol are reported."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.protocol import protocol_of
from embodrl.config.rules.base import Context, note, rule
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import ENVS, PROTOCOLS


@rule("protocol", "env.env_type")
def protocol_is_of_the_environment(context: Context) -> Iterator[Finding]:
    """The protocol is registered, and is defined for the environment."""
    name = context.config.protocol
    env_type = context.config.env.env_type
    if name is None:
        return
    if name not in PROTOCOLS:
        near = nearest(name, PROTOCOLS.names())
        hint = f"write protocol={near}" if is_misspelt(name, near) else "see `embodrl list protocols`"
        yield Finding("protocol", f"no protocol '{name}'", hint, ", ".join(PROTOCOLS), near)
    elif PROTOCOLS.entry(name).env_type != env_type:
        wanted = PROTOCOLS.entry(name).env_type
        message = f"'{name}' is an evaluation in {wanted}, not in {env_type}"
        yield Finding("protocol", message, f"choose env={wanted}, or leave it out", others=("env.env_type",))


@note("protocol", "env", "model")
def protocol_holds(context: Context) -> Iterator[Finding]:
    """Deviations from the chosen protocol."""
    config = context.config
    name = context.config.protocol
    if name is None or name not in PROTOCOLS or PROTOCOLS.entry(name).env_type != config.env.env_type:
        return
    spec = PROTOCOLS.entry(name)
    report = protocol_of(config)
    assert report is not None
    for key, value in report["changed"].items():
        message = f"is {value}, and protocol={name} has {report['settings'][key]}"
        yield Finding(key, message, "remove it to follow the protocol", others=("protocol",))
    if not report["covers_model"]:
        message = f"'{name}' says nothing of {config.model.model_type}: crop, filter, gripper and chunk are the model's"
        yield Finding("protocol", message, f"it is about {', '.join(spec.models)}", others=("model.model_type",))
    if spec.differs:
        yield Finding("protocol", f"not repeated of '{name}': {spec.differs}", "see docs/evaluation.md")


@rule("axes", "env.env_type", "env.tasks", "env.eval.tasks")
def axes_are_of_the_environment(context: Context) -> Iterator[Finding]:
    """The simulator supports the axes for all evaluated tasks."""
    env = context.config.env
    wanted = context.config.axes
    if wanted is None or env.env_type not in ENVS:
        return
    spec = ENVS.entry(env.env_type)
    tasks = env.eval.tasks or env.tasks
    there_are = spec.axes_of(tasks)
    if not there_are:
        others = [each.name for each in ENVS.all() if each.axes]
        hint = f"leave it out; {', '.join(others)} have some"
        yield Finding("axes", f"{env.env_type} does not support perturbed episodes", hint, others=("env.env_type",))
        return
    for name in context.config.chosen_axes if wanted != "all" else ():
        if name not in there_are:
            near = nearest(name, list(there_are))
            message = f"{env.env_type} has no axis '{name}'"
            if name in spec.axes and (having := spec.axes[name].tasks) is not None:
                without = ", ".join(task for task in tasks if task not in having)
                message = f"axis '{name}' is not of {without}, but of {', '.join(having)}"
            hint = f"write axes={near}" if is_misspelt(name, near) else "see `embodrl list axes`"
            yield Finding("axes", message, hint, f"all, {', '.join(there_are)}", near)
