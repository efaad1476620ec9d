"""`embodrl store collect`: a policy acts, its finished episodes go to a store, and newer weights come from there.

Shapes: B environments, C actions in a chunk, A action dimensions, N frames of an episode.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.config import LoadedConfig
from embodrl.config.identity import changes, describe, record_of, settings_read
from embodrl.config.schema import Config
from embodrl.data.demos import ACTED_BY, LOG_PROB, POLICY_VERSION, REWARDS, DemoEpisode
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.replay import POLICY
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, EnvTimeout, EnvWorkerDied, StoreError
from embodrl.fields import Fields, read_regular_file
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.weight_sync.follower import WeightFollower, WeightSource
from embodrl.learners.replay import reward_settings
from embodrl.reporting.progress import Progress
from embodrl.reporting.sinks import MetricsLogger, MetricValue
from embodrl.runs.collect import frame_rate
from embodrl.runs.intervention import Intervention, make_intervention
from embodrl.storage.atomic import output_errors
from embodrl.storage.json_file import write_text_file
from embodrl.store.config import store_settings
from embodrl.store.lease import Lease
from embodrl.store.parts import DONE, open_store
from embodrl.store.shards import ShardSize, ShardWriter
from embodrl.store.store import Retry, Store
from embodrl.store.weights import download_versions
from embodrl.trainer.stop import StopSignal
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.demonstrations import Attempts, Demonstrator, StepwiseActor
from embodrl.workers.env import make_single_pool
from embodrl.workers.parts import make_acting, prepare_acting
from embodrl.workers.play import PlayedChunk, Recorder

logger = logging.getLogger(__name__)

METRICS_FILE = "collect_metrics.jsonl"
ID_FILE = "collector.id"
MAX_ID = 64
STORE_FILE = "store.url"
MAX_URL = 64 * 2**10
COUNTS = ("finished", "solved", "corrected")


_EPISODES = (
    *("env.", "reward.", "protocol", "algorithm.sampling.", "collect.seed", "collect.video_crf"),
    *("model.model_type", "model.num_action_chunks", "model.action_dim", "model.gripper", "model.condition"),
)
"""Settings that numbered episodes depend on; weights come from the store, and each frame records their version."""


def episode_settings(config: Config) -> dict[str, object]:
    """Return the settings that fix a collector's episodes, by key; all episodes under one name share them."""
    return settings_read(config, "store", (r"env\.train\.total_num_envs",), _EPISODES)


class CorrectedActor(Demonstrator):
    """A policy whose actions a person or expert may override."""

    def __init__(self, actor: StepwiseActor, intervention: Intervention) -> None:
        self.actor = actor
        self.intervention = intervention

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        self.actor.begin(rows, seeds)
        self.intervention.begin(rows)

    def __call__(self, observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        output = self.actor(observation, active, number)
        actions, acted_by = self.intervention.correct(observation, output.actions[:, 0])
        self.actor.replan(np.flatnonzero(acted_by != POLICY))  # the rest of the plan assumed another state
        columns = output.forward_inputs | {ACTED_BY: torch.from_numpy(acted_by)}
        columns.pop(LOG_PROB, None)  # within an episode, all or none are the policy's own
        return replace(output, actions=actions[:, None], forward_inputs=columns)


class PolicyCollector(Recorder):
    """Runs numbered attempts in all environments of a pool, and saves finished episodes with the pending numbers.

    Attempt n always has the same seed and task, and its episode the id ``COLLECTOR-n``: an attempt interrupted by a
    kill is run again, and the store gets each number exactly once.

    Args:
        pool: started pool, without auto-reset, one action at a time.
        intervention: source of corrections; None for none.
        log: sink for the metrics of finished episodes, with the episode count as ``iteration``; None for none.

    Raises:
        EmbodrlError: earlier episodes of the collector were made with other settings.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: RolloutEngine,
        shards: ShardWriter,
        intervention: Intervention | None = None,
        log: Callable[[dict[str, MetricValue]], object] | None = None,
    ) -> None:
        self.engine = engine
        self.shards = shards
        self.config = config
        self.intervention = intervention
        self._log = log
        self._since_s = time.monotonic()
        self._wanted = config.collect.num_episodes
        self._identity = episode_settings(config)
        earlier = shards.progress or Fields({"next": 0, "open": [], **dict.fromkeys(COUNTS, 0)}, "progress")
        record = earlier.fields("identity", {}).content
        if record and (changed := changes(record, self._identity)):
            raise EmbodrlError(
                f"the episodes of the collector {self.name} were made with other settings: {describe(changed)}",
                "continue with its own settings, or choose another store.collector",
                code="collect-other-settings",
            )
        self.finished = earlier.integer("finished")
        self.solved = earlier.integer("solved")
        self.corrected = earlier.integer("corrected")
        self._next = earlier.integer("next")
        self._again = [int(number) for number in earlier.numbers("open", low=0)]
        engine.generators = engine.make_generators([config.runner.seed, self._seeds[1], self._next])
        policy = StepwiseActor(engine, pool.spec.num_envs, sample=True)
        actor = policy if intervention is None else CorrectedActor(policy, intervention)
        self.numbers = np.array([self._draw() for _ in range(pool.spec.num_envs)])
        self._attempts = Attempts(pool, actor, self._assign, self, (POLICY_VERSION, ACTED_BY))

    @property
    def name(self) -> str:
        """Name of the collector, the prefix of its episode ids."""
        return store_settings(self.config).collector

    @property
    def _seeds(self) -> tuple[int, int]:
        return self.config.collect.seed, zlib.crc32(self.name.encode())

    def progress(self) -> dict[str, object]:
        """Return the state to resume from: the next number, and the unfinished numbers."""
        begun = {"next": self._next, "open": sorted([*self.numbers.tolist(), *self._again])}
        counts = {"finished": self.finished, "solved": self.solved, "corrected": self.corrected}
        return {**begun, **counts, "identity": record_of(self._identity)}

    def _draw(self) -> int:
        if self._again:
            return self._again.pop(0)
        self._next += 1
        return self._next - 1

    def _assign(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        numbers = self.numbers[rows]
        drawn = [np.random.SeedSequence([*self._seeds, int(n)]).generate_state(1)[0] for n in numbers]
        seeds = 2**30 + np.array(drawn, np.int64) // 4  # far above the evaluation seeds
        return rows, seeds, (numbers % len(self._attempts.pool.spec.tasks)).astype(np.int32)

    def run(self, num_episodes: int, should_stop: Callable[[], bool], tell: Callable[[int, str], None]) -> None:
        """Collect until exactly this many episodes are finished, or until asked to stop.

        Surplus episodes that end in the same step are dropped; a longer collection runs them again.

        Raises:
            OutputError: the disk is full.
        """
        self._wanted = num_episodes

        def is_over() -> bool:
            tell(self.finished, self._note())
            return self.finished >= num_episodes or should_stop()

        self._attempts.run(is_over)

    def _note(self) -> str:
        """Return a progress line, with the share of corrected episodes where corrections are possible."""
        count = max(self.finished, 1)
        by_hand = "" if self.intervention is None else f", {self.corrected / count:.0%} of episodes corrected"
        return f"success {self.solved / count:.0%}{by_hand}, version {self.engine.version}"

    def after(self, chunk: PlayedChunk) -> None:
        """Save the episodes that ended; an attempt lost to a fault keeps its number and is run again."""
        order = np.argsort(self.numbers)
        rows = order[chunk.ended[order]][: self._wanted - self.finished].tolist()
        if not rows:
            return
        episodes = [
            self._attempts.episode(row, bool(chunk.step.success[row]), f"{self.name}-{self.numbers[row]:08d}")
            for row in rows
        ]
        self.finished += len(episodes)
        self.solved += sum(bool(episode.success) for episode in episodes)
        self.corrected += sum(bool((np.asarray(one.acted[ACTED_BY]) != POLICY).any()) for one in episodes)
        self.numbers[rows] = [self._draw() for _ in rows]
        self.shards.add(episodes, self.progress())
        if self._log is not None:
            self._log(self._metrics(episodes))

    def _metrics(self, episodes: list[DemoEpisode]) -> dict[str, MetricValue]:
        """Return the metrics of the episodes that just ended, and of the time since the previous ones."""
        acted_by = [np.asarray(episode.acted[ACTED_BY]) != POLICY for episode in episodes]
        found: dict[str, MetricValue] = {
            "iteration": self.finished,
            "time/total_s": time.monotonic() - self._since_s,
            "collect/success_rate": sum(bool(episode.success) for episode in episodes) / len(episodes),
            "collect/episodes": len(episodes),
            "collect/steps": sum(map(len, acted_by)),
            "collect/corrected_steps": sum(int(taken.sum()) for taken in acted_by),
            "collect/interventions": sum(int(np.diff(taken, prepend=False)[taken].sum()) for taken in acted_by),
            "collect/policy_version": self.engine.version,
        }
        self._since_s = time.monotonic()
        for name, values in self._control().items():
            merge = max if name.endswith("_s") else sum  # for times, the slowest robot's
            found[f"time/control_{name}" if name.endswith("_s") else f"control/{name}"] = merge(values)
        return found

    def _control(self) -> dict[str, list[float]]:
        """Return the control metrics of each process; none for a process lost meanwhile."""
        try:
            answers = self._attempts.pool.call("status")
        except (EnvWorkerDied, EnvTimeout):
            return {}
        found: dict[str, list[float]] = {}
        for answer in answers:
            for name, value in (cast("dict[str, float]", answer) if isinstance(answer, dict) else {}).items():
                found.setdefault(name, []).append(value)
        return found


class Uploads:
    """Periodically copies shards into the store and checks whether the trainer has finished.

    Runs in a thread: an unreachable store may take a minute to fail, and the robot continues meanwhile.
    """

    def __init__(self, store: Store, shards: ShardWriter, lease: Lease, interval_s: float) -> None:
        self._store = store
        self._shards = shards
        self._lease = lease
        self._interval_s = interval_s
        self._retry = Retry(logger.warning)
        self._next = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploads")
        self._look: Future[bool] | None = None

    def is_over(self) -> bool:
        """Start copying complete shards if due; return whether the trainer has finished.

        Raises:
            StoreError: permanent: the store refuses the shards, or another collector has taken the name.
        """
        if self._look is not None:
            if not self._look.done():
                return False
            if self._look.result():
                return True
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval_s
            self._look = self._thread.submit(self._work)
        return False

    def _work(self) -> bool:
        self._retry(self.copy)
        return self._retry(self._store.mark, DONE) is not None

    def copy(self) -> None:
        """Copy complete shards if the collector still owns its name; raises as ``is_over``, or during an outage."""
        self._lease.check()
        self._shards.upload()

    def close(self) -> None:
        """Wait for running copies."""
        self._thread.shutdown()


def spool_id(spool: Path) -> str:
    """Return the id of a collector's directory, created together with it; raises OutputError."""
    path = spool / ID_FILE
    elsewhere = "choose another store.spool_dir"
    with output_errors(f"{path} can't be read or written", path, elsewhere):
        spool.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_text_file(path, secrets.token_hex(8), elsewhere)
        return read_regular_file(path, MAX_ID).decode()


def claim_spool(spool: Path, store: Store) -> None:
    """Note the store of a collector's directory in it.

    Raises:
        StoreError: the directory has episodes for another store, which would go into this one.
        OutputError: the directory can't be written.
    """
    path = spool / STORE_FILE
    elsewhere = "choose another store.spool_dir"
    with output_errors(f"{path} can't be read or written", path, elsewhere):
        spool.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_text_file(path, f"{store}\n", elsewhere)
        noted = read_regular_file(path, MAX_URL).decode().strip()
    if noted != str(store):
        message = f"{spool} has the episodes of a collector of {noted}, not of {store}"
        hint = f"{elsewhere} or store.collector; if that store has moved here, remove {path}"
        raise StoreError(message, hint, code="store-other-spool")


def collect(loaded: LoadedConfig, say: Callable[[str], None] = print, endless: bool = False) -> int:
    """Collect episodes until ``collect.num_episodes``, the trainer's end, or a signal; return the exit code.

    ``endless`` ignores ``collect.num_episodes``, and has a ``store.spool_dir`` of one run (`embodrl join`). Episodes
    that could not be copied to the store stay there; the same command resumes with them.

    Raises:
        EmbodrlError: a requirement is missing, or the disk is full.
    """
    config = loaded.config
    settings = store_settings(config)
    collecting = config.collect
    store = open_store(config)
    prepare_acting(config, loaded.deployment)
    spool = Path(settings.spool_dir) / settings.collector
    if not endless:  # then it is that of a run
        claim_spool(spool, store)
    with ExitStack() as closing:
        pool = make_single_pool(config, config.env.train.total_num_envs)
        stop = closing.enter_context(StopSignal(config.runner.stop_timeout_s))
        closing.callback(pool.close)
        pool.start()
        names = [camera.name for camera in config.env.cameras]
        fps = frame_rate(config, pool.spec.control_hz)

        def make_writer(directory: Path) -> LeRobotWriter:
            return LeRobotWriter(directory, names, fps, collecting.video_crf, config.env.env_type, resume=True)

        lease = Lease(store, settings.collector, spool_id(spool))
        retry = Retry(logger.warning)
        # First, since ShardWriter continues after the store's newest shard.
        retry.insist(lease.take, say, poll_s=settings.poll_s)
        closing.callback(lease.stop)
        lease.keep()
        size = ShardSize(settings.episodes_per_shard, settings.shard_s)
        meta = {REWARDS: reward_settings(config)}
        parts = (store, spool, settings.collector, make_writer, size, meta)
        shards: ShardWriter = retry.insist(ShardWriter, *parts, poll_s=settings.poll_s)
        closing.callback(retry, lease.release)  # not if another process owns the spool
        closing.callback(shards.close)
        directory = spool.resolve() / "weights"
        engine = make_acting(config, weights_dir=directory)
        follower = WeightFollower(
            WeightSource(engine), directory, lambda: download_versions(store, directory), settings.poll_s
        )
        follower.start()
        closing.callback(follower.stop)
        intervention = make_intervention(settings.intervention, config, pool)
        if intervention is not None:
            closing.callback(intervention.close)
        finished = shards.progress.integer("finished") if shards.progress is not None else None
        logged = (config.runner.logger, finished, config.model_dump())
        metrics = closing.enter_context(MetricsLogger(spool, *logged, file_name=METRICS_FILE))
        collector = PolicyCollector(config, pool, engine, shards, intervention, metrics.log)
        uploads = Uploads(store, shards, lease, settings.poll_s)
        say(f"collecting into {store} as {settings.collector}, from episode {collector.finished}")
        stop.can_save("the same command continues with the episodes that are finished")
        total = 0 if endless else collecting.num_episodes
        progress = closing.enter_context(Progress("collect", total, "episodes", config.runner.logger.console))
        collector.run(total or sys.maxsize, lambda: bool(stop) or uploads.is_over(), progress.update)
        with stop.saving():
            uploads.close()
            shards.finish(collector.progress())
            uploads.copy()
        progress.message(f"{collector.finished} episodes, {collector.solved} of them solved, are in {store}")
    return stop.exit_code
