"""The log of a run: every record in a file, warnings also on the screen."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from embodrl.errors import without_controls
from embodrl.fields import open_descriptor

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

MAX_BYTES = 16 << 20
OLDER_FILES = 2
"""Size of a log file, and how many full ones are kept (``embodrl.log.1``, ``.2``)."""
PER_WINDOW = 200
WINDOW_S = 60.0
"""Rate limit: log records from one place in the code, per time window."""


@dataclass
class _Place:
    """Records logged from one place in the code since ``start`` (``time.monotonic``)."""

    start: float
    count: int = 0

    @property
    def dropped(self) -> int:
        return max(0, self.count - PER_WINDOW)


class FloodFilter(logging.Filter):
    """Drops excessive records from one place in the code; its next record reports how many were dropped.

    Handlers and loggers share it: the first one to see a record decides for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[tuple[str, int, str], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        known = record.__dict__
        if "kept" not in known:
            known["kept"] = self._keep(record)
        return known["kept"]

    def _keep(self, record: logging.LogRecord) -> bool:
        # Python's warnings all come from one line of the interpreter, and begin with their source line.
        own = record.getMessage().partition(": ")[0] if record.name == "py.warnings" else ""
        key = (record.name, record.lineno, own)
        now = time.monotonic()  # the clock of log records may go backwards
        place = self.places.setdefault(key, _Place(now))
        if now - place.start >= WINDOW_S:
            self.places[key] = _Place(now)
            old = place
            place = self.places[key]
            if old.dropped:
                record.msg = f"{record.getMessage()} [{old.dropped} like it were left out]"
                record.args = None
        place.count += 1
        return place.count <= PER_WINDOW


class _LogFile(RotatingFileHandler):
    """A log file whose failure, e.g. on a full disk, is reported once and does nothing else."""

    lost = False

    def _open(self) -> TextIOWrapper:
        # Foreign text may contain surrogates, which can't be encoded.
        return open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=open_descriptor)

    def handleError(self, record: logging.LogRecord) -> None:
        self.lost = True
        logging.getLogger().removeHandler(self)
        logging.getLogger(__name__).warning("logging to %s ends: %s", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the unwritten rest is flushed once more
            super().close()


class _Screen(logging.Handler):
    """The current ``sys.stderr``, which a live panel replaces so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal or pipe is closed; nowhere left to report it
            print(f"{record.levelname.lower()}: {without_controls(record.getMessage())}", file=sys.stderr)


class RunLog:
    """While entered, writes log records from INFO up to a file, and from WARNING up to stderr as well.

    Files rotate, and floods are limited. A file that can't be written only causes a warning, so that the run's own
    reports are not lost.
    """

    def __init__(self, path: Path) -> None:
        self._handlers: list[logging.Handler] = [_Screen(logging.WARNING)]
        self._file: _LogFile | None = None
        self._flood = FloodFilter()
        self._problem: OSError | None = None
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _LogFile(path, maxBytes=MAX_BYTES, backupCount=OLDER_FILES)
        except OSError as error:
            self._problem = error
            return
        self._file.setFormatter(logging.Formatter(FORMAT))
        self._handlers.insert(0, self._file)

    def __enter__(self) -> RunLog:
        for handler in self._handlers:
            handler.addFilter(self._flood)
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
            # Shown on the screen by the command line.
            record = logging.LogRecord(__name__, logging.ERROR, "", 0, repr(error), None, (type(error), error, trace))
            self._file.handle(record)
        for (name, line, _), place in list(self._flood.places.items()):
            if place.dropped:
                logging.getLogger(__name__).info("%d records of %s, line %d, were left out", place.dropped, name, line)
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)
