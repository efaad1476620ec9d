"""The rollouts and evaluations of one of several controllers."""

from __future__ import annotations

import base64
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.faults import FaultCounts
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.controllers import ALONE, Controllers
from embodrl.types import Decoding
from embodrl.workers.collector import Metrics, RolloutState, SyncCollector, rollout_metrics
from embodrl.workers.evaluator import (
    EpisodeResults,
    EvalResult,
    Played,
    evaluation_result,
    join_results,
    run_decodings,
)
from embodrl.workers.rollout_backend import LocalBackend

_STOPS = (InterruptedError, KeyboardInterrupt, SystemExit)
"""A stop of the run; the last two, late in its time. All controllers still meet, so that they can save."""


class SharedCollector(SyncCollector):
    """Plays this controller's share of the environments; figures and interruptions are those of all controllers.

    A checkpoint has the states of all, in the format of as many rollout processes.
    """

    controllers: Controllers = ALONE

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        batch: TrajectoryBatch | None = None
        mine: dict[str, Any] | None = None
        stopped: BaseException = InterruptedError()
        try:
            batch, _ = super().gather(iteration)
            mine = {"env_steps": batch.meta["env_steps"], "metas": self.metas()}
        except _STOPS as error:
            stopped = error
        found = self.controllers.exchange("rollout", mine)
        if batch is None or None in found:
            raise stopped
        metrics = rollout_metrics([meta for part in found for meta in part["metas"]])
        each = [rollout_metrics(part["metas"]) for part in found]
        # The controllers played at the same time.
        metrics |= {name: max(one[name] or 0.0 for one in each) for name in ("time/env_s", "time/policy_s")}
        batch.meta["env_steps"] = sum(part["env_steps"] for part in found)
        return batch, metrics

    def state(self) -> RolloutState:
        mine = super().state()
        blobs = {name: base64.b64encode(blob).decode() for name, blob in mine.blobs.items()}
        found = self.controllers.exchange("state of the rollouts", [mine.state, blobs])
        every = {f"rollout_{rank}_{name}": blob for rank, (_, part) in enumerate(found) for name, blob in part.items()}
        return RolloutState(
            {"processes": [state for state, _ in found]},
            blobs={name: base64.b64decode(blob) for name, blob in every.items()},
        )

    def load_state(self, saved: RolloutState, version: int) -> None:
        count = len(saved.state.get("processes", [None]))
        if count != self.controllers.count:
            raise CheckpointError(
                f"the checkpoint was made with {count} controller(s) or rollout process(es), not"
                f" {self.controllers.count}",
                f"resume with {count} of them",
                code="checkpoint-other-settings",
            )
        rank = self.controllers.rank
        prefix = f"rollout_{rank}_"
        blobs = {name.removeprefix(prefix): blob for name, blob in saved.blobs.items() if name.startswith(prefix)}
        super().load_state(RolloutState(saved.state["processes"][rank], blobs=blobs), version)


class SharedBackend(LocalBackend):
    """A controller acts; of an evaluation it plays consecutive episodes, and has the figures of all."""

    controllers: Controllers = ALONE

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> EvalResult:
        config = self.evaluator.config
        episodes = np.array_split(np.arange(config.env.eval.num_episodes), self.controllers.count)
        decodings = run_decodings(config, self.engine, every_decoding)
        mine: dict[str, Any] | None = None
        stopped: BaseException = InterruptedError()
        try:
            played = self.evaluator.run_episodes(episodes[self.controllers.rank], video_dir, decodings=decodings)
            mine = {str(decoding): _plain(results) for decoding, results in played.items()}
        except _STOPS as error:
            stopped = error
        found = self.controllers.exchange("evaluation", mine)
        if None in found:
            raise stopped
        parts: list[Played] = [{cast(Decoding, name): _results(one) for name, one in part.items()} for part in found]
        return evaluation_result(config, join_results(parts, max))

    def total_faults(self) -> FaultCounts:
        found = self.controllers.exchange("faults", asdict(self.faults))
        return FaultCounts(**{each.name: sum(part[each.name] for part in found) for each in fields(FaultCounts)})


def _plain(results: EpisodeResults) -> dict[str, Any]:
    return vars(results) | {"outcome": results.outcome.tolist(), "agents": {}}


def _results(plain: dict[str, Any]) -> EpisodeResults:
    fields_of: dict[str, Any] = dict(plain)
    fields_of["outcome"] = np.asarray(plain["outcome"], np.float64).reshape(-1, 4)
    return EpisodeResults(**fields_of)
