"""Specs of the engines without settings of their own: no torch here."""

from __future__ import annotations

from embodrl.specs import EngineSpec

NATIVE = EngineSpec(
    name="native",
    training="embodrl.hybrid_engines.training.native:NativeTrainEngine",
    rollout="embodrl.hybrid_engines.rollout.native:make_native",
    description="trains in one process on a CPU or a GPU; acts with the policy's own modules",
)
FSDP = EngineSpec(
    name="fsdp",
    training="embodrl.hybrid_engines.training.fsdp:make_fsdp",
    description="one training process for each device, with sharded weights",
    shards=True,
)
