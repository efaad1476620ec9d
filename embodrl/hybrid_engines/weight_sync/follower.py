"""Newer weights for a served policy: published by a run, or named by a client. See weight_sync/disk.py.

Requests are still answered in the meantime: weights are staged in host memory and replace the old ones between two
batches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from embodrl.errors import EmbodrlError, ServingError, WeightSyncError, WeightVersionError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.weight_sync.base import HINT, SyncReport
from embodrl.hybrid_engines.weight_sync.buckets import Layout, layout_of
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class WeightSource:
    """Directories of versions that the served policy loads weights from, one at a time."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._layout: Layout = layout_of(engine.policy)
        # Clients and the follower may ask at the same time.
        self._lock = threading.Lock()
        self._receivers: dict[Path, DiskReceiver] = {}
        self._in_use: Path | None = None

    def take(self, directory: Path, again: bool = False) -> SyncReport | None:
        """Use a directory's newest STABLE version; return it, or None if none is newer than the last one loaded there.

        The versions are ``v000012/`` etc., as written by a run with ``rollout.publish_weights=true``. ``again``: also
        the version loaded last, if another directory's weights are in use.

        Raises:
            WeightSyncError: the version is incomplete, damaged, of another policy, or unreadable; the weights stay
                unchanged.
        """
        with self._lock:
            if again and directory != self._in_use:
                self._receivers.pop(directory, None)
            receiver = self._receivers.setdefault(directory, DiskReceiver(self.engine, directory, self._layout))
            try:
                report = receiver.receive()
                self._in_use = self._in_use if report is None else directory
                return report
            except WeightVersionError:  # the run went back to an older checkpoint: the next poll starts there
                del self._receivers[directory]
                raise
            except OSError as error:
                raise WeightSyncError(
                    f"weights in {directory} can't be read: {error.strerror}", HINT, code="weights-unreadable"
                ) from error

    def has_taken(self, directory: Path) -> bool:
        """Return whether the policy has loaded weights from a directory before."""
        receiver = self._receivers.get(directory)
        return receiver is not None and receiver.version is not None


class WeightFollower(threading.Thread):
    """Loads every new version of a directory, which may appear later, until stopped.

    ``fetch`` is called before every poll, to bring new versions into the directory; it may raise a StoreError. Polls
    are ``poll_s`` seconds apart.
    """

    def __init__(
        self, source: WeightSource, directory: Path, fetch: Callable[[], object] = lambda: None, poll_s: float = LOOK_S
    ) -> None:
        super().__init__(name="weights", daemon=True)
        self._source = source
        self._directory = directory
        self._fetch = fetch
        self._poll_s = poll_s
        self._stopped = threading.Event()

    def run(self) -> None:
        problem = ""
        while not self._stopped.is_set():
            try:
                self._fetch()
                report = self._source.take(self._directory)
                if report is not None:
                    problem = ""
                    logger.info("weights of version %d are in use", report.version)
            except Exception as error:
                # A persistent problem is reported once, not with every poll.
                if str(error) != problem:
                    logger.error("%s", error, exc_info=not isinstance(error, EmbodrlError))
                problem = str(error)
            self._stopped.wait(self._poll_s)

    def stop(self) -> None:
        """Stop after the current poll, which may hang if its file system does."""
        self._stopped.set()
        self.join(2 * LOOK_S)


def stable_directory(text: object) -> Path:
    """Return the directory of versions that a client names: the path itself, or the parent of a version.

    Raises:
        ServingError: the path is not an absolute path of a directory.
    """
    hint = 'send {"directory": DIR}, an absolute path on the server, with v000012/STABLE in it'
    if not isinstance(text, str) or not text.startswith("/"):
        raise ServingError("no directory of weights is named", hint, code="server-weights")
    path = Path(text)
    try:
        if (path / "STABLE").is_file():
            path = path.parent
        if path.is_dir():
            return path
    except OSError as error:
        raise ServingError(f"{text[:200]} can't be read: {error.strerror}", hint, code="server-weights") from error
    raise ServingError(f"there is no directory {text[:200]}", hint, code="server-weights")
