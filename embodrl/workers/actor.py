"""Training in processes of its own: the worker, and the engine that the training loop sees."""

from __future__ import annotations

import errno
import importlib
import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.batch import Batch
from embodrl.data.rng import generator_state, restore_generator
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment
from embodrl.errors import WorkerError
from embodrl.hybrid_engines.base import EngineState, TrainEngine
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.training.engine_state import StateShapes, check_fit
from embodrl.hybrid_engines.training.fsdp import FsdpTrainEngine
from embodrl.hybrid_engines.training.megatron.core import start
from embodrl.hybrid_engines.training.megatron.engine import MegatronTrainEngine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.policy_engine import VALUE_GROUP, PolicyTrainEngine
from embodrl.hybrid_engines.training.sharded_checkpoint import (
    FileFacts,
    buckets,
    num_bytes_of,
    read_index,
    read_whole,
)
from embodrl.hybrid_engines.training.sharding import DP, TP
from embodrl.models.base import VLAPolicy
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.worker import dispatch
from embodrl.workers.policy import build_policy, configure_torch
from embodrl.workers.weights import SendingWorker

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
"""Of tensors on their way between the training processes and the driver at a time."""
START_TIMEOUT_S = 3600.0
"""A process reads a whole checkpoint; one that dies meanwhile is told at once."""


def make_train_engine(
    config: Config,
    deployment: Deployment,
    policy: VLAPolicy,
    log_dir: Path | None = None,
    launcher: Launcher | None = None,
    pipes: Mapping[str, Channel] | None = None,
) -> TrainEngine:
    """Return what ``actor.training_backend`` and the placement ask for.

    Args:
        config: the run.
        deployment: where everything is.
        policy: on its device. Unless ``pipes`` are given, it acts, and always has the weights of the engine's version.
        log_dir: where the output of further processes goes.
        launcher: starts further processes; None takes processes of this machine.
        pipes: see ``GroupTrainEngine``.

    Raises:
        WorkerError: a training process could not be brought up.
    """
    if deployment.trains_in_processes:
        return GroupTrainEngine(config, deployment, policy, log_dir, launcher=launcher, pipes=pipes)
    cores = deployment.threads_of(deployment.of("actor")[0])
    return _native_engine(config, policy, cores, shares_weights=not deployment.rolls_out_in_processes)


def saves_shards(config: Config, deployment: Deployment) -> bool:
    """Tell whether the processes that train write checkpoints, each its part."""
    wanted = config.runner.checkpoint_format
    return wanted == "sharded" or (wanted == "auto" and len(deployment.of("actor")) > 1)


def _native_engine(config: Config, policy: VLAPolicy, cores: int, shares_weights: bool) -> NativeTrainEngine:
    return NativeTrainEngine(
        policy,
        config.actor,
        config.runner.max_iterations,
        policy.device,
        cores,
        keep_reference=config.algorithm.kl.coef > 0,
        may_be_stale=config.runner.max_staleness > 0,
        shares_weights=shares_weights,
    )


def _engine_of_group(config: Config, policy: VLAPolicy, mesh: DeviceMesh) -> PolicyTrainEngine:
    settings: dict[str, Any] = {
        "config": config.actor,
        "total_iterations": config.runner.max_iterations,
        "mesh": mesh,
        "keep_reference": config.algorithm.kl.coef > 0,
        "may_be_stale": config.runner.max_staleness > 0,
    }
    if config.actor.training_backend == "fsdp":
        return FsdpTrainEngine(policy, **settings)
    assert isinstance(policy, OpenVLAPolicy), "the configuration was checked"
    start(config.actor.tensor_parallel_size)
    return MegatronTrainEngine(policy, config.model, **settings)


class ActorWorker(SendingWorker):
    """A training process: one of those that share a model (fsdp, megatron), or the only one (native).

    Args:
        config: the run.
        deployment: where everything of it is.
    """

    def __init__(self, config: Config, deployment: Deployment) -> None:
        for module in config.extensions:
            importlib.import_module(module)
        cores = deployment.threads_of(deployment.of("actor")[self.rank])
        device = configure_torch(config, threads=cores)
        policy = build_policy(config)
        if config.actor.training_backend == "native":
            self._engine: PolicyTrainEngine = _native_engine(config, policy, cores, shares_weights=False)
            return
        torch.set_num_threads(cores)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=self.context.rendezvous, rank=self.rank, world_size=self.world_size
        )
        size = config.actor.tensor_parallel_size
        mesh = init_device_mesh(device.type, (self.world_size // size, size), mesh_dim_names=(DP, TP))
        self._engine = _engine_of_group(config, policy, mesh)

    @property
    def engine(self) -> PolicyTrainEngine:
        """The engine, with all that it needs on its device."""
        self._engine.onload()
        return self._engine

    def stream(self, wanted: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
        with self._engine.memory.present():  # they may be away when a process is brought up anew
            yield from self._engine.weights(wanted)

    @dispatch("one_to_all")
    def offload(self) -> tuple[str, int, int] | None:
        """Take what trains off the device; return the device, and the bytes there before and after."""
        report = self._engine.offload()
        return None if report is None else (str(report.device), report.before, report.after)

    @dispatch("one_to_all")
    def update(
        self, batch: TrajectoryBatch, advantages: dict[str, Tensor], algorithm: str, generator: str
    ) -> tuple[dict[str, float], str, dict[str, Any]]:
        """Train on a rollout; return the metrics, the state of the generator, and the counters."""
        shuffle = torch.Generator()
        restore_generator(shuffle, generator)
        settings = AlgorithmConfig.model_validate_json(algorithm)
        metrics = self.engine.update(batch, Advantages(**advantages), settings, shuffle)
        return metrics, generator_state(shuffle), self.engine.counters()

    @dispatch("one_to_all")
    def imitate(
        self, batch: Batch, learning_rate: float, label_smoothing_bins: float
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Take a step of supervised fine-tuning; return the metrics and the counters."""
        return self.engine.imitate(batch, learning_rate, label_smoothing_bins), self.engine.counters()

    @dispatch("one_to_all")
    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: str) -> Tensor | None:
        """See ``TrainEngine``; from rank 0 alone."""
        found = self.engine.reference_logprobs(batch, AlgorithmConfig.model_validate_json(algorithm))
        return found if self.rank == 0 else None

    @dispatch("one_to_all")
    def proximal(self, batch: TrajectoryBatch, algorithm: str) -> tuple[Tensor, Tensor | None] | None:
        """See ``TrainEngine``; from rank 0 alone."""
        found = self.engine.proximal(batch, AlgorithmConfig.model_validate_json(algorithm))
        return found if self.rank == 0 else None

    @dispatch("one_to_all")
    def inventory(self) -> dict[str, dict[str, int]]:
        """See ``PolicyTrainEngine``."""
        return self.engine.inventory()

    @dispatch("one_to_all")
    def gather(self, section: str, names: list[str]) -> dict[str, Tensor] | None:
        """Return whole tensors of the state, from rank 0 alone."""
        found = self.engine.gather(section, names)
        return found if self.rank == 0 else None

    @dispatch("one_to_all")
    def begin_load(self) -> None:
        """See ``PolicyTrainEngine``."""
        self.engine.begin_load()

    @dispatch("one_to_all")
    def put(self, section: str, tensors: dict[str, Tensor]) -> None:
        """See ``PolicyTrainEngine``."""
        self.engine.put(section, tensors)

    @dispatch("one_to_all")
    def set_counters(self, state: dict[str, Any]) -> None:
        """See ``PolicyTrainEngine``."""
        self.engine.set_counters(state)

    @dispatch("one_to_all")
    def save_shards(self, directory: str) -> FileFacts | tuple[int, str]:
        """Write this process's part of the state; return its files, or what is wrong with the disk."""
        try:
            return self.engine.save_shards(Path(directory))
        except OSError as error:
            return error.errno or errno.EIO, error.strerror or str(error)

    @dispatch("one_to_all")
    def load_shards(self, directory: str, counters: dict[str, Any]) -> None:
        """See ``TrainEngine``."""
        self.engine.load_shards(Path(directory), counters)

    @dispatch("one_to_all")
    def process_id(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def close(self) -> None:
        """Leave the process groups."""
        self.close_sender()
        if dist.is_initialized():
            dist.destroy_process_group()


class GroupTrainEngine(TrainEngine):
    """Trains in the actor processes of a deployment.

    The driver's policy gets the new weights with every update; with ``pipes``, when somebody asks for them.

    Args:
        config: the run.
        deployment: where everything is.
        policy: on its device, as ``build_policy`` made it; acts in this process, unless ``pipes`` are given.
        log_dir: where the output of the processes goes.
        launcher: starts them; None takes processes of this machine.
        pipes: channels of that launcher to the processes that act, which then get the weights from those that train;
            None if the driver sends them, or acts itself.

    Attributes:
        sends: the processes send their weights themselves.
        before_use: called before the policy is read or written, so that whoever took its memory away brings it back.

    Raises:
        WorkerError: a process could not be brought up; none is left.
    """

    def __init__(
        self,
        config: Config,
        deployment: Deployment,
        policy: VLAPolicy,
        log_dir: Path | None = None,
        launcher: Launcher | None = None,
        pipes: Mapping[str, Channel] | None = None,
    ) -> None:
        self.policy = policy
        self.sends, self._behind = pipes is not None, False
        self.before_use: Callable[[], None] = lambda: None
        self.version = 0
        self._counters: dict[str, Any] = {"version": 0, "nonfinite_in_row": 0}
        groups = policy.trainable_groups()
        trained = {id(p): name for name, group in groups.items() for p in group}
        parameters = dict(policy.named_parameters())
        self._trained = {name: p for name, p in parameters.items() if id(p) in trained}
        kept = config.algorithm.kl.coef > 0
        reference = {name: p for name, p in self._trained.items() if kept and trained[id(p)] != VALUE_GROUP}
        self._shapes = StateShapes.of(policy, self._trained, reference)
        places = deployment.of("actor")
        logger.info("%d training process(es), %s", len(places), config.actor.training_backend)
        self.group = WorkerGroup(ActorWorker, "actor", config=config, deployment=deployment)
        self.group.launch(places, launcher or "process", pipes, log_dir, START_TIMEOUT_S)

    def update(
        self, batch: TrajectoryBatch, advantages: Advantages, algorithm: AlgorithmConfig, generator: torch.Generator
    ) -> dict[str, float]:
        columns = {"advantages": advantages.advantages, "returns": advantages.returns, "valid": advantages.valid}
        results = self._call("update", batch, columns, algorithm.model_dump_json(), generator_state(generator))
        metrics, shuffled, counters = results[0]
        restore_generator(generator, shuffled)
        self._behind = True
        if not self.sends:
            self.fetch()
        self._counters, self.version = counters, counters["version"]
        return metrics

    def imitate(self, batch: Batch, learning_rate: float, label_smoothing_bins: float) -> dict[str, float]:
        metrics, counters = self._call("imitate", batch, learning_rate, label_smoothing_bins)[0]
        self._behind = True
        self._counters, self.version = counters, counters["version"]
        return metrics

    @torch.no_grad()
    def fetch(self) -> None:
        self.before_use()
        if not self._behind:
            return
        names = {name: p.numel() * p.element_size() for name, p in self._trained.items()}
        for name, tensor in self._stream("policy", names):
            self._trained[name].copy_(tensor)
        self._behind = False

    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        return self._call("reference_logprobs", batch, algorithm.model_dump_json())[0]

    def proximal(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor | None]:
        return self._call("proximal", batch, algorithm.model_dump_json())[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.fetch()
        yield from self.policy.state_dict().items()

    def state_dict(self) -> EngineState:
        """Return weights, optimizer state and counters; all but the weights are copies."""
        self.fetch()
        inventory = self._call("inventory")[0]
        tensors = {s: dict(self._stream(s, names)) for s, names in inventory.items() if s != "policy"}
        return EngineState({"policy": dict(self.policy.state_dict()), **tensors}, dict(self._counters))

    def load_state_dict(self, saved: EngineState) -> None:
        check_fit(saved.tensors, self._shapes)
        self.before_use()
        mine = self.policy.state_dict()
        self._call("begin_load")
        for section, tensors in saved.tensors.items():
            for names in buckets(num_bytes_of(tensors), BUCKET_BYTES):
                self._call("put", section, {name: tensors[name] for name in names})
        with torch.no_grad():
            for name, tensor in saved.tensors["policy"].items():
                mine[name].copy_(tensor)
        self._behind = False
        self._counters = dict(saved.state)
        self._call("set_counters", self._counters)
        self.version = int(saved.state["version"])

    def counters(self) -> dict[str, Any]:
        return dict(self._counters)

    def save_shards(self, directory: Path) -> FileFacts:
        facts: FileFacts = {}
        for found in self._call("save_shards", str(directory.absolute())):
            if isinstance(found, tuple):
                raise OSError(*found)
            facts |= found
        return facts

    def load_shards(self, directory: Path, counters: Mapping[str, Any]) -> None:
        """See ``TrainEngine``. Only weights are read here."""
        check_fit(read_index(directory), self._shapes)
        self.before_use()
        self._call("load_shards", str(directory.absolute()), dict(counters))
        read_whole(directory, "policy", self.policy.state_dict())
        self._behind = False
        self._counters, self.version = dict(counters), int(counters["version"])

    def state_num_bytes(self) -> int:
        return self._shapes.num_bytes

    def offload(self) -> OffloadReport | None:
        """See ``TrainEngine``; weights leave as well, since what acts has its own. Bytes are those of all processes."""
        found = [report for report in self._call("offload") if report is not None]
        return OffloadReport.total([OffloadReport(torch.device(name), *num_bytes) for name, *num_bytes in found])

    def check(self) -> None:
        self.group.check()

    def close(self) -> None:
        self.group.close()

    def _stream(self, section: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors; one bucket of them is on its way at a time."""
        for names in buckets(sizes, BUCKET_BYTES):
            yield from self._call("gather", section, names)[0].items()

    def _call(self, method: str, *args: Any) -> Any:
        """Return what the processes return; without one of them the others would wait for ever, so all end.

        Raises:
            WorkerError: one died or raised.
        """
        try:
            self.group.check()
            return self.group.call(method, *args).result()
        except WorkerError:
            self.group.kill()
            raise
