"""`embodrl sft`: imitation of demonstrations."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config, SftConfig
from embodrl.data.demos import Demos
from embodrl.data.lerobot import IMAGES, camera_key
from embodrl.data.load import camera_names, load_demos
from embodrl.errors import EmbodrlError, OutputError
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.hybrid_engines.training.parallel import add_gradients
from embodrl.hybrid_engines.training.precision import Precision, autocast, resolve_precision
from embodrl.models.base import VLAPolicy
from embodrl.reporting.progress import Progress
from embodrl.runs.stop import StopSignal
from embodrl.storage.checkpoint import preflight
from embodrl.types import Observation
from embodrl.workers.env import check_simulator
from embodrl.workers.policy import build_policy, configure_torch, num_threads

POLICY_DIR = "policy"
# Asked for before the policy is built and its size known.
MOST_OUTSIDE = 0.02
LEAST_FREE_BYTES = 64 * 2**20


def learning_rate(settings: SftConfig, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to 0."""
    if step < settings.lr_warmup_steps:
        return settings.lr * (step + 1) / settings.lr_warmup_steps
    part = (step - settings.lr_warmup_steps) / max(settings.max_steps - settings.lr_warmup_steps, 1)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(part, 1.0)))


def shift_images(images: NDArray[np.uint8], largest: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return ``uint8[N,V,H,W,3]`` shifted by up to ``largest`` pixels, edges repeated (Kostrikov et al., 2020)."""
    if largest == 0:
        return images
    height, width = images.shape[2:4]
    padded = np.pad(images, ((0, 0), (0, 0), (largest, largest), (largest, largest), (0, 0)), mode="edge")
    shifts = rng.integers(0, 2 * largest + 1, size=(len(images), 2))
    return np.stack([padded[i, :, y : y + height, x : x + width] for i, (y, x) in enumerate(shifts)])


def configured_demos(config: Config) -> Demos:
    """Load the demonstrations of ``config.sft``, of a LeRobot data set the pictures that ``env.cameras`` asks for.

    Raises:
        EmbodrlError: there are none, they are damaged, or it is open which cameras are meant.
    """
    settings, cameras = config.sft, config.env.cameras
    directory = Path(settings.data_dir)
    present = camera_names(directory)
    if present is None:
        if settings.cameras is not None:
            raise EmbodrlError(
                f"{directory} is no LeRobot data set, and its cameras have no names", "set sft.cameras=null"
            )
        return load_demos(directory, settings.max_episodes)
    chosen = settings.cameras
    if chosen is None:
        chosen = tuple(camera.name for camera in cameras)
        missing = [name for name in chosen if camera_key(name) not in present]
        if missing and len(cameras) == len(present) == 1:
            chosen = (present[0],)
        elif missing:
            names = ", ".join(key.removeprefix(IMAGES) for key in present) or "no cameras"
            raise EmbodrlError(
                f"{directory} has {names}, and none that is called {', '.join(missing)}, as in env.cameras",
                "name those that are meant, in the order of env.cameras, in sft.cameras",
            )
    return load_demos(directory, settings.max_episodes, chosen, (cameras[0].height, cameras[0].width))


def check_demos(demos: Demos, config: Config) -> None:
    """Refuse demonstrations of another robot or view than the configured one.

    Raises:
        EmbodrlError: other action dimensions or cameras, or the robot's state is wanted and was not recorded.
    """
    source = config.sft.data_dir
    action_dim, cameras = demos.actions.shape[1], demos.images.shape[1]
    if action_dim != config.model.action_dim:
        raise EmbodrlError(
            f"actions in {source} have {action_dim} dimensions, model.action_dim is {config.model.action_dim}",
            f"set model.action_dim={action_dim}, or use demonstrations of the robot that the policy is for",
        )
    if cameras != len(config.env.cameras):
        raise EmbodrlError(
            f"{source} has pictures of {cameras} cameras, env.cameras has {len(config.env.cameras)}",
            "configure the cameras that the demonstrations were collected with, or collect them anew",
        )
    if config.env.include_state and demos.state.shape[1] == 0:
        raise EmbodrlError(
            f"env.include_state is true, and {source} holds no robot states",
            "collect the demonstrations anew with env.include_state=true, or set env.include_state=false",
        )


def batches(
    demos: Demos, settings: SftConfig, horizon: int, seed: int, include_state: bool = False
) -> Iterator[tuple[Observation, Tensor, Tensor]]:
    """Yield observations, ``float32[N,H,A]`` actions and ``bool[N,H]`` mask without end, shuffled by the epoch.

    Args:
        demos: where they come from.
        settings: section ``sft``.
        horizon: H, actions that the policy learns at once.
        seed: of the order and the shifts.
        include_state: give the robot's state; else ``float32[N,0]``.
    """
    rng = np.random.default_rng(seed)
    state = demos.state if include_state else demos.state[:, :0]
    order = np.zeros(0, np.int64)
    while True:
        while len(order) < settings.batch_size:
            order = np.concatenate([order, rng.permutation(len(demos.actions))])
        frames, order = order[: settings.batch_size], order[settings.batch_size :]
        actions, inside = demos.action_chunks(frames, horizon)
        observation = Observation(
            images=shift_images(demos.images[frames], settings.random_shift_px, rng),
            state=state[frames],
            instruction=[demos.instructions[i] for i in demos.episode[frames]],
            task_id=np.zeros(len(frames), np.int32),
        )
        yield observation, torch.from_numpy(actions), torch.from_numpy(inside)


def make_optimizer(policy: VLAPolicy, settings: SftConfig) -> torch.optim.AdamW:
    """Return AdamW over all groups but the value head; biases and norms are not decayed."""
    parameters = [p for name, group in policy.trainable_groups().items() if name != "value_head" for p in group]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def _backward(
    policy: VLAPolicy,
    inputs: dict[str, Tensor],
    parameters: list[nn.Parameter],
    smoothing: float,
    precision: Precision,
    cores: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the gradients of a batch, of which every core takes a part; return the loss and scalars."""
    total = inputs["action_mask"].sum()
    parts = [
        dict(zip(inputs, part, strict=True)) for part in zip(*(x.chunk(cores) for x in inputs.values()), strict=True)
    ]
    weights = [part["action_mask"].sum() / total for part in parts]

    def compute(index: int) -> tuple[Tensor, dict[str, Tensor]]:
        with autocast(precision, policy.device):
            loss, scalars = policy.sft_loss(parts[index], smoothing)
        return loss * weights[index], {name: value * weights[index] for name, value in scalars.items()}

    losses = [lambda index=index: compute(index) for index in range(len(parts))]
    loss, scalars = add_gradients(losses, parameters, cores)
    return loss, {name: torch.stack([s[name] for s in scalars]).sum() for name in scalars[0]}


def sft(loaded: LoadedConfig) -> int:
    """Train the policy on demonstrations and save it in its public layout; returns the exit code.

    SIGINT and SIGTERM end it after the step under way; the policy so far is saved.

    Raises:
        OutputError: the output directory can't be written or holds a policy, told before anything has started.
        EmbodrlError: there are no demonstrations, or the loss is not finite.
    """
    config, settings = loaded.config, loaded.config.sft
    output_dir = Path(settings.output_dir)
    _check_output(output_dir)
    device = configure_torch(config, loaded.deployment.of("actor")[0])
    if settings.eval_interval:
        check_simulator(config)
    with (
        StopSignal() as stop,
        Progress("sft", settings.max_steps, "steps", config.runner.logger.console) as progress,
    ):
        demos = configured_demos(config)
        check_demos(demos, config)
        policy = build_policy(config, device)
        outside = float((np.abs(demos.actions) > 1).mean())
        if outside > MOST_OUTSIDE:
            progress.message(f"{outside:.0%} of the actions lie beyond [-1, 1], where policies without statistics end")
        progress.message(f"{len(demos.instructions)} episodes, {len(demos.actions)} frames from {settings.data_dir}")
        stop.graceful = True
        done = _train(config, policy, demos, progress, stop)
        _save(policy, output_dir / POLICY_DIR)
        if done < settings.max_steps:
            progress.message(f"stopped by a signal after {done} of {settings.max_steps} steps")
        progress.message(f"saved {output_dir / POLICY_DIR}")
    return 0 if done == settings.max_steps else stop.exit_code


def _train(config: Config, policy: VLAPolicy, demos: Demos, progress: Progress, stop: StopSignal) -> int:
    """Take the optimizer steps; return how many were done when all were, or a signal came."""
    settings, device = config.sft, policy.device
    optimizer = make_optimizer(policy, settings)
    precision = resolve_precision(config.actor.precision, device)
    cores = num_threads(config) if device.type == "cpu" else 1
    stream = batches(demos, settings, policy.action_horizon, config.runner.seed, config.env.include_state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    start_s = time.monotonic()
    done = 0
    with (Path(settings.output_dir) / "sft_metrics.jsonl").open("w") as log:
        while done < settings.max_steps and not stop:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, done)
            observation, actions, inside = next(stream)
            inputs = policy.sft_inputs(observation, actions) | {"action_mask": inside.to(device)}
            loss, scalars = _backward(policy, inputs, parameters, settings.label_smoothing_bins, precision, cores)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            if not math.isfinite(float(loss.detach())):
                raise EmbodrlError(f"the loss is {float(loss)} at step {done}", "lower sft.lr")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            if done % settings.log_interval == 0 or done == settings.max_steps or stop:
                row = {"step": done, "loss": float(loss.detach())} | {k: float(v) for k, v in scalars.items()}
                log.write(json.dumps(row | {"time_s": time.monotonic() - start_s}) + "\n")
                log.flush()
                progress.update(done, " ".join(f"{k} {v:.3f}" for k, v in row.items() if k != "step"))
            if settings.eval_interval and done % settings.eval_interval == 0 and not stop:
                try:
                    progress.message(f"step {done}: success rate {_success_rate(config, policy, stop):.1%}")
                except InterruptedError:
                    break
    return done


def _success_rate(config: Config, policy: VLAPolicy, stop: StopSignal) -> float:
    from embodrl.workers.env import make_pool
    from embodrl.workers.evaluator import Evaluator

    engine = make_rollout_engine(config, policy, num_threads(config))
    with make_pool(config, config.env.eval.total_num_envs) as pool:
        return Evaluator(config, pool, engine, should_stop=lambda: bool(stop)).run().success_rate


def _check_output(output_dir: Path) -> None:
    policy_dir = output_dir / POLICY_DIR
    if policy_dir.exists():
        raise OutputError(f"{policy_dir} holds a policy already", "choose another sft.output_dir, or remove it")
    try:
        preflight(output_dir, LEAST_FREE_BYTES)
    except OutputError as error:
        # The hint that it knows is that of a training run.
        raise OutputError(error.message, "set sft.output_dir to a directory of yours that has room") from error


def _save(policy: VLAPolicy, directory: Path) -> None:
    """Write the policy; a directory of that name holds a whole one."""
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        policy.save_pretrained(partial)
        partial.replace(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OutputError(
            f"{directory} can't be written: {error}", "free some room, or set sft.output_dir to another disk"
        ) from error
