"""Which kind of weight sync a placement gets, and which ones it can not have."""

import pytest
from expect import raises_code

from embodrl.deployment import ProcessPlace
from embodrl.errors import EmbodrlError
from embodrl.workers.weights import choose_weight_sync, uses_nccl


class Placed:
    """``actor`` and ``rollout`` as (node, device) pairs; a device of None is the processor."""

    def __init__(self, actor, rollout):
        self.places = {"actor": actor, "rollout": rollout}

    def of(self, component, /):
        return [
            ProcessPlace(component, rank, node, () if device is None else (device,))
            for rank, (node, device) in enumerate(self.places[component])
        ]


CPU = Placed([(0, None)], [(0, None)])
DISJOINT = Placed([(0, 0), (0, 1)], [(0, 2), (0, 3)])
SAME_GPUS = Placed([(0, 0), (1, 0)], [(0, 0), (1, 0)])
FAR = Placed([(0, 0)], [(1, 0)])


@pytest.mark.parametrize(
    ("placed", "expected"), [(CPU, "memory"), (DISJOINT, "memory"), (SAME_GPUS, "memory"), (FAR, "collective")]
)
def test_the_kind_follows_from_the_placement(placed, expected):
    assert choose_weight_sync(placed) == expected


def test_memory_between_machines_is_refused():
    with raises_code("weight-sync-settings", EmbodrlError, "1"):
        choose_weight_sync(FAR, "memory")


def test_a_kind_that_works_is_used():
    for kind in ("memory", "collective", "disk"):
        assert choose_weight_sync(DISJOINT, kind) == kind


def test_nccl_needs_a_gpu_for_each():
    assert [uses_nccl(placed) for placed in (CPU, DISJOINT, SAME_GPUS, FAR)] == [False, True, False, True]
