"""The composition root of a training run: creates all parts in order and passes each its collaborators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypedDict, cast

import torch

from embodrl.config.schema import Config
from embodrl.data.imitation import DemoDraws, load_checked_demos, observed
from embodrl.data.replay import ReplayStores
from embodrl.deployment import Deployment
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.rollout.native import make_rollout_engine, policy_memory
from embodrl.hybrid_engines.training.remote import RemoteTrainEngine
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.learners.base import Learner
from embodrl.learners.dagger import DaggerUpdater
from embodrl.learners.off_policy import OffPolicyUpdater
from embodrl.learners.offline.backend import OfflineBackend
from embodrl.learners.on_policy import UPDATE, Demonstrations, OnPolicyUpdate
from embodrl.learners.records import ReplayUpdater
from embodrl.learners.replay import make_stores
from embodrl.learners.rollout import Parts, RolloutLearner, RunCallbacks
from embodrl.learners.shared_update import UPDATE as SHARED_UPDATE
from embodrl.models.base import VLAPolicy
from embodrl.names import import_object
from embodrl.pipelines.load import graph_of
from embodrl.pipelines.node_process import with_placed_nodes
from embodrl.processes.memory import MemoryWatch
from embodrl.reporting.metrics_file import METRICS_FILE
from embodrl.reporting.usage import UsageMonitor
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.base import Launcher
from embodrl.specs import LOSSES
from embodrl.trainer.async_evaluation import AsyncEvaluator, finished_since
from embodrl.trainer.evaluations import Evaluations
from embodrl.trainer.files import PUBLISHED_DIR, WEIGHT_SYNC_DIR, check_disk_space, sent_num_bytes
from embodrl.trainer.journal import Journal, View
from embodrl.trainer.loop import Trainer
from embodrl.trainer.saving import Saver, open_metrics
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.session import RunSession
from embodrl.trainer.teacher import check_teacher, load_teacher
from embodrl.trainer.training_share import share_meter
from embodrl.workers.actor import make_shared_engine, make_train_engine
from embodrl.workers.collector import Share, share_config
from embodrl.workers.env import check_environments, check_simulator, check_videos, held_out_pool, make_pool
from embodrl.workers.policy import build_policy, check_features, check_memory, configure_torch, resolve_device
from embodrl.workers.remote_backend import (
    RemoteBackend,
    channels_of,
    launch_rollouts,
    make_launcher,
    rollout_channels,
    sends_weights,
)
from embodrl.workers.reward import RewardWorker
from embodrl.workers.rollout_backend import LocalBackend, acting_policy, evaluator_class, make_collector
from embodrl.workers.saved_rollouts import ROLLOUTS_DIR, ReplayedRollouts, SavingCollector
from embodrl.workers.shared_rollouts import SharedBackend, SharedCollector
from embodrl.workers.weights import LocalSender, RemoteSender, Sender, WeightChannel, choose_weight_sync, uses_nccl

logger = logging.getLogger(__name__)

OnStep = Callable[[int, int], None] | None
"""Called with the finished and the total number of optimizer steps of an update."""
PartsBuilder = Callable[[RunSession, torch.device, Callable[[], bool], ExitStack, OnStep], Parts]
"""Called with the arguments of ``build``."""


STORE_PARTS = "embodrl.store.run_parts:build"


class _Learning(TypedDict, total=False):
    """The fields of ``Parts`` that update the weights."""

    on_policy: OnPolicyUpdate
    imitated: Demonstrations
    from_records: ReplayUpdater
    replay: ReplayStores


def build(
    session: RunSession, device: torch.device, stopped: Callable[[], bool], closing: ExitStack, on_step: OnStep = None
) -> Parts:
    """Create and start the parts of a training run.

    Args:
        session: attempt at the run.
        device: device of the driver's policy.
        stopped: polled during rollouts; True interrupts them.
        closing: closes the started parts, in reverse order.
        on_step: called with the finished and the total number of optimizer steps of an update.

    Raises:
        EnvError: a simulator could not be started.
        WorkerError: a process could not be started.
        OutputError: the disk has too little space.
        EmbodrlError: a requirement of a backend is missing.
    """
    closing.enter_context(MemoryWatch())
    config = session.config
    make: PartsBuilder = acts_in_driver if config.rollout.replay is None else replays_in_driver
    if session.deployment.rolls_out_in_processes:
        make = acts_in_processes
    own = STORE_PARTS if config.store_url is not None else LOSSES.entry(config.algorithm.loss_type).parts
    if own is not None:
        make = cast("PartsBuilder", import_object(own))
    check_teacher(session)
    parts = make(session, device, stopped, closing, on_step)
    if config.runner.save_rollouts:
        rollouts = parts.rollouts
        rollouts.collector = SavingCollector(rollouts.collector, session.directory / ROLLOUTS_DIR, parts.rewards)
    if isinstance(parts.rollouts.collector, ReplayedRollouts):
        parts.rollouts.collector.rewards = parts.rewards
    if config.algorithm.teacher is not None and config.algorithm.kl.coef:
        load_teacher(session, parts.policy, parts.engine)
    session.engine = parts.engine
    session.stop.arm()
    num_bytes = parts.engine.shapes().num_bytes
    sent = sent_num_bytes(config, session.deployment, parts.policy)
    check_disk_space(session.directory, config, parts.policy, num_bytes, keep_best=config.runner.keep_best, sent=sent)
    return parts


def start_learner(
    session: RunSession,
    device: torch.device,
    stopped: Callable[[], bool],
    show_phase: Callable[[str, int], None],
    closing: ExitStack,
    on_step: OnStep = None,
) -> RolloutLearner:
    """Start the parts of a run, and return the learner that performs its iterations.

    Args:
        session: attempt at the run.
        device: device of this process's policy.
        stopped: polled during rollouts; True interrupts them.
        show_phase: called with the start of a phase and its chunks (0: unknown).
        closing: closes the started parts, in reverse order.
        on_step: called with the finished and the total number of optimizer steps of an update.

    Raises:
        EmbodrlError: a requirement is missing, or a process could not be started.
    """
    config = session.config
    parts = build(session, device, stopped, closing, on_step)
    publish_to = session.directory / PUBLISHED_DIR if config.rollout.publish_weights else None
    callbacks = RunCallbacks(session.is_to_stop, show_phase)
    graph = graph_of(session.loaded)
    if config.pipeline.placement:
        graph = with_placed_nodes(graph, config, session.deployment, session.directory / "logs", closing)
    return RolloutLearner(config, session.deployment, graph, parts, callbacks, publish_to)


def device_of(config: Config, deployment: Deployment) -> torch.device:
    """Configure torch, and return the device of this process's policy.

    A process that neither acts nor trains keeps a policy only for checkpoints, publishing and export: on the CPU.
    """
    device = configure_torch(config, deployment.main_place)
    return torch.device("cpu") if deployment.main_place is None else device


def make_policy(session: RunSession, device: torch.device) -> VLAPolicy:
    """Return the policy of a run that learns from reward.

    Raises:
        EmbodrlError: the policy does not support a setting; see also ``build_policy``.
    """
    policy = build_policy(session.weights_from, device)
    check_features(session.config, policy)  # again, since hub checkpoints were skipped before
    return policy


def acts_in_driver(
    session: RunSession, device: torch.device, stopped: Callable[[], bool], closing: ExitStack, on_step: OnStep
) -> Parts:
    """Like ``build``, if the driver acts and runs the simulators."""
    config = session.config
    deployment = session.deployment
    log_dir = session.directory / "logs"
    launcher = _start_launcher(session, closing)
    controllers = session.controllers
    share = Share(controllers.rank, controllers.count)
    whole, config = config, share_config(config, share)
    places = deployment.of("env")[share.rows(whole.env.num_processes)]
    pool = make_pool(config, config.env.train.total_num_envs, log_dir, places=places)
    closing.callback(pool.close)
    pool.start_async()  # while the policy is built
    policy = make_policy(session, device)
    driver_copy_may_leave = config.rollout.enable_offload and deployment.trains_in_processes
    memory = policy_memory(policy) if driver_copy_may_leave else None
    if controllers.count > 1:
        engine: TrainEngine = make_shared_engine(session.weights_from, deployment, policy, controllers)
    else:
        engine = make_train_engine(session.weights_from, deployment, policy, log_dir, launcher, memory=memory)
    closing.callback(engine.close)
    pool.wait_started()
    check_environments(config, pool)
    threads = deployment.threads_of(deployment.of("rollout")[0])
    published = session.directory.resolve() / PUBLISHED_DIR
    part = (share.rank, share.count)
    acting = make_rollout_engine(config, acting_policy(config, policy), threads, part, memory, published)
    rewards = RewardWorker(config, tuple(pool.spec.tasks))
    closing.callback(rewards.close)
    rewards.check(pool.spec)
    should_stop = also_lost(engine, stopped)
    make_own = partial(held_out_pool, log_dir=log_dir, places=places)
    evaluator = evaluator_class(config)(config, pool, acting, should_stop, make_own)
    if controllers.count > 1:
        collector = SharedCollector(config, pool, acting, should_stop, rewards.judging, share)
        rollouts: LocalBackend = SharedBackend(pool, acting, collector, evaluator)
        collector.controllers = rollouts.controllers = controllers
        learned: _Learning = {"on_policy": engine.attach(SHARED_UPDATE, whole, on_step)}
    else:
        rollouts = LocalBackend(pool, acting, make_collector(config, pool, acting, should_stop, rewards), evaluator)
        learned = learning(config, policy, engine, pool, on_step)
    closing.callback(rollouts.close)
    return Parts(policy, engine, rollouts, rewards, **learned, controllers=controllers)


def replays_in_driver(
    session: RunSession, device: torch.device, stopped: Callable[[], bool], closing: ExitStack, on_step: OnStep
) -> Parts:
    """Like ``build``, if saved rollouts take the place of new ones; simulators start with the first evaluation."""
    config = session.config
    deployment = session.deployment
    policy = make_policy(session, device)
    engine = start_engine(session, session.weights_from, policy, closing)
    acting = make_rollout_engine(config, policy, deployment.threads_of(deployment.of("rollout")[0]))
    log_dir = session.directory / "logs"
    should_stop = also_lost(engine, stopped)
    rollouts = OfflineBackend(config, acting, deployment.of("env"), log_dir, should_stop, ReplayedRollouts)
    closing.callback(rollouts.close)
    rewards = RewardWorker(config, config.env.tasks)
    closing.callback(rewards.close)
    return Parts(policy, engine, rollouts, rewards, **learning(config, policy, engine, None, on_step))


def acts_in_processes(
    session: RunSession, device: torch.device, stopped: Callable[[], bool], closing: ExitStack, on_step: OnStep
) -> Parts:
    """Like ``build``, if other processes act, each with its simulators."""
    config = session.config
    deployment = session.deployment
    log_dir = session.directory / "logs"
    launcher = _start_launcher(session, closing)
    assert launcher is not None
    channels = rollout_channels(launcher, len(deployment.of("rollout")))
    policy = make_policy(session, device)
    pipes = channels_of(channels, "weights")
    sends = sends_weights(config, deployment)
    patches = config.rollout.weight_patches
    engine = make_train_engine(session.weights_from, deployment, policy, log_dir, launcher, pipes if sends else None)
    closing.callback(engine.close)
    if isinstance(engine, RemoteTrainEngine) and sends:
        sender: Sender = RemoteSender(cast("WorkerGroup", engine.group), pipes, trained_names(policy), patches)
        where = "training process of rank 0"
        sent_from = resolve_device(config)
    else:
        sender = LocalSender(list(pipes.values()), trained_names(policy), launcher.address, patches=patches)
        where = "driver"
        sent_from = policy.device
    group = launch_rollouts(session.weights_from, deployment, launcher, channels, log_dir, closing)
    kind = choose_weight_sync(deployment, config.rollout.weight_sync)
    weights = WeightChannel(
        kind,
        sender,
        list(channels_of(channels, "answers").values()),
        session.directory.resolve() / WEIGHT_SYNC_DIR,
        "cuda" if uses_nccl(deployment) and sent_from.type == "cuda" else "cpu",
    )
    closing.callback(weights.close)
    logger.info("%d rollout process(es), weights by %s from the %s", group.world_size, kind, where)
    rollouts = RemoteBackend(config, group, channels, weights, policy, engine, also_lost(engine, stopped))
    if config.rollout.replay is not None:  # the processes act in evaluations
        rollouts.collector = ReplayedRollouts(config, rollouts)
    closing.callback(rollouts.rewards.close)
    closing.callback(rollouts.close)
    return Parts(policy, engine, rollouts, rollouts.rewards, **learning(config, policy, engine, None, on_step))


def _start_launcher(session: RunSession, closing: ExitStack) -> Launcher | None:
    launcher = make_launcher(session.config, session.deployment, session.deployment.trains_in_processes)
    if launcher is not None:
        closing.callback(launcher.close)
    return launcher


def start_engine(session: RunSession, config: Config, policy: VLAPolicy, closing: ExitStack) -> TrainEngine:
    """Return the engine of a run without separate rollout processes; see ``make_train_engine``."""
    deployment = session.deployment
    launcher = _start_launcher(session, closing) if deployment.trains_in_processes else None
    engine = make_train_engine(config, deployment, policy, session.directory / "logs", launcher)
    closing.callback(engine.close)
    return engine


def make_trainer(
    session: RunSession,
    learner: Learner,
    schedule: Schedule,
    view: View,
    closing: ExitStack,
    file_name: str = METRICS_FILE,
    built_from: Config | None = None,
) -> Trainer:
    """Return the trainer of an attempt at its starting point, with rows, checkpoints and evaluations.

    Args:
        session: attempt at the run.
        learner: performs an iteration.
        schedule: iterations after which the run evaluates, saves and ends.
        view: display of the rows.
        closing: parts to close, in reverse order.
        file_name: file of rows in the run directory.
        built_from: configuration that the policy was built from; None for the run's.

    Raises:
        CheckpointError: the checkpoint was made with other settings.
    """
    checkpoint = session.checkpoint
    # Before its row is dropped.
    late = None if checkpoint is None else finished_since(session.directory, checkpoint, file_name)
    metrics = open_metrics(session, closing, file_name)
    usage = closing.enter_context(UsageMonitor.of_run(session.config, session.deployment))
    meter = share_meter(session.loaded, session.directory)
    journal = Journal(metrics, view, session.config.model.warm_start is not None, usage, meter)
    view.restore(journal.rows)
    async_evaluator = None
    if session.config.runner.eval_async and (schedule.eval_interval or schedule.evaluates_last):
        built_from = built_from or session.config
        async_evaluator = AsyncEvaluator(built_from, session.deployment, session.directory, learner.policy)
        closing.callback(async_evaluator.close)
    saver = Saver(session, learner)
    evaluations = Evaluations(session, learner, journal, saver.manager, async_evaluator)
    trainer = Trainer(session, learner, schedule, journal, evaluations, saver)
    if checkpoint is not None:
        view.message(f"resuming from {checkpoint.path}")
        trainer.restore(checkpoint, late)
    return trainer


def also_lost(engine: TrainEngine, stopped: Callable[[], bool]) -> Callable[[], bool]:
    """Return ``stopped`` with an added check, which raises as soon as a training process has died."""

    def should_stop() -> bool:
        engine.check()
        return stopped()

    return should_stop


def learning(
    config: Config, policy: VLAPolicy, engine: TrainEngine, pool: EnvPool | None, on_step: OnStep
) -> _Learning:
    """Return the objects that update the weights, and the data they learn from besides rollouts."""
    loss = LOSSES.entry(config.algorithm.loss_type)
    if not loss.off_policy:
        update: OnPolicyUpdate = engine.attach(UPDATE, config, on_step)
        if not config.algorithm.bc_coef:
            return {"on_policy": update}
        return {"on_policy": update, "imitated": load_demonstrations(config, policy)}
    stores = make_stores(config, policy, None if pool is None else pool.spec.state_dim)
    if loss.imitates:
        return {"replay": stores, "from_records": DaggerUpdater(config, policy, engine, stores.online, on_step)}
    return {"replay": stores, "from_records": OffPolicyUpdater(config, engine, stores, on_step)}


def load_demonstrations(config: Config, policy: VLAPolicy) -> Demonstrations:
    """Return the demonstrations that are imitated in addition to the loss of rollouts (``algorithm.bc_coef``).

    They are ``algorithm.off_policy.demos``, and each step uses ``actor.global_batch_size`` frames.

    Raises:
        EmbodrlError: the demonstrations are damaged, or from another environment or robot.
    """
    source = config.algorithm.off_policy.demos
    assert source is not None, "the configuration was checked"
    imitated = config.model_copy(update={"sft": config.sft.model_copy(update={"data_dir": source})})
    demos = load_checked_demos(imitated)
    logger.info("%d demonstrations, %d frames, are imitated, too", len(demos.tasks), len(demos.actions))
    size = config.actor.global_batch_size
    frames = DemoDraws(observed(demos, config), size, policy.action_horizon, config.runner.seed)
    return Demonstrations(config, policy, frames)


def check_machine(config: Config, deployment: Deployment) -> None:
    """Reject what cannot work on this machine, before anything starts."""
    resolve_device(config)
    check_simulator(config)
    if config.evaluated is not config:
        check_simulator(config.evaluated)
    check_videos(config)
    check_memory(config, deployment, decoding=config.env.eval.decoding_of(every=False))
