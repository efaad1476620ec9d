"""`embodrl collect`."""

from __future__ import annotations

from pathlib import Path

from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load_measured


def collect(overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False) -> None:
    """Gather demonstrations by scripted experts.

    \b
    Examples:
      embodrl collect env=maniskill collect.num_episodes=400 collect.output_dir=data/push
      embodrl collect env=maniskill_mix collect.noise_std=0.12
    """

    def action() -> int | None:
        loaded = load_measured(overrides, config, verb="collect", trust=trust)
        from embodrl.runs import collect as worker
        from embodrl.runs.files import removed_if_empty
        from embodrl.workers.env import places_here

        with removed_if_empty(Path(loaded.config.collect.output_dir)):
            return worker.collect(loaded.config, places_here(loaded.deployment)).exit_code

    execute(action, debug)
