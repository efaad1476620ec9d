"""`embodrl fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embodrl.cli.common import Debug, execute


def fetch(
    repository: Annotated[
        str, typer.Argument(metavar="REPO", help="OWNER/NAME[@REVISION] of the hub", show_default=False)
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="branch, tag or commit; default: main", show_default=False)
    ] = None,
    dataset: Annotated[
        bool, typer.Option("--dataset", help="the repository is a dataset, not a model", show_default=False)
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="target directory; default: the hub's cache", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Fetch a checkpoint or a dataset from the Hugging Face hub, and verify the checksum of every file.

    Running it again resumes an interrupted download and verifies existing files. Login, cache and mirror are
    configured as for the hub's own tools: `hf auth login` or HF_TOKEN, HF_HOME, HF_ENDPOINT.

    \b
    Examples:
      embodrl fetch openvla/openvla-7b
      embodrl fetch lerobot/pusht --dataset --revision v3.0
      embodrl fetch openvla/openvla-7b --to checkpoints/openvla-7b
    """

    def action() -> None:
        from dataclasses import replace

        from embodrl.errors import OutputError, UsageError
        from embodrl.hub import DATASET_FILES, MODEL_FILES, is_own_copy, parse
        from embodrl.hub import fetch as run

        name = parse(
            ("hf://datasets/" if dataset else "hf://") + repository.removeprefix("hf://").removeprefix("datasets/")
        )
        if name is None or (revision is not None and name.revision is not None):
            hint = "give OWNER/NAME, and the revision only once: OWNER/NAME@REVISION or --revision"
            raise UsageError(f"'{repository}' is not a hub repository name", hint, code="hub-name")
        chosen = name if revision is None else parse(f"{name}@{revision}")
        if chosen is None:
            raise UsageError(f"'{revision}' is not a revision", "give a branch, tag or commit", code="hub-name")
        if to is not None and to.exists() and not is_own_copy(to):
            problem = f"{to} exists and was not created by a fetch"
            raise OutputError(problem, "give a new directory", code="output-exists")
        place = run(chosen, DATASET_FILES if dataset else MODEL_FILES, to, verify_all=True)
        commit = replace(chosen, revision=place.name) if to is None else place
        setting = "sft.data_dir" if dataset else "model.model_path"
        print(f"{place}: fetched and verified against the hub's checksums; use it as {setting}={commit}")

    execute(action, debug)
