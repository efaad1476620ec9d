"""Wrong configurations of demonstrations; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

DATA = [
    Wrong(
        "videos of raw ones",
        "collect.video_crf",
        "raw-demonstrations-have-no-videos",
        ("collect.video_crf=6", "collect.format=raw"),
    ),
    Wrong(
        "demonstrations whose slowest are the fastest",
        "collect.min_speed",
        "speeds-are-ordered",
        ("collect.min_speed=0.6", "collect.max_speed=0.5"),
    ),
    Wrong("statistics of a file that is not there", "sft.stats", "statistics-exist", ("sft.stats=dat",), names="data"),
    Wrong("statistics for a policy", "model.stats_path", "statistics-exist", ("model.stats_path=nothing.json",)),
    Wrong(
        "cameras too many", "sft.cameras", "a-camera-of-the-data-for-each-of-the-policy", ("sft.cameras=[top,wrist]",)
    ),
    Wrong(
        "data to mix that are not there",
        "sft.further_data",
        "every-dataset-has-a-weight",
        ("sft.further_data=[data/nothing]",),
        names="directory",
    ),
    Wrong(
        "a weight too few",
        "sft.data_weights",
        "every-dataset-has-a-weight",
        ("sft.data_weights=[1]", "sft.further_data=[/]"),
        names="2 numbers",
    ),
    Wrong("unknown axis", "axes", "axes-are-of-the-environment", ("axes=light,ligth",), names="light"),
    Wrong(
        "axis of other tasks",
        "axes",
        "axes-are-of-the-environment",
        ("axes=goal", "env.tasks=[StackCube-v1]"),
        names="PushCube",
    ),
    Wrong("axes of data", "axes", "axes-are-of-the-environment", ("axes=all", "env=dataset"), names="maniskill"),
    Wrong(
        "axes on a gpu",
        "axes",
        "axes-are-of-single-scenes",
        ("axes=all", "env.sim_backend=physx_cuda", "env.num_processes=1"),
    ),
]
