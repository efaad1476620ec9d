"""`embodrl join`: simulators and a policy that gather experience for a run with ``store.url`` until it ends."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.config.compose import assignment
from embodrl.config.identity import changes, describe, record_of
from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import UsageError
from embodrl.fields import read_fields
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.weight_sync.follower import WeightFollower, WeightSource
from embodrl.pipelines.load import load_run
from embodrl.reporting.run_files import CONFIG_FILE
from embodrl.reporting.sinks import MetricsLogger
from embodrl.specs import LOSSES
from embodrl.storage.atomic import atomic_directory, remove
from embodrl.store.collect import METRICS_FILE, collect, spool_id
from embodrl.store.config import store_settings
from embodrl.store.lease import Lease
from embodrl.store.parts import DONE, open_store
from embodrl.store.rollout_shards import MARK, ROLLOUTS, Demand, SharedRollout, run_of
from embodrl.store.shards import place_of
from embodrl.store.shared_rollouts import rollout_settings
from embodrl.store.store import Retry, Store, pause
from embodrl.store.weights import download_versions
from embodrl.trainer.stop import StopSignal
from embodrl.workers.async_collector import EpisodeRunner, make_runners
from embodrl.workers.collector import EpisodeSchedule, Metrics, rollout_metrics
from embodrl.workers.env import check_environments, make_pool
from embodrl.workers.lockstep import meta_of
from embodrl.workers.parts import make_acting, prepare_acting
from embodrl.workers.recorders import Judging
from embodrl.workers.reward import RewardWorker

logger = logging.getLogger(__name__)

# Simulators keep a journal that rollouts from fresh episodes never read, so it would only grow.
_ROLLOUTS_A_JOURNAL = 64


def load_joined(target: str, overrides: Sequence[str], trust: bool = False) -> LoadedConfig:
    """Return the configuration of a run, with settings of this process; its spool is that of this run alone.

    Args:
        target: directory of a run with ``store.url``, or its store: a directory or URL.
        overrides: settings of the command line.
        trust: see ``load_config``.

    Raises:
        ConfigError: the configuration is invalid.
        StoreError: the store can't be reached, or has no run.
        UsageError: the run has no store, or would reject what these settings make.
    """
    place = _store_of(target, trust)
    store = Store(place)
    store.check()
    text, run = run_of(store)
    source = Path(place) / "run" / "settings"
    trained = load_run(source, [assignment("store.url", place)], "store", trust=trust, text=text).config
    loaded = load_run(source, [assignment("store.url", place), *overrides], "store", trust=trust, text=text)
    config = loaded.config
    if not LOSSES.entry(config.algorithm.loss_type).off_policy:
        _check_sizes(trained, config)
    settings = store_settings(config)
    own = settings.model_copy(update={"spool_dir": str(Path(settings.spool_dir) / run)})
    return replace(loaded, config=config.model_copy(update={"store": own}))


def _store_of(target: str, trust: bool) -> str:
    """Return the absolute directory or URL of the store of a run, or of a store."""
    file = Path(target).expanduser() / CONFIG_FILE
    if "://" not in target and file.is_file():
        url = load_run(file, [], "store", trust=trust).config.store_url
        if url is None:
            hint = "nothing can join a run without a store: start it with store.url=DIR"
            raise UsageError(f"{target} has no store.url", hint, code="store-none")
        target = url
    return target if "://" in target else str(Path(target).expanduser().absolute())


def _check_sizes(trained: Config, config: Config) -> None:
    """Refuse what the trainer would reject, or could not add up to an update."""
    if other := changes(record_of(rollout_settings(trained)), rollout_settings(config)):
        hint = "leave these settings as they are in the run"
        raise UsageError(f"the run has other settings: {describe(other)}", hint, code="store-other-settings")
    envs, own = trained.env.train.total_num_envs, config.env.train.total_num_envs
    if envs % own:
        message = f"the {envs} environments of an update are not whole rollouts of {own}"
        hint = f"set env.train.total_num_envs to a divisor of {envs}"
        raise UsageError(message, hint, code="store-other-settings")


class Spool:
    """The rollouts of a collector on their way to a store; the newest stays here, so numbers go on after a kill."""

    def __init__(self, store: Store, directory: Path, collector: str) -> None:
        self._store = store
        self._directory = directory
        self.collector = collector

    def _complete(self) -> list[Path]:
        return sorted(self._directory.glob(f"{self.collector}-{'[0-9]' * 6}"))

    def next_number(self) -> int:
        """Return the number after all that this collector has made; raises StoreError."""
        demand = Demand.of(self._store)
        names = [path.name for path in self._complete()] + self._store.names(ROLLOUTS)
        own = [number for collector, number in map(place_of, names) if collector == self.collector]
        taken = 0 if demand is None else demand.ledger.next.get(self.collector, 0)
        return max([number + 1 for number in own] + [taken])

    def add(self, rollout: SharedRollout, settings: dict[str, object]) -> None:
        """Save a rollout durably; raises OutputError."""
        with atomic_directory(self._directory / f"{self.collector}-{rollout.number:06d}") as staging:
            rollout.write(staging, settings)

    def upload(self) -> bool:
        """Copy everything into the store; raises StoreError."""
        complete = self._complete()
        for path in complete:
            self._store.put(path, f"{ROLLOUTS}/{path.name}", read_fields(path / MARK).content)
        for path in complete[:-1]:
            remove(path)
        return True

    def room(self, version: int | None) -> bool | None:
        """Copy everything into the store, and ask whether it has room for a rollout by weights of this version.

        Args:
            version: None if there are none of the run yet.

        Returns:
            None after the trainer's end.

        Raises:
            StoreError: the store can't be reached.
        """
        self.upload()
        if self._store.mark(DONE) is not None:
            return None
        demand = None if version is None else Demand.of(self._store)
        return demand is not None and version is not None and demand.has_room(self._store, version)


class RolloutWriter:
    """Makes numbered rollouts while the trainer has room for them.

    Rollout n of a collector begins in the same episodes and samples with the same random numbers whenever it is made.

    Args:
        engine: acts; another thread gives it newer weights.
        runner: all environments of this process.
        rewards: judges the episodes; None without a reward function or model.
        is_ready: returns whether the engine has weights of the run; raises StoreError if another process has the name.

    Attributes:
        next: number of the next rollout.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        runner: EpisodeRunner,
        rewards: RewardWorker | None,
        spool: Spool,
        is_ready: Callable[[], bool],
    ) -> None:
        self.config = config
        self.engine = engine
        self.runner = runner
        self.rewards = rewards
        self.spool = spool
        self.is_ready = is_ready
        self.retry = Retry(logger.warning)
        self.poll_s = store_settings(config).poll_s
        self.stream = zlib.crc32(spool.collector.encode())
        self.next: int = self.retry.insist(spool.next_number, poll_s=self.poll_s)
        train = config.env.train
        if not train.use_fixed_reset_state_ids:  # then all have the same
            train = train.model_copy(update={"seed": train.seed + self.stream})
        own = config.model_copy(update={"env": config.env.model_copy(update={"train": train})})
        self.schedule = EpisodeSchedule(own, config.env.train.total_num_envs, len(config.env.tasks))

    def run(self, should_stop: Callable[[], bool], made: Callable[[Metrics], None]) -> None:
        """Make rollouts until the trainer has finished, or until asked to stop.

        Args:
            should_stop: polled, within rollouts too.
            made: called with the metrics of each rollout.

        Raises:
            StoreError: the store refuses a rollout.
            OutputError: the disk is full.
        """
        settings = rollout_settings(self.config)
        while not self._until(self._is_wanted, should_stop):
            began = self.engine.version
            try:
                batch = self._roll_out(self.next, should_stop)
                rewards = None if self.rewards is None else self.rewards.detach(batch, should_stop)
            except InterruptedError:
                return
            self.spool.add(SharedRollout(self.spool.collector, self.next, began, batch, rewards), settings)
            self.next += 1
            made(rollout_metrics([meta_of(batch)]) | {"collect/policy_version": self.engine.version})
            if self.next % _ROLLOUTS_A_JOURNAL == 0:
                self.runner.rebuild()

    def _until(self, is_wanted: Callable[[], bool | None], should_stop: Callable[[], bool]) -> bool:
        """Wait until another rollout is wanted; return True if none will be, or the process is to stop."""
        while not should_stop():
            wanted = self.retry(is_wanted, default=False)
            if wanted is None:
                return True
            if wanted:
                return False
            pause(self.poll_s, should_stop)
        return True

    def _is_wanted(self) -> bool | None:
        is_ready = self.is_ready()  # first, since it raises if another process has taken the name
        return self.spool.room(self.engine.version if is_ready else None)

    def _roll_out(self, number: int, should_stop: Callable[[], bool]) -> TrajectoryBatch:
        iteration, epoch = divmod(number, self.config.algorithm.rollout_epoch)
        random = (self.config.runner.seed, self.stream, number)
        return self.runner.roll_out(self.schedule.shard(iteration, epoch, random), should_stop)


def join(loaded: LoadedConfig, say: Callable[[str], None] = print) -> int:
    """Gather for a run until it has finished, or until a signal; return the exit code.

    Raises:
        EmbodrlError: a requirement is missing, or the disk is full.
    """
    config = loaded.config
    if LOSSES.entry(config.algorithm.loss_type).off_policy:
        return collect(loaded, say, endless=True)
    settings = store_settings(config)
    store = open_store(config, create=False)
    prepare_acting(config, loaded.deployment)
    directory = Path(settings.spool_dir) / settings.collector
    with ExitStack() as closing:
        pool = make_pool(config, config.env.train.total_num_envs)
        stop = closing.enter_context(StopSignal(config.runner.stop_timeout_s))
        closing.callback(pool.close)
        pool.start_async()
        weights = directory.resolve() / "weights"
        engine = make_acting(config, weights_dir=weights)
        pool.wait_started()
        check_environments(config, pool)
        lease = Lease(store, settings.collector, spool_id(directory))
        retry = Retry(logger.warning)
        retry.insist(lease.take, say, poll_s=settings.poll_s)
        closing.callback(retry, lease.release)
        closing.callback(lease.stop)
        lease.keep()
        source = WeightSource(engine)
        follower = WeightFollower(source, weights, lambda: download_versions(store, weights), settings.poll_s)
        follower.start()
        closing.callback(follower.stop)
        rewards = RewardWorker(config, tuple(pool.spec.tasks)) if config.reward.judged else None
        judging = Judging(keep_frames=config.algorithm.srpo.enabled)  # which the trainer compares
        if rewards is not None:
            closing.callback(rewards.close)
            rewards.check(pool.spec)
            judging = rewards.judging
        (runner,) = make_runners(config, pool, engine, judging)

        def is_ready() -> bool:
            lease.check()
            return source.has_taken(weights)

        spool = Spool(store, directory, settings.collector)
        writer = RolloutWriter(config, engine, runner, rewards, spool, is_ready)
        logged = (config.runner.logger, writer.next or None, config.model_dump())
        log = closing.enter_context(MetricsLogger(directory, *logged, file_name=METRICS_FILE)).log

        def made(metrics: Metrics) -> None:
            log({"iteration": writer.next, **metrics})
            success, version = metrics.get("rollout/success_rate") or 0, metrics["collect/policy_version"]
            say(f"rollout {writer.next}: success {success:.0%}, version {version}")

        say(f"gathering for the run of {store} as {settings.collector}")
        stop.can_save("the same command continues, and repeats the rollout in progress")
        writer.run(lambda: bool(stop), made)
        retry(spool.upload)
        say(f"{writer.next} rollouts of {settings.collector} have been made")
    return stop.exit_code
