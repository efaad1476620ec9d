"""The built-in advantage estimators and losses. Imports no torch."""

from __future__ import annotations

_SPECS = "embodrl.algorithms.spec"

ESTIMATORS = {name: f"{_SPECS}:{name.upper()}" for name in ("gae", "grpo", "rloo", "reinforce_pp", "zero", "none")}
LOSSES = {
    **{name: f"{_SPECS}:{name.upper()}" for name in ("actor_critic", "actor", "fpo", "sac", "dagger")},
    "iql": "embodrl.learners.offline.spec:IQL",
    "nft": f"{_SPECS}:NFT",
    "recap": "embodrl.learners.offline.spec:RECAP",
    "td3_bc": "embodrl.learners.offline.spec:TD3_BC",
    "rlt": "embodrl.models.small_actors.spec:RLT_LOSS",
}
