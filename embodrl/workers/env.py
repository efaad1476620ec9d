"""From configuration to a pool of simulator processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from embodrl.config.isolated import AUTO, interpreter_of
from embodrl.config.schema import Config
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.deployment.topology import assign_cpus
from embodrl.envs.pool.faults import Bounds
from embodrl.envs.pool.options import EnvTimeouts, RemoteEnv
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError, MissingDependencyError
from embodrl.preflight.findings import MachineFinding
from embodrl.preflight.isolated import check_pins
from embodrl.specs import ENV_SERVERS, ENVS

logger = logging.getLogger(__name__)


def check_simulator(config: Config) -> None:
    """Reject a simulator that cannot run on this machine, before anything starts; warn about an outdated one.

    Raises:
        MissingDependencyError: a package is missing.
        EnvError: a server of ``env.remote`` is unreachable or rejects the connection; missing packages there show when
            simulators start.
    """
    if config.env.remote:
        for address in dict.fromkeys(config.env.remote):
            ENV_SERVERS.get(address.partition("://")[0])(address)
        return
    from embodrl.preflight.simulators import find_warnings, preflight

    preflight(config.env.env_type, interpreter_of(config), config.env)
    outdated = check_pins(config.env.env_type) if config.env.python == AUTO else None
    for warning in filter(None, (outdated, *find_warnings(config.env.env_type, interpreter_of(config)))):
        logger.warning("%s: %s; %s", warning.name, warning.detail, warning.hint)


def check_environments(config: Config, pool: EnvPool, training: bool = True) -> None:
    """Reject started environments that cannot do what the run relies on; warn about suspicious ones.

    Raises:
        EnvError: offloading, ``algorithm.branch`` or ``env.train.start_from_demos`` needs a state that cannot be saved
            or set; or a seed has no effect although groups are episodes with equal seeds, or demonstrations are
            repeated from theirs.
    """
    starts = training and config.env.train.start_from_demos is not None
    if starts and (message := _missing(pool, "check_row_state")):
        message += ", and env.train.start_from_demos repeats actions in single environments"
        hint = "derive it from SteppingEnv, or leave env.train.start_from_demos out"
        raise EnvError(message, hint, code="env-state-unsupported")
    # An asynchronous run saves rollouts, not simulators.
    if training and (config.runner.max_staleness == 0 or config.algorithm.branch.enabled):
        _check_state(config, pool)
    found = pool.call("check_episodes", restart=True)[0]
    codes = found if isinstance(found, list) else []
    name = config.env.env_type
    if "seed-ignored" in codes:
        message = f"env {name}: two resets with one seed start different episodes"
        hint = "seed all generators in reset"
        if training and (size := config.algorithm.group_size) > 1:
            message += f", and algorithm.group_size={size} compares episodes of one seed"
            raise EnvError(message, hint, code="seed-ignored")
        if starts:
            message += ", and env.train.start_from_demos repeats episodes from their seeds"
            raise EnvError(message, hint, code="seed-ignored")
        logger.warning("%s: evaluations are not comparable, and lost episodes are not repeatable; %s", message, hint)
    if "instruction-empty" in codes:
        logger.warning(
            "env %s has an empty instruction, so the policy receives no task; set Simulator.instruction", name
        )


def _missing(pool: EnvPool, question: str) -> str:
    return next((str(answer) for answer in pool.call(question, restart=True) if answer), "")


def _check_state(config: Config, pool: EnvPool) -> None:
    missing = _missing(pool, "check_state")
    pool.keeps_state = not missing
    if not missing:
        if config.algorithm.branch.enabled and (message := _missing(pool, "check_row_state")):
            hint = "give it get_row_state and set_row_state, or choose algorithm=rloo"
            message += ", and algorithm.branch.enabled=true continues single episodes from their states"
            raise EnvError(message, hint, code="env-state-unsupported")
        return
    hint = "give the simulator get_state and set_state, or wrap it in embodrl.envs.simulator.Replayed"
    if config.env.enable_offload:
        message = f"{missing}, and env.enable_offload=true takes simulators out of memory"
        raise EnvError(message, f"{hint}; or set env.enable_offload=false", code="env-state-unsupported")
    if config.algorithm.branch.enabled:
        message = f"{missing}, and algorithm.branch.enabled=true continues episodes from their states"
        raise EnvError(message, f"{hint}; or choose algorithm=rloo", code="env-state-unsupported")
    logger.warning(
        "%s: checkpoints contain no simulators, and a resumed run starts fresh ones; it matches the original run only"
        " if episodes depend on the reset seed alone. %s",
        missing,
        f"To save them, {hint}",
    )


def check_videos(config: Config, here: bool = False) -> None:
    """Reject videos that cannot be encoded, before anything starts; ``here``: this process handles videos, too.

    An env server that cannot encode them warns in its own log.

    Raises:
        MissingDependencyError: the simulators' interpreter, or this one, lacks imageio or its ffmpeg.
    """
    if not config.env.video.enabled:
        return
    from embodrl.preflight.simulators import preflight_videos

    python = interpreter_of(config)
    if not config.env.remote:
        preflight_videos(python)
    if here and (config.env.remote or python is not None):
        preflight_videos()


def try_simulator(config: Config) -> MachineFinding:
    """Make one environment as configured, in the interpreter that would run it, and render one frame."""
    from embodrl.preflight.simulators import draw_frame, preflight

    name = f"env={config.env.env_type}"
    if config.env.remote:
        try:
            check_simulator(config)
        except EnvError as error:
            return MachineFinding(name, "error", error.message, error.hint)
        return MachineFinding(name, "ok", f"env servers answer: {', '.join(config.env.remote)}")
    try:
        preflight(config.env.env_type, interpreter_of(config), config.env)
    except MissingDependencyError as error:
        return MachineFinding(name, "error", error.message, error.hint)
    return draw_frame(name, config.env.env_type, env_kwargs(config), interpreter_of(config), config.extensions)


def env_kwargs(config: Config) -> dict[str, object]:
    """Return the keyword arguments of the VectorEnv as plain values, without ``num_envs``.

    They are the settings that all environments read, the ones listed in ``SimulatorSpec.reads``, and all fields that
    the simulator's settings class adds to ``EnvConfig``.
    """
    env = config.env
    spec = ENVS.entry(config.env.env_type)
    readable: dict[str, dict[str, object]] = {
        "cameras": {"cameras": [camera.model_dump(mode="json") for camera in env.cameras]},
        "image_size": {"image_size": env.cameras[0].height},
        "include_images": {"include_images": env.include_images},
        "state": {"full_state": env.state == "full"},
        "reward_mode": {"reward_mode": env.reward_mode} | _shaping(config),
        "success_bonus": {"success_bonus": env.success_bonus},
        "render_detail": {"render_detail": env.render_detail},
        "action_dim": {"action_dim": config.model.action_dim},
        "video": {"video_size": [env.video.height, env.video.width], "video_fps": env.video.fps},
    }
    kwargs: dict[str, object] = {
        "tasks": list(env.tasks),
        "max_episode_steps": env.max_episode_steps,
        "max_chunk": config.model.num_action_chunks,
        "include_state": env.include_state,
        "auto_reset": env.train.auto_reset,
        "ignore_terminations": env.train.ignore_terminations,
    }
    for name in spec.reads:
        kwargs |= readable[name]
    return kwargs | env.model_dump(mode="json", include=set(env.own_settings))


def _shaping(config: Config) -> dict[str, object]:
    if config.env.reward_mode != "potential":
        return {}
    per_action = config.algorithm.reward_type == "action_level"
    return {"shaping_gamma": config.algorithm.gamma, "discounts_actions": per_action}


def places_here(deployment: Deployment) -> Sequence[ProcessPlace] | None:
    """Return the simulator placements for a single-machine verb; None if some are on another machine."""
    places = deployment.of("env")
    return places if all(place.node == 0 for place in places) else None


def gpu_variables(place: ProcessPlace) -> dict[str, str]:
    """Return the environment variables that select a simulator process's GPUs for rendering.

    CUDA, and with it SAPIEN, numbers only the visible devices. MuJoCo's EGL numbers all devices, like nvidia-smi; a
    device set by the user is kept, and the number of a device given in CUDA_VISIBLE_DEVICES by UUID is unknown.
    """
    if place.visible is None:
        return {}
    first = place.visible.partition(",")[0]
    egl = {"MUJOCO_EGL_DEVICE_ID": first} if first.isdigit() and "MUJOCO_EGL_DEVICE_ID" not in os.environ else {}
    hip = {"HIP_VISIBLE_DEVICES": place.visible} if "HIP_VISIBLE_DEVICES" in os.environ else {}
    return {"CUDA_VISIBLE_DEVICES": place.visible, **hip, **egl}


def held_out_pool(config: Config, log_dir: Path | None, places: Sequence[ProcessPlace] | None) -> EnvPool:
    """Return a pool for a training run's evaluations in environments other than its own; see ``make_pool``."""
    where = None if log_dir is None else log_dir / "evaluation"
    return make_pool(config, config.env.train.total_num_envs, where, places=places)


def make_single_pool(
    config: Config,
    total_num_envs: int,
    places: Sequence[ProcessPlace] | None = None,
    log_dir: Path | None = None,
) -> EnvPool:
    """Return a pool for episodes of single actions, which are reset one by one; see ``make_pool``."""
    single = {"max_chunk": 1, "auto_reset": False}
    return make_pool(config, total_num_envs, log_dir, places=places, **single)


def make_pool(
    config: Config,
    total_num_envs: int,
    log_dir: Path | None = None,
    env_type: str | None = None,
    places: Sequence[ProcessPlace] | None = None,
    axis: str | None = None,
    **overrides: object,
) -> EnvPool:
    """Return a pool of simulator processes, not yet started.

    Args:
        config: run configuration.
        total_num_envs: number of environments over ``env.num_processes`` processes.
        log_dir: directory for the processes' output.
        env_type: variant with the same arguments that replaces the configured one.
        places: placements of the processes, with cores and GPUs; None pins them to this machine's cores in turn.
        axis: perturbation axis of all episodes; None for none.
        overrides: keyword arguments of the VectorEnv that override the configuration.
    """
    env = config.env
    slots = assign_cpus(env.num_processes) if env.pin_cpus and places is None else [None] * env.num_processes
    cpus = [None if slot is None else slot.cpu for slot in slots]
    numa_nodes = [None if slot is None else slot.numa_node for slot in slots]
    environs: list[Mapping[str, str]] = [{} for _ in slots]
    if places is not None and not env.remote:
        cpus = [next(iter(place.cpus), None) for place in places]
        numa_nodes = [place.numa_node for place in places]
        environs = [gpu_variables(place) for place in places]
    timeouts = EnvTimeouts(
        env.start_timeout_s, env.reset_timeout_s, env.step_timeout_s, config.cluster.heartbeat_timeout_s
    )
    remotes = []
    for rank in range(env.num_processes if env.remote else 0):
        first = rank % len(env.remote)
        own, *others = dict.fromkeys(env.remote[first:] + env.remote[:first])
        remotes.append(RemoteEnv(own, env.reconnect_timeout_s, env.python, env.pin_cpus, timeouts, others=others))
    return EnvPool.create(
        env_type or env.env_type,
        {**env_kwargs(config), **overrides},
        total_num_envs=total_num_envs,
        num_processes=env.num_processes,
        cpus=cpus,
        numa_nodes=numa_nodes,
        environs=environs,
        remotes=remotes,
        python=None if remotes else interpreter_of(config),
        # The server's watchdog judges the simulator; this one only has to outlast it and a cut connection.
        timeouts=timeouts.longer_by(env.reconnect_timeout_s) if remotes else timeouts,
        log_dir=log_dir,
        extensions=config.extensions,
        axis=axis,
        real_time=None if env.real_time.control_hz is None else env.real_time.model_dump(mode="json"),
        max_restarts=env.max_restarts,
        restart_window_s=config.cluster.restart_window_s,
        bounds=Bounds(env.max_abs_reward, env.max_abs_state),
    )
