"""A name in a store that one process has at a time.

Stores have no locks, and clocks of machines differ. The owner counts up in the store while it lives; who finds another
owner there watches whether it still counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from embodrl.errors import StoreError
from embodrl.storage.store import Store

LEASES = "leases"
BEAT_S, STALE_S = 10.0, 40.0
_LOOK_S = 1.0


class Lease:
    """A name that its owner keeps. Of two that begin at once, the first one loses it at its next ``keep``.

    Args:
        store: where the name is.
        name: what processes must not share.
        owner: the same whenever this one starts again, and no other's.
        clock, sleep: in seconds.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store, self._name, self._owner, self._clock, self._sleep = store, name, owner, clock, sleep
        self._place = f"{LEASES}/{name}"
        self._beats, self._beaten = 0, 0.0

    def take(self, say: Callable[[str], object]) -> None:
        """Take the name; from another owner only if it has not counted for ``STALE_S``.

        Args:
            say: gets a line before it waits.

        Raises:
            StoreError: another process has it, or the store can't be reached.
        """
        found, end_s = self._read(), self._clock() + STALE_S
        if found is not None and found[0] != self._owner:
            say(f"{self._name} belonged to another process: looking for {STALE_S:g} s whether that one lives")
            while self._clock() < end_s:
                self._sleep(_LOOK_S)
                now = self._read()
                if now is None:
                    break
                if now != found:
                    raise self._taken()
        self._beat()

    def keep(self) -> None:
        """Show that this process lives, if it is time.

        Raises:
            StoreError: another process has taken the name, or the store can't be reached.
        """
        found = self._read()
        if found is not None and found[0] != self._owner:
            raise self._taken()
        if found is None or self._clock() - self._beaten >= BEAT_S:
            self._beat()

    def release(self) -> None:
        """Leave the name to others.

        Raises:
            StoreError: the store can't be reached.
        """
        found = self._read()
        if found is not None and found[0] == self._owner:
            self._store.remove(self._place)

    def _read(self) -> tuple[str, int] | None:
        mark = self._store.mark(self._place)
        return None if mark is None else (mark.text("owner"), mark.integer("beats"))

    def _beat(self) -> None:
        self._beats += 1
        self._store.put_note(self._place, {"owner": self._owner, "beats": self._beats})
        self._beaten = self._clock()

    def _taken(self) -> StoreError:
        return StoreError(
            f"another process is {self._name} in {self._store}",
            "give each collector a name of its own (store.collector); one that was killed continues from its own"
            " store.spool_dir",
            code="store-name-taken",
        )
