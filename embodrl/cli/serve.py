"""`embodrl serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load, show_notes, split_path


def arguments_of(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Return the policy's path, if any, and the settings; ``policy=`` and ``protocol=`` exist only in this command.

    A policy that is not a directory is a hub repository: ``model.model_path``.
    """
    from embodrl.hub import is_hub_id

    path, rest = split_path(arguments)
    settings: list[str] = []
    for text in rest:
        name, equals, value = text.partition("=")
        if (name, equals) == ("protocol", "="):
            settings.append(f"serve.protocols=[{value.strip('[]')}]")
        elif (name, equals) == ("policy", "=") and is_hub_id(value):
            settings.append(f"model.model_path={value}")
        elif (name, equals) == ("policy", "="):
            path = Path(value)
        else:
            settings.append(text)
    return path, settings


def serve(overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False) -> None:
    """Serve a policy to robots and benchmarks, until Ctrl-C or SIGTERM.

    The first argument, or policy=PATH, may be a run (its final policy, or its newest checkpoint), one of its
    checkpoints, a policy directory, or a model on the hub. protocol=openpi,http selects protocols (serve.protocols).
    The environment defines the policy's cameras; no simulator is started. Clients need the printed token
    (serve.token); see docs/serving.md.

    \b
    Examples:
      embodrl serve outputs/my-run
      embodrl serve policy=outputs/my-run/policy protocol=openpi,http serve.port=8000
      embodrl serve model=openvla env=maniskill serve.host=0.0.0.0
      embodrl serve model=pi05_libero policy=OWNER/NAME env=libero_spatial serve=libero
    """

    say = partial(print, flush=True)

    def action() -> int | None:
        path, rest = arguments_of(overrides)
        if path is None:
            loaded = load(rest, config, verb="serve", trust=trust)
            if not rest and config is None:
                say(f"no policy is named: serving the {loaded.config.model.model_type} that comes with embodrl")
            from embodrl.serving import verb

            return verb.serve(loaded, say=say)
        from embodrl.runs.policies import find_policy
        from embodrl.serving import verb

        source = find_policy(path)
        if config is not None:
            loaded = load(source.arguments(rest), config, verb="serve", trust=trust)
        else:
            loaded = source.load_config(rest, trust, "serve")
            show_notes(loaded.notes)
        return verb.serve(loaded, source, say=say)

    execute(action, debug)
