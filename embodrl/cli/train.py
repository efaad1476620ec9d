"""`embodrl train`."""

from __future__ import annotations

from embodrl.cli.app import PresetDirectories, with_presets
from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, importing, load_measured


def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    presets: PresetDirectories = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Train a policy.

    \b
    Examples:
      embodrl train env=maniskill model=openvla
      embodrl train env=maniskill_mix runner.max_iterations=100 runner.seed=1
      embodrl train 'env.tasks=[PushCube-v1,PullCube-v1]' runner.output_dir=outputs/two
      embodrl train --config my.yaml algorithm.gamma=0.99
    """

    def action() -> int | None:
        loaded = load_measured(with_presets(overrides, presets), config, verb="train", trust=trust)
        with importing():
            from embodrl.runs import train as verb

        return verb.train(loaded).exit_code

    execute(action, debug)
