"""Section ``store``: settings shared by `embodrl store collect`, `train` and `eval`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from embodrl.config.schema import Config, PathText, PositiveFloat, PositiveInt, Section, section_in
from embodrl.config.schema.section import ReadBy


class StoreConfig(Section):
    """Settings shared by collectors, trainer and evaluators."""

    url: Annotated[PathText | None, ReadBy("store", "train")] = Field(
        default=None,
        description="a directory that all processes reach, redis://HOST:PORT/DB/PREFIX, or a URL of fsspec such as"
        " s3://BUCKET/PREFIX",
    )
    collector: str = Field(
        default="collector-0",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*",
        description="name of a collector and prefix of its episode ids: unique among running collectors",
    )
    spool_dir: PathText = Field(
        default="outputs/spool",
        description="local directory of a collector, for episodes not yet in the store, or of an evaluator",
    )
    episodes_per_shard: PositiveInt = Field(
        default=32, le=100_000, description="episodes that a collector writes into the store at a time"
    )
    shard_s: PositiveFloat = Field(
        default=60.0, description="seconds after which a collector writes an incomplete shard into the store"
    )
    window_episodes: PositiveInt = Field(
        default=1000, description="number of newest usable episodes that the trainer learns from"
    )
    successes_only: bool = Field(default=True, description="imitate solved episodes only")
    corrections_only: bool = Field(
        default=False, description="imitate only the corrections by an expert or a person (HG-DAgger)"
    )
    intervention: PathText | None = Field(
        default=None,
        description="who may correct a collector's policy: a person at a keyboard, spacemouse or browser, or a"
        " stand-in for one by the rule of algorithm.dagger: expert (the scripted one) or the directory of a policy",
    )
    steps_per_episode: PositiveFloat = Field(
        default=1.0, description="optimizer steps that each finished episode allows; then the trainer waits for more"
    )
    publish_interval: PositiveInt = Field(
        default=50, description="optimizer steps between checkpoints, each of which publishes the weights"
    )
    remove_used: bool = Field(
        default=False, description="the trainer removes shards from the store once they have left its window"
    )
    compact_episodes: PositiveInt = Field(
        default=1000, le=100_000, description="limit on episodes in a shard merged by `embodrl store compact`"
    )
    poll_s: Annotated[PositiveFloat, ReadBy("store", "train")] = Field(
        default=1.0, description="seconds between two checks of the store"
    )


def store_settings(config: Config) -> StoreConfig:
    """Return the section ``store``, or its defaults if the configuration has none."""
    return section_in(config, "store", StoreConfig)
