"""Evaluation environments that differ from training, by the settings in ``env.eval``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import ValidationError

from embodrl.config.rules.base import Context, rule
from embodrl.config.rules.interface import env_interface
from embodrl.config.rules.simulators import env_has_the_cameras, env_has_the_reward, shortened, tasks_exist
from embodrl.config.schema.env import OF_EVALUATIONS
from embodrl.config.schema.tagged import env_settings
from embodrl.names import nearest
from embodrl.rule_set import Finding
from embodrl.specs import ENVS, MODELS, EngineSpec, ModelSpec

SETTINGS = "env.eval.settings"
OTHER = "env.eval.env_type"


@rule("env.eval", "env.env_type", "env.tasks", "env.cameras", "env.max_episode_steps", "model.num_action_chunks")
def evaluations_can_be_played(context: Context) -> Iterator[Finding]:
    """Settings that only evaluations use are as valid as the training settings."""
    config = context.config
    wrong = False
    env_type = config.env.eval.env_type or config.env.env_type
    if env_type != config.env.env_type and not (env_type in ENVS and ENVS.entry(env_type).simulates):
        able = [spec.name for spec in ENVS.all() if spec.simulates]
        near = nearest(env_type, able)
        yield Finding(OTHER, f"there is no simulator '{env_type}'", "name another one", shortened(able), near)
        return
    for name in config.env.eval.settings:
        if name not in (own := env_settings(env_type)().own_settings):
            wrong = True
            known = sorted(own)
            hint = "give settings that only this simulator has; tasks and max_episode_steps are env.eval.tasks and ..."
            message = f"{env_type} has no setting '{name}' of its own"
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
        yield from _as_seen(context, replace(context, config=evaluated))


def _as_seen(context: Context, played: Context) -> Iterator[Finding]:
    """What the policy sees and does means the same in training and in evaluations."""
    sizes = [[(camera.height, camera.width) for camera in each.config.env.cameras] for each in (context, played)]
    if sizes[0] != sizes[1]:
        shown = ", ".join(f"{height} x {width}" for height, width in sizes[0])
        message = "has another number or other sizes of cameras than env.cameras"
        yield Finding("env.eval.cameras", message, f"give them the sizes of env.cameras: {shown}", shown)
    mine, theirs = context.simulator, played.simulator
    if mine is theirs or mine is None or theirs is None:
        return
    names = f"{theirs.name} and {mine.name}"
    dims = context.config.model.action_dim
    hint = f"leave it out, or evaluate the policy with embodrl eval env={theirs.name}"
    if theirs.action_dim not in (None, dims):
        message = f"{theirs.name} takes {theirs.action_dim} dimensions per action, the policy gives {dims}"
        yield Finding(OTHER, message, hint, others=("model.action_dim",))
    trained, evaluated = env_interface(context), env_interface(played)
    if trained is None or evaluated is None:
        return
    # Other names of cameras are other views.
    found = [f"{n} ({there}, {here})" for n, here, there in trained.differences(evaluated) if n != "cameras"]
    if found:
        yield Finding(OTHER, f"{names} differ in {', '.join(found)}", hint, others=("env.env_type",))


def _as_played(context: Context, played: Context) -> Iterator[Finding]:
    env = played.config.env
    chunk = played.config.model.num_action_chunks
    if env.eval.max_episode_steps is not None and env.eval.max_episode_steps < chunk:
        message = f"is shorter than a chunk of {chunk} actions"
        yield Finding("env.eval.max_episode_steps", message, f"set it to at least {chunk}", f"at least {chunk}")
    rules = [tasks_exist, env_has_the_cameras, env_has_the_reward]
    if played.simulator is not None:
        rules += [each.check for one in played.simulator.rules for each in one.rules]
    for check in rules:
        # Findings of the training environment are reported as such, and another simulator's rules don't apply to it.
        known = {finding.message for finding in check(context)} if played.simulator is context.simulator else set[str]()
        for finding in check(played):
            section, _, name = finding.key.partition(".")
            if finding.message in known or section != "env":
                continue
            first = name.partition(".")[0]
            key = at = f"env.eval.{name}"
            if first in OF_EVALUATIONS:
                at = f"env.eval.{first}"
            elif first in env.own_settings:
                key, at = f"{SETTINGS}.{name}", SETTINGS
            else:
                key = at = OTHER
            code = finding.code or check.__name__.replace("_", "-")
            hint = finding.hint.replace(f"env.{name}=", f"{key}=")
            hint = hint.replace("set it", f"set env.{name}") if key == OTHER else hint
            yield replace(finding, key=key, hint=hint, at=at, others=(), code=code)


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
    for name in (*OF_EVALUATIONS, "env_type", "settings"):
        if context.config.protocol is not None and getattr(env.eval, name):
            message = f"departs from protocol={context.config.protocol}, which determines what is evaluated"
            yield Finding(f"env.eval.{name}", message, "leave it out, or the protocol", others=("protocol",))
