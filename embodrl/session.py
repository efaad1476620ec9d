"""A training run taken step by step, by a script in place of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from embodrl.api import ConfigLike, collect, configured, torch_settings
from embodrl.data.demos import Demos
from embodrl.data.load import is_lerobot, load_demos
from embodrl.errors import EmbodrlError, UsageError
from embodrl.hybrid_engines.training.remote import RemoteTrainEngine
from embodrl.learners.objective import given_loss, unusable_loss
from embodrl.learners.rollout import RolloutLearner
from embodrl.names import import_object, label_of, workflow_agents
from embodrl.pipelines.load import load_run
from embodrl.pipelines.walk import Walk
from embodrl.processes.cores import bound_to
from embodrl.reporting.metrics_file import Row
from embodrl.runs.eval_result import EvaluationResult, evaluation_of
from embodrl.specs import LOSSES
from embodrl.trainer.files import export_policy, refuse_earlier_run, run_directory
from embodrl.trainer.parts import check_machine, device_of, start_learner
from embodrl.trainer.session import RunSession, run_directory_of
from embodrl.trainer.stop import StopSignal
from embodrl.workers.collector import rollout_metrics
from embodrl.workers.lockstep import meta_of
from embodrl.workers.repetition import ReplayedEpisode, replay
from embodrl.workers.rollout_backend import LocalBackend
from embodrl.workers.workflows.episodes import EpisodePlayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embodrl.algorithms.advantages import Advantages
    from embodrl.algorithms.losses import LossOutput
    from embodrl.config.load import LoadedConfig
    from embodrl.config.schema import Config
    from embodrl.data.trajectory import TrajectoryBatch
    from embodrl.models.base import VLAPolicy
    from embodrl.pipelines.graph import GraphNode
    from embodrl.runs.collect import CollectResult


@contextmanager
def started(loaded: LoadedConfig) -> Iterator[RolloutLearner]:
    """Start the parts of a run, without its trainer; they end with the block.

    Raises:
        EmbodrlError: the directory holds an earlier run, a requirement is missing, or a process could not be started.
    """
    config = loaded.config
    if config.cluster.controllers > 1:
        message = "a session is carried out by one process"
        raise UsageError(message, "set cluster.controllers to 1", code="session-has-one-controller")
    directory = run_directory(config)
    place = loaded.deployment.main_place
    check_machine(config, loaded.deployment)
    with torch_settings(), run_directory_of(directory) as lock, bound_to(place.cpus if place is not None else ()):
        refuse_earlier_run(directory)
        device = device_of(config, loaded.deployment)
        session = RunSession(loaded, directory, lock, StopSignal(), None, None)
        with ExitStack() as closing:
            learner = start_learner(session, device, lambda: False, lambda *_: None, closing)
            learner.begin()
            yield learner


class Session:
    """The parts of a run with rollouts, driven by a script.

    >>> with embodrl.Session(["env=toy", "model=mlp"]) as session:          # doctest: +SKIP
    ...     for _ in range(20):
    ...         batch = session.rollout()
    ...         advantages = session.advantages(batch)
    ...         session.train(batch, advantages)
    ...         print(session.sync()["rollout/success_rate"])

    Off policy (SAC, DAgger) there are no advantages: ``session.train(batch)`` stores the rollout and updates.

    Each step is the one that the trainer takes: an iteration has the row, and the weights, of `embodrl train`'s.
    Simulators and processes run from ``with`` to its end. ``runner.output_dir`` holds their logs; rows, checkpoints,
    evaluations on the way, moves between devices and the report are the script's.

    Args:
        config: as for ``embodrl.load_config``.
        overrides: as for ``embodrl.load_config``.

    Attributes:
        iteration: finished iterations.
    """

    def __init__(self, config: ConfigLike = None, overrides: Sequence[str] = ()) -> None:
        self._loaded = configured(config, overrides, "train").with_absolute_paths()
        self.iteration = 0
        self._closing = ExitStack()
        self._started: RolloutLearner | None = None
        self._walk: Walk | None = None
        self._episodes: EpisodePlayer | None = None
        self._has_played = False

    @property
    def config(self) -> Config:
        """Values of the configuration."""
        return self._loaded.config

    @property
    def policy(self) -> VLAPolicy:
        """The policy with the weights of the last update."""
        self._learner.engine.fetch()
        return self._learner.policy

    def __enter__(self) -> Self:
        """Start the simulators and processes of the run.

        Raises:
            EmbodrlError: the algorithm has no rollouts, or the pipeline is one's own (``session-pipeline``), a
                requirement is missing, or a process could not be started.
        """
        config = self.config
        if LOSSES.entry(config.algorithm.loss_type).offline or config.pipeline.fn is not None:
            raise EmbodrlError(
                "a session takes the steps of a built-in pipeline with rollouts, and the configuration implies another",
                "leave out pipeline.fn and choose an algorithm such as ppo or sac, or call embodrl.train",
                code="session-pipeline",
            )
        self._started = self._closing.enter_context(started(self._loaded))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started = self._walk = self._episodes = None
        self._closing.__exit__(kind, error, trace)

    def episodes(self) -> EpisodePlayer:
        """Return what plays single episodes, which the script submits, until the session ends.

        While they run, ``evaluate`` is refused, and ``train``, too, unless ``runner.max_staleness`` is 1 or more.

        Raises:
            EmbodrlError: there is no ``rollout.workflow``, or one of several agents, other processes act, or rollouts
                ahead of training have the environments (``session-episodes``).
        """
        rollouts, config = self._learner.parts.rollouts, self.config
        if self._episodes is not None:
            return self._episodes
        problem = hint = ""
        if config.rollout.workflow is None:
            problem = "there is no workflow that plays single episodes"
            hint = f"set rollout.workflow={_CHUNKS} and env.train.auto_reset=false"
        elif workflow_agents(config.rollout.workflow):
            problem, hint = "its workflow has several agents", "let rollout() play whole rollouts"
        elif not isinstance(rollouts, LocalBackend):
            problem, hint = "other processes act", "keep the default placement of rollout"
        elif config.env.enable_offload or config.rollout.enable_offload:
            problem = "simulators or weights leave their memory for training"
            hint = "set env.enable_offload=false and rollout.enable_offload=false"
        elif self._has_played and config.runner.max_staleness:
            problem, hint = "rollouts ahead of training have the environments", "call it before the first rollout()"
        if problem:
            raise _refused(problem, hint)
        assert isinstance(rollouts, LocalBackend)
        judging = self._learner.parts.rewards.judging
        self._episodes = EpisodePlayer(config, rollouts.pool, rollouts.engine, judging)
        self._closing.callback(self._episodes.close)
        return self._episodes

    def rollout(self, batch: TrajectoryBatch | None = None) -> TrajectoryBatch:
        """Begin an iteration: play episodes, judge them, and add the log-probs of other policies that the loss reads.

        Args:
            batch: of ``EpisodePlayer.batch``, with as many episodes as a rollout, in place of playing them; None plays.

        Returns:
            chunks of all environments, (T, B, ...); see ``embodrl.TrajectoryBatch``. Its columns may be replaced.

        Raises:
            EmbodrlError: the iteration before has not ended (``session-order``), or the rollout failed; it may be
                repeated.
        """
        learner = self._learner
        if self._walk is not None:
            raise _out_of_order("rollout", "the iteration before has not ended", "call train and sync first")
        if batch is None:
            self._check_idle("rollout", ahead=False)
            self._has_played = True
        else:
            self._check_batch(batch)
        walk = Walk(learner.graph, learner.open_iteration(self.iteration), learner.before_node)
        found: object = batch
        try:
            while (node := walk.next()) is not None and node.role not in _LEARNS:
                if node.role == "rollout" and batch is not None:
                    steps: dict[str, float | None] = {"env_steps": batch.meta["env_steps"]}
                    walk.end(node, None, rollout_metrics([meta_of(batch)]) | steps)
                    continue
                found = _run(walk, node, *(() if found is None else (found,)))
        except BaseException:  # raised again
            learner.undo()
            raise
        self._walk = walk
        return cast("TrajectoryBatch", found).with_inputs()  # the pipeline's nodes return batches

    def advantages(self, batch: TrajectoryBatch) -> Advantages:
        """Estimate advantages and returns with ``algorithm.adv_type``; or make ``embodrl.Advantages`` by other means.

        Off policy there are none.

        Returns:
            of every chunk, or action; see ``embodrl.Advantages``.

        Raises:
            EmbodrlError: there was no rollout since the last ``sync``, or its advantages are known (``session-order``).
        """
        walk, node = self._next("advantages", "advantage")
        return _run(walk, node, batch)  # pyright: ignore[reportReturnType]  (the pipeline's node returns them)

    def train(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages | None = None,
        loss: Callable[..., LossOutput] | None = None,
    ) -> dict[str, float | None]:
        """Update the weights with ``algorithm.loss_type``.

        On policy: ``algorithm.update_epoch`` times over the batch. Off policy: the batch is added to the replay buffer,
        from which the updates draw.

        Args:
            batch: of ``rollout``.
            advantages: of ``advantages``, or of one's own; None off policy, where there are none.
            loss: in its place, a function that ``embodrl.register_loss`` would take. Training processes import it.

        Returns:
            metrics, by the names of metrics.jsonl.

        Raises:
            EmbodrlError: there was no rollout since the last update (``session-order``), the run can't use the loss
                (``loss-unusable``, ``function-parameter-unknown``), or advantages are given off policy, or not given on
                policy (``session-advantages``).
        """
        self._check_idle("train", ahead=True)
        off_policy = self._is_off_policy
        if off_policy != (advantages is None):
            problem = "an off-policy update has no advantages" if off_policy else "an update on policy needs advantages"
            hint = "call train(batch)" if off_policy else "call train(batch, session.advantages(batch))"
            raise EmbodrlError(problem, hint, code="session-advantages")
        given = {} if loss is None else {"loss": self._usable(loss)}
        walk, node = self._next("train", *_LEARNS, "train")
        known = walk.metrics().keys()
        if node.role == "store":
            _run(walk, node, batch)
        elif node.role == "advantage":
            walk.skip(node)
        if node.role in _LEARNS:
            walk, node = self._next("train", "train")
        _run(walk, node, *(() if off_policy else (batch, advantages)), **given)
        return {name: value for name, value in walk.metrics().items() if name not in known}

    def sync(self) -> Row:
        """Send the weights to the rollouts, and end the iteration.

        Returns:
            its row, as in metrics.jsonl.

        Raises:
            EmbodrlError: there was no update since the last ``sync`` (``session-order``).
        """
        walk, node = self._next("sync", "sync")
        _run(walk, node)
        self._walk = None
        row = self._learner.close_iteration(walk.metrics())
        self.iteration += 1
        return row

    def evaluate(self, video_dir: str | Path | None = None) -> EvaluationResult:
        """Play the episodes of ``env.eval`` on their fixed seeds, in every decoding of ``env.eval.decoding``.

        Args:
            video_dir: directory for videos; None for none.
        """
        learner = self._learner
        self._check_idle("evaluate", ahead=False)
        learner.phases.enter("act")
        directory = None if video_dir is None else Path(video_dir)
        return evaluation_of(learner.parts.rollouts.evaluate(directory, every_decoding=True))

    def save(self, directory: str | Path) -> None:
        """Write the policy in its public layout, for ``embodrl.load_policy`` or ``model.warm_start``.

        Raises:
            OutputError: the directory is not writable; its previous contents are unchanged.
        """
        export_policy(self.policy, Path(directory), self.config, iteration=self.iteration)

    def record(self, directory: str | Path, num_episodes: int, overrides: Sequence[str] = ()) -> CollectResult:
        """Play episodes with the policy and keep them as a dataset, as `embodrl collect` does.

        They are played in simulators that are started for it. Training is not affected.

        Args:
            directory: of the dataset, new or empty.
            num_episodes: successful ones, unless ``collect.keep_failures``.
            overrides: more of the section ``collect``, such as ``collect.sample=true``.

        Raises:
            EmbodrlError: a setting is invalid, or submitted episodes run (``session-episodes``).
        """
        learner = self._learner
        self._check_idle("record", ahead=False)
        learner.phases.enter("act")
        more = [f"collect.output_dir={Path(directory).absolute()}", f"collect.num_episodes={num_episodes}"]
        if self._loaded.deployment.rolls_out_in_processes:
            more += _IN_THIS_PROCESS
        text, name = self._loaded.to_yaml(), Path("the session's configuration")
        loaded = load_run(name, [*more, *overrides], "record", resuming=True, trust=True, text=text)
        return collect(loaded, policy=self.policy)

    def replay(self, recorded: str | Path | Demos, episodes: Sequence[int] | None = None) -> list[ReplayedEpisode]:
        """Repeat the actions of recorded episodes in the simulator, from their seeds, and compare the outcomes.

        They are played in simulators that are started for it.

        Args:
            recorded: directory of ``record``, or of `embodrl collect`; or its episodes.
            episodes: numbers of episodes; None for all whose seed and task are known.

        Raises:
            EmbodrlError: there are no such episodes, or they are of another environment (``replay-impossible``).
        """
        _ = self._learner  # raises outside of the block
        if isinstance(recorded, Demos):
            return replay(recorded, self.config, episodes)
        directory = Path(recorded)
        small = (_SIDE, _SIDE) if is_lerobot(directory) else None
        return replay(load_demos(directory, size=small), self.config, episodes)

    @property
    def _is_off_policy(self) -> bool:
        return LOSSES.entry(self.config.algorithm.loss_type).off_policy

    @property
    def _learner(self) -> RolloutLearner:
        if self._started is None:
            raise EmbodrlError(
                "the session has not been started, or has ended",
                "write `with embodrl.Session(...) as session:`, and call it within",
                code="session-closed",
            )
        return self._started

    def _check_idle(self, step: str, ahead: bool) -> None:
        """Refuse a step that would take environments, or weights, from submitted episodes.

        Args:
            step: name of the step.
            ahead: it is possible beside them if they act with a copy of the weights.
        """
        if self._episodes is None or (ahead and self.config.runner.max_staleness):
            return
        if step == "rollout" and self.config.runner.max_staleness:
            raise _refused("rollouts ahead of training would take the environments", "pass rollout() a batch of them")
        if not self._episodes.is_idle:
            raise _refused(f"{step} is called while submitted episodes run", "pause() and wait() for them before")

    def _check_batch(self, batch: TrajectoryBatch) -> None:
        config = self.config
        count = config.env.train.total_num_envs * config.algorithm.rollout_epoch
        if config.runner.save_rollouts or config.rollout.replay is not None:
            raise _refused("submitted episodes are neither saved nor replayed", "leave both out, or call rollout()")
        if config.algorithm.filter.enabled:
            raise _refused("dynamic sampling plays further rollouts", "set algorithm.filter.enabled=false")
        if "episodes" not in batch.meta or batch.batch_size[1] != count:
            problem = f"an update takes {count} submitted episodes, and the batch has {batch.batch_size[1]}"
            raise _refused(problem, f"make it with EpisodePlayer.batch, of {count} episodes")

    def _usable(self, loss: Callable[..., LossOutput]) -> Callable[..., LossOutput] | str:
        """Return the loss as the engine takes it: a function, or its name where other processes train."""
        label = label_of(loss)
        given_loss(loss, self.config)
        if not isinstance(self._learner.engine, RemoteTrainEngine):
            return loss
        if not _is_importable(label, loss):
            hint = "define it by name in a module, not in the script or in a function"
            raise unusable_loss(label, "can't be imported by the training processes", hint)
        return label

    def _next(self, step: str, *roles: str) -> tuple[Walk, GraphNode]:
        """Return the walk over the iteration in progress, and its next node, which has one of the roles."""
        _ = self._learner  # raises outside of the block
        node = None if self._walk is None else self._walk.next()
        if self._walk is None or node is None or node.role not in roles:
            due = "rollout" if node is None else _STEPS[node.role]
            steps = "rollout, train" if self._is_off_policy else "rollout, advantages, train"
            raise _out_of_order(step, f"{due} comes next", f"call {steps} and sync in this order")
        return self._walk, node


def _run(walk: Walk, node: GraphNode, *inputs: object, **options: object) -> object:
    """Run a node; its output is the script's alone. After an error it may be repeated."""
    begun = walk.begin(node, inputs)
    if options:
        begun = replace(begun, node=replace(node, fn=partial(node.fn, **options)))
    value, metrics = begun.call()
    walk.end(node, None, metrics)
    return value


_SIDE = 64
"""Pixels that the images of replayed episodes are reduced to: nothing reads them."""


def _is_importable(label: str, function: object) -> bool:
    """Return whether a fresh process finds the function under its name."""
    try:
        return not label.startswith("__main__:") and import_object(label) is function
    except EmbodrlError:
        return False


_IN_THIS_PROCESS = (r"cluster.component_placement={actor\,rollout\,env: 0}", "cluster.placement=given")
_IN_THIS_PROCESS += ("rollout.own_process=false",)
_CHUNKS = "embodrl.workers.workflows.workflow:ChunkWorkflow"
_LEARNS = ("advantage", "store")
"""Roles of the first node that learns from a rollout: on and off policy."""
_STEPS = {"advantage": "advantages or train", "store": "train", "train": "train", "sync": "sync"}
"""Role of a node -> the steps that run it."""


def _refused(problem: str, hint: str) -> EmbodrlError:
    return EmbodrlError(problem, hint, code="session-episodes")


def _out_of_order(step: str, problem: str, hint: str) -> EmbodrlError:
    return EmbodrlError(f"{step} is out of order: {problem}", hint, code="session-order")
