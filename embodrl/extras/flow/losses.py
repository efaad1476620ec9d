"""Losses of flow policies alone. Imports no torch."""

from __future__ import annotations

from embodrl.specs import FunctionSpec

NFT = FunctionSpec(
    name="nft",
    target="embodrl.extras.flow.nft:nft_loss",
    description="negative-aware fine-tuning of flow policies, without likelihoods",
    parameters=(
        *("errors", "old_errors", "logprobs", "old_logprobs", "advantages", "valid", "logprob_type", "weights"),
        "counts",
    ),
)
