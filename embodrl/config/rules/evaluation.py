"""Evaluation environments that differ from training: ``env.eval.tasks``, ``max_episode_steps`` and ``settings``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import ValidationError

from embodrl.config.rules.base import Context, rule
from embodrl.config.rules.simulators import tasks_exist
from embodrl.names import nearest
from embodrl.rule_set import Finding
from embodrl.specs import MODELS, EngineSpec, ModelSpec

SETTINGS = "env.eval.settings"
_DIRECT = ("tasks", "max_episode_steps")


@rule("env.eval", "env.env_type", "env.tasks", "env.max_episode_steps", "model.num_action_chunks")
def evaluations_can_be_played(context: Context) -> Iterator[Finding]:
    """Settings that only evaluations use are as valid as the training settings."""
    config = context.config
    wrong = False
    for name in config.env.eval.settings:
        if name not in config.env.own_settings:
            wrong = True
            known = sorted(config.env.own_settings)
            hint = "give settings that only this simulator has; tasks and max_episode_steps are env.eval.tasks and ..."
            message = f"{config.env.env_type} has no setting '{name}' of its own"
            yield Finding(f"{SETTINGS}.{name}", message, hint, ", ".join(known), nearest(name, known), at=SETTINGS)
    if wrong:
        return
    try:
        evaluated = config.evaluated
    except ValidationError as error:
        for each in error.errors():
            name = ".".join(str(part) for part in each["loc"])
            hint = "give a value that env accepts for it, too"
            yield Finding(f"{SETTINGS}.{name}", each["msg"].lower(), hint, at=SETTINGS)
        return
    if evaluated is not config:
        yield from _as_played(context, replace(context, config=evaluated))


def _as_played(context: Context, played: Context) -> Iterator[Finding]:
    env = played.config.env
    chunk = played.config.model.num_action_chunks
    if env.eval.max_episode_steps is not None and env.eval.max_episode_steps < chunk:
        message = f"is shorter than a chunk of {chunk} actions"
        yield Finding("env.eval.max_episode_steps", message, f"set it to at least {chunk}", f"at least {chunk}")
    rules = [tasks_exist]
    if context.simulator is not None:
        rules += [each.check for one in context.simulator.rules for each in one.rules]
    for check in rules:
        known = {finding.message for finding in check(context)}
        for finding in check(played):
            section, _, name = finding.key.partition(".")
            if finding.message in known or section != "env":
                continue
            key = f"env.eval.{name}" if name in _DIRECT else f"{SETTINGS}.{name}"
            code = finding.code or check.__name__.replace("_", "-")
            hint = finding.hint.replace(f"env.{name}=", f"{key}=")
            yield replace(finding, key=key, hint=hint, at=key if name in _DIRECT else SETTINGS, others=(), code=code)


def _decodings(spec: ModelSpec, engine: EngineSpec) -> tuple[str, ...]:
    """Return the decodings that a family supports; its policy may support fewer."""
    if spec.only_acts:
        return ("greedy",)
    is_ordered = spec.kind in ("tokens", "") and engine.decodes_all
    return ("greedy", "sampled", *(("mean",) if is_ordered else ()))


@rule("env.eval.decoding", "env.eval.decoding_on_the_way", "serve.decoding", "model.model_type", "rollout.backend")
def decodings_exist(context: Context) -> Iterator[Finding]:
    """The family supports the chosen decoding."""
    config = context.config
    family = context.config.model.model_type
    if family not in MODELS:
        return
    known = _decodings(MODELS.entry(family), context.rollout_engine)
    played = config.env.eval
    of_evaluations = "env.eval.decoding_on_the_way" if played.decoding == "all" else "env.eval.decoding"
    for key, chosen in (
        (of_evaluations, played.decoding_of(every=False)),
        ("serve.decoding", config.serve.decoding),
    ):
        if chosen not in ("all", *known):
            by = "" if context.rollout_engine.decodes_all else f" with rollout.backend={config.rollout.backend}"
            message = f"'{family}'{by} has no decoding '{chosen}'"
            yield Finding(key, message, f"set it to {known[0]}", ", ".join(known), others=("model.model_type",))


@rule("env.eval", "env.tasks", "protocol")
def evaluations_follow_what_is_given(context: Context) -> Iterator[Finding]:
    """Evaluation-only verbs and protocols set what is evaluated with the env settings themselves."""
    env = context.config.env
    origin = context.origin("env.tasks")
    if context.verb == "eval" and env.eval.tasks not in (None, env.tasks) and origin.kind == "argument":
        message = f"env.tasks is {', '.join(env.tasks)}, but evaluations have tasks of their own"
        hint = f"write env.eval.tasks=[{','.join(env.tasks)}] in place of env.tasks"
        yield Finding("env.eval.tasks", message, hint, "null, or the same tasks", others=("env.tasks",))
    for name in (*_DIRECT, "settings"):
        if context.config.protocol is not None and getattr(env.eval, name):
            message = f"departs from protocol={context.config.protocol}, which determines what is evaluated"
            yield Finding(f"env.eval.{name}", message, "leave it out, or the protocol", others=("protocol",))
