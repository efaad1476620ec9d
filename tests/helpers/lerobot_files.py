"""Small LeRobot datasets as other software writes them, each changed in what a test is about.

Two episodes of 12 frames at 10 per second; frame i of episode e is of the colour (20 i + 5, 100 e, 7).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH, FPS = 12, 10
SIZE = (32, 48)
KEY = "observation.images."
Columns = dict[str, Any]


def pictures(episode: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.stack([np.full((*size, 3), (20 * i + 5, 100 * episode, 7), np.uint8) for i in range(LENGTH)])


def encode(path: Path, frames: np.ndarray, fps: float = FPS, rotation: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y"]
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    plain = path.with_suffix(".plain.mp4") if rotation else path
    codec = ["-c:v", "libx264rgb", "-qp", "0", "-bf", "0", "-threads", "1"]
    subprocess.run([*ffmpeg, *raw, *codec, str(plain)], input=frames.tobytes(), check=True)
    if rotation:
        turned = ["-display_rotation", str(rotation), "-i", str(plain), "-c", "copy", str(path)]
        subprocess.run([*ffmpeg, *turned], check=True)
        plain.unlink()


def columns_of(episode: int) -> Columns:
    actions = np.random.default_rng(episode).uniform(-1, 1, (LENGTH, 7)).astype(np.float32)
    state = np.c_[np.cumsum(actions, 0) * 0.05, np.zeros(LENGTH)].astype(np.float32)
    return {
        "action": list(actions),
        "observation.state": list(state),
        "timestamp": np.arange(LENGTH, dtype=np.float32) / FPS,
        "frame_index": np.arange(LENGTH),
        "episode_index": np.full(LENGTH, episode),
        "index": np.arange(LENGTH) + episode * LENGTH,
        "task_index": np.zeros(LENGTH, np.int64),
    }


def put_table(path: Path, columns: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)


def info_of(version: str, cameras: tuple[str, ...]) -> dict[str, Any]:
    picture = {"dtype": "video", "shape": [*SIZE, 3], "names": ["height", "width", "channels"]}
    features: dict[str, Any] = {
        "action": {"dtype": "float32", "shape": [7]},
        "observation.state": {"dtype": "float32", "shape": [8]},
        **{KEY + name: dict(picture) for name in cameras},
    }
    places = ("episode_chunk", "episode_{episode_index:06d}") if version != "v3.0" else ("chunk_index", "")
    at = f"chunk-{{{places[0]}:03d}}/" + (places[1] or "file-{file_index:03d}")
    totals = {"total_episodes": 2, "total_frames": 2 * LENGTH}
    videos = f"videos/chunk-{{{places[0]}:03d}}/{{video_key}}/{places[1]}.mp4"
    videos = videos if version != "v3.0" else f"videos/{{video_key}}/{at}.mp4"
    paths = {"data_path": f"data/{at}.parquet", "video_path": videos, "chunks_size": 1000}
    return {"codebase_version": version, "fps": FPS, "features": features, **totals, **paths}


def build(
    root: Path,
    *,
    version: str = "v2.1",
    cameras: tuple[str, ...] = ("top",),
    tasks: tuple[str, ...] = ("pick up the cup",),
    shoot: Callable[[int], tuple[np.ndarray, float]] = lambda episode: (pictures(episode), FPS),
    columns: Callable[[Columns], None] = lambda columns: None,
    info: Callable[[dict[str, Any]], None] = lambda info: None,
    episodes: Callable[[Columns], None] = lambda episodes: None,
    rotation: int = 0,
) -> Path:
    """Write a dataset: v2.1 with a file per episode, or v3.0 with the rows of all in one and their pictures too.

    Args:
        root: directory.
        version: of the format.
        cameras: that have files.
        tasks: instructions by task_index.
        shoot: pictures and rate of the video of an episode; in v3.0 these are joined.
        columns: changes those of an episode.
        info: changes meta/info.json.
        episodes: changes the columns of meta/episodes of v3.0.
        rotation: in degrees, that videos are displayed with.
    """
    content = info_of(version, cameras)
    keys = [KEY + name for name in cameras]
    rows = [columns_of(episode) for episode in range(2)]
    for each in rows:
        columns(each)
    shot = [shoot(episode) for episode in range(2)]
    if version == "v3.0":
        names = rows[0].keys()
        put_table(root / "data/chunk-000/file-000.parquet", {n: [*rows[0][n], *rows[1][n]] for n in names})
        for key in keys:
            path = root / f"videos/{key}/chunk-000/file-000.mp4"
            encode(path, np.concatenate([frames for frames, _ in shot]), shot[0][1], rotation)
        _put_episodes(root, keys, episodes)
        put_table(root / "meta/tasks.parquet", {"task_index": np.arange(len(tasks)), "task": list(tasks)})
    else:
        for number in range(2):
            put_table(root / f"data/chunk-000/episode_{number:06d}.parquet", rows[number])
            for key in keys:
                encode(root / f"videos/chunk-000/{key}/episode_{number:06d}.mp4", *shot[number], rotation)
        (root / "meta").mkdir()
        lines = [{"episode_index": number, "tasks": [tasks[0]], "length": LENGTH} for number in range(2)]
        (root / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = [{"task_index": place, "task": text} for place, text in enumerate(tasks)]
        (root / "meta/tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in words))
    info(content)
    (root / "meta/info.json").write_text(json.dumps(content))
    return root


def _put_episodes(root: Path, keys: list[str], change: Callable[[Columns], None]) -> None:
    table: Columns = {"episode_index": [0, 1], "length": [LENGTH, LENGTH]}
    for kind in ("data", *(f"videos/{key}" for key in keys)):
        table |= {f"{kind}/chunk_index": [0, 0], f"{kind}/file_index": [0, 0]}
    for key in keys:
        table[f"videos/{key}/from_timestamp"] = [0.0, LENGTH / FPS]
    change(table)
    put_table(root / "meta/episodes/chunk-000/file-000.parquet", table)
