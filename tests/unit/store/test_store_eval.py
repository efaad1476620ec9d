"""The evaluator of a store: each version that it takes is measured once, and it ends after the trainer's last."""

import torch
from served import MeanPolicy, engine_of

from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.hybrid_engines.weight_sync.follower import WeightSource
from embodrl.store.evaluate import VersionEvaluator
from embodrl.store.parts import DONE, RESULTS, status_lines
from embodrl.store.store import Store
from embodrl.store.weights import upload_versions


def test_versions_are_measured_as_they_come_and_once(tmp_path):
    store, policy, measured = Store(f"memory://{tmp_path.name}"), MeanPolicy(), []
    store.create()
    sender = DiskSender(tmp_path / "sent")

    def publish(version: int) -> None:
        named = {name: torch.full_like(tensor, version) for name, tensor in policy.named_parameters()}
        sender.send(named.items(), version)
        upload_versions(store, tmp_path / "sent")

    def measure() -> dict[str, object]:
        measured.append(policy.offset.item())
        return {"success_rate": 0.5, "interval": [0.4, 0.6], "episodes": 10}

    coming = iter([lambda: publish(2), lambda: publish(4), lambda: store.put_note(DONE, {"version": 4})])

    def evaluate() -> None:
        source = WeightSource(engine_of(policy))
        evaluator = VersionEvaluator(store, source, tmp_path / "taken", measure, lambda: next(coming)())
        evaluator.run(lambda: False, lambda line: None)

    evaluate()
    assert measured == [2, 4] and store.names(RESULTS) == [f"{RESULTS}/v000002", f"{RESULTS}/v000004"]
    evaluate()  # once more, as after a kill
    assert measured == [2, 4]
    assert "version 4: success 50.0% (40.0% to 60.0%) of 10 episodes" in status_lines(store)
