"""Losses of algorithms that learn from a dataset alone. Imports no torch."""

from __future__ import annotations

from embodrl.extras.offline.rules import RULES
from embodrl.specs import FunctionSpec

IQL = FunctionSpec(
    name="iql",
    target="embodrl.extras.offline.algorithm:advantage_weights",
    description="implicit Q-learning on a dataset: imitation weighted by advantages",
    offline=True,
    parts="embodrl.extras.offline.parts:build",
    rules=(RULES,),
)
RECAP = FunctionSpec(
    name="recap",
    target="embodrl.extras.offline.algorithm:advantage_indicator",
    description="imitation of a dataset whose instructions say whether the advantage is positive",
    offline=True,
    parts="embodrl.extras.offline.parts:build",
    rules=(RULES,),
)
