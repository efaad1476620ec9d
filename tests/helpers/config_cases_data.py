"""Wrong configurations of demonstrations; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

DATA = [
    Wrong("format that is not known", "collect.format", "lerobot", ("collect.format=lerobt",)),
    Wrong("videos of raw ones", "collect.video_crf", "format is raw", ("collect.video_crf=6", "collect.format=raw")),
    Wrong("rate of raw pictures", "collect.fps", "format is raw", ("collect.fps=10", "collect.format=raw")),
    Wrong("compression beyond all", "collect.video_crf", "51", ("collect.video_crf=52",)),
    Wrong("cameras too many", "sft.cameras", "env.cameras has 1", ("sft.cameras=[top,wrist]",)),
]
