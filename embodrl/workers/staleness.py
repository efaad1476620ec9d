"""How far rollouts may run ahead of training: a pure state machine without threads."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunningLimit:
    """How many shards may run at once, between ``low`` and ``high``: as many as keep training busy.

    Each update changes it by at most one (additive increase and decrease). Shards beyond what training needs would only
    wait, and grow old.

    Attributes:
        now: the limit.
    """

    low: int
    high: int
    now: int

    def adapt(self, waited: bool, waiting: int, dropped: int) -> None:
        """Follow an update that has taken its shards.

        Args:
            waited: whether training had to wait for them.
            waiting: finished shards left for later updates.
            dropped: shards that became too old since the last update.
        """
        if waited and not dropped:
            self.now = min(self.high, self.now + 1)
        elif waiting or dropped:
            self.now = max(self.low, self.now - 1)


@dataclass
class StalenessGate:
    """Admits shards of rollouts, and picks shards to train on, so that no chunk is trained on too late.

    A shard is one unit of work of a stage; an update takes ``batch_size`` of them. With v updates done, at most
    ``(max_staleness + v + 1) * batch_size`` shards are accepted or running (AReaL: Fu et al. 2025, arXiv 2505.24298,
    sec. 5.1, counted in shards). That alone does not bound the staleness, since a slow shard may be overtaken again and
    again. So an update also waits for running shards if leaving them to later updates would make one too old: a shard
    started under version b must be trained on while the version is at most ``b + max_staleness``.

    Attributes:
        max_staleness: eta, most updates between the weights that chose an action and the weights it trains.
        batch_size: B, shards per update.
        max_running: C, concurrently running shards.
        limit: adapts their number below C; None: always C.
        version: v, updates done.
        rejected: finished shards not trained on: filtered out, or too old.
        running: start version of each running shard, by number.
        waiting: start version of finished shards not given out yet.
        given_out: start version of shards that the current update trains on or has rejected.
    """

    max_staleness: int
    batch_size: int
    max_running: int
    version: int = 0
    rejected: int = 0
    running: dict[int, int] = field(default_factory=dict[int, int])
    waiting: dict[int, int] = field(default_factory=dict[int, int])
    given_out: dict[int, int] = field(default_factory=dict[int, int])
    limit: RunningLimit | None = None

    @property
    def accepted(self) -> int:
        """Shards finished and kept since the start of the run: trained on, given out, or waiting."""
        # Of the shards given out, the update rejected all beyond B (dynamic sampling); ``update`` counts them as
        # rejected.
        return self.version * self.batch_size + min(len(self.given_out), self.batch_size) + len(self.waiting)

    def capacity(self) -> int:
        """Return the number of shards that may start now."""
        ahead = (self.max_staleness + self.version + 1) * self.batch_size - (self.accepted + len(self.running))
        most = self.max_running if self.limit is None else self.limit.now
        return max(0, min(most - len(self.running), ahead))

    def begin(self, shard: int) -> None:
        """Record the start of a shard."""
        assert self.capacity() > 0 and shard not in self.running and shard not in self.waiting
        # Newer weights may arrive while it runs, but its oldest chunks have this version.
        self.running[shard] = self.version

    def finish(self, shard: int) -> None:
        """Record that a shard is ready to be trained on."""
        self.waiting[shard] = self.running.pop(shard)

    def abandon(self, shard: int) -> None:
        """Record that a running shard was interrupted; it may start again."""
        del self.running[shard]

    def drop_too_old(self) -> list[int]:
        """Reject the waiting shards that are too old for any update; return them.

        They exist only after ``max_staleness`` was lowered, or after an interrupted update that had taken more than its
        batch asks for less the next time.
        """
        dropped = [shard for shard, began in self.waiting.items() if self.version - began > self.max_staleness]
        for shard in dropped:
            del self.waiting[shard]
        self.rejected += len(dropped)
        return dropped

    def choose(self, count: int | None = None) -> list[int] | None:
        """Return the ``count`` oldest waiting shards (None: B), or None while an update must wait for running ones."""
        count = self.batch_size if count is None else count
        # Oldest first, so that no shard grows too old behind newer ones.
        oldest = sorted(self.waiting, key=lambda shard: (self.waiting[shard], shard))
        chosen = oldest[:count]
        if len(chosen) < count:
            return None
        left = [self.waiting[shard] for shard in oldest[count:]] + list(self.running.values())
        for began in self.running.values():
            # Later updates take B shards each: shards that started this early must fit into the updates they may wait
            # for.
            updates = max(0, began + self.max_staleness - self.version)
            if sum(other <= began for other in left) > updates * self.batch_size:
                return None
        return chosen

    def give_out(self, chosen: list[int]) -> None:
        """Record that the current update takes these shards; beyond B, it rejected some."""
        for shard in chosen:
            self.given_out[shard] = self.waiting.pop(shard)

    def take_back(self) -> None:
        """Cancel the update; the shards given out wait for the next one."""
        self.waiting |= self.given_out
        self.given_out.clear()

    def update(self, version: int) -> None:
        """Record that the update is done."""
        self.rejected += max(0, len(self.given_out) - self.batch_size)
        self.version = version
        self.given_out.clear()
