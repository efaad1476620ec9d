"""A worker that trains a tiny policy as a whole and cut up, in one process group, and tells the differences."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replay_frames import buffer_of
from tiny_families import observation
from tiny_training import largest_difference, tiny_rollout
from torch.distributed.device_mesh import init_device_mesh
from updates import on_policy, update

from embodrl.algorithms.advantages import compute_advantages
from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.data.replay import ReplayStores
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training import sharded_checkpoint
from embodrl.hybrid_engines.training.fsdp import FsdpTrainEngine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.training.sharding import held
from embodrl.learners.imitation_update import ImitationUpdate
from embodrl.learners.off_policy import OffPolicyUpdater
from embodrl.learners.offline.td3_bc import Td3BcUpdater
from embodrl.learners.records import ReplayUpdater
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.workers.policy import build_policy, configure_torch

Metrics = dict[str, float]


class Comparer(Worker):
    """A process of a group of gloo; every method returns the same in all of them."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", init_method=self.context.rendezvous, rank=self.rank, world_size=self.world_size)

    @dispatch("one_to_all")
    def compare(self, family: str, config: Config, num_updates: int = 2) -> dict[str, float]:
        """Return the largest differences from one process by kind, and how many metrics there were."""
        native, batches = self._native(family, config, num_updates)
        whole = update_all(native, batches, config)
        engine = self._cut(config)
        cut = update_all(engine, batches, config)
        mine, theirs = engine.state_dict().tensors, native.state_dict().tensors
        assert mine.keys() == theirs.keys()
        found = {section: largest_difference(mine[section], theirs[section]) for section in theirs}
        return found | {"metrics": difference(cut, whole), "counted": float(sum(map(len, whole)))}

    @dispatch("one_to_all")
    def compare_replay(self, config: Config) -> dict[str, float]:
        """Return the same of steps from a replay buffer with demonstrations, critics beside the policy."""

        def learn(engine: PolicyTrainEngine) -> tuple[Metrics, EngineState]:
            if config.algorithm.loss_type == "td3_bc":
                updater: ReplayUpdater = Td3BcUpdater(config, engine, buffer_of(60))
            else:
                updater = OffPolicyUpdater(config, engine, ReplayStores(buffer_of(60), buffer_of(30, seed=1)))
            metrics = updater.learn(torch.Generator().manual_seed(3))
            return {name: float(value or 0.0) for name, value in metrics.items()}, engine.state_dict()

        return self._compared(config, learn)

    @dispatch("one_to_all")
    def compare_imitation(self, family: str, config: Config, weighted: bool) -> dict[str, float]:
        """Return the same of two steps that imitate, every action with a weight or all alike."""
        configure_torch(config)
        policy = build_policy(config)
        rows = observation(family, 6, 0)
        actions = torch.rand(6, policy.action_horizon, policy.action_dim, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(2)
        inputs = {name: tensor.cpu() for name, tensor in policy.sft_inputs(rows, actions).items()}
        mask = torch.rand(6, policy.action_horizon, generator=torch.Generator().manual_seed(4))
        batch = Batch(inputs | {"action_mask": mask if weighted else mask > 0.3})

        def learn(engine: PolicyTrainEngine) -> tuple[Metrics, EngineState]:
            update = ImitationUpdate(engine, config)
            steps = [update.step(batch, 1e-3, 0.0, 9.0 if weighted else None) for _ in range(2)]
            update.complete()
            return {f"{number} {name}": x for number, step in enumerate(steps) for name, x in step.items()}, (
                engine.state_dict()
            )

        return self._compared(config, learn)

    def _compared(
        self, config: Config, learn: Callable[[PolicyTrainEngine], tuple[Metrics, EngineState]]
    ) -> dict[str, float]:
        configure_torch(config)
        native = NativeTrainEngine(build_policy(config), EngineOptions.of(config), "cpu")
        whole, theirs = learn(native)
        cut, mine = learn(self._cut(config))
        assert mine.state == theirs.state and mine.tensors.keys() == theirs.tensors.keys()
        found = {name: largest_difference(mine.tensors[name], theirs.tensors[name]) for name in theirs.tensors}
        return found | {"metrics": difference([cut], [whole]), "counted": float(len(whole))}

    @dispatch("one_to_all")
    def decide(self, config: Config) -> tuple[list[Metrics], list[Metrics]]:
        """Return the metrics, cut up and whole, of an update that stops early and one with a NaN in one chunk."""
        native, batches = self._native("openvla", config, 1)
        results: list[list[Metrics]] = []
        for engine in (self._cut(config), native):
            engine.state.version = 1  # the policy trains
            batch, algorithm = batches[0], config.algorithm
            advantages = compute_advantages(batch, algorithm)
            early = update(engine, batch, advantages, algorithm, torch.Generator().manual_seed(0))
            advantages.advantages[0, 1] = torch.nan
            patient = algorithm.model_copy(update={"update_epoch": 1, "target_kl": None})
            broken = update(engine, batch, advantages, patient, torch.Generator().manual_seed(0))
            results.append([early, {n: value for n, value in broken.items() if not math.isnan(value)}])
        return results[0], results[1]

    @dispatch("one_to_all")
    def offload(self, config: Config) -> tuple[float, list[int], list[tuple[int, int]]]:
        """Train with offload between updates and without.

        Returns:
            the largest difference of metrics and state; how many bytes are left of weights, leaves, moments and
            reference while they are away; and bytes before and after, an update.
        """
        _, batches = self._native("openvla", config, 3)
        straight, offloaded = self._cut(config), self._cut(config)
        whole: list[Metrics] = []
        cut: list[Metrics] = []
        left: list[int] = []
        reports: list[tuple[int, int]] = []
        for batch in batches:
            whole += update_all(straight, [batch], config)
            cut += update_all(offloaded, [batch], config)
            report = offloaded.offload()
            assert report is not None
            reports.append((report.before, report.after))
            kept = (
                *offloaded.policy.parameters(),
                *offloaded.state.leaves.values(),
                *(offloaded.state.reference or []),
            )
            moments = [t for kept_of in offloaded.state.optimizer.state.values() for t in kept_of.values()]
            left.append(sum(held(t).untyped_storage().nbytes() for t in (*kept, *moments)))
        weights = dict(offloaded.weights())  # brings them back
        assert largest_difference(weights, dict(straight.weights())) == 0
        offloaded.offload()
        mine, theirs = offloaded.state_dict().tensors, straight.state_dict().tensors
        assert mine.keys() == theirs.keys()
        found = max(largest_difference(mine[section], theirs[section]) for section in theirs)
        return max(found, difference(cut, whole)), left, reports

    @dispatch("one_to_all")
    def go_on(self, config: Config, other: Config) -> dict[str, float]:
        """Return how far apart runs end that continue from a state of ``config``: itself, ``other`` and one process."""
        native, batches = self._native("openvla", config, 3)
        engine = self._cut(config)
        update_all(engine, batches[:2], config)
        state = engine.state_dict()
        tensors = {s: {name: t.clone() for name, t in parts.items()} for s, parts in state.tensors.items()}
        saved = EngineState(tensors, dict(state.state))
        straight = update_all(engine, batches[2:], config)
        end = engine.state_dict().tensors
        found: dict[str, float] = {}
        for name, resumed in (("same", self._cut(config)), ("other", self._cut(other)), ("native", native)):
            resumed.load_state_dict(saved)
            loaded = resumed.state_dict().tensors
            assert all(largest_difference(loaded[s], saved.tensors[s]) == 0 for s in saved.tensors)
            found[name] = difference(update_all(resumed, batches[2:], config), straight)
            if name == "same":
                last = resumed.state_dict().tensors
                found["weights"] = max(largest_difference(last[section], end[section]) for section in end)
        return found

    @dispatch("one_to_all")
    def reshard(self, config: Config, others: dict[str, Config], path: str) -> dict[str, float]:
        """Return how far the states of engines are apart that read what another has written in shards.

        Each of ``others`` reads what ``config`` wrote and the other way round, and so does one process.
        """
        directory = Path(path)
        sharded_checkpoint.BUCKET_BYTES = 100_000  # several files a section
        native, batches = self._native("openvla", config, 3)
        engine = self._cut(config)
        update_all(engine, batches[:2], config)
        found: dict[str, float] = {}
        self._pass_on(engine, native, directory / "native")
        found["native"] = apart(engine, native)
        for name, other in others.items():
            cut = self._cut(other)
            self._pass_on(engine, cut, directory / name)
            back, from_native = self._cut(config), self._cut(other)
            self._pass_on(cut, back, directory / f"from {name}")
            self._pass_on(native, from_native, directory / f"native to {name}")
            found[name] = max(apart(engine, e) for e in (cut, back, from_native))
            found[f"{name} continued"] = difference(
                update_all(back, batches[2:], config), update_all(engine, batches[2:], config)
            )
            native.load_state_dict(engine.state_dict())
        return found

    def _pass_on(self, writer: PolicyTrainEngine, reader: PolicyTrainEngine, directory: Path) -> None:
        """Write in shards and read; of engines in one process, which all processes have, rank 0 writes."""
        if writer.is_shared or self.rank == 0:
            facts = writer.save_shards(directory)
            assert facts and all((directory / name).stat().st_size == f["num_bytes"] for name, f in facts.items())
        dist.barrier()
        reader.load_shards(directory, writer.counters())

    @dispatch("one_to_all")
    def fail(self, config: Config, path: str) -> list[str]:
        """Return what is said where the last rank can't write, and where a checkpoint is of another policy."""
        engine, directory = self._cut(config), Path(path)
        if self.rank == self.world_size - 1:
            open_file = Path.open

            def full(path: Path, *args: Any, **kwargs: Any) -> Any:
                if path.suffix == ".safetensors":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return open_file(path, *args, **kwargs)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Path, "open", full)
                first = raised(lambda: engine.save_shards(directory / "full"))
        else:
            first = raised(lambda: engine.save_shards(directory / "full"))
        engine.save_shards(directory / "good")
        architecture = config.model.architecture.model_copy(update={"num_hidden_layers": 1})
        model = config.model.model_copy(update={"architecture": architecture})
        other = self._cut(config.model_copy(update={"model": model}))
        return [first, raised(lambda: other.load_shards(directory / "good", engine.counters()))]

    @dispatch("one_to_all")
    def refuse(self, config: Config) -> str:
        """Return what is said of a state with a weight that does not fit."""
        engine = self._cut(config)
        saved = engine.state_dict()
        tensors = saved.tensors | {"policy": saved.tensors["policy"] | {"value_head.out.weight": torch.zeros(3)}}
        try:
            engine.load_state_dict(EngineState(tensors, saved.state))
        except CheckpointError as error:
            return str(error)
        return ""

    def close(self) -> None:
        dist.destroy_process_group()

    def _cut(self, config: Config) -> FsdpTrainEngine:
        configure_torch(config)
        size = config.actor.tensor_parallel_size
        mesh = init_device_mesh("cpu", (self.world_size // size, size), mesh_dim_names=("dp", "tp"))
        return FsdpTrainEngine(build_policy(config), EngineOptions.of(config), mesh)

    def _native(
        self, family: str, config: Config, num_rollouts: int
    ) -> tuple[NativeTrainEngine, list[TrajectoryBatch]]:
        """Return an engine, and rollouts of its policy as it is."""
        configure_torch(config)
        policy = build_policy(config)
        batches = [tiny_rollout(family, policy, config, seed) for seed in range(num_rollouts)]
        return NativeTrainEngine(policy, EngineOptions.of(config), "cpu"), batches


def apart(mine: PolicyTrainEngine, theirs: PolicyTrainEngine) -> float:
    """Return the largest difference between two states; the steps of Adam and the counters must be equal."""
    one, other = mine.state_dict(), theirs.state_dict()
    assert one.state == other.state and one.tensors.keys() == other.tensors.keys() == {
        "policy",
        "optimizer",
        "reference",
    }
    assert all(t.dtype == other.tensors[s][name].dtype for s, parts in one.tensors.items() for name, t in parts.items())
    return max(largest_difference(one.tensors[section], other.tensors[section]) for section in one.tensors)


def raised(call: Callable[[], Any]) -> str:
    """Return what a call says when it fails; "" if it does not."""
    try:
        call()
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def update_all(engine: PolicyTrainEngine, batches: list[TrajectoryBatch], config: Config) -> list[Metrics]:
    """Return the metrics of an update for each rollout."""
    found: list[Metrics] = []
    for number, batch in enumerate(batches):
        if config.algorithm.kl.coef > 0:
            batch = batch.replace(ref_logprobs=on_policy(engine, config).reference_logprobs(batch))
        advantages = compute_advantages(batch, config.algorithm)
        generator = torch.Generator().manual_seed(number)
        found.append(update(engine, batch, advantages, config.algorithm, generator))
    return found


def difference(mine: list[Metrics], theirs: list[Metrics]) -> float:
    """Return the largest difference between metrics of the same names, relative to those above 1."""
    pairs: list[tuple[Any, Any]] = []
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        pairs += [(one[name], other[name]) for name in one]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
