"""Versions of weights reach a directory by way of a store."""

import pytest
import torch
from served import MeanPolicy, engine_of

from embodrl.errors import StoreError
from embodrl.hybrid_engines.weight_sync.disk import STABLE, DiskSender, StoredVersion, versions_in
from embodrl.hybrid_engines.weight_sync.follower import WeightSource
from embodrl.store.learner import PublishedWeights
from embodrl.store.store import Store
from embodrl.store.weights import RESULTS, download_versions, newest_version, upload_versions


def weights(value: float):
    return {name: torch.full_like(tensor, value) for name, tensor in MeanPolicy().named_parameters()}.items()


def test_a_policy_takes_what_was_sent_elsewhere(tmp_path):
    store, policy = Store(f"memory://{tmp_path.name}"), MeanPolicy()
    store.create()
    source = WeightSource(engine_of(policy))
    sender = DiskSender(tmp_path / "sent", {"offset"})  # after the first version, only what trains
    assert newest_version(store) is None
    for version in (0, 5, 7, 9):
        sender.send(weights(version), version)
        upload_versions(store, tmp_path / "sent")
        download_versions(store, tmp_path / "taken")
        report = source.take(tmp_path / "taken")
        assert report is not None and report.version == version == newest_version(store)
        assert policy.offset.item() == version
    assert versions_in(tmp_path / "taken") == versions_in(tmp_path / "sent") == [9, 7, 0]


def test_an_interrupted_download_is_repeated(tmp_path):
    store = Store(str(tmp_path / "store"))
    store.create()
    DiskSender(tmp_path / "sent").send(weights(1), 1)
    upload_versions(store, tmp_path / "sent")
    download_versions(store, tmp_path / "taken")
    (tmp_path / "taken" / "v000001" / STABLE).unlink()  # written last
    download_versions(store, tmp_path / "taken")
    assert versions_in(tmp_path / "taken") == [1]


def test_versions_that_a_run_went_back_from_are_replaced(tmp_path):
    """Also where the store was away meanwhile, and for a reader that was cut off."""
    store, policy = Store(f"memory://{tmp_path.name}"), MeanPolicy()
    store.create()
    published = PublishedWeights(store, tmp_path / "sent", policy)
    source = WeightSource(engine_of(policy))
    sender = DiskSender(tmp_path / "sent")
    for version in (1, 2, 3):
        sender.send(weights(version), version)
    upload_versions(store, tmp_path / "sent")
    for version in (2, 3):
        store.put_note(f"{RESULTS}/v{version:06d}", {"success_rate": 0.5})
    download_versions(store, tmp_path / "taken")
    assert source.take(tmp_path / "taken") is not None and policy.offset.item() == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "remove", _away)
        published.drop_newer(2)
    DiskSender(tmp_path / "sent").send(weights(30), 3)
    published.catch_up()
    download_versions(store, tmp_path / "taken")
    assert source.take(tmp_path / "taken") is not None and policy.offset.item() == 30
    assert source.take(tmp_path / "taken") is None
    assert store.names(RESULTS) == [f"{RESULTS}/v000002"]
    (tmp_path / "taken" / "v000003" / STABLE).write_text("")  # damaged
    download_versions(store, tmp_path / "taken")
    assert StoredVersion.open(tmp_path / "taken", 3).read()["offset"].item() == 30


def _away(*_: object) -> None:
    raise StoreError("the store is away", "", code="store-unreachable")


def test_another_trainer_can_not_replace_a_version(tmp_path):
    store = Store(str(tmp_path / "store"))
    store.create()
    for name, value in (("one", 1.0), ("other", 2.0)):
        DiskSender(tmp_path / name).send(weights(value), 1)
    upload_versions(store, tmp_path / "one")
    with pytest.raises(StoreError) as raised:
        upload_versions(store, tmp_path / "other")
    assert raised.value.code == "store-name-taken"
