"""Demonstrations."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, Finding, rule
from embodrl.specs import ENVS


@rule("env.env_type", "env.tasks")
def experts_show_the_tasks(context: Context) -> Iterator[Finding]:
    """For `embodrl collect`: there is a scripted expert for every task."""
    env, spec = context.config.env, context.simulator
    if not context.collecting or spec is None or spec.expert_tasks is None:
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
        message = f"there is no scripted expert for {', '.join(lacking)}"
        yield Finding("env.tasks", message, "collect demonstrations of tasks that have one", ", ".join(shown))


@rule("collect.format", "collect.fps", "collect.video_crf")
def raw_demonstrations_have_no_videos(context: Context) -> Iterator[Finding]:
    """The format raw has neither a frame rate nor compressed videos."""
    if context.config.collect.format != "raw":
        return
    for key in ("collect.fps", "collect.video_crf"):
        if context.by_user(key):
            message = f"{key} belongs to LeRobot data sets, and collect.format is raw"
            yield Finding(key, message, "leave it out, or set collect.format=lerobot", others=("collect.format",))


@rule("sft.cameras", "env.cameras")
def a_camera_of_the_data_for_each_of_the_policy(context: Context) -> Iterator[Finding]:
    """sft.cameras names one camera for each of env.cameras."""
    chosen, cameras = context.config.sft.cameras, context.config.env.cameras
    if chosen is not None and len(chosen) != len(cameras):
        names = ", ".join(camera.name for camera in cameras)
        message = f"{len(chosen)} cameras are named, and env.cameras has {len(cameras)} ({names})"
        yield Finding("sft.cameras", message, "name one for each, in that order", others=("env.cameras",))
