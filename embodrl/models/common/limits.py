"""Checks of what a policy is given against what it has room for, the same for all families."""

from __future__ import annotations

import logging

from embodrl.errors import CheckpointError, EmbodrlError

LEAST_USED = 0.9
"""Embeddings are padded to a round number at most: Llama's has 32064 rows for 32000 ids, PaliGemma's as many as ids."""
SMALLEST_PUBLISHED = 30_000
"""Rows of an embedding; smaller ones are embodrl's tiny sizes, a good part of which are action tokens."""
SHOWN = 100
"""Characters of an instruction in a message."""

logger = logging.getLogger(__name__)


def check_cameras(found: int, most: int | None = None) -> None:
    """Refuse an observation with no camera, or with more than ``most``; None is any number.

    Raises:
        EmbodrlError: see above.
    """
    if found < 1 or (most is not None and found > most):
        allowed = "1 or more" if most is None else "1" if most == 1 else f"1 to {most}"
        message = f"the policy takes {allowed} cameras, the observation has {found}"
        raise EmbodrlError(message, f"configure {allowed} in env.cameras", code="num-cameras")


def check_prompt(instruction: str, num_tokens: int, most: int, hint: str) -> None:
    """Refuse an instruction whose prompt has more than ``most`` tokens.

    Raises:
        EmbodrlError: see above.
    """
    if num_tokens > most:
        shown = instruction if len(instruction) <= SHOWN else f"{instruction[:SHOWN]}..."
        message = f"the prompt for '{shown}' has {num_tokens} tokens; at most {most} fit"
        raise EmbodrlError(message, hint, code="prompt-too-long")


def check_vocabulary(source: object, num_ids: int, most: int, hint: str = "use the model's own tokenizer") -> None:
    """Refuse a tokenizer with more ids than the model has embeddings, and warn of one with far fewer.

    Raises:
        CheckpointError: see above; names ``source``.
    """
    if num_ids > most:
        message = f"the tokenizer of {source} has {num_ids} ids, the model {most}"
        raise CheckpointError(message, hint, code="tokenizer-mismatch")
    if most >= SMALLEST_PUBLISHED and num_ids < LEAST_USED * most:
        logger.warning(
            "the tokenizer of %s has %d ids, and the model %d embeddings: it is not the model's own, and its prompts"
            " mean nothing to trained weights; %s",
            source,
            num_ids,
            most,
            hint,
        )
