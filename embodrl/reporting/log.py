"""The log of a run: every record in a file, warnings on the screen as well."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from types import TracebackType

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LogFile(logging.FileHandler):
    """A file whose loss, such as by a full disk, is reported once and costs nothing else."""

    lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        self.lost = True
        logging.getLogger().removeHandler(self)
        logging.getLogger(__name__).warning("logging to %s ends: %s", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written before is flushed once more
            super().close()


class _Screen(logging.Handler):
    """The present ``sys.stderr``: a live panel puts its own in place, so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal or pipe is closed; there is nowhere to say so
            print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


class RunLog:
    """While it is entered, log records from INFO on go to a file, and from WARNING on to stderr as well.

    A file that can't be written costs a warning: it must not hide what the run has to report.

    Args:
        path: appended to.
    """

    def __init__(self, path: Path) -> None:
        self._handlers: list[logging.Handler] = [_Screen(logging.WARNING)]
        self._file: _LogFile | None = None
        self._problem: OSError | None = None
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _LogFile(path, encoding="utf-8")
        except OSError as error:
            self._problem = error
            return
        self._file.setFormatter(logging.Formatter(FORMAT))
        self._handlers.insert(0, self._file)

    def __enter__(self) -> RunLog:
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)
        logging.getLogger("embodrl").setLevel(logging.INFO)
        logging.captureWarnings(True)
        if self._problem is not None:
            logging.getLogger(__name__).warning("no log file: %s can't be written: %s", self._path, self._problem)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._file is not None and not self._file.lost:
            # The command line shows it on the screen.
            record = logging.LogRecord(__name__, logging.ERROR, "", 0, repr(error), None, (type(error), error, trace))
            self._file.handle(record)
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)
