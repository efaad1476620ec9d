"""``cluster.placement=auto`` weighs memory: what is passed over, what is chosen, and what is nearest."""

from __future__ import annotations

import pytest

from embodrl.config import LoadedConfig, load_config
from embodrl.deployment import Deployment
from embodrl.preflight.placement import weighed
from embodrl.preflight.run_memory import GIB, HEADROOM, MemoryOf, plan_memory
from embodrl.tools.plan.plan import make_plan

SHARDED = ("actor=fsdp", "actor.micro_batch_size=4", "env.num_processes=32", "env.train.total_num_envs=64")
SEVEN_B = ("model=openvla_7b", "actor.param_dtype=bf16", "cluster=8xh100")
AHEAD = ("runner.max_staleness=1", "algorithm.decoupled.enabled=true")
MIB = 1 << 20


def planned(*settings: str) -> LoadedConfig:
    return load_config([*SEVEN_B, *settings], verb="plan")


def by_hand(actors: int, rollouts: int) -> str:
    """Return the placement that gives training the first GPUs, and rollouts the next."""
    where = f"{actors}-{actors + rollouts - 1}" if rollouts > 1 else str(actors)
    return f"cluster.component_placement={{actor:0-{actors - 1},rollout:{where},env:{where}}}".replace(":0-0", ":0")


def memories(*settings: str) -> list[MemoryOf]:
    loaded = planned(*settings)
    return plan_memory(loaded.config, loaded.deployment).memories


def on_gpu(number: int, *settings: str) -> int:
    """Return the bytes that a placement needs on a GPU."""
    return next(memory.total for memory in memories(*settings) if memory.device == number)


def too_small_for(num_bytes: int) -> str:
    """Return the setting of GPUs that lack a MiB for so many bytes."""
    return f"cluster.hardware.gpu_memory_gib={(num_bytes - MIB) / HEADROOM / GIB}"


def sizes(deployment: Deployment) -> tuple[int, int]:
    return len(deployment.of("actor")), len(deployment.of("rollout"))


def test_the_weighed_placement_is_the_fastest_that_fits() -> None:
    # 160 chunks in micro-batches of 4 are shared by 1, 2, 4, 5 and 8; 32 simulators by 1, 2, 4 and 8. With half of
    # the work in training, 4 and 4 take 1/8, and 5 and 2 follow: 1/4, of all that take 1/4 the smallest sum.
    auto = (*SHARDED, *AHEAD, "cluster.placement=auto")
    assert sizes(weighed(planned(*auto)).deployment) == (4, 4)
    even, more = on_gpu(0, *SHARDED, *AHEAD, by_hand(4, 4)), on_gpu(0, *SHARDED, *AHEAD, by_hand(5, 2))
    assert more < even - MIB
    loaded = planned(*auto, too_small_for(even))
    assert sizes(loaded.deployment) == (4, 4), "without weighing"
    found = weighed(loaded).deployment
    assert sizes(found) == (5, 2)
    (passed,) = [line for line in found.reasons if line.startswith("passed over")]
    assert passed.startswith("passed over: training on 4 and rollouts on 4, apart: node 0 GPU 0 needs")
    assert f"needs {even / GIB:.2f} GiB, and nine tenths of {(even - MIB) / HEADROOM / GIB:.2f} GiB" in passed
    assert by_hand(5, 2) in found.reasons[-1], "the last line is the placement by hand"
    again = weighed(loaded)
    assert weighed(again) is again


def test_a_weighed_run_that_takes_turns_is_divided_where_sharing_does_not_fit() -> None:
    # One process trains on GPU 0, where a rollout process has weights of its own, too.
    native = ("actor.micro_batch_size=1", "env.num_processes=4")
    large = "cluster.hardware.gpu_memory_gib=200"
    shared = weighed(planned(*native, "cluster.placement=auto", large)).deployment
    assert shared.of("actor")[0].devices == (0,) and (0,) in [place.devices for place in shared.of("rollout")]
    both, alone = (
        on_gpu(0, *native, where)
        for where in ("cluster.component_placement={actor:0,rollout:'0,2,4,6',env:'0,2,4,6'}", by_hand(1, 4))
    )
    assert alone < both - MIB
    apart = weighed(planned(*native, "cluster.placement=auto", too_small_for(both))).deployment
    assert apart.of("actor")[0].devices == (0,) and sizes(apart) == (1, 4)
    assert [place.devices for place in apart.of("rollout")] == [(1,), (2,), (3,), (4,)]
    assert "sharing devices: node 0 GPU 0 needs" in "\n".join(apart.reasons)


def test_where_nothing_fits_the_nearest_weighed_placement_is_named() -> None:
    small = "cluster.hardware.gpu_memory_gib=10"
    places = [by_hand(a, r) for a in (1, 2, 4, 5) for r in (1, 2, 4) if a + r <= 8]
    places.append("cluster.component_placement={actor:0-7,rollout:0-7,env:0-7}")
    missing = {place: max(memory.missing for memory in memories(*SHARDED, *AHEAD, small, place)) for place in places}
    least = min(missing.values())
    plan = make_plan(planned(*SHARDED, *AHEAD, "cluster.placement=auto", small))
    assert not plan.fits and least > 0
    (verdict,) = [line for line in plan.deployment.reasons if line.startswith("no placement fits")]
    assert f"lacks {least / GIB:.2f} GiB: node 0 GPU" in verdict
    assert max(memory.missing for memory in plan.memory.memories) == least


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "hybrid"])
def test_other_names_are_not_weighed(name: str) -> None:
    loaded = planned(*SHARDED, f"cluster.placement={name}", "cluster.hardware.gpu_memory_gib=10")
    assert weighed(loaded) is loaded


def test_what_is_unknown_is_not_weighed_and_said() -> None:
    loaded = planned(*SHARDED, "cluster.placement=auto", "model.model_path=someone/large")
    found = weighed(loaded).deployment
    assert found.processes == loaded.deployment.processes
    assert "without regard to the memory of the model" in "\n".join(found.reasons)
