"""Training in processes that share the layers of OpenVLA's language model, with megatron-core."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embodrl.config.schema import Config, ModelConfig
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.megatron.core import start
from embodrl.hybrid_engines.training.megatron.layout import policy_pieces, publish
from embodrl.hybrid_engines.training.megatron.optimizer import DistributedAdamW
from embodrl.hybrid_engines.training.megatron.policy import LLAMA, ParallelOpenVLAPolicy
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.policy_engine import Leaves
from embodrl.hybrid_engines.training.sharding import DP, TP, held, whole
from embodrl.hybrid_engines.training.shares import SharedState, SharedTrainEngine
from embodrl.hybrid_engines.training.side_modules import ADAM_STATE
from embodrl.hybrid_engines.training.state_shapes import FLOAT32_BYTES, MASTER, StateShapes
from embodrl.models.base import VLAPolicy
from embodrl.models.openvla.policy import OpenVLAPolicy


class MegatronState(SharedState):
    """State under the names of the public layout.

    Args:
        policy: sharded over the processes of ``mesh[TP]``.
        mesh: mesh with the dimensions ``dp`` and ``tp``.
        distributed: the optimizer's state is distributed over ``dp``.
    """

    def __init__(
        self, policy: ParallelOpenVLAPolicy, options: EngineOptions, mesh: DeviceMesh, distributed: bool
    ) -> None:
        self.distributed = distributed
        self.pieces = policy_pieces(policy, LLAMA)
        self.tensor_mesh = mesh[TP]
        self.group = mesh.get_group(DP)
        super().__init__(policy, options, policy.device)
        self.places = {piece.name: (name, piece) for name, pieces in self.pieces.items() for piece in pieces}
        self.parameters = dict(policy.named_parameters())
        self.names = {p: name for name, p in self.parameters.items() if p in self.leaves}
        if self.zero is not None:
            self.leaves = self.zero.stretches

    def _build_optimizer(self) -> torch.optim.Optimizer:
        adamw = cast(torch.optim.AdamW, super()._build_optimizer())
        self.zero = DistributedAdamW(self.policy, adamw) if self.distributed else None
        # The update uses only the common interface of both optimizers.
        return adamw if self.zero is None else cast(torch.optim.Optimizer, self.zero)

    def _make_masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return none: megatron-core's distributed optimizer keeps its own float32 copies, the stretches."""
        return {}

    def offloadable(self) -> Iterator[Tensor]:
        yield from super().offloadable()
        if self.zero is not None:
            yield from self.zero.memory()

    def reference_weights(self) -> dict[str, Tensor]:
        return dict(self.held("reference"))

    def kept_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        in_half = parameter.dtype.itemsize < FLOAT32_BYTES
        return (*ADAM_STATE, MASTER) if self.zero is not None and in_half else ADAM_STATE

    def _holders(self, section: str) -> dict[str, Tensor]:
        """Return the parallel tensors of ``policy`` or ``reference``, by their own names."""
        if section == "policy":
            return {name: t for name, t in self.policy.state_dict().items() if name in self.pieces}
        if self.reference is None:
            return {}
        pairs = zip(self.policy_parameters, self.reference, strict=True)
        return {self.names[parameter]: kept for parameter, kept in pairs}

    def _steps(self) -> dict[str, Tensor]:
        """Return the step counts of the parameters that have taken steps, by their own names.

        A collective call with ``distributed``.
        """
        taken = torch.zeros(len(self.names), device=self.device)
        for index, parameter in enumerate(self.names):
            leaf = self.leaves.get(parameter)
            if leaf is not None and leaf in self.optimizer.state:
                taken[index] = self.optimizer.state[leaf]["step"]
        if self.zero is not None:
            dist.all_reduce(taken, dist.ReduceOp.MAX, group=self.group)
        return {name: taken[index].clone() for index, name in enumerate(self.names.values()) if taken[index] > 0}

    def _moment_of(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Return a moment or the float32 copy in the parameter's shape; a collective call with ``distributed``."""
        if self.zero is None:
            return self.optimizer.state[self.leaves[parameter]][key]
        leaf = self.leaves.get(parameter)
        total = torch.zeros(parameter.numel(), device=self.device)
        if leaf is not None:
            total[self.zero.span(parameter)] = leaf.detach() if key == MASTER else self.optimizer.state[leaf][key]
        dist.all_reduce(total, group=self.group)
        return total.view(parameter.shape)

    def held(self, section: str, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield this process's tensors of a section one by one, under public names; all by default."""
        self.memory.onload()
        if section != "optimizer":
            yield from publish(self._holders(section), self.pieces, self.tensor_mesh, wanted)
            return
        steps = self._steps()
        for parameter, name in self.names.items():
            if name not in steps:
                continue
            for key in self.kept_of(parameter):
                found = [p for p in self.pieces[name] if wanted is None or f"{key}.{p.name}" in wanted]
                moment = self._moment_of(parameter, key) if found and key != "step" else None
                for piece in found:
                    part = steps[name] if moment is None else piece.distribute(piece.get(moment), self.tensor_mesh)
                    yield f"{key}.{piece.name}", part

    def shards(self) -> dict[str, dict[str, Tensor]]:
        """Return this process's state under public names; parts of fused tensors are copies.

        A collective call with ``distributed``.
        """
        sections = ("policy", "optimizer", *(["reference"] if self.reference is not None else []))
        return {section: dict(self.held(section)) for section in sections}

    def inventory(self) -> dict[str, dict[str, int]]:
        self.memory.onload()
        found: dict[str, dict[str, int]] = {"policy": {}, "optimizer": {}}
        for section in ("policy", "reference"):
            for name, holder in self._holders(section).items():
                for piece in self.pieces[name]:
                    found.setdefault(section, {})[piece.name] = piece.num_bytes(holder)
        steps = self._steps()
        for name in steps:
            parameter = self.parameters[name]
            in_float32 = 1 if self.zero is None else FLOAT32_BYTES // parameter.itemsize
            for piece in self.pieces[name]:
                found["optimizer"][f"step.{piece.name}"] = steps[name].element_size()
                for key in self.kept_of(parameter)[1:]:
                    found["optimizer"][f"{key}.{piece.name}"] = in_float32 * piece.num_bytes(parameter)
        return found

    def parts(self, section: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Like ``HeldState.parts``, but a collective call with ``distributed``; parts of fused tensors are copies."""
        return dict(self.held(section, set(names)))

    def whole(self) -> EngineState:
        """Return whole weights, optimizer state and counters: a collective call, and a copy."""
        inventory = self.inventory()
        return EngineState({s: self.gather(s, list(names)) for s, names in inventory.items()}, self.counters())

    def shapes(self) -> StateShapes:
        shards = {section: dict(self.held(section)) for section in ("policy", "reference")}
        trained = {piece.name for name in self.names.values() for piece in self.pieces[name]}
        sizes = {s: {n: tuple(t.shape) for n, t in parts.items()} for s, parts in shards.items()}
        kept = [t for parts in shards.values() for t in parts.values()]
        num_bytes = sum(t.numel() * t.element_size() for t in kept)
        for tensor in (t for name, t in shards["policy"].items() if name in trained):
            in_half = tensor.itemsize < FLOAT32_BYTES and self.zero is not None
            num_bytes += tensor.numel() * (3 * FLOAT32_BYTES if in_half else 2 * tensor.itemsize)
        return StateShapes(
            sizes["policy"],
            {name: shape for name, shape in sizes["policy"].items() if name in trained},
            sizes["reference"],
            num_bytes,
        )

    def put(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            owner = name.partition(".")[2] if section == "optimizer" else name
            piece = self.places[owner][1]
            self.load_part(section, name, tensor if name.startswith("step.") else piece.cut(tensor))
        self._finish_load(section)

    def room(self, section: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new tensors, since the stored ones are fused."""
        owners = {name: name.partition(".")[2] if section == "optimizer" else name for name in saved}
        like = dict(self.held("policy", set(owners.values())))
        return {
            name: torch.zeros((), device=self.device)
            if not tensor.ndim and section == "optimizer"
            else torch.zeros_like(like[owners[name]], dtype=tensor.dtype)
            for name, tensor in saved.items()
        }

    def load_parts(self, section: str, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            self.load_part(section, name, held(part))
        self._finish_load(section)

    @torch.no_grad()
    def load_part(self, section: str, name: str, part: Tensor) -> None:
        """Load this process's part of a public tensor; call ``_finish_load`` after the last one of a section.

        Args:
            section: policy, optimizer or reference; unused entries are skipped.
            name: public name; for a moment, prefixed with the moment's.
            part: see ``layout.Piece.cut``; step counts are whole.
        """
        self.memory.onload()
        if section == "optimizer":
            key, _, owner = name.partition(".")
            if key in self.kept_of(self.parameters[self.places[owner][0]]):
                self._put_moment(key, owner, part.to(self.device))
            return
        holders = self._holders(section)
        own_name, piece = self.places[name]
        if own_name in holders:
            piece.put(holders[own_name], part.to(self.device))

    def _finish_load(self, section: str) -> None:
        """Copy loaded weights to the optimizer; its float32 copies, loaded later, replace them."""
        if self.zero is not None and section == "policy":
            self.zero.take_weights()

    def _put_moment(self, key: str, owner: str, part: Tensor) -> None:
        name, piece = self.places[owner]
        parameter = self.parameters[name]
        leaf = self.leaves.get(parameter)
        if leaf is None:
            return  # held by another process of the data group
        state = self.optimizer.state[leaf]
        if key == "step":
            state[key] = part.to(torch.float32, copy=True)
            return
        mine = leaf if key == MASTER else state.setdefault(key, torch.zeros_like(leaf))
        if self.zero is None:
            piece.put(mine, part)
            return
        holder = torch.zeros(parameter.shape, device=self.device)
        chosen = torch.zeros(parameter.shape, dtype=torch.bool, device=self.device)
        piece.put(holder, part)
        piece.select(chosen).fill_(True)
        span = self.zero.span(parameter)
        mine.copy_(torch.where(chosen.flatten()[span], holder.flatten()[span], mine))


class MegatronTrainEngine(SharedTrainEngine[MegatronState]):
    """AdamW on this process's part of the language model, and on the replicated vision, projector and value head.

    Call ``megatron.core.start`` first. The state has the names and shapes of the public layout, so that a checkpoint
    fits every training backend.

    Args:
        policy: whole, identical in all processes, on the device; sharded in place, and must not be used afterwards.
        model: section ``model``.
        mesh: mesh of the policy's device, with the dimensions ``dp`` and ``tp``, of consecutive ranks.
        distributed_optimizer: distribute the optimizer's state over ``dp`` (see ``optimizer.py``); by default on CUDA.
            Otherwise every process holds all of it: the same arithmetic with torch's AdamW.

    Raises:
        EmbodrlError: the dimensions cannot be divided evenly.
        MissingDependencyError: megatron-core is not installed.
    """

    def __init__(
        self,
        policy: OpenVLAPolicy,
        model: ModelConfig,
        options: EngineOptions,
        mesh: DeviceMesh,
        distributed_optimizer: bool | None = None,
    ) -> None:
        cuda = policy.device.type == "cuda"
        distributed = cuda if distributed_optimizer is None else distributed_optimizer
        super().__init__(MegatronState(ParallelOpenVLAPolicy(policy, model), options, mesh, distributed), options, mesh)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _collect_policy(self, parameters: Sequence[nn.Parameter] | None) -> Leaves:
        state = self.state
        if state.zero is not None:
            state.zero.reduce_gradients()
        elif self.num_shares > 1:
            for parameter in state.leaves:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.group)
        return state.leaves

    def _num_copies(self, parameter: nn.Parameter) -> int:
        state = self.state
        cut = state.pieces[state.names[parameter]][0].dim is not None
        return (1 if cut else state.tensor_mesh.size()) * (1 if state.distributed else self.num_shares)

    def weights(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's whole tensors by public names: a collective call."""
        for name, part in self.state.held("policy", wanted):
            yield name, whole(part)


def make(policy: VLAPolicy, config: Config, mesh: DeviceMesh) -> MegatronTrainEngine:
    """Return the engine of one training process, after creating megatron-core's process groups."""
    assert isinstance(policy, OpenVLAPolicy), "the configuration was checked"
    start(config.actor.tensor_parallel_size)
    return MegatronTrainEngine(policy, config.model, EngineOptions.of(config), mesh)
