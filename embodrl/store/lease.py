"""A lease on a name in a store, held by one process at a time.

Stores have no locks, and machine clocks differ. A thread of the owner increments a counter in the store, so that a
robot or a long copy can't delay it; a process that finds another owner watches whether the counter still advances.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from embodrl.errors import StoreError
from embodrl.store.store import Retry, Store

logger = logging.getLogger(__name__)

LEASES = "leases"
BEAT_S = 10.0
STALE_S = 40.0
_LOOK_S = 1.0
_LOOKS = 3
_UNREADABLE = ("", 0)
"""A lease that is being written, or whose writer was killed."""


class Lease:
    """A lease on a name. Of two processes that start at once, the first one loses it.

    Args:
        name: name that processes must not share.
        owner: id of this process, unique and stable across restarts.
        stopped: set when this process releases the name.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        stopped: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._name = name
        self._owner = owner
        self._clock = clock
        self._sleep = sleep
        self._place = f"{LEASES}/{name}"
        self._beats = 0
        self._stopped = stopped or threading.Event()
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self._access = threading.Lock()
        self._problem: StoreError | None = None

    def take(self, say: Callable[[str], object]) -> None:
        """Take the name; from another owner only if its counter has not advanced for ``STALE_S``.

        ``say`` prints a line before it waits.

        Raises:
            StoreError: another process owns the name, or the store can't be reached.
        """
        found = self._read()
        end_s = self._clock() + STALE_S
        if found is not None and found[0] != self._owner:
            say(f"{self._name} belonged to another process: checking for {STALE_S:g} s whether that process is alive")
            while self._clock() < end_s:
                self._sleep(_LOOK_S)
                now = self._read()
                if now is None:
                    break
                if now != found:
                    raise self._taken()
        self._beat()

    def keep(self) -> None:
        """Increment the counter every ``BEAT_S`` in a thread, until ``stop``."""
        self._thread.start()

    def check(self) -> None:
        """Check that this process still owns the name.

        Raises:
            StoreError: another process has taken the name, or the store can't be reached.
        """
        if self._problem is not None:
            raise self._problem
        self._must_own()

    def stop(self) -> None:
        """Stop the counter."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def release(self) -> None:
        """Stop the counter and release the name; raises StoreError."""
        self.stop()
        found = self._read()
        if found is not None and found[0] == self._owner:
            self._store.remove(self._place)

    def _live(self) -> None:
        retry = Retry(logger.warning)
        while not self._stopped.wait(BEAT_S):
            try:
                retry(self._count)
            except StoreError as error:  # raised by the next ``check``
                self._problem = error
                return

    def _count(self) -> None:
        self._must_own()
        self._beat()

    def _must_own(self) -> None:
        found = self._read()
        if found is not None and found not in (_UNREADABLE, (self._owner, found[1])):
            raise self._taken()

    def _read(self) -> tuple[str, int] | None:
        """Return owner and counter; None only if there is no owner."""
        for _ in range(_LOOKS):
            try:
                with self._access:
                    note = self._store.note(self._place)
            except StoreError as error:
                if error.code != "store-unreadable":
                    raise
                self._sleep(_LOOK_S)
            else:
                return None if note is None else (note.text("owner"), note.integer("beats"))
        return _UNREADABLE

    def _beat(self) -> None:
        self._beats += 1
        with self._access:
            self._store.put_note(self._place, {"owner": self._owner, "beats": self._beats})

    def _taken(self) -> StoreError:
        return StoreError(
            f"another process is {self._name} in {self._store}",
            "give each collector its own name (store.collector); a killed collector resumes from its own"
            " store.spool_dir",
            code="store-name-taken",
        )
