"""The trainer of a store."""

from types import SimpleNamespace

from embodrl.extras.store.learner import StoreLearner
from embodrl.extras.store.shards import EPISODES
from embodrl.extras.store.store import Store


def test_used_shards_are_removed_but_for_the_newest_of_each_collector(tmp_path):
    store = Store(str(tmp_path))
    store.create()
    names = [f"{EPISODES}/{name}" for name in ("desk-000000", "desk-000001", "desk-000002", "robot-000000")]
    for name in names:
        store.put_note(name, {})
    trainer = object.__new__(StoreLearner)
    trainer.store = store
    trainer.followed = SimpleNamespace(finished=lambda: [name for name in names if name != names[1]])
    trainer.remove_used()
    assert store.names(EPISODES) == names[1:]
