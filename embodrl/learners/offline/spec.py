"""Losses of algorithms that learn from a dataset alone. Imports no torch."""

from __future__ import annotations

from embodrl.learners.offline.rules import RULES
from embodrl.learners.offline.settings import OfflineConfig
from embodrl.specs import FunctionSpec

IQL = FunctionSpec(
    name="iql",
    target="embodrl.algorithms.offline:advantage_weights",
    description="implicit Q-learning on a dataset: imitation weighted by advantages",
    offline=True,
    settings=OfflineConfig,
    section="offline",
    parts="embodrl.trainer.offline_parts:build",
    rules=(RULES,),
)
TD3_BC = FunctionSpec(
    name="td3_bc",
    target="embodrl.algorithms.offline:td3_bc",
    description="a deterministic actor between its critics and the actions of a dataset (TD3+BC)",
    offline=True,
    settings=OfflineConfig,
    section="offline",
    parts="embodrl.trainer.offline_parts:build_td3_bc",
    rules=(RULES,),
)
RECAP = FunctionSpec(
    name="recap",
    target="embodrl.algorithms.offline:advantage_indicator",
    description="imitation of a dataset whose instructions state whether the advantage is positive",
    offline=True,
    settings=OfflineConfig,
    section="offline",
    parts="embodrl.trainer.offline_parts:build",
    rules=(RULES,),
)
