"""Demonstrations."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, note, path_kind, rule
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import ENVS

STATISTICS = ("auto", "checkpoint", "data")


@rule("env.env_type", "env.tasks", "algorithm.loss_type", "algorithm.dagger.expert")
def experts_show_the_tasks(context: Context) -> Iterator[Finding]:
    """Collection, and DAgger and interventions without a policy as expert, need a scripted one for every task."""
    env = context.config.env
    spec = context.simulator
    asks = context.loss.imitates and context.verb != "store"  # which imitates by itself
    off_policy = context.config.algorithm.off_policy
    asks = asks or (off_policy.interventions and off_policy.intervention_device is None)
    asks = asks and context.config.algorithm.dagger.expert is None
    if not (context.collecting or asks) or spec is None or spec.expert_tasks is None:
        return
    shown = spec.expert_tasks
    if not shown:
        there_are = [
            f"{other.name} ({', '.join(other.expert_tasks or ()) or other.experts})"
            for other in ENVS.all()
            if other.experts and other.expert_tasks != ()
        ]
        hint = spec.demonstrations or "choose an environment that has experts"
        yield Finding("env.env_type", f"{env.env_type} has no scripted experts", hint, ", ".join(there_are))
    elif lacking := [task for task in env.tasks if task not in shown]:
        message = f"no scripted expert for {', '.join(lacking)}"
        yield Finding("env.tasks", message, "choose tasks that have one", ", ".join(shown))


@note("sft", "algorithm.off_policy.demos")
def layout_of_data_that_is_not_read(context: Context) -> Iterator[Finding]:
    """Settings of the dataset layout have no effect in a run without a dataset."""
    if context.verb not in ("train", "plan") or context.config.algorithm.off_policy.demos is not None:
        return
    for key in ("sft.keys", "sft.cameras", "sft.check_robot"):
        if context.by_user(key):
            message = "has no effect: the run reads no demonstrations"
            yield Finding(key, message, "leave it out", others=("algorithm.off_policy.demos",))


@rule("collect.format", "collect.fps", "collect.video_crf")
def raw_demonstrations_have_no_videos(context: Context) -> Iterator[Finding]:
    """Format raw has neither a frame rate nor compressed videos."""
    if context.config.collect.format != "raw":
        return
    for key in ("collect.fps", "collect.video_crf"):
        if context.by_user(key):
            message = f"{key} belongs to LeRobot datasets, and collect.format is raw"
            yield Finding(key, message, "leave it out, or set collect.format=lerobot", others=("collect.format",))


@rule("sft.further_data", "sft.data_weights")
def every_dataset_has_a_weight(context: Context) -> Iterator[Finding]:
    """Datasets to mix are directories on this machine, and there is one weight for each."""
    sft = context.config.sft
    for directory in sft.further_data:
        if directory not in context.made_before and path_kind(directory) != "directory":
            hint = "correct the path; `embodrl fetch` gets datasets from the hub"
            yield Finding("sft.further_data", f"no directory '{directory}'", hint, "directories of datasets")
    count = 1 + len(sft.further_data)
    if sft.further_data and sft.data_weights is not None and len(sft.data_weights) != count:
        message = f"{len(sft.data_weights)} weights for {count} datasets"
        hint = "give one for sft.data_dir and one for each of sft.further_data, in this order"
        yield Finding("sft.data_weights", message, hint, f"{count} numbers above 0", others=("sft.further_data",))


@rule("sft.cameras", "env.cameras")
def a_camera_of_the_data_for_each_of_the_policy(context: Context) -> Iterator[Finding]:
    """sft.cameras names one camera for each of env.cameras."""
    chosen = context.config.sft.cameras
    cameras = context.config.env.cameras
    if chosen is not None and len(chosen) != len(cameras):
        names = ", ".join(camera.name for camera in cameras)
        message = f"{len(chosen)} cameras are named, but env.cameras has {len(cameras)} ({names})"
        yield Finding("sft.cameras", message, "name one for each, in the same order", others=("env.cameras",))


@rule("env.env_type", "sft.eval_interval")
def there_is_a_simulator(context: Context) -> Iterator[Finding]:
    """Only `embodrl sft` (without evaluations) and `embodrl serve` run without a simulator."""
    config = context.config
    spec = context.simulator
    if spec is None or spec.simulates or context.verb in (None, "serve"):
        return
    hint = "name a simulator (env=NAME, see `embodrl list envs`)"
    if context.verb != "sft":
        message = f"`embodrl {context.verb}` needs a simulator, and {spec.name} is none"
        offline = "compare actions with `embodrl data check DATA --policy RUN/policy`, or "
        instead = f"{offline if context.verb == 'eval' else ''}{hint}; {spec.name} is for `embodrl sft`"
        yield Finding("env.env_type", message, instead)
    elif config.sft.eval_interval:
        message = f"evaluations need a simulator, and env.env_type {spec.name} is none"
        yield Finding("sft.eval_interval", message, f"set it to 0, or {hint}", "0", others=("env.env_type",))


@rule("sft.stats", "model.stats_path")
def statistics_exist(context: Context) -> Iterator[Finding]:
    """Statistics come from a single source, which exists."""
    chosen = context.config.sft.stats
    given = context.config.model.stats_path
    allowed = f"{', '.join(STATISTICS)}, or an existing file"
    if chosen not in STATISTICS and path_kind(chosen) != "file":
        near = nearest(chosen, list(STATISTICS))
        hint = f"write sft.stats={near}" if is_misspelt(chosen, near) else "`embodrl data stats` writes such a file"
        yield Finding("sft.stats", f"there is no file '{chosen}'", hint, allowed, near)
    if given is not None and path_kind(given) != "file":
        hint = "`embodrl data stats` writes such a file; null uses the checkpoint's"
        yield Finding("model.stats_path", f"there is no file '{given}'", hint, "an existing file, or null")
    elif given is not None and chosen != "auto":
        message = f"is {chosen}, but model.stats_path names other statistics"
        yield Finding("sft.stats", message, "set only one of the two", "auto", others=("model.stats_path",))
