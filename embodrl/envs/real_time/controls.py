"""Control signals from people, buttons or scripts to a robot, as files in a directory.

Files work across processes, terminals and languages, and an emergency stop survives a restart of the robot's process.
"""

from __future__ import annotations

from pathlib import Path

STOP = "stop"
PAUSE = "pause"
"""In effect while the file exists."""
READY = "ready"
SUCCESS = "success"
FAILURE = "failure"
"""In effect once: the file is removed when read."""


class Controls:
    """A directory of control files, created if missing; None disables all signals."""

    def __init__(self, directory: str | None) -> None:
        self.directory = None if directory is None else Path(directory).expanduser()
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    def holds(self, name: str) -> bool:
        """Whether a file exists."""
        return self.directory is not None and (self.directory / name).exists()

    def take(self, name: str) -> bool:
        """Remove a file; return whether it existed."""
        if not self.holds(name):
            return False
        assert self.directory is not None
        (self.directory / name).unlink(missing_ok=True)
        return True

    def say(self, name: str) -> None:
        """Create a file."""
        if self.directory is not None:
            (self.directory / name).touch()

    def switch(self, name: str) -> None:
        """Create a file, or remove it if it exists."""
        if not self.take(name):
            self.say(name)
