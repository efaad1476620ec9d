"""From the configuration to a pool of simulator processes."""

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
    """Refuse a simulator that can't run on this machine, before anything is started; warn of an outdated one.

    Raises:
        MissingDependencyError: names the missing package.
        EnvError: a server of ``env.remote`` can't be reached, or refuses; what it lacks shows when simulators start.
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
    """Refuse environments that have just started and can't do what the run relies on; warn of odd ones.

    Raises:
        EnvError: a state can't be saved and is to be, for offloading or ``algorithm.branch``; or a seed has no effect
            and episodes of one seed are to form groups.
    """
    if training and config.runner.max_staleness == 0:  # an asynchronous run saves rollouts, and no simulator
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
        logger.warning("%s: evaluations are not comparable, and lost episodes not repeatable; %s", message, hint)
    if "instruction-empty" in codes:
        logger.warning("env %s has an empty instruction, and the policy gets no task; set Simulator.instruction", name)


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
        "%s: checkpoints are without simulators, and a resumed run begins with fresh ones; it is the same run only if"
        " what follows a reset depends on its seed alone. %s",
        missing,
        f"To save them, {hint}",
    )


def check_videos(config: Config, here: bool = False) -> None:
    """Refuse videos that could not be encoded, before anything is started.

    Args:
        config: the run; without ``env.video.enabled`` there is nothing to refuse.
        here: this process, too, reads and writes videos.

    Raises:
        MissingDependencyError: the interpreter of the simulators, or this one, lacks imageio or its ffmpeg.
    """
    if not config.env.video.enabled:
        return
    from embodrl.preflight.simulators import preflight_videos

    python = interpreter_of(config)
    preflight_videos(python)
    if here and python is not None:
        preflight_videos()


def try_simulator(config: Config) -> MachineFinding:
    """Make one environment as configured, in the interpreter that would run it, and draw one frame."""
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
    """Return the keyword arguments of the VectorEnv, without ``num_envs``, as plain values.

    They are the settings that all environments read, those of ``SimulatorSpec.reads``, and all that the simulator's
    settings class adds to ``EnvConfig``.
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
    """Return the places of the simulators of a verb that runs on one machine; None if some are on another one."""
    places = deployment.of("env")
    return places if all(place.node == 0 for place in places) else None


def gpu_variables(place: ProcessPlace) -> dict[str, str]:
    """Return the environment variables by which a simulator process renders on the GPUs that it is placed on.

    CUDA, and with it SAPIEN, counts the visible devices alone. MuJoCo's EGL counts all, as nvidia-smi does; a device
    that the user names is kept, and of one that CUDA_VISIBLE_DEVICES names by its UUID the number is not known.
    """
    if place.visible is None:
        return {}
    first = place.visible.partition(",")[0]
    egl = {"MUJOCO_EGL_DEVICE_ID": first} if first.isdigit() and "MUJOCO_EGL_DEVICE_ID" not in os.environ else {}
    return {"CUDA_VISIBLE_DEVICES": place.visible, **egl}


def held_out_pool(config: Config, log_dir: Path | None, places: Sequence[ProcessPlace] | None) -> EnvPool:
    """Return a pool for the evaluations of a training run in other environments than its own; see ``make_pool``."""
    where = None if log_dir is None else log_dir / "evaluation"
    return make_pool(config, config.env.train.total_num_envs, where, places=places)


def make_single_pool(config: Config, total_num_envs: int, places: Sequence[ProcessPlace] | None = None) -> EnvPool:
    """Return a pool for episodes of single actions, which end where they terminate; see ``make_pool``."""
    single = {"max_chunk": 1, "auto_reset": False, "ignore_terminations": False}
    return make_pool(config, total_num_envs, places=places, **single)


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
        config: the run.
        total_num_envs: environments over ``env.num_processes`` processes.
        log_dir: where the processes' output goes.
        env_type: a variant, of the same arguments, that replaces the configured one.
        places: of the processes, with their cores and GPUs; None binds them to the cores of this machine in turn.
        axis: along which all episodes are perturbed; None for none.
        overrides: keyword arguments of the VectorEnv that differ from the configuration.
    """
    env = config.env
    slots = assign_cpus(env.num_processes) if env.pin_cpus and places is None else [None] * env.num_processes
    cpus = [None if slot is None else slot.cpu for slot in slots]
    numa_nodes = [None if slot is None else slot.numa_node for slot in slots]
    environs: list[Mapping[str, str]] = [{} for _ in slots]
    if places is not None:
        cpus = [next(iter(place.cpus), None) for place in places]
        numa_nodes = [place.numa_node for place in places]
        environs = [gpu_variables(place) for place in places]
    timeouts = EnvTimeouts(
        env.start_timeout_s, env.reset_timeout_s, env.step_timeout_s, config.cluster.heartbeat_timeout_s
    )
    remotes = [
        RemoteEnv(env.remote[rank % len(env.remote)], env.reconnect_timeout_s, env.python, env.pin_cpus, timeouts)
        for rank in range(env.num_processes if env.remote else 0)
    ]
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
