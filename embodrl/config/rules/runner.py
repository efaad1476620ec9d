"""The training loop, its output, demonstrations and fine-tuning."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from embodrl.config.rules.base import Context, note, path_kind, rule
from embodrl.rule_set import Finding
from embodrl.specs import ENVS


@rule("runner.name")
def name_is_one_directory(context: Context) -> Iterator[Finding]:
    """The name of a run is a directory name in outputs/."""
    name = context.config.runner.name
    if not re.fullmatch(r"\w[\w.+@=-]{0,199}", name):
        near = re.sub(r"[^\w.+@=-]+", "-", name).strip("-.")[:200] or "my-run"
        message = f"'{name}' is not a valid directory name in outputs/"
        hint = f"write runner.name={near}; for another location, set runner.output_dir"
        yield Finding("runner.name", message, hint, "letters, digits and _ . + @ = -, at most 200 of them")


KERNEL_DIRS = ("/proc", "/sys")
"""Kernel directories, where no files can be created, whatever the permissions."""


@rule("runner.output_dir", "collect.output_dir", "sft.output_dir")
def outputs_can_be_written(context: Context) -> Iterator[Finding]:
    """The output directory exists or can be created."""
    config = context.config
    if context.verb == "serve":  # it writes nothing
        return
    for key, text in (
        ("runner.output_dir", config.runner.output_dir),
        ("collect.output_dir", config.collect.output_dir),
        ("sft.output_dir", config.sft.output_dir),
    ):
        if key == "runner.output_dir" and text == "auto":
            continue
        if not text or "\0" in text:
            yield Finding(key, "the path is empty or contains a zero byte", "give a directory", "a directory")
            continue
        path = Path(text).absolute()
        if any(map(path.resolve().is_relative_to, KERNEL_DIRS)):
            yield Finding(key, f"'{path}' can't be written to: it belongs to the kernel", "give another directory")
            continue
        present = next(p for p in (path, *path.parents) if path_kind(str(p)))
        if path_kind(str(present)) == "file":
            yield Finding(
                key, f"'{present}' is a file, not a directory", "give another directory", "a directory, new or old"
            )
        elif not os.access(present, os.W_OK | os.X_OK):
            yield Finding(key, f"'{present}' can't be written to", "give another directory, or change its permissions")


@rule("runner.logger.wandb_mode", "runner.logger.wandb_project")
def wandb_is_installed(context: Context) -> Iterator[Finding]:
    """Weights & Biases is an optional dependency."""
    logger = context.config.runner.logger
    if logger.wandb_mode != "off" and importlib.util.find_spec("wandb") is None:
        message = f"mode '{logger.wandb_mode}' needs the package wandb, which is not installed"
        yield Finding("runner.logger.wandb_mode", message, "pip install 'embodrl[wandb]', or set it to off", "off")
    if logger.wandb_mode != "off" and not logger.wandb_project:
        yield Finding("runner.logger.wandb_project", "the project has no name", "give one, e.g. embodrl", "text")


@rule(
    *("runner.logger.mlflow_mode", "runner.logger.mlflow_experiment"),
    *("runner.logger.swanlab_mode", "runner.logger.swanlab_project"),
)
def trackers_are_available(context: Context) -> Iterator[Finding]:
    """MLflow and SwanLab are optional dependencies, and a server of MLflow has an address."""
    logger = context.config.runner.logger
    for name, mode, group in (
        ("mlflow", logger.mlflow_mode, ("mlflow_experiment", logger.mlflow_experiment)),
        ("swanlab", logger.swanlab_mode, ("swanlab_project", logger.swanlab_project)),
    ):
        key = f"runner.logger.{name}_mode"
        if mode == "off":
            continue
        if not group[1]:
            yield Finding(f"runner.logger.{group[0]}", "it has no name", "give one, e.g. embodrl", "text")
        elif importlib.util.find_spec(name) is None:
            message = f"mode '{mode}' needs the package {name}, which is not installed"
            yield Finding(key, message, f"pip install 'embodrl[{name}]', or set it to off", "off")
        elif name == "mlflow" and mode == "online" and not os.environ.get("MLFLOW_TRACKING_URI"):
            hint = "set the environment variable MLFLOW_TRACKING_URI, or write runner.logger.mlflow_mode=offline"
            yield Finding(key, "no server is named", hint, "off, offline")


@rule("sft")
def sft_warm_up_ends(context: Context) -> Iterator[Finding]:
    """The warm-up is shorter than the fine-tuning."""
    sft = context.config.sft
    if sft.lr_warmup_steps >= sft.max_steps and context.by_user("sft.lr_warmup_steps"):
        message = f"{sft.lr_warmup_steps} warm-up steps fill all of sft.max_steps = {sft.max_steps}"
        hint = f"set it to {sft.max_steps // 10}, or raise sft.max_steps"
        others = ("sft.max_steps",)
        yield Finding("sft.lr_warmup_steps", message, hint, f"0 to {sft.max_steps - 1}", others=others)


@note("sft")
def sft_is_shorter_than_its_warm_up(context: Context) -> Iterator[Finding]:
    """A fine-tuning shorter than the default warm-up never reaches its learning rate."""
    sft = context.config.sft
    short = sft.lr_warmup_steps >= sft.max_steps and not context.by_user("sft.lr_warmup_steps")
    if short and context.by_user("sft.max_steps"):
        reached = f"{sft.max_steps} of {sft.lr_warmup_steps} steps of the warm-up"
        hint = f"set sft.lr_warmup_steps={sft.max_steps // 10} unless this is a smoke test"
        yield Finding("sft.max_steps", f"is {reached}: the learning rate never reaches sft.lr", hint)


@note("sft.eval_interval", "env.eval", "runner")
def sft_evaluates(context: Context) -> Iterator[Finding]:
    """Evaluation settings have no effect without evaluations."""
    if context.verb not in ("sft", "store") or context.config.sft.eval_interval:
        return
    keys = [f"env.eval.{name}" for name in type(context.config.env.eval).model_fields if context.verb == "sft"]
    for key in (*keys, *(f"runner.{name}" for name in ("eval_async", "stop_at_success", "max_regression"))):
        if context.by_user(key):
            yield Finding(key, "has no effect: sft.eval_interval is 0", "set sft.eval_interval, or leave it out")


@rule("sft.label_smoothing_bins")
def smoothing_is_narrower_than_the_range(context: Context) -> Iterator[Finding]:
    """The Gaussian target is narrower than the 256 bins."""
    bins = context.config.sft.label_smoothing_bins
    if bins >= 128:
        message = f"a standard deviation of {bins:g} bins blurs all 256 bins into one"
        yield Finding("sft.label_smoothing_bins", message, "set it to 4", "0 to below 128")


@rule("collect.num_episodes", "env.tasks")
def every_task_is_demonstrated(context: Context) -> Iterator[Finding]:
    """There is at least one demonstration per task."""
    episodes = context.config.collect.num_episodes
    tasks = len(context.config.env.tasks)
    if episodes < tasks:
        message = f"{episodes} demonstrations can't cover {tasks} tasks"
        hint = f"set it to a multiple of {tasks}"
        yield Finding("collect.num_episodes", message, hint, f"at least {tasks}", others=("env.tasks",))


@rule("sft.random_shift_px", "env.cameras")
def shifts_stay_in_the_picture(context: Context) -> Iterator[Finding]:
    """Random shifts leave most of the image visible."""
    shift = context.config.sft.random_shift_px
    side = min(min(camera.height, camera.width) for camera in context.config.env.cameras)
    if 2 * shift > side:
        message = f"shifts of up to {shift} pixels move most of an image of {side} pixels out of sight"
        hint = f"set it to {max(1, side // 16)}"
        yield Finding("sft.random_shift_px", message, hint, f"0 to {side // 2}", others=("env.cameras",))


@note("model.warm_start")
def recipes_begin_with_other_stages(context: Context) -> Iterator[Finding]:
    """Training alone skips the earlier stages of a recipe."""
    stages = context.config.recipe.stages
    name = context.choices.get("experiment")
    given = ("model.warm_start", "model.model_path", "algorithm.off_policy.demos")
    if context.verb == "train" and name and stages[:1] not in ((), ("rl",)) and not any(map(context.by_user, given)):
        message = f"{name} is a recipe: training alone skips {', '.join(s for s in stages if s != 'rl')}"
        yield Finding("experiment", message, f"all stages: `embodrl run experiment={name}`")


@note("runner")
def intervals_are_reached(context: Context) -> Iterator[Finding]:
    """Intervals are no longer than the run."""
    runner = context.config.runner
    for key, interval in (("eval_interval", runner.eval_interval), ("save_interval", runner.save_interval)):
        if interval > runner.max_iterations and context.by_user(f"runner.{key}"):
            message = f"{interval} is longer than the run of {runner.max_iterations} iterations, so only its end counts"
            yield Finding(f"runner.{key}", message, f"set it to at most {runner.max_iterations}")


@note("runner.max_staleness", "algorithm.decoupled")
def stale_data_is_corrected(context: Context) -> Iterator[Finding]:
    """Stale data need a correction, a correction needs stale data, and the run is long enough for the staleness."""
    staleness = context.config.runner.max_staleness
    decoupled = context.config.algorithm.decoupled.enabled
    if staleness > 1 and not decoupled:
        message = f"actions may be {staleness} updates old, but the loss clips against the behaviour policy"
        yield Finding("runner.max_staleness", message, "consider algorithm.decoupled.enabled=true")
    last = context.config.runner.max_iterations - 1
    if staleness > last:
        message = f"a run of {last + 1} iterations can get {last} ahead at most"
        yield Finding("runner.max_staleness", message, f"set it to at most {last}, or raise runner.max_iterations")
    if staleness == 0 and decoupled and context.by_user("algorithm.decoupled.enabled"):
        message = "has no effect on learning: with runner.max_staleness 0 no data are stale"
        yield Finding("algorithm.decoupled.enabled", message, "leave it out, or set runner.max_staleness")


@note("runner.eval_interval", "env.eval", "env.video")
def evaluation_happens(context: Context) -> Iterator[Finding]:
    """The last iteration is always evaluated and recorded; without other evaluations every_eval has no effect."""
    runner = context.config.runner
    only_the_last = runner.eval_interval == 0 and not runner.eval_at_start
    if only_the_last and context.config.env.video.enabled and context.by_user("env.video.every_eval"):
        message = "has no effect: with runner.eval_interval 0 only the last iteration is evaluated"
        yield Finding("env.video.every_eval", message, "leave it out, or set runner.eval_interval")


@rule("runner.stop_evaluations", "runner.eval_interval", "runner.max_iterations", "runner.stop_at_success")
def early_stop_can_happen(context: Context) -> Iterator[Finding]:
    """There are enough evaluations for early stopping."""
    runner = context.config.runner
    if runner.stop_at_success is None:
        return
    interval = runner.eval_interval or runner.max_iterations
    count = -(-runner.max_iterations // interval)
    if count < runner.stop_evaluations:
        message = f"{runner.stop_evaluations} evaluations have to reach it, but the run has {count} after updates"
        hint = "lower runner.eval_interval or runner.stop_evaluations, or raise runner.max_iterations"
        others = ("runner.eval_interval", "runner.max_iterations")
        yield Finding("runner.stop_evaluations", message, hint, f"1 to {count}", others=others)


@rule("runner.eval_async", "rollout.backend", "env.env_type", "env.num_processes")
def evaluations_beside_can_run(context: Context) -> Iterator[Finding]:
    """Asynchronous evaluation is one process with native inference and the simulators of a rollout process."""
    config = context.config
    key = "runner.eval_async"
    if not config.runner.eval_async:
        return
    if config.rollout.backend != "native":
        message = (
            f"is true, but rollout.backend is '{config.rollout.backend}': the evaluation process needs native inference"
        )
        yield Finding(key, message, "set it to false, or rollout=native", "false", others=("rollout.backend",))
    batched = ENVS.entry(config.env.env_type).batched_by
    places = context.solution.places.get("rollout", ())
    share = config.env.num_processes // max(1, len(places))
    if batched is not None and getattr(config.env, batched[0]) == batched[1] and share > 1:
        message = f"is true, and its {share} simulators ({batched[0]}={batched[1]}) would share one GPU"
        hint = "set it to false, or place a rollout process next to each simulator"
        yield Finding(key, message, hint, "false", others=("env.num_processes",))


@note("runner.eval_async", "runner.eval_interval", "runner.max_iterations", "runner.eval_at_start")
def evaluations_beside_overlap(context: Context) -> Iterator[Finding]:
    """The last evaluation blocks the run, so it does not overlap with training."""
    runner = context.config.runner
    only_the_last = runner.eval_interval in (0, runner.max_iterations) and not runner.eval_at_start
    if runner.eval_async and only_the_last and context.by_user("runner.eval_async"):
        message = "saves no time: only the last iteration is evaluated, and the run waits for it"
        yield Finding("runner.eval_async", message, "leave it out, or set runner.eval_interval")


@note("collect")
def noise_is_noisy(context: Context) -> Iterator[Finding]:
    """Noise needs both its parts."""
    collect = context.config.collect
    for key, other, idle in (
        ("noise_std", "noise_fraction", collect.noise_fraction == 0),
        ("noise_fraction", "noise_std", collect.noise_std == 0),
    ):
        if idle and context.by_user(f"collect.{key}") and getattr(collect, key) > 0:
            yield Finding(f"collect.{key}", f"has no effect: collect.{other} is 0", "leave it out")


@rule("collect.min_speed", "collect.max_speed")
def speeds_are_ordered(context: Context) -> Iterator[Finding]:
    """The minimum speed of demonstrations does not exceed the maximum."""
    collect = context.config.collect
    if collect.min_speed > collect.max_speed:
        message = f"{collect.min_speed} is above collect.max_speed = {collect.max_speed}"
        hint = "set it to collect.max_speed, for demonstrations of one speed"
        allowed = f"above 0, up to {collect.max_speed}"
        yield Finding("collect.min_speed", message, hint, allowed, others=("collect.max_speed",))
