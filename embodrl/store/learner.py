"""The learner of `embodrl store train`: imitates the episodes of a store, and publishes its weights there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.learners.imitation import ImitationHooks, ImitationLearner
from embodrl.models.base import VLAPolicy
from embodrl.storage.checkpoint import Checkpoint
from embodrl.store.batches import FollowedBatches
from embodrl.store.config import store_settings
from embodrl.store.parts import DONE
from embodrl.store.shards import EPISODES, newest_of_each
from embodrl.store.store import Retry, Store
from embodrl.store.weights import remove_newer, upload_versions

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class PublishedWeights:
    """The weights that collectors and evaluators take from a store; uploads are retried after an outage.

    ``directory`` holds the versions on this machine; ``policy`` gives the names of the weights.
    """

    def __init__(self, store: Store, directory: Path, policy: VLAPolicy) -> None:
        self.store = store
        self._directory = directory
        self._sender = DiskSender(directory, trained_names(policy))
        self._retry = Retry(logger.warning)
        self._is_behind = False
        self._back_to: int | None = None

    def drop_newer(self, version: int) -> None:
        """Remove versions above this one: they follow a checkpoint that the run has not resumed from."""
        self._sender.drop_newer(version)
        self._back_to = version
        self._upload()

    def publish(self, engine: TrainEngine, step: int) -> None:
        """Publish the weights of a step, unless a previous process has published them."""
        if self._sender.version is None or step > self._sender.version:
            self._sender.send(engine.weights(), step)
        self._upload()

    def catch_up(self) -> None:
        """Upload versions that the store has not received."""
        if self._is_behind:
            self._upload()

    def _upload(self) -> None:
        def upload() -> bool:
            self._upload_versions()
            return True

        self._is_behind = not self._retry(upload, default=False)

    def _upload_versions(self) -> None:
        # First, and also after an outage of the store: by then a version of the same number may have been made.
        if self._back_to is not None:
            remove_newer(self.store, self._back_to)
            self._back_to = None
        upload_versions(self.store, self._directory)

    def finish(self, step: int, is_to_stop: Callable[[], bool], poll_s: float) -> None:
        """Mark in the store that no further weights will come; retried until it succeeds or the run is to stop."""

        def mark() -> bool:
            self._upload_versions()
            self.store.put_note(DONE, {"version": step})
            return True

        while not self._retry(mark, default=False):
            if is_to_stop():
                logger.error("%s was not told that training is over: its collectors continue", self.store)
                return
            time.sleep(poll_s)


class StoreLearner(ImitationLearner):
    """Imitates the episodes of a store, as many steps as they allow; saves each checkpoint before publishing it."""

    def __init__(
        self,
        config: Config,
        policy: VLAPolicy,
        engine: TrainEngine,
        batches: FollowedBatches,
        weights: PublishedWeights,
        hooks: ImitationHooks,
    ) -> None:
        self.settings = store_settings(config)
        pauses = (config.sft.log_interval, self.settings.publish_interval, config.sft.eval_interval)
        super().__init__(config, policy, engine, batches, pauses, hooks)
        self.followed = batches
        self.weights = weights
        self._retry = Retry(logger.warning)
        self._next_look = 0.0
        self._restored_at: int | None = None

    def begin(self) -> None:
        if self._restored_at is not None:  # a killed process may have saved the checkpoint without publishing it
            self.weights.publish(self.engine, self._restored_at)

    def load_state(self, checkpoint: Checkpoint) -> None:
        super().load_state(checkpoint)
        self._restored_at = checkpoint.state.integer("iteration")

    def saved(self, iteration: int) -> None:
        self.weights.publish(self.engine, iteration)
        if self.settings.remove_used:
            self._retry(self.remove_used)

    def await_batch(self, iteration: int) -> bool:
        while not self.hooks.should_stop():
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + self.settings.poll_s
                self._retry(self.followed.poll)
                self.weights.catch_up()
            allowed = self.settings.steps_per_episode * self.followed.num_episodes
            if self.followed.is_ready and iteration < allowed:
                return True
            self.engine.check()
            time.sleep(_LOOK_S)
        return False

    def remove_used(self) -> None:
        """Remove shards that are no longer needed, except the newest of each collector."""
        names = self.weights.store.names(EPISODES)
        for name in set(names).intersection(self.followed.finished()).difference(newest_of_each(names)):
            self.weights.store.remove(name)
