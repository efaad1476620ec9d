"""The built-in training and rollout backends. Imports no torch."""

from __future__ import annotations

ENGINES = {
    "native": "embodrl.hybrid_engines.spec:NATIVE",
    "fsdp": "embodrl.hybrid_engines.spec:FSDP",
    "megatron": "embodrl.hybrid_engines.training.megatron.spec:ENGINE",
    "remote": "embodrl.hybrid_engines.rollout.remote.spec:ENGINE",
    "vllm": "embodrl.hybrid_engines.rollout.vllm.spec:ENGINE",
}
