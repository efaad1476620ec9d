"""Senders that are killed in the middle of a sync: the old version keeps acting, and the next sender is heard."""

import pytest
from sync_parts import Actor, Net, Trainer

from embodrl.errors import WorkerDied
from embodrl.scheduler.group import WorkerGroup, wait_all
from embodrl.scheduler.launchers.process import ProcessLauncher

pytestmark = pytest.mark.slow
START_S, CALL_S = 240.0, 200.0


@pytest.fixture(scope="module")
def groups():
    launcher = ProcessLauncher()
    channels = {"weights_0": launcher.channel("weights_0", 2)}
    trainer = WorkerGroup(Trainer, "trainer", receivers=1).launch(1, launcher, channels, timeout_s=START_S)
    actor = WorkerGroup(Actor, "actor", receivers=1).launch(1, launcher, channels, timeout_s=START_S)
    yield trainer, actor
    trainer.kill()
    actor.kill()
    launcher.close()


@pytest.mark.parametrize("kind", ["memory", "collective", "disk"])
def test_a_sender_that_is_killed_midway_leaves_the_old_version(tmp_path, groups, kind):
    trainer, actor = groups

    def connect(meeting, receiver=True):
        meeting = str(tmp_path / "weights") if kind == "disk" else f"file://{tmp_path}/{meeting}"
        sides = [trainer.connect(kind, meeting, None, 2048, False)]
        wait_all([*sides, actor.connect(kind, meeting, stall_timeout_s=2.0)] if receiver else sides, CALL_S)

    connect("first")
    trainer.send(0).result(CALL_S) if kind == "disk" else wait_all([trainer.send(0), actor.receive()], CALL_S)
    if kind == "disk":
        actor.receive().result(CALL_S)
    dying = trainer.send(1, kill_at=8)
    receiving = actor.receive(0.0 if kind == "disk" else 60.0)
    with pytest.raises(WorkerDied):
        dying.result(CALL_S)
    (answer,) = receiving.result(CALL_S)
    if kind == "disk":
        assert answer is None  # it was never marked STABLE
    else:
        assert answer["error"] == "IncompleteSyncError"
        assert ("stopped after" if kind == "memory" else "was lost at") in answer["message"]
    assert actor.state().result(CALL_S) == [(0, Net().become(0).sums())]
    trainer.restart(0, START_S)
    connect("second", receiver=kind == "collective")  # a broken group is rebuilt, the others are kept
    sent = trainer.send(2)
    if kind == "disk":
        sent.result(CALL_S)
    (report,) = actor.receive().result(CALL_S)
    assert report["version"] == 2
    assert actor.state().result(CALL_S) == [(2, Net().become(2).sums())]
