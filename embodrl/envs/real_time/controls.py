"""What a person, a button or a script tells a robot: files in a directory.

Files work across processes, terminals and languages, and an emergency stop survives a restart of the robot's process.
"""

from __future__ import annotations

from pathlib import Path

STOP = "stop"
PAUSE = "pause"
"""Hold while they are there."""
READY = "ready"
SUCCESS = "success"
FAILURE = "failure"
"""Count once: they are removed when they are read."""


class Controls:
    """A directory with such files.

    Args:
        directory: of the files, which is made if there is none; None: none says anything.
    """

    def __init__(self, directory: str | None) -> None:
        self.directory = None if directory is None else Path(directory).expanduser()
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    def holds(self, name: str) -> bool:
        """Return whether a file is there."""
        return self.directory is not None and (self.directory / name).exists()

    def take(self, name: str) -> bool:
        """Return whether a file is there, and remove it."""
        if not self.holds(name):
            return False
        assert self.directory is not None
        (self.directory / name).unlink(missing_ok=True)
        return True

    def say(self, name: str) -> None:
        """Make a file."""
        if self.directory is not None:
            (self.directory / name).touch()

    def switch(self, name: str) -> None:
        """Make a file, or remove it where it is."""
        if not self.take(name):
            self.say(name)
