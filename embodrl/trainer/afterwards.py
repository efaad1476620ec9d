"""What follows a result: pages, videos, summaries. None of it may cost the result or its exit code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from embodrl.errors import EmbodrlError, OutputError

logger = logging.getLogger(__name__)


@contextmanager
def afterwards(what: str, repeated_by: str) -> Iterator[None]:
    """Log what the block raises as one warning: the result that it follows stands.

    Args:
        what: is made from the result, e.g. ``report.html``.
        repeated_by: the command that makes it again.
    """
    try:
        yield
    except Exception as error:
        why = error.message if isinstance(error, EmbodrlError) else f"{type(error).__name__}: {error}"
        hint = f"the result stands; `{repeated_by}` makes it again"
        logger.warning("%s", OutputError(f"{what} could not be made: {why}", hint, code="result-without-page"))
        logger.debug("what was raised:", exc_info=True)
