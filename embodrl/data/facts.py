"""Self-description of a dataset of demonstrations: robot, rate, cameras and sizes. Reads no frames; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embodrl.data import lerobot as layout
from embodrl.data.demos import HINT, damaged
from embodrl.errors import EmbodrlError, FileDamagedError, UsageError
from embodrl.fields import read_fields
from embodrl.hub import DATASET_FACTS, cached, parse_dataset
from embodrl.storage.integrity import check_checksums
from embodrl.storage.tensor_files import open_tensors

RAW_INDEX = "index.json"
LARGEST_SIDE = 256
"""In pixels: larger images are downscaled at loading, unless ``env.cameras`` says otherwise."""


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about a dataset.

    Attributes:
        cameras: name -> height and width in pixels.
        state_dim: 0 without a state.
        fps: frames per second; None if unknown.
        robot_type: as named by the dataset's writer; None if unknown.
    """

    cameras: dict[str, tuple[int, int]]
    action_dim: int
    state_dim: int
    fps: float | None
    robot_type: str | None

    def env_cameras(self, chosen: list[str] | None) -> list[dict[str, object]]:
        """Return ``env.cameras``: the chosen cameras (by default all) at the size of the first, at most 256 pixels."""
        names = list(self.cameras) if chosen is None else chosen
        first = next((name for name in names if name in self.cameras), None)
        height, width = self.cameras[first] if first is not None else (LARGEST_SIDE, LARGEST_SIDE)
        scale = min(1.0, LARGEST_SIDE / max(height, width))
        size = {"height": max(1, round(height * scale)), "width": max(1, round(width * scale))}
        return [{"name": name, **size} for name in names]


def data_directory(data_dir: str) -> Path:
    """Return the directory of ``sft.data_dir``: a path, or a dataset in the hub's cache. Downloads nothing."""
    name = parse_dataset(data_dir)
    found = None if name is None else cached(name, DATASET_FACTS)
    return Path(data_dir).expanduser() if found is None else found


def missing(directory: Path) -> EmbodrlError:
    """Return the error for a directory without demonstrations."""
    if directory.is_dir():
        problem = f"{directory} holds no demonstrations"
        hint = "give the directory that holds meta/ or index.json"
    else:
        problem = f"{directory} does not exist"
        hint = "correct the path"
    collect = f"`embodrl collect env=NAME collect.output_dir={directory}` collects demonstrations"
    return UsageError(problem, f"{hint}; {collect}", code="dataset-missing")


def read_facts(directory: Path, keys: Mapping[str, str] | None = None) -> DatasetFacts:
    """Return the facts of a LeRobot dataset (with ``sft.keys``) or a ``raw`` dataset.

    Raises EmbodrlError if the dataset is missing, damaged, or of an unsupported version.
    """
    if (directory / layout.INFO).parent.is_dir():
        from embodrl.data.lerobot_info import read_info

        check_checksums(directory, [layout.INFO])
        info = read_info(directory, keys)
        sizes = {name: feature.size for name, feature in info.features.items()}
        cameras = {name.removeprefix(layout.IMAGES): info.features[name].picture_size for name in info.cameras}
        state_dim = sizes.get(layout.STATE, 0)
        return DatasetFacts(cameras, sizes.get(layout.ACTION, 0), state_dim, info.fps, info.robot_type)
    if not (directory / RAW_INDEX).is_file():
        raise missing(directory)
    check_checksums(directory, [RAW_INDEX])
    return _raw_facts(directory)


def check_shard(path: Path) -> None:
    """Raise FileDamagedError if a file named by the index of a ``raw`` dataset is missing; either may be wrong."""
    if not path.is_file():
        raise damaged(path, f"it is missing, and {RAW_INDEX} names it")


def _raw_facts(directory: Path) -> DatasetFacts:
    index = read_fields(directory / RAW_INDEX, FileDamagedError, HINT)
    path = directory / Path(index.objects("episodes")[0].text("shard") if index.objects("episodes") else "none").name
    check_shard(path)
    try:
        with open_tensors(path, "np") as shard:
            shapes = {name: list(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
    except OSError as error:
        raise damaged(path, error) from error
    images = shapes.get("images", [0, 0, 0, 0, 3])
    cameras = {f"camera{number}": (images[2], images[3]) for number in range(images[1])}
    meta = index.fields("meta", {})
    return DatasetFacts(
        cameras, shapes.get("actions", [0, 0])[1], shapes.get("state", [0, 0])[1], None, meta.text("robot_type", None)
    )
