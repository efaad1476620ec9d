"""The trainer of a store."""

from types import SimpleNamespace

from embodrl.extras.store.shards import EPISODES
from embodrl.extras.store.store import Store
from embodrl.extras.store.train import StoreTrainer


def test_used_shards_are_removed_but_for_the_newest_of_each_collector(tmp_path):
    store = Store(str(tmp_path))
    store.create()
    names = [f"{EPISODES}/{name}" for name in ("desk-000000", "desk-000001", "desk-000002", "robot-000000")]
    for name in names:
        store.put_note(name, {})
    trainer = object.__new__(StoreTrainer)
    trainer.store = store
    trainer.followed = SimpleNamespace(finished=lambda: [name for name in names if name != names[1]])
    trainer._remove_used()
    assert store.names(EPISODES) == names[1:]
