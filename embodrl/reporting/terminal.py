"""Standard output and error that may fail at any time without ending the run.

A pipe whose reader has exited fails with EPIPE. A closed terminal fails with EIO if SIGHUP is ignored (``nohup``,
``disown``), and a full disk behind a redirection with ENOSPC.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


class SafeStream(io.TextIOBase):
    """Writes to another stream until that fails, then logs one warning and discards all further output.

    Args:
        stream: wrapped stream; None if the process has none.
        name: name of the stream, for the warning.
    """

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self._stream = stream
        self._name = name

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write text; return its length in any case."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def close(self) -> None:
        """No-op: the wrapped stream belongs to others, and ``io`` closes, i.e. flushes, collected streams."""

    def _lose(self, error: Exception) -> None:
        stream = self._stream
        self._stream = None
        # The interpreter flushes the stream's buffer at exit, which must not fail either.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:  # noqa: PTH123
            assert stream is not None
            os.dup2(nowhere.fileno(), stream.fileno())
        if logger.hasHandlers():  # only for a run with a log, not for `embodrl list | head`
            logger.warning("%s is lost (%s); the run continues, with its log file", self._name, error)


def safe_console() -> Console:
    """Return a console on a safe wrapper of the current standard output."""
    from rich.console import Console

    safe = sys.stdout if isinstance(sys.stdout, SafeStream) else SafeStream(sys.stdout, "standard output")
    return Console(file=cast("TextIO", safe))


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Make standard output and error of this process safe in the block."""
    before = sys.stdout, sys.stderr
    if not any(isinstance(stream, SafeStream) for stream in before):
        sys.stdout = SafeStream(before[0], "standard output")  # pyright: ignore[reportAttributeAccessIssue]
        sys.stderr = SafeStream(before[1], "standard error")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before
