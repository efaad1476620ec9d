"""Which kind of weight sync a placement gets, and which ones it can not have."""

import pytest

from embodrl.deployment import ProcessPlace
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.weight_sync.choice import choose_weight_sync, uses_nccl


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
    ("placed", "same_process", "wanted"),
    [
        (CPU, True, "shared"),
        (CPU, False, "memory"),
        (DISJOINT, False, "memory"),
        (SAME_GPUS, False, "memory"),
        (FAR, False, "collective"),
    ],
)
def test_the_kind_follows_from_the_placement(placed, same_process, wanted):
    assert choose_weight_sync(placed, same_process) == wanted


@pytest.mark.parametrize(
    ("kind", "placed", "same_process", "message"),
    [
        ("shared", CPU, False, "different processes, which share no memory"),
        ("collective", CPU, True, "one process, which has nobody to send to"),
        ("memory", FAR, False, "machine 1 has a rollout and no trainer"),
        ("memroy", CPU, False, r"there is no weight sync 'memroy'(.|\n)*did you mean 'memory'"),
    ],
)
def test_a_kind_that_can_not_work_is_refused(kind, placed, same_process, message):
    with pytest.raises(EmbodrlError, match=message):
        choose_weight_sync(placed, same_process, kind)


def test_a_kind_that_can_work_is_taken():
    for kind in ("memory", "collective", "disk"):
        assert choose_weight_sync(DISJOINT, False, kind) == kind


def test_nccl_needs_a_gpu_for_each():
    assert [uses_nccl(placed) for placed in (CPU, DISJOINT, SAME_GPUS, FAR)] == [False, True, False, True]
