"""Checks of policy inputs against the model's limits, shared by all families."""

from __future__ import annotations

import logging

from embodrl.errors import CheckpointError, EmbodrlError

LEAST_USED = 0.9
"""Minimum used fraction: embeddings are at most padded to a round number (Llama: 32064 rows for 32000 ids)."""
SMALLEST_PUBLISHED = 30_000
"""Minimum embedding rows of published models; embodrl's tiny sizes are smaller, with a large share of action tokens."""
SHOWN = 100
"""Maximum characters of an instruction in a message."""

logger = logging.getLogger(__name__)


def check_cameras(found: int, most: int | None = None) -> None:
    """Raise ``EmbodrlError`` for an observation with no cameras, or more than ``most`` (None: no limit)."""
    if found < 1 or (most is not None and found > most):
        allowed = "1 or more" if most is None else "1" if most == 1 else f"1 to {most}"
        message = f"the policy takes {allowed} cameras, the observation has {found}"
        raise EmbodrlError(message, f"configure {allowed} in env.cameras", code="num-cameras")


def check_prompt(instruction: str, num_tokens: int, most: int, hint: str) -> None:
    """Raise ``EmbodrlError`` for an instruction whose prompt has more than ``most`` tokens."""
    if num_tokens > most:
        shown = instruction if len(instruction) <= SHOWN else f"{instruction[:SHOWN]}..."
        message = f"the prompt for '{shown}' has {num_tokens} tokens; at most {most} fit"
        raise EmbodrlError(message, hint, code="prompt-too-long")


def check_vocabulary(source: object, num_ids: int, most: int, hint: str = "use the model's own tokenizer") -> None:
    """Raise ``CheckpointError`` for a tokenizer with more ids than embeddings; warn of one with far fewer."""
    if num_ids > most:
        message = f"the tokenizer of {source} has {num_ids} ids, the model {most}"
        raise CheckpointError(message, hint, code="tokenizer-mismatch")
    if most >= SMALLEST_PUBLISHED and num_ids < LEAST_USED * most:
        logger.warning(
            "the tokenizer of %s has %d ids but the model has %d embeddings: it is not the model's own, and its prompts"
            " mean nothing to trained weights; %s",
            source,
            num_ids,
            most,
            hint,
        )
