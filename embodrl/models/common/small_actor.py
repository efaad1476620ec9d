"""Choice of a policy's small actor, from the configuration or the checkpoint; see ``embodrl.specs.SMALL_ACTORS``."""

from __future__ import annotations

import json
from pathlib import Path

from embodrl.config.schema import ModelConfig, SmallActorConfig
from embodrl.errors import CheckpointError, PolicyFileError
from embodrl.fields import read_fields
from embodrl.hub import parse
from embodrl.models.common import checkpoint
from embodrl.specs import MODELS

ACTOR_CONFIG = "small_actor.json"


def actor_of(config: ModelConfig) -> tuple[SmallActorConfig, Path | None]:
    """Return the small actor of a configuration or its checkpoint, and the checkpoint's directory if it has the actor.

    Raises:
        CheckpointError: no such checkpoint, or its actor differs from the configured one.
        PolicyFileError: the actor's settings are damaged.
    """
    wanted = config.small_actor
    directory = Path(config.model_path or config.warm_start or "builtin").expanduser()
    if config.model_path is not None and not directory.is_dir() and parse(config.model_path) is not None:
        directory = directory if MODELS.entry(config.model_type).only_acts else checkpoint.resolve(config.model_path)
    if not (directory / ACTOR_CONFIG).is_file():
        return wanted, None
    checkpoint.check_link(directory / ACTOR_CONFIG, directory)
    fields = read_fields(directory / ACTOR_CONFIG, PolicyFileError, "save the policy again")
    try:
        stored = SmallActorConfig.model_validate_json(json.dumps(dict(fields.content)))
    except ValueError as error:
        raise PolicyFileError(f"{directory / ACTOR_CONFIG}: {error}", "save the policy again") from error
    if stored.kind is None or (wanted.kind is not None and stored != wanted):
        raise CheckpointError(
            f"{directory} has a small actor with {stored.model_dump()}, and {wanted.model_dump()} is wanted",
            "leave model.small_actor out, which takes that of the checkpoint, or set it to the same",
            code="small-actor-differs",
        )
    return stored, directory
