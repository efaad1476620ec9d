"""`embodrl store collect`, `train`, `eval`, `compact` and `status`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from embodrl.cli.app import add, make_app
from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load_measured

if TYPE_CHECKING:
    from embodrl.config import LoadedConfig

app = make_app()


@app.callback()
def about() -> None:
    """Collector, trainer and evaluator as processes that share only a store: episodes, weights, results.

    Each may be stopped or killed at any time; the same command resumes.

    \b
    Examples:
      embodrl store train experiment=hybrid store.url=/data/store sft.output_dir=outputs/trainer
      embodrl store collect experiment=hybrid store.url=/data/store store.collector=desk
      embodrl store eval experiment=hybrid store.url=/data/store
      embodrl store compact store.url=/data/store
      embodrl store status store.url=/data/store
    """


def _run(
    verb: Callable[[LoadedConfig, Callable[[str], None]], int], overrides: Overrides, config: ConfigFile, trust: bool
) -> int:
    return verb(load_measured(overrides, config, verb="store", trust=trust), lambda line: print(line, flush=True))


def collect(overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False) -> None:
    """Act with the policy, write finished episodes into the store, and load newer weights from there.

    \b
    Examples:
      embodrl store collect experiment=hybrid store.url=/data/store
      embodrl store collect experiment=hybrid store.url=s3://bucket/run store.collector=desk collect.num_episodes=1000
    """

    def action() -> int:
        from embodrl.store.collect import collect as verb

        return _run(verb, overrides, config, trust)

    execute(action, debug)


def train(overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False) -> None:
    """Imitate the solved episodes in the store as they come, and publish the weights there.

    \b
    Examples:
      embodrl store train experiment=hybrid store.url=/data/store sft.output_dir=outputs/trainer
    """

    def action() -> int:
        from embodrl.store.train import train as verb

        return _run(verb, overrides, config, trust)

    execute(action, debug)


def evaluate(
    overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False
) -> None:
    """Evaluate every version of the weights in the store, as they come, and write the results there.

    \b
    Examples:
      embodrl store eval experiment=hybrid store.url=/data/store
    """

    def action() -> int:
        from embodrl.store.evaluate import evaluate as verb

        return _run(verb, overrides, config, trust)

    execute(action, debug)


def status(overrides: Overrides = None, config: ConfigFile = None, debug: Debug = False) -> None:
    """Print what the store holds: episodes by collector, versions of the weights, results.

    \b
    Examples:
      embodrl store status store.url=/data/store
    """

    def action() -> int:
        from embodrl.cli.common import load
        from embodrl.store.parts import open_store, status_lines

        for line in status_lines(open_store(load(overrides, config, "store").config, create=False)):
            print(line)
        return 0

    execute(action, debug)


def compact(overrides: Overrides = None, config: ConfigFile = None, debug: Debug = False) -> None:
    """Merge the small shards of each collector into large ones, while other processes write and read.

    Run one such command at a time; after a kill, repeat it to complete the work.

    \b
    Examples:
      embodrl store compact store.url=/data/store
      embodrl store compact store.url=s3://bucket/run store.compact_episodes=5000
    """

    def action() -> int:
        from embodrl.cli.common import load
        from embodrl.store.compaction import compact as verb
        from embodrl.store.config import store_settings
        from embodrl.store.parts import open_store

        loaded = load(overrides, config, "store").config
        verb(open_store(loaded, create=False), store_settings(loaded).compact_episodes, print)
        return 0

    execute(action, debug)


COMMANDS = {"collect": collect, "train": train, "eval": evaluate, "compact": compact, "status": status}
for name, command in COMMANDS.items():
    add(app, command, name)
