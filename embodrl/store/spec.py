"""The verbs `embodrl store`. Read by `embodrl --help`, so it names modules without importing them."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="store",
    target="embodrl.cli.store:app",
    description="Collector, trainer and evaluator as processes that share only a store: episodes, weights, results.",
    sections={"store": "embodrl.store.config:StoreConfig"},
    rules=("embodrl.store.rules:RULES",),
    resumes={"store_metrics.jsonl": "embodrl.store.train:resume"},
)
