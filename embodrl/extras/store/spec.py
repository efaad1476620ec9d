"""The verbs `embodrl store`."""

from __future__ import annotations

from embodrl.extras.store.config import StoreConfig
from embodrl.extras.store.rules import RULES
from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="store",
    target="embodrl.extras.store.cli:app",
    sections={"store": StoreConfig},
    rules=(RULES,),
    resumes={"store_metrics.jsonl": "embodrl.extras.store.train:resume"},
)
