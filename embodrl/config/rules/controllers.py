"""Several controllers (``cluster.controllers``)."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, multiples, rule, teacher_is_apart, value_of
from embodrl.config.schema import Config
from embodrl.deployment.launched import VARIABLES, launched
from embodrl.rule_set import Finding

KEY = "cluster.controllers"
_SINGLE = "is of one controller"
_OF_ALL = "reads the rollouts of all controllers at once"
_ONE_DEVICE = "give a controller one device: {actor: 0, rollout: 0, env: 0}"
_DIVIDED = ("env.train.total_num_envs", "env.eval.total_num_envs", "env.num_processes", "actor.global_batch_size")
_SECTIONS = ("actor", "algorithm", "cluster", "env", "pipeline", "reward", "rollout", "runner")


def _one_controllers(config: Config) -> dict[str, tuple[bool, str, str]]:
    """Return, by key, whether it excludes several controllers, why, and what is allowed."""
    algorithm = config.algorithm
    runner = config.runner
    rollout = config.rollout
    backend = config.actor.training_backend
    moves_copy = backend == "fsdp" and rollout.enable_offload
    return {
        "actor.training_backend": (backend not in ("native", "fsdp"), _SINGLE, "native, fsdp"),
        "actor.tensor_parallel_size": (config.actor.tensor_parallel_size > 1, "splits layers over processes", "1"),
        "actor.own_process": (bool(config.actor.own_process), _SINGLE, "null, false"),
        "rollout.own_process": (bool(rollout.own_process), _SINGLE, "null, false"),
        "rollout.backend": (rollout.backend != "native", _SINGLE, "native"),
        "rollout.enable_offload": (moves_copy, "moves whole weights, which stay beside shards here", "false"),
        "rollout.workflow": (rollout.workflow is not None, _SINGLE, "null"),
        "rollout.replay": (rollout.replay is not None, _SINGLE, "null"),
        "rollout.publish_weights": (rollout.publish_weights, _SINGLE, "false"),
        "runner.save_rollouts": (runner.save_rollouts, _SINGLE, "false"),
        "runner.eval_async": (runner.eval_async, _SINGLE, "false"),
        "runner.max_staleness": (runner.max_staleness > 0, "lets rollouts of one controller run ahead", "0"),
        "runner.checkpoint_format": (runner.checkpoint_format == "sharded", "shards over processes", "auto, full"),
        "cluster.launcher": (config.cluster.launcher != "process", "starts the processes of one", "process"),
        "pipeline.fn": (config.pipeline.fn is not None, _OF_ALL, "null"),
        "pipeline.placement": (bool(config.pipeline.placement), _SINGLE, "{}"),
        "reward.fn": (config.reward.fn is not None, _OF_ALL, "null"),
        "reward.model": (config.reward.model is not None, _OF_ALL, "null"),
        "reward.judge.url": (config.reward.judge.url is not None, _OF_ALL, "null"),
        "env.train.start_from_demos": (config.env.train.start_from_demos is not None, _OF_ALL, "null"),
        "env.train.failed_seed_fraction": (config.env.train.failed_seed_fraction > 0, _OF_ALL, "0"),
        "env.train.task_curriculum.parts": (bool(config.env.train.task_curriculum.parts), _OF_ALL, "[]"),
        "algorithm.adv_type": (
            algorithm.adv_type not in ("gae", "grpo", "rloo", "reinforce_pp"),
            _OF_ALL,
            "gae, grpo, rloo, reinforce_pp",
        ),
        "algorithm.loss_type": (algorithm.loss_type not in ("actor", "actor_critic"), _OF_ALL, "actor, actor_critic"),
        "algorithm.by_task": (bool(algorithm.by_task), _OF_ALL, "[]"),
        "algorithm.filter.enabled": (algorithm.filter.enabled, _OF_ALL, "false"),
        "algorithm.pf_ppo.method": (algorithm.pf_ppo.method is not None, _OF_ALL, "null"),
        "algorithm.srpo.enabled": (algorithm.srpo.enabled, _OF_ALL, "false"),
        "algorithm.decoupled.enabled": (algorithm.decoupled.enabled, _OF_ALL, "false"),
        "algorithm.chunk_fraction": (algorithm.chunk_fraction != 1.0, _OF_ALL, "1.0"),
        "algorithm.bc_coef": (algorithm.bc_coef > 0, _SINGLE, "0"),
    }


@rule(KEY, *_SECTIONS)
def controllers_share_a_run(context: Context) -> Iterator[Finding]:
    """Several controllers train on-policy, each in one process with its part of the environments."""
    config = context.config
    count = config.cluster.controllers
    if count == 1:
        return
    for key, (is_set, why, allowed) in _one_controllers(config).items():
        if is_set:
            message = f"{why}, and {KEY} is {count}"
            yield Finding(key, message, f"leave it at its default, or set {KEY}=1", allowed, others=(KEY,))
    if config.store_url is not None:
        yield Finding(KEY, f"is {count}, and a store has one trainer", "leave out one of them", "1")
    if context.made_before:
        yield Finding(KEY, f"is {count}, and other stages of a recipe have one", f"set {KEY}=1", "1")
    yield from _several_processes(context, count)
    yield from _undivided(config, count)


def _several_processes(context: Context, count: int) -> Iterator[Finding]:
    if context.deployment is None:
        return
    actor, rollout = ({(p.node, p.devices) for p in context.deployment.of(name)} for name in ("actor", "rollout"))
    if actor != rollout:
        message = f"places actor and rollout apart, and each of {count} controllers has one device"
        yield Finding("cluster.component_placement", message, _ONE_DEVICE, others=(KEY,))
    for component in ("actor", "rollout"):
        found = context.deployment.of(component)
        if len(found) > 1:
            message = f"places {len(found)} processes of {component}, and each of {count} controllers is a single one"
            yield Finding("cluster.component_placement", message, _ONE_DEVICE, others=(KEY,))


def _undivided(config: Config, count: int) -> Iterator[Finding]:
    size = config.algorithm.group_size
    for key in _DIVIDED:
        value = value_of(config, key)
        assert isinstance(value, int)
        groups = size if key == "env.train.total_num_envs" else 1
        if value % (count * groups):
            what = f"{KEY}={count}" + (f" times algorithm.group_size={size}" if groups > 1 else "")
            hint = f"use {multiples(value, count * groups)}"
            yield Finding(key, f"is {value}, not a multiple of {what}", hint, others=(KEY,))
    if config.env.eval.num_episodes < count:
        message = f"is {config.env.eval.num_episodes}, less than {KEY}={count}"
        yield Finding("env.eval.num_episodes", message, f"use at least {count}", others=(KEY,))


@rule(KEY, "algorithm.teacher", "algorithm.kl", "actor.training_backend", "model")
def sharded_controllers_share_no_teacher(context: Context) -> Iterator[Finding]:
    """A teacher of the policy's shapes takes the place of weights that no controller has whole."""
    config = context.config
    sharded = config.cluster.controllers > 1 and config.actor.training_backend == "fsdp"
    if sharded and teacher_is_apart(config) is False:
        message = f"has the policy's shapes, and with {KEY}={config.cluster.controllers} no process has whole weights"
        hint = "set actor=native, or choose a teacher of another size"
        yield Finding("algorithm.teacher", message, hint, "null", others=(KEY, "actor.training_backend"))


@rule(KEY, machine_specific=True)
def controllers_are_launched(context: Context) -> Iterator[Finding]:
    """A launcher such as torchrun starts as many processes as there are controllers."""
    if context.verb not in (None, "train"):
        return
    count = context.config.cluster.controllers
    place = launched()
    hint = f"start it with torchrun --nproc-per-node {max(count, 2)} -m embodrl train ... {KEY}={max(count, 2)}"
    if place is None:
        if count > 1:
            message = f"is {count}, and no launcher has set {', '.join(VARIABLES)}"
            yield Finding(KEY, message, hint, "1")
    elif place.size != count:
        message = f"is {count}, and WORLD_SIZE, of the launcher of this process, is {place.size}"
        yield Finding(KEY, message, f"set {KEY}={place.size}, or start {count} process(es)", str(place.size))
