"""`embodrl collect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load_measured, show_notes

if TYPE_CHECKING:
    from embodrl.config import LoadedConfig
    from embodrl.workers.policy import RecordedPolicy


def collect(
    overrides: Overrides = None,
    config: ConfigFile = None,
    resumable: Annotated[
        bool,
        typer.Option(
            "--resumable",
            help="when stopped, keep the episodes so that the same command resumes, rather than a smaller dataset",
            show_default=False,
        ),
    ] = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Collect demonstrations with scripted experts or a policy.

    policy=PATH may be a run (its final policy, or its newest checkpoint), one of its checkpoints, a policy directory,
    a model on the hub, or the URL of a policy server. A run's configuration applies; ARGS override it.

    \b
    Examples:
      embodrl collect env=maniskill collect.num_episodes=400 collect.output_dir=data/push
      embodrl collect env=maniskill_mix collect.noise_std=0.12
      embodrl collect policy=outputs/my-run collect.num_episodes=100 collect.output_dir=data/mine
      embodrl collect policy=outputs/my-run collect.sample=true collect.keep_failures=true
    """

    def action() -> int | None:
        texts = overrides or []
        paths = [text.partition("=")[2] for text in texts if text.startswith("policy=")]
        rest = [text for text in texts if not text.startswith("policy=")]
        if paths:
            loaded, acting = _policy(paths[-1], rest, config, trust)
        else:
            loaded = load_measured(rest, config, verb="collect", trust=trust)
            acting = None
        from embodrl.runs import collect as worker
        from embodrl.trainer.files import removed_if_empty

        with removed_if_empty(Path(loaded.config.collect.output_dir)):
            return worker.collect(loaded.config, loaded.deployment, acting, resumable).exit_code

    execute(action, debug)


def _policy(text: str, rest: list[str], config: Path | None, trust: bool) -> tuple[LoadedConfig, RecordedPolicy]:
    from embodrl.config.compose import assignment
    from embodrl.hub import is_hub_id
    from embodrl.runs.policies import find_policy
    from embodrl.workers.parts import acting_policy

    if "://" in text and not is_hub_id(text):
        loaded = load_measured(["model=remote", assignment("model.url", text), *rest], config, verb="record")
        return loaded, acting_policy(loaded, text)
    if is_hub_id(text):
        loaded = load_measured([assignment("model.model_path", text), *rest], config, verb="record", trust=trust)
        return loaded, acting_policy(loaded, text)
    source = find_policy(Path(text))
    if config is not None:
        loaded = load_measured(source.arguments(rest), config, verb="record", trust=trust)
    else:
        loaded = source.load_config(rest, trust, "record")
        show_notes(loaded.notes)
    return loaded, acting_policy(loaded, text, source.make_policy)
