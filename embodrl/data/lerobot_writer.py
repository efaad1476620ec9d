"""Writer of LeRobot datasets, v3.0.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodrl.data import lerobot as layout
from embodrl.data.columns import Array
from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import EXECUTED, DemoEpisode
from embodrl.data.lerobot_stats import PixelStats, vector_stats
from embodrl.data.parquet import Table
from embodrl.data.video_file import CODEC, VideoEncoder, pixel_format
from embodrl.errors import EmbodrlError
from embodrl.fields import Fields
from embodrl.storage.json_file import write_json_file

Row = dict[str, object]


@dataclass
class _OpenFile:
    """The episodes of the data and video files being written.

    Attributes:
        start: first frame in them.
        columns: columns of each episode.
        rows: row of each episode in ``meta/episodes``.
        encoders: by video key.
        num_bytes: of all columns.
    """

    start: int = 0
    columns: list[dict[str, Array]] = field(default_factory=list[dict[str, Array]])
    rows: list[Row] = field(default_factory=list[Row])
    encoders: dict[str, VideoEncoder] = field(default_factory=dict[str, VideoEncoder])
    num_bytes: int = 0

    def is_full(self) -> bool:
        """Whether a file has reached the size at which the next one begins."""
        sizes = (encoder.path.stat().st_size for encoder in self.encoders.values() if encoder.path.exists())
        videos_full = max(sizes, default=0) >= layout.VIDEO_FILE_MB * layout.MEGABYTE
        return videos_full or self.num_bytes >= layout.DATA_FILE_MB * layout.MEGABYTE


class LeRobotWriter(DatasetWriter):
    """Writes a LeRobot dataset; see ``DatasetWriter`` for further arguments and errors.

    Args:
        fps: frames per second, also an attribute; None until known, before the first episode.
        crf: quality of the videos; 0 is lossless.
        robot_type: free text, or None.

    Raises:
        MissingDependencyError: the extra ``datasets`` is not installed.
    """

    format = "lerobot"

    def __init__(
        self,
        directory: Path,
        cameras: Sequence[str],
        fps: int | None,
        crf: int = 0,
        robot_type: str | None = None,
        resume: bool = False,
    ) -> None:
        self._pa, self._pq, _ = layout.require("pyarrow", "pyarrow.parquet", "imageio_ffmpeg")
        self.keys = [layout.camera_key(name) for name in cameras]
        self._fps = fps
        self.crf = crf
        self.robot_type = robot_type
        self._file = 0
        self._open = _OpenFile()
        self._num_episodes = 0
        self._tasks: dict[str, int] = {}
        self._vectors: dict[str, list[Array]] = {}
        self._pixels: dict[str, PixelStats] = {key: PixelStats() for key in self.keys}
        self._features: dict[str, object] = {}
        super().__init__(directory, resume)

    @property
    def fps(self) -> int:
        """Frames per second."""
        assert self._fps is not None, "set before the first episode"
        return self._fps

    @fps.setter
    def fps(self, value: int) -> None:
        self._fps = value

    def _add(self, episode: DemoEpisode) -> None:
        features = self._describe(episode)
        if features != (self._features or features):
            raise EmbodrlError(
                f"an episode for {self.directory} has other features than the earlier ones: {features}",
                "continue a collection with the settings it started with",
                code="dataset-other-features",
            )
        self._features = features
        length = len(episode.actions)
        number = self._num_episodes
        start = self.num_frames
        columns = self._columns(episode, number)
        for name, values in columns.items():
            self._vectors.setdefault(name, []).append(values)
        self._open.columns.append(columns)
        self._open.num_bytes += sum(values.nbytes for values in columns.values())
        row: Row = {
            "episode_index": number,
            "tasks": [episode.instruction],
            "length": length,
            "dataset_from_index": start,
            "dataset_to_index": start + length,
            **self._place("data"),
            **self._place("meta/episodes"),
            layout.OWN_TASK: episode.task,
            layout.OWN_SEED: episode.seed,
            layout.OWN_SUCCESS: episode.success,
        }
        row |= {} if episode.id is None else {layout.OWN_ID: episode.id}
        stats: dict[str, Mapping[str, object]] = {name: vector_stats(values) for name, values in columns.items()}
        for view, key in enumerate(self.keys):
            pixels = PixelStats()
            pixels.add(episode.images[:, view])
            self._pixels[key].merge(pixels)
            self._encoder(key, *episode.images.shape[2:4]).add(episode.images[:, view])
            stats[key] = pixels.stats()
            row |= self._place(f"videos/{key}")
            row[f"videos/{key}/from_timestamp"] = (start - self._open.start) / self.fps
            row[f"videos/{key}/to_timestamp"] = (start - self._open.start + length) / self.fps
        for name, values in stats.items():
            row |= {f"stats/{name}/{statistic}": value for statistic, value in values.items()}
        self._open.rows.append(row)
        self._num_episodes += 1
        self.num_frames += length
        if self._open.is_full():
            self._finish_file()

    def _columns(self, episode: DemoEpisode, number: int) -> dict[str, Array]:
        """Return one array per feature other than images, ``[N]`` or ``[N,D]``."""
        length = len(episode.actions)
        frames = np.arange(length)
        task = self._tasks.setdefault(episode.instruction, len(self._tasks))
        columns: dict[str, Array] = {layout.ACTION: episode.actions.astype(np.float32)}
        if episode.state.shape[1]:
            columns[layout.STATE] = episode.state.astype(np.float32)
        columns |= episode.columns()
        return columns | {
            "timestamp": (frames / self.fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": self.num_frames + frames,
            "task_index": np.full(length, task),
        }

    def _describe(self, episode: DemoEpisode) -> dict[str, object]:
        assert episode.images.shape[1] == len(self.keys), "one image per camera"
        height, width = episode.images.shape[2:4]
        video = {
            "video.height": height,
            "video.width": width,
            "video.channels": 3,
            "video.codec": CODEC,
            "video.pix_fmt": pixel_format(self.crf),
            "video.is_depth_map": False,
            "video.fps": self.fps,
            "has_audio": False,
        }
        camera = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": video,
        }
        features: dict[str, object] = dict.fromkeys(self.keys, camera)
        vectors = {layout.STATE: episode.state.shape[1], layout.ACTION: episode.actions.shape[1]}
        features |= {
            name: {"dtype": "float32", "shape": [size], "names": None} for name, size in vectors.items() if size
        }
        features |= {
            name: {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": None}
            for name, values in episode.columns().items()
        }
        return features | {
            name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in layout.COUNTERS.items()
        }

    def _place(self, kind: str) -> dict[str, int]:
        chunk, index = divmod(self._file, layout.CHUNKS_SIZE)
        return {f"{kind}/chunk_index": chunk, f"{kind}/file_index": index}

    def _path(self, template: str, **names: str) -> Path:
        chunk, index = divmod(self._file, layout.CHUNKS_SIZE)
        path = self.staging / template.format(chunk_index=chunk, file_index=index, **names)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _encoder(self, key: str, height: int, width: int) -> VideoEncoder:
        if key not in self._open.encoders:
            path = self._path(layout.VIDEO_PATH, video_key=key)
            self._open.encoders[key] = VideoEncoder(path, height, width, self.fps, self.crf)
        return self._open.encoders[key]

    def _finish_file(self) -> None:
        written = self._open
        if not written.columns:
            return
        columns = {name: np.concatenate([each[name] for each in written.columns]) for name in written.columns[0]}
        table = self._pa.table({name: self._array(values) for name, values in columns.items()})
        self._pq.write_table(table, self._path(layout.DATA_PATH), write_page_checksum=True)
        episodes = self._pa.Table.from_pylist(written.rows)
        self._pq.write_table(episodes, self._path(layout.EPISODES_PATH), write_page_checksum=True)
        for encoder in written.encoders.values():
            encoder.close()
        self._file += 1
        self._open = _OpenFile(start=self.num_frames)

    def _array(self, values: Array) -> Any:
        """Return a column: numbers, or fixed-size lists for features with several dimensions."""
        if values.ndim == 1 or values.shape[1] == 1:
            return self._pa.array(values.ravel())
        return self._pa.FixedSizeListArray.from_arrays(self._pa.array(values.ravel()), values.shape[1])

    def _flush(self) -> dict[str, object]:
        self._finish_file()
        return {
            "file": self._file,
            "episodes": self._num_episodes,
            "frames": self.num_frames,
            "fps": self.fps,
            "features": self._features,
            "tasks": self._tasks,
            "pixels": {key: {"frames": p.frames, "counts": p.counts.tolist()} for key, p in self._pixels.items()},
        }

    def _restore(self, state: Fields) -> None:
        self._file = state.integer("file")
        self._num_episodes = state.integer("episodes")
        self.num_frames = state.integer("frames")
        self._open = _OpenFile(start=self.num_frames)
        self._fps = state.integer("fps", low=1)
        self._features = dict(state.fields("features").content)
        tasks = state.fields("tasks")
        self._tasks = {name: tasks.integer(name) for name in tasks}
        pixels = state.fields("pixels")
        if set(pixels) != set(self.keys):
            state.refuse(f"it has the cameras {', '.join(pixels)}, not {', '.join(self.keys)}")
        for key in self.keys:
            kept = pixels.fields(key)
            counts = np.array(kept.items("counts", 3), np.int64)
            self._pixels[key] = PixelStats(counts, kept.integer("frames"))
        features = state.fields("features")
        for path in sorted((self.staging / "data").glob("*/*.parquet")):
            table = Table(path)
            for name in table.names:
                feature = features.fields(name)
                size = int(feature.numbers("shape", 1)[0])
                is_whole = feature.text("dtype") == "int64" and size == 1
                values: Array = table.integers(name) if is_whole else table.vectors(name, size)
                is_flat = size == 1 and name not in (layout.ACTION, layout.STATE, EXECUTED)
                self._vectors.setdefault(name, []).append(values.ravel() if is_flat else values)

    def _write_meta(self, meta: Mapping[str, object]) -> None:
        self._pq.write_table(self._task_table(), self.staging / layout.TASKS)
        stats: dict[str, Mapping[str, object]] = {key: pixels.stats() for key, pixels in self._pixels.items()}
        stats |= {name: vector_stats(np.concatenate(parts)) for name, parts in self._vectors.items()}
        info = {
            "codebase_version": layout.VERSION,
            "robot_type": self.robot_type,
            "total_episodes": self._num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": layout.CHUNKS_SIZE,
            "data_files_size_in_mb": layout.DATA_FILE_MB,
            "video_files_size_in_mb": layout.VIDEO_FILE_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{self._num_episodes}"},
            "data_path": layout.DATA_PATH,
            "video_path": layout.VIDEO_PATH,
            "features": self._features,
        }
        for name, content in ((layout.STATS, stats), (layout.OWN_META, dict(meta)), (layout.INFO, info)):
            write_json_file(self.staging / name, content)

    def _task_table(self) -> Any:
        """Return the instructions as the index of a pandas table, by which readers look them up."""
        table = self._pa.table({"task_index": list(self._tasks.values()), "task": list(self._tasks)})
        column = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
        text = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
        pandas = {
            "index_columns": ["task"],
            "column_indexes": [{"name": None, "field_name": None, **text, "metadata": {"encoding": "UTF-8"}}],
            "columns": [
                {"name": "task_index", "field_name": "task_index", **column},
                {"name": "task", "field_name": "task", **text},
            ],
            "creator": {"library": "pyarrow", "version": self._pa.__version__},
            "pandas_version": "2.0.0",
        }
        return table.replace_schema_metadata({"pandas": json.dumps(pandas)})

    def _stop(self) -> None:
        for encoder in self._open.encoders.values():
            encoder.abort()
