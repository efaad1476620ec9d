"""Follow-up products of a result: pages, videos, summaries. None may cost the result or its exit code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from embodrl.errors import EmbodrlError, OutputError

logger = logging.getLogger(__name__)


@contextmanager
def afterwards(what: str, repeated_by: str) -> Iterator[None]:
    """Log an exception of the block as one warning, since the result itself is complete.

    The block makes ``what``, e.g. ``report.html``; the command ``repeated_by`` creates it again.
    """
    try:
        yield
    except Exception as error:
        why = error.message if isinstance(error, EmbodrlError) else f"{type(error).__name__}: {error}"
        hint = f"the result stands; `{repeated_by}` makes it again"
        logger.warning("%s", OutputError(f"{what} could not be made: {why}", hint, code="result-without-page"))
        logger.debug("what was raised:", exc_info=True)
