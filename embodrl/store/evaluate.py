"""`embodrl store eval`: evaluate every version of the weights in a store, as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.errors import WeightSyncError
from embodrl.hybrid_engines.weight_sync.follower import WeightSource
from embodrl.reporting.progress import Progress
from embodrl.runs.eval_result import evaluation_of
from embodrl.store.config import store_settings
from embodrl.store.parts import DONE, open_store
from embodrl.store.store import Retry, Store
from embodrl.store.weights import RESULTS, download_versions
from embodrl.trainer.stop import StopSignal
from embodrl.workers.env import make_pool
from embodrl.workers.evaluator import Evaluator
from embodrl.workers.parts import make_acting, prepare_acting

logger = logging.getLogger(__name__)


class VersionEvaluator:
    """Evaluates the newest version in a store, and writes the result there.

    Args:
        directory: directory for copies of the weights.
        measure: returns the result of an evaluation, as JSON.
        pause: called while there is nothing to do.
    """

    def __init__(
        self,
        store: Store,
        source: WeightSource,
        directory: Path,
        measure: Callable[[], dict[str, object]],
        pause: Callable[[], None],
    ) -> None:
        self._store = store
        self._source = source
        self._directory = directory
        self._measure = measure
        self._pause = pause
        self._retry = Retry(logger.warning)
        self._newest = -1

    def run(self, should_stop: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Evaluate until the trainer has finished and its last version has a result, or until asked to stop."""
        while not should_stop():
            done = self._retry(self._store.mark, DONE)  # read before the versions, the last of which it names
            version = self._take()
            name = f"{RESULTS}/v{self._newest:06d}"
            if version is not None and self._retry(self._store.mark, name) is None:
                result = {"version": version, **self._measure()}
                while not self._retry(self._put, name, result, default=False) and not should_stop():
                    self._pause()
                say(f"version {version}: success {result['success_rate']:.1%}")
            elif done is not None and self._newest >= done.integer("version"):
                return
            elif version is None:
                self._pause()

    def _put(self, name: str, result: dict[str, object]) -> bool:
        self._store.put_note(name, result)
        return True

    def _take(self) -> int | None:
        """Return the version just taken; None if there is no newer one."""
        self._retry(download_versions, self._store, self._directory)
        try:
            report = self._source.take(self._directory)
        except WeightSyncError as error:
            logger.error("%s", error)
            return None
        if report is None:
            return None
        self._newest = report.version
        return report.version


def evaluate(loaded: LoadedConfig, say: Callable[[str], None] = print) -> int:
    """Evaluate versions as they come; return the exit code. The same command resumes after a stop or a kill.

    Raises:
        EmbodrlError: a requirement is missing, or the weights belong to another policy.
    """
    config = loaded.config
    store = open_store(config)
    prepare_acting(config, loaded.deployment, config.env.eval.decoding)
    with ExitStack() as closing:
        pool = make_pool(config.evaluated, config.env.eval.total_num_envs)
        stop = closing.enter_context(StopSignal(config.runner.stop_timeout_s))
        closing.callback(pool.close)
        pool.start()
        directory = (Path(store_settings(config).spool_dir) / "evaluator" / "weights").resolve()
        engine = make_acting(config, weights_dir=directory)
        evaluator = Evaluator(config, pool, engine, should_stop=lambda: bool(stop))
        progress = Progress("eval", evaluator.num_plays, "episodes", config.runner.logger.console)
        closing.enter_context(progress)

        def measure() -> dict[str, object]:
            result = evaluator.run(progress=progress.update)
            found = evaluation_of(result)
            return {
                "success_rate": found.success_rate,
                "interval": list(found.interval),
                "episodes": result.episodes,
                "lost_episodes": result.lost_episodes,
                "per_task": dict(found.per_task),
                "decodings": {name: one.success_rate for name, one in result.by_decoding.items()},
                "time": time.time(),
            }

        def pause() -> None:
            time.sleep(min(store_settings(config).poll_s, 1.0))

        stop.can_save("the same command continues with the newest version")
        say(f"evaluating the versions in {store}")
        try:
            VersionEvaluator(store, WeightSource(engine), directory, measure, pause).run(lambda: bool(stop), say)
        except InterruptedError:
            say("stopped during an evaluation; the same command repeats it")
    return stop.exit_code
