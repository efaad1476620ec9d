"""The mapping between a parallel Llama's tensors and the public weights: which part of which tensor a process holds.

A process's part of any public tensor is one stretch of its rows or columns, so that parts are DTensors over the tensor
group; only the fused layers hold several public tensors in one, in megatron-core's order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from embodrl.hybrid_engines.training.megatron.core import tensor_group
from embodrl.hybrid_engines.training.megatron.llama import ParallelAttention, ParallelLlama
from embodrl.models.common.llama import Llama

Select = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """A public tensor, or a process's part of it, inside a tensor of the parallel model.

    Attributes:
        name: public name.
        select: maps the holding tensor to a view with the piece's elements in order.
        width: columns of the part.
        dim: sharded dimension of the whole; None if every process holds the whole.
    """

    name: str
    select: Select
    width: int | None
    dim: int | None

    def get(self, holder: Tensor) -> Tensor:
        """Return the part, ``[rows,columns]``; a copy if it is scattered over the holder."""
        view = self.select(holder)
        return view if self.width is None else view.reshape(-1, self.width)

    def put(self, holder: Tensor, part: Tensor) -> None:
        """Write the part."""
        view = self.select(holder)
        view.copy_(part.reshape(view.shape))

    def num_bytes(self, holder: Tensor) -> int:
        """Return the bytes of the whole public tensor."""
        parts = 1 if self.dim is None else tensor_group().size()
        return self.select(holder).numel() * holder.element_size() * parts

    def cut(self, whole: Tensor) -> Tensor:
        """Return this process's part of the public tensor."""
        if self.dim is None:
            return whole
        group = tensor_group()
        return whole.chunk(group.size(), dim=self.dim)[group.rank()]

    def distribute(self, part: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the part from ``get`` as a DTensor of the whole over ``mesh``, the tensor group."""
        placement = Replicate() if self.dim is None else Shard(self.dim)
        return DTensor.from_local(part.contiguous(), mesh, [placement], run_check=False)


def _itself(holder: Tensor) -> Tensor:
    return holder


def _one(name: str, dim: int | None) -> list[Piece]:
    return [Piece(name, _itself, None, dim)]


def _qkv(prefix: str, attention: ParallelAttention, width: int) -> list[Piece]:
    groups = attention.groups
    heads = attention.heads_of_group
    size = attention.head_dim

    def rows(part: slice) -> Select:
        return lambda holder: holder.view(groups, heads + 2, size, width)[:, part]

    parts = {"q": slice(0, heads), "k": slice(heads, heads + 1), "v": slice(heads + 1, heads + 2)}
    return [Piece(f"{prefix}.{name}_proj.weight", rows(part), width, 0) for name, part in parts.items()]


def _gate_up(prefix: str, width: int) -> list[Piece]:
    def half(number: int) -> Select:
        return lambda holder: holder.chunk(2, dim=0)[number]

    return [Piece(f"{prefix}.{name}_proj.weight", half(n), width, 0) for n, name in enumerate(("gate", "up"))]


def llama_pieces(model: ParallelLlama) -> dict[str, list[Piece]]:
    """Return the pieces of every parameter of the model, by its name, under public names."""
    width = model.spec.hidden_size
    pieces = {
        "model.embed_tokens.weight": _one("model.embed_tokens.weight", 0),
        "model.norm.weight": _one("model.norm.weight", None),
        "lm_head.weight": _one("lm_head.weight", 0),
    }
    for number, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{number}"
        attention = layer.get_submodule("self_attention")
        assert isinstance(attention, ParallelAttention)
        pieces |= {
            f"{prefix}.input_layernorm.weight": _one(f"{prefix}.input_layernorm.weight", None),
            f"{prefix}.self_attention.linear_qkv.weight": _qkv(f"{prefix}.self_attn", attention, width),
            f"{prefix}.self_attention.linear_proj.weight": _one(f"{prefix}.self_attn.o_proj.weight", 1),
            f"{prefix}.pre_mlp_layernorm.weight": _one(f"{prefix}.post_attention_layernorm.weight", None),
            f"{prefix}.mlp.linear_fc1.weight": _gate_up(f"{prefix}.mlp", width),
            f"{prefix}.mlp.linear_fc2.weight": _one(f"{prefix}.mlp.down_proj.weight", 1),
        }
    return pieces


def policy_pieces(policy: nn.Module, prefix: str) -> dict[str, list[Piece]]:
    """Return the pieces of every saved tensor of a policy with a parallel Llama, whose names have ``prefix``."""
    llama = policy.get_submodule(prefix.removesuffix("."))
    assert isinstance(llama, ParallelLlama)
    inside = llama_pieces(llama)
    return {
        name: [Piece(prefix + p.name, p.select, p.width, p.dim) for p in inside[name.removeprefix(prefix)]]
        if name.startswith(prefix)
        else _one(name, None)
        for name, tensor in policy.state_dict().items()
        if tensor is not None  # megatron-core's layers have entries without contents
    }


def publish(
    holders: Mapping[str, Tensor],
    pieces: Mapping[str, list[Piece]],
    mesh: DeviceMesh,
    wanted: Container[str] | None = None,
) -> Iterator[tuple[str, DTensor]]:
    """Yield the held public tensors one by one, as views where possible.

    Pieces without an entry in ``holders`` are skipped; ``wanted`` None yields all names; ``mesh`` is the tensor group.
    """
    for name, holder in holders.items():
        for piece in pieces[name]:
            if wanted is None or piece.name in wanted:
                yield piece.name, piece.distribute(piece.get(holder), mesh)


@torch.no_grad()
def parallelize(public: Llama) -> ParallelLlama:
    """Return this process's part of a Llama, which is emptied layer by layer and must not be used afterwards.

    Device and trainable weights stay the same. At most one layer is held twice.

    Raises:
        EmbodrlError: the dimensions cannot be divided evenly.
    """
    device = public.lm_head.weight.device
    model = ParallelLlama(public)
    weights = dict(public.named_parameters())
    parameters = dict(model.named_parameters())
    for name, pieces in llama_pieces(model).items():
        parameter = parameters[name]
        for piece in pieces:
            source = weights.pop(piece.name)
            piece.put(parameter.data, piece.cut(source.detach()).to(parameter.device))
            parameter.requires_grad_(source.requires_grad)
            source.data = source.data.new_empty(0)
        parameter.data = parameter.data.to(device)
    assert not weights, f"not converted: {min(weights)}"
    return model
