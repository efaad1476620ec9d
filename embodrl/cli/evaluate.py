"""`embodrl eval`."""

from __future__ import annotations

from embodrl.cli.common import ConfigFile, Debug, JsonFile, Overrides, execute, load


def evaluate(
    overrides: Overrides = None, config: ConfigFile = None, json: JsonFile = None, debug: Debug = False
) -> None:
    """Measure a policy on fixed seeds.

    \b
    Examples:
      embodrl eval env=maniskill model=openvla
      embodrl eval env=maniskill_pull env.eval.num_episodes=256 --json result.json
      embodrl eval model.warm_start=outputs/my-run/policy
    """

    def action() -> int | None:
        loaded = load(overrides, config)
        from embodrl.workers import evaluate as worker

        return worker.evaluate(loaded.config, json)

    execute(action, debug)
