"""Training processes, and the choice of the training engine of a run."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodrl.config.schema import Config
from embodrl.data.rng import generator_state, restore_generator
from embodrl.data.shared_inputs import RowInputs
from embodrl.deployment import Deployment
from embodrl.hybrid_engines.base import Counters, FileFacts, TrainEngine
from embodrl.hybrid_engines.controllers import Controllers, are_on_one_machine
from embodrl.hybrid_engines.offload import Offload
from embodrl.hybrid_engines.process_groups import join_mesh, loopback_only, make_mesh
from embodrl.hybrid_engines.training.data_parallel import ControllerEngine, DataParallelTrainEngine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.training.remote import RemoteTrainEngine
from embodrl.hybrid_engines.training.state_shapes import StateShapes
from embodrl.models.base import VLAPolicy
from embodrl.names import import_object
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.worker import dispatch
from embodrl.specs import ENGINES
from embodrl.workers.policy import build_policy, configure_torch
from embodrl.workers.weights import SendingWorker

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 3600.0
"""Generous, since a process may read a whole checkpoint; the death of a process is noticed at once."""


def make_train_engine(
    config: Config,
    deployment: Deployment,
    policy: VLAPolicy,
    log_dir: Path | None = None,
    launcher: Launcher | None = None,
    pipes: Mapping[str, Channel] | None = None,
    memory: Offload | None = None,
) -> TrainEngine:
    """Return the engine of ``actor.training_backend``, in this process or in separate ones.

    Args:
        config: run configuration.
        deployment: placement of all processes.
        policy: policy on its device.
        log_dir: directory for the output of the training processes.
        launcher: starts the training processes; None starts them on this machine.
        pipes: the launcher's channels to the rollout processes, if the training processes send weights directly.
        memory: weights of ``policy``, which may be offloaded while other processes train.

    Raises:
        WorkerError: a training process could not be started; the others have been stopped.
    """
    if deployment.trains_in_processes:
        group = launch_trainers(config, deployment, log_dir, launcher, pipes)
        return RemoteTrainEngine(policy, group, memory, group.world_size // config.actor.tensor_parallel_size)
    return make_native_engine(config, deployment, policy)


def launch_trainers(
    config: Config,
    deployment: Deployment,
    log_dir: Path | None = None,
    launcher: Launcher | None = None,
    pipes: Mapping[str, Channel] | None = None,
) -> WorkerGroup:
    """Start the training processes of a deployment; arguments as in ``make_train_engine``.

    Raises:
        WorkerError: a process could not be started; the others have been stopped.
    """
    places = deployment.of("actor")
    logger.info("%d training process(es), %s", len(places), config.actor.training_backend)
    group = WorkerGroup(ActorWorker, "actor", config=config, deployment=deployment)
    return group.launch(places, launcher or "process", pipes, log_dir, START_TIMEOUT_S)


def make_native_engine(config: Config, deployment: Deployment, policy: VLAPolicy) -> NativeTrainEngine:
    """Return the engine that trains in this process."""
    cores = deployment.threads_of(deployment.of("actor")[0])
    return _native_engine(config, policy, cores, shares_weights=not deployment.rolls_out_in_processes)


def make_shared_engine(
    config: Config, deployment: Deployment, policy: VLAPolicy, controllers: Controllers
) -> ControllerEngine:
    """Return the engine of one of several controllers; with fsdp, ``policy`` only acts."""
    cores = deployment.threads_of(deployment.of("actor")[0])
    if config.actor.training_backend == "fsdp":
        from embodrl.hybrid_engines.training.sharded_controllers import ShardedControllerEngine  # torch's compiler

        with loopback_only(are_on_one_machine()):
            mesh = make_mesh(policy.device, controllers.count, 1, config.cluster.collective_timeout_s)
            return ShardedControllerEngine(policy, EngineOptions.of(config), mesh, controllers)
    return DataParallelTrainEngine(policy, EngineOptions.of(config), policy.device, cores, controllers)


def saves_shards(config: Config, deployment: Deployment) -> bool:
    """Return whether each training process writes its own checkpoint shard."""
    wanted = config.runner.checkpoint_format
    return wanted == "sharded" or (wanted == "auto" and len(deployment.of("actor")) > 1)


def _native_engine(config: Config, policy: VLAPolicy, cores: int, shares_weights: bool) -> NativeTrainEngine:
    return NativeTrainEngine(policy, EngineOptions.of(config), policy.device, cores, shares_weights)


def _engine_of_group(config: Config, policy: VLAPolicy, mesh: DeviceMesh) -> PolicyTrainEngine:
    maker = ENGINES.entry(config.actor.training_backend).training
    assert maker is not None, "the configuration was checked"
    # Imported only here: torch's compiler and megatron-core take longer than a simulator needs to start.
    make: Any = import_object(maker) if isinstance(maker, str) else maker
    return make(policy, config, mesh)


def _with_own_inputs(
    world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[tuple[tuple[Any, ...], dict[str, Any]] | None]:
    """Give every process its part of the last argument, a list with one part for each share of the rows, or None."""
    *others, held = args
    # Neighbouring ranks are one share: they have parts of the same tensors (``join_mesh``).
    parts = [None if held is None else held[rank * len(held) // world_size] for rank in range(world_size)]
    return [((*others, part), kwargs) for part in parts]


class ActorWorker(SendingWorker):
    """A training process: one of several that share a model (fsdp, megatron), or the only one (native)."""

    def __init__(self, config: Config, deployment: Deployment) -> None:
        self._updates: list[Any] = []
        cores = deployment.threads_of(deployment.of("actor")[self.rank])
        device = configure_torch(config, threads=cores)
        policy = build_policy(config)
        if config.actor.training_backend == "native":
            self._engine: PolicyTrainEngine = _native_engine(config, policy, cores, shares_weights=False)
            return
        torch.set_num_threads(cores)
        size = config.actor.tensor_parallel_size
        timeout_s = config.cluster.collective_timeout_s
        with loopback_only(len({place.node for place in deployment.of("actor")}) == 1):
            mesh = join_mesh(device, self.context.rendezvous, self.rank, self.world_size, size, timeout_s)
            self._engine = _engine_of_group(config, policy, mesh)

    @property
    def engine(self) -> PolicyTrainEngine:
        """The engine, fully onloaded to its device."""
        self._engine.onload()
        return self._engine

    def stream(self, wanted: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
        with self._engine.present():  # the process may restart while the weights are offloaded
            yield from self._engine.weights(wanted)

    @dispatch("one_to_all")
    def offload(self) -> tuple[str, int, int] | None:
        """Offload the training state; return the device and the bytes allocated there before and after."""
        report = self._engine.offload()
        return None if report is None else (str(report.device), report.before, report.after)

    @dispatch("one_to_all")
    def take_peak_memory(self) -> int | None:
        return self._engine.take_peak_memory()

    @dispatch("one_to_all")
    def attach(self, update: str, config: Config) -> int:
        """Create an update that drives the engine; return its number."""
        self._updates.append(self.engine.attach(update, config))
        return len(self._updates) - 1

    @dispatch(_with_own_inputs)
    def call_update(
        self,
        number: int,
        method: str,
        args: list[Any],
        generators: dict[int, str],
        held: RowInputs | None,
    ) -> tuple[Any, dict[int, str], Counters]:
        """Call a method of an update; return the result (rank 0 only), the generator states, and the counters.

        ``generators`` maps positions among the arguments to generator states; ``held`` has the policy inputs that this
        process reads, None if the arguments have them.
        """
        update = self._updates[number]
        for place, state in generators.items():
            args[place] = torch.Generator()
            restore_generator(args[place], state)
        self._engine.onload()
        update.hold(held)
        try:
            answer = getattr(update, method)(*args)
        finally:
            update.hold(None)
        states = {place: generator_state(args[place]) for place in generators}
        return answer if self.rank == 0 else None, states, self._engine.counters()

    @dispatch("one_to_all")
    def complete_update(self) -> Counters:
        """Increment the version; return the counters."""
        self.engine.complete_update()
        return self.engine.counters()

    @dispatch("one_to_all")
    def shapes(self) -> StateShapes | None:
        """Return the expected shapes of a saved state, from rank 0 only."""
        found = self.engine.state.shapes()
        return found if self.rank == 0 else None

    @dispatch("one_to_all")
    def inventory(self) -> dict[str, dict[str, int]]:
        return self.engine.state.inventory()

    @dispatch("one_to_all")
    def gather(self, section: str, names: list[str]) -> dict[str, Tensor] | None:
        """Return whole tensors of the state, from rank 0 only."""
        found = self.engine.state.gather(section, names)
        return found if self.rank == 0 else None

    @dispatch("one_to_all")
    def start_load(self) -> None:
        self.engine.state.start_load()

    @dispatch("one_to_all")
    def put(self, section: str, tensors: dict[str, Tensor]) -> None:
        self.engine.state.put(section, tensors)

    @dispatch("one_to_all")
    def set_counters(self, state: Counters) -> None:
        self.engine.state.set_counters(state)

    @dispatch("one_to_all")
    def save_shards(self, directory: str) -> FileFacts | tuple[int, str]:
        """Write this process's shard of the state; return its files, or the disk error."""
        try:
            return self.engine.save_shards(Path(directory))
        except OSError as error:
            return error.errno or errno.EIO, error.strerror or str(error)

    @dispatch("one_to_all")
    def load_shards(self, directory: str, counters: Counters) -> None:
        self.engine.load_shards(Path(directory), counters)

    @dispatch("one_to_all")
    def process_id(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self.close_sender()
        if dist.is_initialized():
            dist.destroy_process_group()
