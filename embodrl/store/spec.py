"""The verbs `embodrl store` and `join`. Read by `embodrl --help`, so it names modules without importing them."""

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
JOIN = VerbSpec(
    name="join",
    target="embodrl.cli.join:join",
    description="Gather for a run with store.url, beside others, until it ends.",
    reads_as="store",
)
