"""Environments: counts, episodes, tasks, seeds, cameras, backends."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

from pydantic import ValidationError

from embodrl.config.rules.base import Context, multiples, note, path_kind, rule, value_of
from embodrl.config.schema import Config
from embodrl.deployment.solver import hardware_by_node
from embodrl.rule_set import Finding
from embodrl.specs import ENV_SERVERS

# `embodrl collect` gives up after this many attempts; each uses the next seed.
MAX_ATTEMPTS_PER_EPISODE = 10


def evaluated_tasks(config: Config) -> tuple[str, tuple[str, ...]]:
    """Return the evaluated tasks, and the key that names them; env's tasks if the others are invalid."""
    try:
        tasks = config.evaluated.env.tasks
    except ValidationError:  # reported by a separate rule
        tasks = config.env.tasks
    return "env.tasks" if tasks == config.env.tasks else "env.eval.tasks", tasks


@rule("env.train.total_num_envs", "env.eval.total_num_envs", "env.num_processes")
def processes_share_the_environments(context: Context) -> Iterator[Finding]:
    """Environments are spread evenly over the processes."""
    env = context.config.env
    for split, count in (("train", env.train.total_num_envs), ("eval", env.eval.total_num_envs)):
        if count % env.num_processes:
            yield Finding(
                f"env.{split}.total_num_envs",
                f"{count} environments can't be spread evenly over env.num_processes = {env.num_processes} processes:"
                f" {count} / {env.num_processes} leaves {count % env.num_processes}",
                f"set it to {multiples(count, env.num_processes)}, or change env.num_processes",
                f"a multiple of {env.num_processes}",
                others=("env.num_processes",),
            )


@rule("env.num_processes", "rollout.pipeline_stages")
def stages_are_whole_processes(context: Context) -> Iterator[Finding]:
    """A pipeline stage is a group of whole processes."""
    processes = context.config.env.num_processes
    stages = context.config.rollout.pipeline_stages
    if processes % stages:
        yield Finding(
            "rollout.pipeline_stages",
            f"{processes} processes can't be split into {stages} stages of whole processes:"
            f" {processes} / {stages} leaves {processes % stages}",
            f"set env.num_processes to {multiples(processes, stages)}, or rollout.pipeline_stages to 1",
            f"a divisor of env.num_processes = {processes}",
            others=("env.num_processes",),
        )


@rule("env.remote", "env.python", "cluster.launcher", "cluster.component_placement")
def env_servers_run_the_simulators(context: Context) -> Iterator[Finding]:
    """Env servers have addresses, their own interpreters and devices, and no access to the run directory."""
    config = context.config
    remote = context.config.env.remote
    if not remote:
        return
    form = rf"({'|'.join(map(re.escape, ENV_SERVERS))})://([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{{1,5}}"
    wrong = [address for address in remote if not re.fullmatch(form, address)]
    if wrong:
        allowed = ", ".join(f"{scheme}://HOST:PORT" for scheme in ENV_SERVERS)
        yield Finding("env.remote", f"{', '.join(wrong)}: no address", "name `embodrl env serve`", allowed)
    others = ("env.remote",)
    if config.env.python not in (None, "auto"):
        message = "is an interpreter of this machine, but the simulators run on others"
        yield Finding("env.python", message, "leave it out, or set it to auto", "null, auto", others=others)
    if context.launcher.many_machines:
        message = f"'{config.cluster.launcher}' starts processes on other machines itself"
        yield Finding("cluster.launcher", message, "place env on those machines, without env.remote", others=others)
    named = [key for key in config.cluster.component_placement if key.strip() == "env"]
    if named and context.by_user("cluster.component_placement"):
        message = "places env on devices of this machine, but env.remote names servers"
        yield Finding("cluster.component_placement", message, "place env together with rollout", others=others)


@rule("env.train.total_num_envs", "env.num_processes", "algorithm.group_size")
def groups_stay_in_a_process(context: Context) -> Iterator[Finding]:
    """The environments of a group share a process."""
    env = context.config.env
    size = context.config.algorithm.group_size
    per_process = env.train.total_num_envs // env.num_processes
    if env.train.total_num_envs % env.num_processes == 0 and per_process % size:
        yield Finding(
            "algorithm.group_size",
            f"{env.train.total_num_envs} environments / {env.num_processes} processes = {per_process} per process,"
            f" which is not a multiple of the group size {size}",
            f"set env.train.total_num_envs to a multiple of {size * env.num_processes}, or change the group size",
            f"a divisor of {per_process}",
            others=("env.train.total_num_envs", "env.num_processes"),
        )


@rule("env.train.total_num_envs", "algorithm.group_size", "env.tasks")
def every_task_has_a_group(context: Context) -> Iterator[Finding]:
    """There are at least as many groups of environments as tasks."""
    config = context.config
    groups = config.env.train.total_num_envs // config.algorithm.group_size
    if groups < len(config.env.tasks):
        yield Finding(
            "env.train.total_num_envs",
            f"{config.env.train.total_num_envs} environments in groups of {config.algorithm.group_size} make {groups}"
            f" initial states for {len(config.env.tasks)} tasks",
            f"set it to at least {len(config.env.tasks) * config.algorithm.group_size}, or name fewer tasks",
            f"at least {len(config.env.tasks) * config.algorithm.group_size}",
            others=("env.tasks", "algorithm.group_size"),
        )


@rule("env.train", "env.max_episode_steps", "model.num_action_chunks")
def chunks_fit_into_episodes(context: Context) -> Iterator[Finding]:
    """A chunk is no longer than an episode or a rollout."""
    config = context.config
    chunk = config.model.num_action_chunks
    for key, steps in (
        ("env.max_episode_steps", config.env.max_episode_steps),
        ("env.train.max_steps_per_rollout_epoch", config.env.train.max_steps_per_rollout_epoch),
    ):
        if steps < chunk:
            yield Finding(
                "model.num_action_chunks",
                f"a chunk of {chunk} actions is longer than {key} = {steps}",
                f"set it to at most {steps}, or raise {key}",
                f"1 to {steps}",
                others=(key,),
            )


@note("env.train", "model.num_action_chunks")
def rollouts_are_whole_chunks(context: Context) -> Iterator[Finding]:
    """Rollouts are rounded up to whole chunks."""
    chunk = context.config.model.num_action_chunks
    key = "env.train.max_steps_per_rollout_epoch"
    steps = context.config.env.train.max_steps_per_rollout_epoch
    if steps % chunk and context.by_user(key):
        yield Finding(key, f"{steps} steps become {context.config.rollout_chunks * chunk}, whole chunks of {chunk}", "")


@rule("env.train", "env.max_episode_steps")
def rollouts_without_reset_end_with_the_episode(context: Context) -> Iterator[Finding]:
    """Without auto-reset a rollout is at most one episode long."""
    env = context.config.env
    if not env.train.auto_reset and env.train.max_steps_per_rollout_epoch > env.max_episode_steps:
        yield Finding(
            "env.train.max_steps_per_rollout_epoch",
            f"without auto_reset an episode ends after {env.max_episode_steps} steps and the other"
            f" {env.train.max_steps_per_rollout_epoch - env.max_episode_steps} of the rollout would stay empty",
            f"set it to at most {env.max_episode_steps}, or env.train.auto_reset=true",
            f"1 to {env.max_episode_steps}",
            others=("env.train.auto_reset", "env.max_episode_steps"),
        )


@rule(
    *("env.train", "algorithm.adv_type", "algorithm.by_task"),
    *("algorithm.normalization_scope", "algorithm.normalize_advantages"),
)
def groups_keep_step(context: Context) -> Iterator[Finding]:
    """Group estimators compare episodes from one initial state, so the environments of a group stay in lockstep."""
    config = context.config
    algorithm = config.algorithm
    train = config.env.train
    grouped = context.grouped_by
    by_group = algorithm.normalize_advantages and algorithm.normalization_scope == "group"
    if (grouped or by_group) and train.auto_reset and not train.ignore_terminations:
        key = grouped or "algorithm.normalization_scope"
        yield Finding(
            "env.train.auto_reset",
            f"{key.rpartition('.')[2]} '{context.estimators[grouped].name if grouped else 'group'}' compares the"
            " episodes of a group, but after an auto-reset its environments are in different episodes",
            "set env.train.auto_reset=false, or env.train.ignore_terminations=true",
            others=(key,),
        )


DEMOS = "env.train.start_from_demos"
PARTS = "env.train.task_curriculum.parts"
STARTS = ("env.train.failed_seed_fraction", DEMOS, PARTS)
"""Settings by which outcomes decide where the next episodes begin."""


@rule(*STARTS, "env.train", "runner.max_staleness", "rollout", "cluster")
def outcomes_are_known_before_the_next_start(context: Context) -> Iterator[Finding]:
    """Where episodes begin depends on earlier outcomes only if one process begins all of them, in lockstep."""
    config = context.config
    in_the_way = {
        "runner.max_staleness": (config.runner.max_staleness > 0, "rollouts that run ahead begin first", "0"),
        "rollout.workflow": (config.rollout.workflow is not None, "a workflow begins episodes itself", "null"),
        "env.train.use_fixed_reset_state_ids": (
            config.env.train.use_fixed_reset_state_ids,
            "every rollout would begin with the same episodes",
            "false",
        ),
        "cluster.component_placement": (
            context.gathers_in_processes,
            "no rollout process knows the outcomes of the others",
            "rollout in the main process",
        ),
    }
    for start in STARTS:
        for key, (is_set, message, allowed) in in_the_way.items():
            if value_of(config, start) and is_set:
                hint = f"leave it at its default, or leave {start} out"
                yield Finding(key, f"{message}, and {start} chooses where they begin", hint, allowed, others=(start,))


@rule(*STARTS, "env.train", "env.max_episode_steps")
def episodes_end_before_the_next_start(context: Context) -> Iterator[Finding]:
    """Outcomes decide where episodes begin only if episodes end within a rollout."""
    if context.config.env.train.ignore_terminations:
        yield from _cut_off_starts(context, "no outcome")


def _cut_off_starts(context: Context, known: str) -> Iterator[Finding]:
    config = context.config
    steps, limit = config.env.train.max_steps_per_rollout_epoch, config.env.max_episode_steps
    for start in STARTS:
        if value_of(config, start) and steps < limit:
            yield Finding(
                "env.train.max_steps_per_rollout_epoch",
                f"rollouts end after {steps} steps, before the step limit, and {start} would know {known}",
                f"set it to a multiple of env.max_episode_steps = {limit}, or leave {start} out",
                f"at least {limit}",
                others=(start, "env.max_episode_steps"),
            )


OF_KINDS = {"stages": ("success_rate",), "between": ("low", "high", "factor")}
"""Settings of each kind of part, all of which it needs."""


@rule(PARTS, "env.tasks")
def parts_choose_among_tasks(context: Context) -> Iterator[Finding]:
    """A curriculum has several tasks, and its parts the settings of their kinds."""
    config = context.config
    parts = config.env.train.task_curriculum.parts
    if parts and len(config.env.tasks) < 2:
        message = f"there is nothing to choose: the run plays {', '.join(config.env.tasks)}"
        yield Finding(PARTS, message, "name several in env.tasks, or leave it out", "[]", others=("env.tasks",))
    for index, part in enumerate(parts):
        own = OF_KINDS[part.kind]
        key = f"{PARTS}.{index}"
        for name in type(part).model_fields:
            given = name != "kind" and getattr(part, name) is not None
            if given and name not in own:
                yield Finding(f"{key}.{name}", f"kind '{part.kind}' does not have it", "leave it out", "null")
        if missing := [name for name in own if getattr(part, name) is None]:
            message = f"kind '{part.kind}' lacks {', '.join(missing)}"
            yield Finding(f"{key}.kind", message, f"set {', '.join(own)} beside it")
        elif part.low is not None and part.high is not None and part.low > part.high:
            message = f"no success rate is above {part.low} and below {part.high}"
            yield Finding(f"{key}.low", message, f"set it to at most {part.high}", others=(f"{key}.high",))


@rule(DEMOS, "env.env_type", "env.real_time", "algorithm.branch")
def demonstrations_can_be_repeated(context: Context) -> Iterator[Finding]:
    """Starts within demonstrations need single, simulated environments, and the demonstrations."""
    config = context.config
    source = config.env.train.start_from_demos
    if source is None:
        return
    if source not in context.made_before and path_kind(source) != "directory":
        hint = "make it: embodrl collect collect.output_dir=..."
        yield Finding(DEMOS, f"no directory '{source}'", hint, "a directory")
    if config.algorithm.branch.enabled:
        message = "a group begins where its first episode has got to, not in a demonstration"
        yield Finding(
            "algorithm.branch.enabled", message, f"set it to false, or leave {DEMOS} out", "false", others=(DEMOS,)
        )
    if config.env.real_time.control_hz is not None:
        message = "actions repeated by a robot, or in real time, do not lead to the same state"
        yield Finding(DEMOS, message, "leave it out", "null", others=("env.real_time.control_hz",))
    batched = None if context.simulator is None else context.simulator.batched_by
    if batched is not None and getattr(config.env, batched[0]) == batched[1]:
        message = f"'{batched[1]}' simulates all environments at once, and repeats no actions in one of them"
        yield Finding(f"env.{batched[0]}", message, "choose another value", f"not {batched[1]}", others=(DEMOS,))


@rule("env.train", "env.reward_mode", "algorithm.adv_type")
def success_is_worth_ending(context: Context) -> Iterator[Finding]:
    """With sparse rewards an episode earns nothing after its success."""
    config = context.config
    needs_values = context.estimator.needs_values
    if config.env.train.ignore_terminations and config.env.reward_mode == "sparse" and needs_values:
        yield Finding(
            "env.train.ignore_terminations",
            "with reward_mode 'sparse' the steps after a success earn nothing, and a critic would learn that"
            " solved states are worthless",
            "set env.train.ignore_terminations=false, or env.reward_mode=dense_delta",
            others=("env.reward_mode",),
        )


@note("env.reward_mode", "env.train")
def waiting_may_pay(context: Context) -> Iterator[Finding]:
    """A dense reward is paid at every step, and success ends the episode."""
    train = context.config.env.train
    dense = context.config.env.reward_mode == "dense" and context.by_user("env.reward_mode")
    if dense and not train.ignore_terminations:
        yield Finding(
            "env.reward_mode",
            "'dense' pays at every step and a success ends the episode: waiting just short of it can earn more",
            "set env.reward_mode=dense_delta, which pays progress, or a large env.success_bonus",
        )


@rule("env.reward_mode", "env.success_bonus")
def sparse_reward_exists(context: Context) -> Iterator[Finding]:
    """Sparse rewards consist of the success bonus."""
    env = context.config.env
    if env.reward_mode == "sparse" and env.success_bonus == 0:
        yield Finding(
            "env.success_bonus",
            "with reward_mode 'sparse' and a bonus of 0 there is never any reward",
            "set it to 1, or env.reward_mode=dense_delta",
            "above 0",
            others=("env.reward_mode",),
        )


@rule("env.eval", "env.tasks")
def every_task_is_evaluated(context: Context) -> Iterator[Finding]:
    """An evaluation has at least one episode per task."""
    env = context.config.env
    (key, tasks) = evaluated_tasks(context.config)
    if env.eval.num_episodes < len(tasks):
        yield Finding(
            "env.eval.num_episodes",
            f"{env.eval.num_episodes} episodes can't cover {len(tasks)} tasks",
            f"set it to a multiple of {len(tasks)}",
            f"at least {len(tasks)}",
            others=(key,),
        )


@rule("env.eval", "collect.seed", "collect.num_episodes")
def seeds_are_apart(context: Context) -> Iterator[Finding]:
    """Evaluations never use an initial state of the fine-tuning data; training samples its seeds at random."""
    config = context.config
    first = config.env.eval.seed
    last = config.env.eval.seed + config.env.eval.num_episodes - 1
    start = config.collect.seed
    count = MAX_ATTEMPTS_PER_EPISODE * config.collect.num_episodes
    if start <= last and first <= start + count - 1:
        key = "collect.seed"
        blamed = "env.eval.seed" if context.by_user("env.eval.seed") and not context.by_user(key) else key
        below = start - (last - first + 1) if blamed == "env.eval.seed" else first - count
        yield Finding(
            blamed,
            f"up to {MAX_ATTEMPTS_PER_EPISODE} attempts per episode use the seeds {start} to {start + count - 1}, which"
            f" overlap the evaluation's, {first} to {last}",
            "keep the two ranges well apart, so that evaluations use unseen initial states",
            f"0 to {below}, or far above" if below >= 0 else "far above",
            others=tuple(k for k in (key, "collect.num_episodes", "env.eval.seed") if k != blamed),
        )


@rule("env.cameras", "model.model_type")
def cameras_are_sound(context: Context) -> Iterator[Finding]:
    """Cameras have unique names, a field of view below pi, one size, and a direction if they have a position."""
    cameras = context.config.env.cameras
    names = [camera.name for camera in cameras]
    for index, camera in enumerate(cameras):
        key = f"env.cameras.{index}"
        if camera.name in names[:index]:
            yield Finding(f"{key}.name", f"two cameras are called '{camera.name}'", "give each camera a unique name")
        if camera.fov_rad is not None and camera.fov_rad >= math.pi:
            hint = f"it is in radians: {camera.fov_rad:g} degrees are {math.radians(camera.fov_rad):.3g}"
            yield Finding(
                f"{key}.fov_rad", f"{camera.fov_rad:g} radians are half a turn or more", hint, "below 3.14159"
            )
        if (camera.eye is None) != (camera.target is None):
            given, absent = ("eye", "target") if camera.eye is not None else ("target", "eye")
            yield Finding(
                f"{key}.{given}",
                f"{given} is given without {absent}",
                f"give {absent}, too, or neither",
                "both or none",
            )
        if camera.eye is not None and camera.eye == camera.target:
            yield Finding(f"{key}.target", "the camera looks at its own position", "move target away from eye")
        if (camera.height, camera.width) != (cameras[0].height, cameras[0].width):
            yield Finding(
                f"{key}.height",
                f"{camera.height}x{camera.width} pixels, not {cameras[0].height}x{cameras[0].width} as the first",
                "give all cameras one size; their images form one array",
            )


@rule("env.video")
def videos_have_even_sizes(context: Context) -> Iterator[Finding]:
    """H.264 in the usual pixel format needs even sizes."""
    video = context.config.env.video
    for name, size in (("height", video.height), ("width", video.width)):
        if video.enabled and size % 2:
            yield Finding(
                f"env.video.{name}",
                f"video encoders want an even size, not {size}",
                f"set it to {size + 1}",
                "even numbers",
            )


@note("env.eval", "env.tasks")
def tasks_have_equal_shares(context: Context) -> Iterator[Finding]:
    """Episodes are spread evenly over tasks."""
    env = context.config.env
    (_, tasks) = evaluated_tasks(context.config)
    if env.eval.num_episodes > len(tasks) and env.eval.num_episodes % len(tasks):
        yield Finding(
            "env.eval.num_episodes",
            f"{env.eval.num_episodes} episodes can't be spread evenly over {len(tasks)} tasks",
            f"{multiples(env.eval.num_episodes, len(tasks))} would be",
        )


@note("env.num_processes", "cluster.hardware", "cluster.num_nodes", "cluster.node_groups")
def processes_have_cores(context: Context) -> Iterator[Finding]:
    """More processes than cores slow each other down."""
    cluster = context.config.cluster
    processes = context.config.env.num_processes
    cores = os.cpu_count() or 1
    if cluster.hardware.name is not None and context.deployment is not None:
        cores = sum(each.num_cores * each.threads_per_core for each in hardware_by_node(cluster))
    if processes > cores and context.by_user("env.num_processes"):
        yield Finding(
            "env.num_processes", f"{processes} processes share {cores} cores", f"{cores} would be at least as fast"
        )


@note("env.video", "env.eval.num_episodes")
def filmed_episodes_exist(context: Context) -> Iterator[Finding]:
    """No more episodes are recorded than evaluated."""
    env = context.config.env
    if context.by_user("env.video.num_episodes") and env.video.num_episodes > env.eval.num_episodes:
        message = f"only env.eval.num_episodes = {env.eval.num_episodes} episodes can be recorded"
        yield Finding("env.video.num_episodes", message, f"set it to {env.eval.num_episodes}")


@note(*STARTS, "env.train", "env.max_episode_steps")
def failures_end_before_the_next_start(context: Context) -> Iterator[Finding]:
    """Outcomes that decide where episodes begin include failures, many of which end at the step limit."""
    if not context.config.env.train.ignore_terminations:
        yield from _cut_off_starts(context, "no failure that the limit ends")


@note("env.train", "env.max_episode_steps")
def rollouts_reach_the_step_limit(context: Context) -> Iterator[Finding]:
    """Every rollout begins with new episodes, so in a rollout shorter than an episode no failure ends."""
    env = context.config.env
    lasts = env.train.ignore_terminations
    if lasts and context.loss.off_policy:  # its success is that of evaluations
        return
    if context.family is not None and context.family.kind == "text":  # whose chunks are messages
        return
    if env.train.max_steps_per_rollout_epoch < env.max_episode_steps:
        yield Finding(
            "env.train.max_steps_per_rollout_epoch",
            f"rollouts of {env.train.max_steps_per_rollout_epoch} steps never reach env.max_episode_steps ="
            f" {env.max_episode_steps}: {'nothing ends' if lasts else 'only successes end'} within one, so"
            f" rollout/success_rate is {'' if lasts else '1 or '}null",
            f"set it to a multiple of {env.max_episode_steps}",
            f"at least {env.max_episode_steps}",
            others=("env.max_episode_steps",),
        )
