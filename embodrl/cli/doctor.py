"""`embodrl doctor`."""

from __future__ import annotations

from embodrl.cli.common import Debug, execute


def doctor(debug: Debug = False) -> None:
    """Check what this machine has: packages, Vulkan driver, GPU, cores, disk.

    \b
    Example:
      embodrl doctor
    """

    def action() -> int | None:
        from embodrl.scheduler.doctor import run_doctor

        return run_doctor()

    execute(action, debug)
