"""Learning from rollouts: an iteration runs a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.imitation import DemoDraws
from embodrl.data.offline import OfflineData
from embodrl.data.replay import ReplayStores
from embodrl.data.rng import capture_rng, generator_state, restore_generator, restore_rng
from embodrl.deployment import Deployment
from embodrl.errors import CheckpointError, PipelineError
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.controllers import ALONE, Controllers
from embodrl.hybrid_engines.weight_sync.disk import WeightPublisher
from embodrl.learners.base import Learner, LearnerState
from embodrl.learners.memory_phases import TRAIN_ROLES, MemoryPhases, peak_memory
from embodrl.learners.on_policy import Demonstrations, OnPolicyUpdate
from embodrl.learners.records import ReplayUpdater
from embodrl.models.base import VLAPolicy
from embodrl.pipelines.checks import CHANGES
from embodrl.pipelines.context import PipelineContext
from embodrl.pipelines.graph import Graph, GraphNode
from embodrl.pipelines.outcomes import Metrics
from embodrl.pipelines.walk import Walk
from embodrl.reporting.metrics_file import Row
from embodrl.storage.checkpoint import Checkpoint
from embodrl.workers.collector import RolloutState
from embodrl.workers.reward import RewardWorker
from embodrl.workers.rollout_backend import RolloutBackend

REPLAY = "replay"
# Metrics that readers expect in every row: null before the first rollout, and without training.
ROW_0: Row = {"iteration": 0, "env_steps": 0} | dict.fromkeys(
    ("rollout/success_rate", "time/env_s", "time/policy_s", "time/train_s", "train/policy_loss")
)


@dataclass(frozen=True)
class Parts:
    """The started parts of a run.

    Attributes:
        engine: train engine; copies its weights to ``policy`` on demand (``fetch``).
        imitated: demonstrations that these updates also imitate.
        from_records: updates the weights of off-policy and offline runs from records.
        controllers: main processes of the run, which share its rollouts.
    """

    policy: VLAPolicy
    engine: TrainEngine
    rollouts: RolloutBackend
    rewards: RewardWorker
    on_policy: OnPolicyUpdate | None = None
    imitated: Demonstrations | None = None
    from_records: ReplayUpdater | None = None
    replay: ReplayStores | None = None
    recorded: OfflineData | None = None
    controllers: Controllers = ALONE

    @property
    def stores(self) -> ReplayStores | OfflineData | DemoDraws | None:
        """Learning data that a checkpoint keeps besides rollouts."""
        if self.imitated is not None:
            return self.imitated.frames
        return self.recorded if self.replay is None else self.replay


@dataclass(frozen=True)
class RunCallbacks:
    """Functions that a run calls: whether to stop, and the start of a phase with its chunks (0: unknown)."""

    is_to_stop: Callable[[], bool]
    show_phase: Callable[[str, int], None]


class RolloutLearner(Learner):
    """Plays, judges, estimates advantages and updates, as defined by the nodes of a graph.

    Every version of the weights is written to ``publish_to``; None for none.
    """

    records_videos = True

    def __init__(
        self,
        config: Config,
        deployment: Deployment,
        graph: Graph,
        parts: Parts,
        callbacks: RunCallbacks,
        publish_to: Path | None = None,
    ) -> None:
        super().__init__(parts.policy, parts.engine)
        self.config = config
        self.parts = parts
        self.graph = graph
        self.phases = MemoryPhases(config, parts.rollouts, parts.engine)
        self.env_steps = 0
        self._deployment = deployment
        self._callbacks = callbacks
        self._publish_to = publish_to
        self._publisher: WeightPublisher | None = None
        self._shuffle = torch.Generator().manual_seed(config.runner.seed)
        self._open: _OpenIteration | None = None
        self._is_restored = False

    def first_row(self) -> Row:
        return dict(ROW_0)

    def begin(self) -> None:
        if self._publish_to is not None:
            self._publisher = WeightPublisher(self._publish_to, self.policy, self.engine.version)
        self._publish()
        if self._is_restored:
            self.parts.rollouts.restored(self.engine)

    def step(self, iteration: int) -> Row:
        context = self.open_iteration(iteration)
        with Walk(self.graph, context, self.before_node) as walk:
            while (node := walk.next()) is not None:
                walk.end(node, *walk.begin(node).call())
        return self.close_iteration(walk.metrics())

    def open_iteration(self, iteration: int) -> PipelineContext:
        """Begin an iteration, and return the context of its nodes.

        Args:
            iteration: updates done so far.
        """
        start = time.perf_counter()
        self.phases.enter("act")
        parts = self.parts
        acting = (parts.rollouts.collector, parts.rewards)
        learning = (parts.on_policy, parts.imitated, parts.from_records, parts.replay, parts.recorded)
        before = _RollbackState(capture_rng(), generator_state(self._shuffle), parts.rewards.state())
        totals = parts.controllers if parts.controllers.count > 1 else None
        context = PipelineContext(self.config, iteration, self.engine, *acting, self._shuffle, *learning, totals)
        self._open = _OpenIteration(start, iteration, before)
        return context

    def close_iteration(self, metrics: Metrics) -> Row:
        """End the iteration in progress, and return its row.

        Args:
            metrics: metrics of its nodes.

        Raises:
            PipelineError: no node has reported ``env_steps``, the number of simulated steps.
        """
        assert self._open is not None
        steps = metrics.pop("env_steps", None)
        if steps is None:
            raise PipelineError(
                f"no node of the pipeline '{self.graph.name}' reports the number of simulated steps",
                "return (batch, {'env_steps': STEPS}) from the node that gathers experience",
            )
        self.env_steps += int(steps)
        self._publish()
        self.phases.enter("rest")
        metrics |= self.phases.take_metrics() | peak_memory(self.engine)
        faults = self.parts.rollouts.total_faults()
        seconds = time.perf_counter() - self._open.start
        iteration = self._open.iteration
        self._open = None
        self.is_updating = False
        if self.parts.controllers.count > 1:
            metrics["usage/controllers_mib"] = self.parts.controllers.take_num_bytes() / 2**20
        return ROW_0 | {
            "iteration": iteration + 1,
            "env_steps": self.env_steps,
            **metrics,
            **self.parts.rollouts.sync_metrics(),
            "env/restarts": faults.restarts,
            "env/quarantined": faults.quarantined,
            "rollout/restarts": faults.rollout_restarts,
            "time/total_s": seconds,
            "time/env_steps_per_s": int(steps) / seconds,
        }

    def undo(self) -> None:
        self.parts.rollouts.collector.drain()
        if self._open is not None:
            before = self._open.before
            restore_rng(before.rng)
            restore_generator(self._shuffle, before.shuffle)
            if before.rewards:
                self.parts.rewards.load_state(before.rewards)
            self.parts.rollouts.collector.undo()
            self._open = None

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> Row:
        self._show_phase("evaluation", "evaluation", self.parts.rollouts.num_decodings(every_decoding))
        self.phases.enter("act")
        return self.parts.rollouts.evaluate(video_dir, every_decoding).metrics()

    def saved(self, iteration: int) -> None:
        self.parts.rollouts.saved(self.engine)

    def finish(self) -> None:
        self.parts.rollouts.finish(self.engine.version, self._callbacks.is_to_stop)

    def prepare_save(self) -> None:
        self.parts.rollouts.collector.reset_history()

    def release_after_save(self) -> None:
        self.phases.enter("rest")
        self.phases.take_metrics()  # they belong to no iteration

    def state(self) -> LearnerState:
        rollouts = self.parts.rollouts.collector.state()
        stores = self.parts.stores
        kept = {"rewards": self.parts.rewards.state(), REPLAY: stores.state() if stores else {}}
        content: dict[str, object] = {
            "env_steps": self.env_steps,
            "shuffle": generator_state(self._shuffle),
            "rollout": {"state": rollouts.state, "tensors": sorted(rollouts.tensors), "blobs": sorted(rollouts.blobs)},
            "faults": vars(self.parts.rollouts.total_faults()),
            "rewards": bool(kept["rewards"]),
        }
        if (learner := self.parts.from_records) is not None:
            content |= learner.state().content
            kept |= learner.state().tensors
        tensors = rollouts.tensors | {name: part for name, part in kept.items() if part}
        return LearnerState(content, tensors, rollouts.blobs)

    def load_state(self, checkpoint: Checkpoint) -> None:
        self._is_restored = True
        state = checkpoint.state
        collector = self.parts.rollouts.collector
        stores = self.parts.stores
        collector.update_weights(self.engine.weights(), self.engine.version)
        rollouts = state.fields("rollout")
        try:
            collector.load_state(
                RolloutState(
                    dict(rollouts.fields("state").content),
                    {name: checkpoint.tensors(name) for name in rollouts.texts("tensors")},
                    {name: checkpoint.blob(name) for name in rollouts.texts("blobs")},
                ),
                self.engine.version,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error.message}", error.hint, code=error.code) from error
        if state.flag("rewards", False):
            self.parts.rewards.load_state(checkpoint.tensors("rewards"))
        if stores is not None:
            stores.load_state(checkpoint.tensors(REPLAY))
        if self.parts.from_records is not None:
            self.parts.from_records.load_state(checkpoint)
        restore_generator(self._shuffle, state.text("shuffle"))
        if self.parts.controllers.rank == 0:  # they are of all controllers
            faults = state.fields("faults")
            vars(self.parts.rollouts.faults).update({name: faults.integer(name) for name in faults})
        self.env_steps = state.integer("env_steps")

    def before_node(self, node: GraphNode) -> None:
        """Enter the memory phase of a node; before an update, a stop undoes the iteration, as during its rollout."""
        if self._callbacks.is_to_stop() and not self.is_updating:
            raise InterruptedError
        if node.role in TRAIN_ROLES:
            self.phases.enter("train")
        if node.role == "sync":
            self._publish()  # first: servers that act meanwhile are asked for the new version at once
        self.is_updating = self.is_updating or node.role in CHANGES
        self._show_phase(node.name, node.role)

    def _show_phase(self, name: str, role: str, decodings: int = 0) -> None:
        """Show the number of chunks of a phase, if this process steps through them."""
        config = self.config
        chunks = 0
        local = not self._deployment.rolls_out_in_processes and config.rollout.workflow is None
        plays = config.runner.max_staleness == 0 and config.store_url is None
        if role == "rollout" and local and plays:
            chunks = config.algorithm.rollout_epoch * config.rollout_chunks
        elif role == "evaluation" and local:
            waves = -(-config.env.eval.num_episodes // config.env.train.total_num_envs) * decodings
            chunks = waves * -(-config.evaluated.env.max_episode_steps // config.model.num_action_chunks)
        self._callbacks.show_phase(name, chunks)

    def _publish(self) -> None:
        if self._publisher is not None:
            self._publisher.publish(self.engine.weights(), self.engine.version)


@dataclass(frozen=True)
class _RollbackState:
    """State that an iteration changes before its update, besides the rollouts."""

    rng: dict[str, Any]
    shuffle: str
    rewards: dict[str, Tensor]


@dataclass(frozen=True)
class _OpenIteration:
    """An iteration in progress.

    Attributes:
        start: its beginning, by ``time.perf_counter()``.
        iteration: updates done before it.
    """

    start: float
    iteration: int
    before: _RollbackState
