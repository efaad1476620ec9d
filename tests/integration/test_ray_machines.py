"""Which node of Ray's is which machine, what is reserved on it, and what happens when it goes; all on two raylets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from expect import raises_code

from embodrl.deployment import ProcessPlace
from embodrl.errors import EmbodrlError, WorkerDied
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.worker import Worker, dispatch

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

from embodrl.scheduler.launchers.ray import machines as ray_machines  # noqa: E402
from embodrl.scheduler.launchers.ray.launcher import RayLauncher  # noqa: E402

pytestmark = pytest.mark.slow
START_S, CALL_S = 240.0, 120.0
SMALL, LARGE = 2, 8  # CPUs of the driver's node, and of the other


class Located(Worker):
    """Tells where it is."""

    @dispatch()
    def node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()


@contextlib.contextmanager
def started_cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("OMP_NUM_THREADS", "1")
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": SMALL, "include_dashboard": False})
        try:
            found.add_node(num_cpus=LARGE)
            found.wait_for_nodes()
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started_cluster() as found:
        yield found


def node_ids(cluster: Any) -> list[str]:
    return [cluster.head_node.node_id, *(node.node_id for node in cluster.worker_nodes)]


def places(*machines: int, component: str = "located") -> list[ProcessPlace]:
    return [ProcessPlace(component, rank, machine) for rank, machine in enumerate(machines)]


def reserved() -> list[list[dict[str, float]]]:
    """The bundles of each group that is reserved now, in the order of machines."""
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    return sorted(([bundle for _, bundle in sorted(group["bundles"].items())] for group in groups), key=len)


# Alone on either machine: Ray itself would choose the same node for both.
@pytest.mark.parametrize("machines", [(0,), (1,), (1, 0)])
def test_a_worker_is_on_the_node_of_its_machine(cluster: Any, machines: tuple[int, ...]) -> None:
    launcher = RayLauncher(places(*machines), cluster.address)
    try:
        with WorkerGroup(Located, "located").launch(places(*machines), launcher, timeout_s=START_S) as group:
            assert group.node_id().result(CALL_S) == [node_ids(cluster)[machine] for machine in machines]
    finally:
        launcher.close()


def test_simulators_have_as_many_cpus_as_their_own_machine_has(cluster: Any) -> None:
    launcher = RayLauncher(places(0, 1), cluster.address, 30.0, {0: 4, 1: 4})
    try:
        assert reserved() == [[{"CPU": 2.0}, {"CPU": 5.0}]]
    finally:
        launcher.close()


def test_simulators_go_without_where_another_job_holds_the_cpus(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_machines, "CHILDREN_TIMEOUT_S", 1.0)
    other = RayLauncher(places(*[1] * 6), cluster.address)
    try:
        mine = RayLauncher(places(0, 1), None, 30.0, {0: 1, 1: 4})
        assert reserved() == [[{"CPU": 6.0}], [{"CPU": 1.0}, {"CPU": 1.0}]]
        assert "Ray has no CPU for each simulator" in caplog.text
        assert f"machine 1 ({cluster.head_node.node_ip_address}) 5 CPU" in caplog.text
        mine.close()
    finally:
        other.close()


@pytest.mark.parametrize(
    ("machines", "lacking"), [([1] * 9, ["machine 1", "9 CPU"]), ([0, 2], ["1 CPU", "machine 2 1 CPU"])]
)
def test_what_the_machines_do_not_have_is_refused(cluster: Any, machines: list[int], lacking: list[str]) -> None:
    with raises_code("ray-resources", EmbodrlError, *lacking, "2 CPU", "8 CPU", "10 CPU"):
        RayLauncher(places(*machines), cluster.address, timeout_s=0.5)
    assert not ray.is_initialized()


@pytest.mark.timeout(600)
def test_a_worker_whose_machine_has_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = places(1, component="first")
    with started_cluster() as cluster:
        launcher = RayLauncher([*places(0, 1), *firsts], cluster.address)
        group = WorkerGroup(Located, "located", independent=True).launch(places(0, 1), launcher, timeout_s=START_S)
        first = WorkerGroup(Located, "first").launch(firsts, launcher, timeout_s=START_S)
        cluster.remove_node(*cluster.worker_nodes)
        cluster.wait_for_nodes()
        with raises_code("worker-died", WorkerDied, "located[1]"):
            group.call_on(1, "node_id").result(CALL_S)
        asked = ray_machines.Reservation.is_lost
        for known in (True, False):  # to Ray, when the worker is started; otherwise a moment later
            for which, rank in ((group, 1), (first, 0)):
                answers = [known]
                monkeypatch.setattr(
                    ray_machines.Reservation,
                    "is_lost",
                    lambda self, machine, answers=answers: answers.pop() if answers else asked(self, machine),
                )
                with raises_code("worker-died", WorkerDied, "machine 1") as caught:
                    which.restart(rank, START_S)
                assert caught.value.rank == rank
        assert group.call_on(0, "node_id").result(CALL_S) == cluster.head_node.node_id
        group.close()
        first.close()
        launcher.close()
