"""Converts RLDS datasets (TFRecord files of tensorflow_datasets) for `embodrl sft`.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions, D dimensions of a feature.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from embodrl.data.dataset_writer import DatasetWriter
from embodrl.data.demos import RECORDED, REWARDS, DemoEpisode, Outcomes, check_numbers, damaged, layout_error
from embodrl.errors import EmbodrlError
from embodrl.fields import read_fields
from embodrl.tools.converters.rlds_features import Chosen, RldsFeature, choose_features, read_features
from embodrl.tools.converters.tfrecord import Example, records

FEATURES = "features.json"
INFO = "dataset_info.json"
BLANK = 8
"""Maximum brightness range, of 255, of a blank image; JPEG adds some noise."""
MAX_BYTES = 2**33
"""Size limit of the images of an episode."""
_SHARD = re.compile(r"(?P<split>[^-.]+)\.tfrecord(-(?P<index>\d{5,})-of-(?P<count>\d{5,}))?$")


@dataclass(frozen=True)
class RldsChoice:
    """The user's selection.

    Attributes:
        cameras: image features, in this order; None for all colour images that are not blank.
        action, state: vector features to be joined; state None for ``observation/state``.
        split: split of the files; None for ``train``, or the only one.
    """

    cameras: tuple[str, ...] | None = None
    action: tuple[str, ...] = ("action",)
    state: tuple[str, ...] | None = None
    split: str | None = None
    instruction: str | None = None


class Rlds:
    """An RLDS dataset.

    Args:
        report: called with lines about omissions and progress.

    Raises:
        EmbodrlError: there is no such dataset, split or feature, or the cameras differ in size.
    """

    def __init__(self, source: Path, choice: RldsChoice, report: Callable[[str], None]) -> None:
        self.source = source
        self.choice = choice
        self.report = report
        if not (source / FEATURES).is_file():
            below = sorted(path.parent.relative_to(source) for path in source.glob(f"*/{FEATURES}"))
            hint = f"give {source / below[-1]}" if below else "give the folder of a version, with features.json"
            raise EmbodrlError(f"there is no {FEATURES} in {source}", hint, code="rlds-no-dataset")
        self.features = read_features(source / FEATURES)
        given = choice.instruction is not None
        path = source / FEATURES
        self.chosen = choose_features(path, self.features, choice.cameras, choice.action, choice.state, given)
        self.files = self._files()
        for note in self.chosen.notes:
            report(note)
        self.cameras = dict(self.chosen.cameras)
        if choice.cameras is None:
            self._drop_blank_cameras()
        sizes = {name: self.features[full].shape[:2] for name, full in self.cameras.items()}
        if len(set(sizes.values())) > 1:
            raise EmbodrlError(
                f"the cameras of {source} differ in size: {sizes}",
                "name cameras of one size with --cameras",
                code="dataset-camera-sizes",
            )

    def convert(self, make_writer: Callable[[], DatasetWriter]) -> tuple[int, int]:
        """Write all episodes; return how many episodes and frames.

        Raises:
            FileDamagedError: a record is damaged; names file and offset.
        """
        episodes = 0
        with make_writer() as writer:
            for path in self.files:
                before = episodes
                for example in self._examples(path):
                    for episode in self._episodes(example, episodes):
                        writer.add(episode)
                        episodes += 1
                self.report(f"{path.name}: {episodes - before} episodes")
            if not episodes:
                raise EmbodrlError(f"{self.source} holds no episodes", "give another split", code="dataset-empty")
            writer.close(
                {REWARDS: RECORDED, "source": [path.name for path in self.files], "cameras": list(self.cameras)}
            )
        return episodes, writer.num_frames

    # -- files ----------------------------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        splits: dict[str, list[Path]] = {}
        for path in sorted(self.source.iterdir()):
            if found := _SHARD.search(path.name):
                splits.setdefault(found["split"], []).append(path)
        wanted = self.choice.split or (next(iter(splits)) if len(splits) == 1 else "train")
        if wanted not in splits:
            raise EmbodrlError(
                f"{self.source} has no files of the split '{wanted}'; it has {', '.join(splits) or 'none'}",
                "name one with --split" if splits else "give the folder with the files DATASET-SPLIT.tfrecord-...",
                code="rlds-split",
            )
        if others := sorted(splits.keys() - {wanted}):
            self.report(f"split {wanted}; left out: {', '.join(others)} (--split)")
        files = splits[wanted]
        counts = {int(found["count"] or 1) for path in files if (found := _SHARD.search(path.name))}
        if counts != {len(files)}:
            self.report(f"{len(files)} of {max(counts)} files of the split are present: only these are converted")
        self._lengths = self._stated_lengths(wanted, files)
        return files

    def _stated_lengths(self, split: str, files: Sequence[Path]) -> dict[Path, int]:
        """Return the number of episodes per file according to dataset_info.json; empty if it does not say."""
        path = self.source / INFO
        if not path.is_file():
            return {}
        info = read_fields(path, hint="copy it from the dataset again")
        kind = info.text("fileFormat", "tfrecord")
        if kind != "tfrecord":
            hint = "prepare the dataset with file_format=tfrecord"
            raise layout_error(path, f"the files are {kind}, but only tfrecord can be read", hint)
        stated = next((one for one in info.objects("splits") if one.text("name", "") == split), None)
        if stated is None or "shardLengths" not in stated:
            return {}
        lengths = stated.texts("shardLengths")
        places = [int(found["index"] or 0) for file in files if (found := _SHARD.search(file.name))]
        return {file: int(lengths[n]) for file, n in zip(files, places, strict=True) if n < len(lengths)}

    def _examples(self, path: Path) -> Iterator[Example]:
        count = 0
        for offset, data in records(path):
            yield Example(data, path, offset)
            count += 1
        if count != self._lengths.get(path, count):
            raise damaged(path, f"it has {count} records, and {self._lengths[path]} by {INFO}")

    # -- episodes -------------------------------------------------------------------------------------------------

    def _episodes(self, example: Example, number: int) -> Iterator[DemoEpisode]:
        """Yield an episode, or one per instruction where the instruction changes."""
        chosen = self.chosen
        actions = self._joined(example, chosen.actions, None)
        length = len(actions)
        if not length:
            return
        state = self._joined(example, chosen.state, length) if chosen.state else np.zeros((length, 0), np.float32)
        for what, values in (("action", actions), ("state", state)):
            check_numbers(example.path, f"steps/{what}", values, number)
        words = self._words(example, length)
        images = self._images(example, length)
        outcomes = self._outcomes(example, chosen, actions)
        solved = None if outcomes is None or not outcomes.rewards.any() else bool((outcomes.rewards > 0).any())
        changes = [0, *(n for n in range(1, length) if words[n] != words[n - 1]), length]
        for part, (start, stop) in enumerate(pairwise(changes)):
            rows = slice(start, stop)
            led = outcomes and Outcomes(outcomes.executed[rows], outcomes.rewards[rows], outcomes.terminated[rows])
            success = solved if stop == length else None
            yield DemoEpisode(
                images[rows], state[rows], actions[rows], words[start], words[start], number + part, success, led
            )

    def _outcomes(self, example: Example, chosen: Chosen, actions: NDArray[np.float32]) -> Outcomes | None:
        if chosen.reward is None or chosen.terminal is None:
            return None
        rewards = self._vector(example, chosen.reward, len(actions))[:, 0]
        terminated = self._vector(example, chosen.terminal, len(actions))[:, 0] != 0
        return Outcomes(actions, rewards, terminated)

    def _words(self, example: Example, length: int) -> list[str]:
        if self.choice.instruction is not None:
            return [self.choice.instruction] * length
        assert self.chosen.words is not None
        texts = [value.decode("utf-8", "replace") for value in self._bytes(example, self.chosen.words, length)]
        if any(not text.strip() for text in texts):
            problem = f"the record at byte {example.offset} has no instruction in steps/{self.chosen.words}"
            raise layout_error(example.path, problem, "give the instruction with --instruction TEXT")
        return texts

    def _joined(self, example: Example, names: Sequence[str], length: int | None) -> NDArray[np.float32]:
        """Return vectors side by side, ``float32[N,D]``."""
        parts: list[NDArray[np.float32]] = []
        for name in names:
            parts.append(self._vector(example, name, length))
            length = len(parts[0])
        return np.concatenate(parts, axis=1)

    def _vector(self, example: Example, name: str, length: int | None) -> NDArray[np.float32]:
        width = int(np.prod(cast("tuple[int, ...]", self.features[name].shape)))
        values = self._values(example, name)
        count = len(values) // max(width, 1)
        if isinstance(values, list) or len(values) != count * width or count != (count if length is None else length):
            raise example.refuse(f"steps/{name} has {len(values)} values of {width} in {length or 'its'} steps")
        return values.reshape(count, width).astype(np.float32)

    def _bytes(self, example: Example, name: str, length: int) -> list[bytes]:
        values = self._values(example, name)
        if not isinstance(values, list) or len(values) != length:
            raise example.refuse(f"steps/{name} has {len(values)} entries in {length} steps")
        return values

    def _values(self, example: Example, name: str) -> NDArray[np.generic] | list[bytes]:
        if f"steps/{name}" not in example:
            raise example.refuse(f"it has no steps/{name}, which {FEATURES} names")
        return example[f"steps/{name}"]

    # -- pictures -------------------------------------------------------------------------------------------------

    def _images(self, example: Example, length: int) -> NDArray[np.uint8]:
        views: list[NDArray[np.uint8]] = []
        for name in self.cameras.values():
            frames: list[NDArray[np.uint8]] = []
            for step, encoded in enumerate(self._bytes(example, name, length)):
                frames.append(_decode(example, f"steps/{name}, step {step}", encoded, self.features[name]))
                if frames[0].nbytes * length * len(self.cameras) > MAX_BYTES:
                    raise example.refuse(f"the pictures of {length} steps are larger than {MAX_BYTES:,} bytes")
            if len({frame.shape for frame in frames}) > 1:
                raise example.refuse(f"the images of steps/{name} differ in size")
            views.append(np.stack(frames))
        if len({view.shape for view in views}) > 1:
            hint = "name cameras of one size with --cameras"
            raise layout_error(example.path, f"the record at byte {example.offset} has cameras of several sizes", hint)
        return np.stack(views, axis=1) if views else np.zeros((length, 0, 0, 0, 3), np.uint8)

    def _drop_blank_cameras(self) -> None:
        """Drop cameras that are blank in every episode."""
        blank = dict(self.cameras)
        for path in self.files:
            for example in self._examples(path) if blank else ():
                blank = {name: full for name, full in blank.items() if self._is_blank(example, full)}
                if not blank:
                    break
        for name in blank:
            self.report(f"camera {name} is blank in every episode: omitted (name it in --cameras to keep it)")
            del self.cameras[name]

    def _is_blank(self, example: Example, name: str) -> bool:
        values = self._values(example, name)
        different = set(values) if isinstance(values, list) else set[bytes]()
        pictures = (_decode(example, f"steps/{name}", encoded, self.features[name]) for encoded in different)
        return all(int(picture.max()) - int(picture.min()) <= BLANK for picture in pictures)


def _decode(example: Example, what: str, encoded: bytes, feature: RldsFeature) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(encoded), formats=["JPEG", "PNG"])
        size = (picture.size[1], picture.size[0])
        if any(wanted not in (None, found) for wanted, found in zip(feature.shape, size, strict=False)):
            raise example.refuse(f"{what} is {size[0]} x {size[1]}, and {FEATURES} says {feature.shape}")
        return np.asarray(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise example.refuse(f"{what} can't be decoded: {error}") from error
