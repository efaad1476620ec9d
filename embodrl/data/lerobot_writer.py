"""Writing a LeRobot data set, v3.0.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodrl.data import lerobot as layout
from embodrl.data.columns import Array
from embodrl.data.demos import ELSEWHERE, Episode
from embodrl.data.lerobot_stats import PixelStats, vector_stats
from embodrl.data.video_file import CODEC, VideoEncoder, pixel_format
from embodrl.errors import EmbodrlError
from embodrl.storage.atomic import output_error, publish_directory, sync_tree

Row = dict[str, Any]


class LeRobotWriter:
    """Writes episodes into a hidden directory that ``close`` renames to its final name.

    Args:
        directory: does not exist yet, or is empty.
        cameras: their V names.
        fps: frames per second, as the attribute ``fps``; None until it is known, before the first episode.
        crf: of the videos; 0 is lossless.
        robot_type: free text, or None.

    Raises:
        MissingDependencyError: the extra ``datasets`` is not installed.
        EmbodrlError: the directory is not empty, or the rest of a collection that was killed lies beside it.
        OutputError: it can't be written; later, the disk is full.
    """

    def __init__(
        self, directory: Path, cameras: Sequence[str], fps: int | None, crf: int = 0, robot_type: str | None = None
    ) -> None:
        self._pa, self._pq, _ = layout.require("pyarrow", "pyarrow.parquet", "imageio_ffmpeg")
        self.directory = directory.absolute()
        self.staging = self.directory.with_name(f".{self.directory.name}.partial")
        if directory.is_dir() and any(directory.iterdir()):
            raise EmbodrlError(f"{directory} holds something already", "choose another, new directory")
        if self.staging.exists():
            raise EmbodrlError(
                f"{self.staging} is the rest of a collection that was killed, or of one that is under way",
                f"remove it (rm -r {self.staging}), or choose another directory",
            )
        self.keys = [layout.camera_key(name) for name in cameras]
        self._fps, self.crf, self.robot_type = fps, crf, robot_type
        self.num_frames = 0
        self._file = 0
        self._rows: list[Row] = []
        self._data_bytes = 0
        self._encoders: dict[str, VideoEncoder] = {}
        self._file_start = 0
        self._episodes: list[Row] = []
        self._tasks: dict[str, int] = {}
        self._vectors: dict[str, list[Array]] = {}
        self._pixels: dict[str, PixelStats] = {key: PixelStats() for key in self.keys}
        self._features: dict[str, Any] = {}
        self._aborted = False
        with self._output_errors():
            self.staging.mkdir(parents=True)
            self.staging.rmdir()

    @property
    def fps(self) -> int:
        """Frames per second."""
        assert self._fps is not None, "set before the first episode"
        return self._fps

    @fps.setter
    def fps(self, value: int) -> None:
        self._fps = value

    def add(self, episode: Episode) -> None:
        """Add an episode."""
        with self._output_errors():
            self._add(episode)

    def _add(self, episode: Episode) -> None:
        assert episode.images.shape[1] == len(self.keys), "one picture a camera"
        if not self._features:
            self._features = self._describe(episode)
        length, number = len(episode.actions), len(self._episodes)
        columns = self._columns(episode, number)
        for name, values in columns.items():
            self._vectors.setdefault(name, []).append(values)
        self._rows.append(columns)
        self._data_bytes += sum(values.nbytes for values in columns.values())
        start = self.num_frames
        row: Row = {
            "episode_index": number,
            "tasks": [episode.instruction],
            "length": length,
            "dataset_from_index": start,
            "dataset_to_index": start + length,
            **self._place("data", self._file),
            **self._place("meta/episodes", 0),
            layout.OWN_TASK: episode.task,
            layout.OWN_SEED: episode.seed,
            layout.OWN_SUCCESS: episode.success,
        }
        stats: dict[str, Any] = {name: vector_stats(values) for name, values in columns.items()}
        for view, key in enumerate(self.keys):
            pixels = PixelStats()
            pixels.add(episode.images[:, view])
            self._pixels[key].merge(pixels)
            self._encoder(key, *episode.images.shape[2:4]).add(episode.images[:, view])
            stats[key] = pixels.stats()
            row |= self._place(f"videos/{key}", self._file)
            row[f"videos/{key}/from_timestamp"] = (start - self._file_start) / self.fps
            row[f"videos/{key}/to_timestamp"] = (start - self._file_start + length) / self.fps
        for name, values in stats.items():
            row |= {f"stats/{name}/{statistic}": value for statistic, value in values.items()}
        self._episodes.append(row)
        self.num_frames += length
        if self._is_full():
            self._finish_file()

    def _columns(self, episode: Episode, number: int) -> dict[str, Array]:
        """Return one array a feature that is no picture, ``[N]`` or ``[N,D]``."""
        length = len(episode.actions)
        frames = np.arange(length)
        task = self._tasks.setdefault(episode.instruction, len(self._tasks))
        columns: dict[str, Array] = {layout.ACTION: episode.actions.astype(np.float32)}
        if episode.state.shape[1]:
            columns[layout.STATE] = episode.state.astype(np.float32)
        return columns | {
            "timestamp": (frames / self.fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": self.num_frames + frames,
            "task_index": np.full(length, task),
        }

    def _describe(self, episode: Episode) -> dict[str, Any]:
        """Return the features as info.json has them."""
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
        features: dict[str, Any] = dict.fromkeys(self.keys, camera)
        vectors = {layout.STATE: episode.state.shape[1], layout.ACTION: episode.actions.shape[1]}
        features |= {
            name: {"dtype": "float32", "shape": [size], "names": None} for name, size in vectors.items() if size
        }
        return features | {
            name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in layout.COUNTERS.items()
        }

    def _place(self, kind: str, file: int) -> dict[str, int]:
        chunk, index = divmod(file, layout.CHUNKS_SIZE)
        return {f"{kind}/chunk_index": chunk, f"{kind}/file_index": index}

    def _path(self, template: str, file: int, **names: str) -> Path:
        chunk, index = divmod(file, layout.CHUNKS_SIZE)
        path = self.staging / template.format(chunk_index=chunk, file_index=index, **names)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _encoder(self, key: str, height: int, width: int) -> VideoEncoder:
        if key not in self._encoders:
            path = self._path(layout.VIDEO_PATH, self._file, video_key=key)
            self._encoders[key] = VideoEncoder(path, height, width, self.fps, self.crf)
        return self._encoders[key]

    def _is_full(self) -> bool:
        """One of the present files has reached the size at which the next one begins."""
        sizes = (encoder.path.stat().st_size for encoder in self._encoders.values() if encoder.path.exists())
        videos_full = max(sizes, default=0) >= layout.VIDEO_FILE_MB * layout.MEGABYTE
        return videos_full or self._data_bytes >= layout.DATA_FILE_MB * layout.MEGABYTE

    def _finish_file(self) -> None:
        if not self._rows:
            return
        columns = {name: np.concatenate([row[name] for row in self._rows]) for name in self._rows[0]}
        table = self._pa.table({name: self._array(values) for name, values in columns.items()})
        self._pq.write_table(table, self._path(layout.DATA_PATH, self._file))
        for encoder in self._encoders.values():
            encoder.close()
        self._rows, self._encoders, self._data_bytes = [], {}, 0
        self._file += 1
        self._file_start = self.num_frames

    def _array(self, values: Array) -> Any:
        """Return a column: numbers, or lists of a fixed length where a feature has several dimensions."""
        if values.ndim == 1 or values.shape[1] == 1:
            return self._pa.array(values.ravel())
        return self._pa.FixedSizeListArray.from_arrays(self._pa.array(values.ravel()), values.shape[1])

    def close(self, meta: Mapping[str, Any]) -> None:
        """Write what is left, statistics and ``meta`` (how it was made), and give the directory its name.

        After a failure, which ``add`` has reported, there is nothing to write.
        """
        if self._aborted:
            return
        with self._output_errors():
            self._finish_file()
            self._write_meta(meta)
            sync_tree(self.staging)
            publish_directory(self.staging, self.directory)

    @contextlib.contextmanager
    def _output_errors(self) -> Iterator[None]:
        """Leave nothing behind when the disk is full or failing."""
        try:
            yield
        except OSError as error:
            self.abort()
            what = f"demonstrations can't be written to {self.directory}"
            raise output_error(what, self.directory, error, ELSEWHERE) from error

    def _write_meta(self, meta: Mapping[str, Any]) -> None:
        self._pq.write_table(self._pa.Table.from_pylist(self._episodes), self._path(layout.EPISODES_PATH, 0))
        self._pq.write_table(self._task_table(), self.staging / layout.TASKS)
        stats: dict[str, Any] = {key: pixels.stats() for key, pixels in self._pixels.items()}
        stats |= {name: vector_stats(np.concatenate(parts)) for name, parts in self._vectors.items()}
        info = {
            "codebase_version": layout.VERSION,
            "robot_type": self.robot_type,
            "total_episodes": len(self._episodes),
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": layout.CHUNKS_SIZE,
            "data_files_size_in_mb": layout.DATA_FILE_MB,
            "video_files_size_in_mb": layout.VIDEO_FILE_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": layout.DATA_PATH,
            "video_path": layout.VIDEO_PATH,
            "features": self._features,
        }
        for name, content in ((layout.STATS, stats), (layout.OWN_META, dict(meta)), (layout.INFO, info)):
            text = json.dumps(content, indent=4, ensure_ascii=False, allow_nan=False)
            (self.staging / name).write_text(text + "\n", encoding="utf-8")

    def _task_table(self) -> Any:
        """Return the instructions as pandas writes a table whose index they are: that is how they are looked up."""
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

    def abort(self) -> None:
        """Leave nothing behind."""
        self._aborted = True
        for encoder in self._encoders.values():
            encoder.abort()
        shutil.rmtree(self.staging, ignore_errors=True)
