"""The log of a run: everything that embodrl has to say in a file, warnings on the screen as well."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

from embodrl.errors import OutputError

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LogFile(logging.FileHandler):
    """A file whose loss (a full disk, say) is told once and costs nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger(__name__).warning("%s can't be written any more: %s", self.baseFilename, sys.exc_info()[1])


class _Screen(logging.Handler):
    """The present ``sys.stderr``: a live panel puts its own in place, so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


class RunLog:
    """While it is entered, log records from INFO on go to a file, and from WARNING on to stderr as well.

    Args:
        path: appended to.

    Raises:
        OutputError: the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _LogFile(path, encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"{path} can't be written: {error}", "set runner.output_dir to a directory of yours"
            ) from error
        self._file.setFormatter(logging.Formatter(FORMAT))
        self._screen = _Screen(logging.WARNING)

    def __enter__(self) -> RunLog:
        for handler in (self._file, self._screen):
            logging.getLogger().addHandler(handler)
        logging.getLogger("embodrl").setLevel(logging.INFO)
        logging.captureWarnings(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # the command line shows it on the screen
            record = logging.LogRecord(__name__, logging.ERROR, "", 0, repr(error), None, (type(error), error, trace))
            self._file.handle(record)
        for handler in (self._file, self._screen):
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)
