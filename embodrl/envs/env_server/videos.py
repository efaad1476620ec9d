"""Videos of simulators on an env server: encoded there, sent with the step that ends the episode, written by the run.

The run numbers its videos: a server never learns a path of the run's machine, and a run never names one of the
server's.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from embodrl.envs.env_server.link import MAX_MESSAGE_BYTES
from embodrl.envs.pool.manager import EnvManager
from embodrl.errors import MessageError
from embodrl.fields import Fields, read_regular_file
from embodrl.storage.atomic import atomic_file

logger = logging.getLogger("embodrl.envs")

START = "start_video"
MAX_BYTES = MAX_MESSAGE_BYTES // 4
"""Largest size of the videos in one answer; larger ones are dropped with a warning."""
_WRITTEN = re.compile(r"(\d{1,9})_(success|failure)\.mp4")


class ServedVideos:
    """The server's side: a folder of its own that the simulator writes to."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, manager: EnvManager, arguments: Fields) -> None:
        """Record the upcoming episode of ``row`` as the video ``number``."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="embodrl-videos-")
        number = arguments.integer("number", low=0)
        manager.call(
            START, {"row": arguments.integer("row", low=0), "path": str(Path(self._folder.name) / str(number))}
        )

    def take(self) -> dict[str, bytes]:
        """Return the videos that have been finished by their file names, and forget them."""
        taken: dict[str, bytes] = {}
        if self._folder is None:
            return taken
        for file in sorted(Path(self._folder.name).iterdir()):
            if _WRITTEN.fullmatch(file.name) is None:
                continue  # not yet complete
            if file.stat().st_size + sum(map(len, taken.values())) > MAX_BYTES:
                logger.warning("a video of %d MiB was dropped: too large to send", file.stat().st_size >> 20)
            else:
                taken[file.name] = read_regular_file(file, MAX_BYTES)
            file.unlink()
        return taken

    def close(self) -> None:
        """Delete the folder."""
        if self._folder is not None:
            self._folder.cleanup()


class RemoteVideos:
    """The run's side: where each video goes."""

    def __init__(self) -> None:
        self._paths: list[Path] = []

    def start(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return what is sent to the server for a request ``{"row", "path"}``."""
        self._paths.append(Path(str(arguments["path"])))
        return {"row": arguments["row"], "number": len(self._paths) - 1}

    def keep(self, videos: object) -> None:
        """Write the videos of an answer, by file name.

        Raises:
            MessageError: none of the run's.
        """
        if not isinstance(videos, dict):
            raise MessageError(f"the env server sent a {type(videos).__name__} as videos")
        for name, data in cast("dict[object, object]", videos).items():
            found = _WRITTEN.fullmatch(str(name))
            if found is None or int(found[1]) >= len(self._paths) or not isinstance(data, bytes):
                raise MessageError(f"the env server sent the video '{name}', which this run did not ask for")
            path = self._paths[int(found[1])]
            target = path.with_name(f"{path.name}_{found[2]}.mp4")
            try:
                with atomic_file(target) as partial:
                    partial.write_bytes(data)
            except OSError as error:  # as in ``VideoWriter``: the episodes matter more
                logger.warning("the video %s was dropped: %s", target, error)
