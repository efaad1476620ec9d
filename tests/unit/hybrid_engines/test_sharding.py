"""Which part of a tensor a process holds, what is cut, and what the placement makes of it."""

from __future__ import annotations

import pytest
import torch
from tiny_families import FAMILIES, build
from torch import nn

from embodrl.config import load_config
from embodrl.hybrid_engines.training.sharding import blocks_of, held, num_copies, part_of, whole
from embodrl.hybrid_engines.training.state_shapes import StateShapes, buckets
from embodrl.hybrid_engines.training.tensor_parallel import decoder_layers
from embodrl.tools.plan.plan import make_plan
from embodrl.workers.actor import saves_shards


def test_a_plain_tensor_is_held_whole_by_all() -> None:
    tensor = torch.arange(6.0)
    assert part_of(tensor, tensor) is tensor and held(tensor) is tensor
    assert whole(nn.Parameter(tensor)).requires_grad is False
    assert num_copies(tensor, 4) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_disjoint_and_run(family: str) -> None:
    policy = build(family)
    blocks = blocks_of(policy)
    assert len(blocks) >= 3
    parameters = [id(p) for block in blocks for p in block.parameters()]
    assert len(parameters) == len(set(parameters))
    unused = {id(p) for p in policy.unused_parameters()}
    assert all(any(id(p) not in unused for p in block.parameters()) for block in blocks)


def test_the_layers_that_tensor_parallelism_cuts() -> None:
    names = {family: len(decoder_layers(build(family))) for family in FAMILIES}
    assert names == {
        "openvla": 2,
        "openvla_oft": 2,
        "pi0": 4,
        "pi05": 4,
        "pi0_fast": 2,
        "gr00t": 2,
        "gr00t_n1_7": 2,
        "smolvla": 4,
    }  # pi: PaliGemma and the expert


def test_bytes_of_a_state() -> None:
    module = nn.Linear(3, 2)
    shapes = StateShapes.of(module, {"weight": module.weight}, {"weight": module.weight})
    assert shapes.policy == {"weight": (2, 3), "bias": (2,)}
    assert shapes.num_bytes == 4 * (8 + 6 + 2 * 6)  # all weights, the reference, two moments of what trains


def test_buckets_keep_the_order_and_the_size() -> None:
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 2}
    assert list(buckets(sizes, 10)) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(buckets({}, 10)) == []


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        ((), False),
        (("actor=fsdp",), True),
        (("actor.own_process=true",), True),
        (("cluster=8xh100", "cluster.component_placement={actor:0,rollout:1,env:0-1}"), True),
        (("cluster=8xh100", "cluster.component_placement={actor:1,rollout:1,env:0-1}"), False),
    ],
)
def test_who_trains_in_processes_of_their_own(arguments: tuple[str, ...], own: bool) -> None:
    assert load_config(list(arguments), verb="plan").deployment.trains_in_processes is own


@pytest.mark.parametrize(
    ("arguments", "sharded"),
    [
        ((), False),
        (("runner.checkpoint_format=sharded",), True),
        (("actor=fsdp", "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"), True),
        (
            (
                "actor=fsdp",
                "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
                "runner.checkpoint_format=full",
            ),
            False,
        ),
        (("actor=fsdp",), False),
    ],
)
def test_several_training_processes_write_shards(arguments: tuple[str, ...], sharded: bool) -> None:
    loaded = load_config(["cluster.device=cpu", *arguments], verb="plan")
    assert saves_shards(loaded.config, loaded.deployment) is sharded


def test_a_plan_divides_what_fsdp_cuts() -> None:
    settings = ("model=openvla_7b", "cluster=8xh100", "env.num_processes=8", "actor.param_dtype=bf16")
    placed = "cluster.component_placement={actor:0-3,rollout:4,env:0-7}"
    batches = ("actor.global_batch_size=8", "actor.micro_batch_size=1")

    def needed(*more: str) -> dict[str, int]:
        plan = make_plan(load_config([*settings, *batches, *more], verb="plan"))
        return next(memory.needed for memory in plan.memory.memories if memory.device == 0)

    one = needed("cluster.component_placement={actor:0,rollout:4,env:0-7}")
    four = needed(placed, "actor=fsdp", *batches)
    lean = needed(placed, "actor=fsdp", *batches, "actor.fsdp.reduce_every_micro_batch=true")
    assert four["optimizer"] == one["optimizer"] // 4
    assert four["gradients"] == one["gradients"] and lean["gradients"] == one["gradients"] // 4
    assert one["weights"] // 4 < four["weights"] < one["weights"] // 4 + 3 << 30
    assert four["activations"] == one["activations"]
