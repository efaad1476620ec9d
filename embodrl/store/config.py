"""Section ``store``: what `embodrl store collect`, `train` and `eval` share."""

from __future__ import annotations

from pydantic import Field

from embodrl.config.schema import Config, PathText, PositiveFloat, PositiveInt, Section, section_in


class StoreConfig(Section):
    """What collectors, trainer and evaluators share."""

    url: PathText | None = Field(
        default=None, description="a directory that all of them reach, or a URL of fsspec such as s3://BUCKET/PREFIX"
    )
    collector: str = Field(
        default="collector-0",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*",
        description="name of a collector, which its episodes are named after: one for each that runs at a time",
    )
    spool_dir: PathText = Field(
        default="outputs/spool",
        description="directory of a collector, for episodes that are not in the store yet, and of an evaluator",
    )
    episodes_per_shard: PositiveInt = Field(
        default=32, le=100_000, description="episodes that a collector writes into the store at once"
    )
    shard_s: PositiveFloat = Field(
        default=60.0, description="seconds after which a collector writes fewer of them into the store"
    )
    window_episodes: PositiveInt = Field(
        default=1000, description="newest episodes that the trainer learns from, of those that it may use"
    )
    successes_only: bool = Field(default=True, description="imitate solved episodes only")
    corrections_only: bool = Field(
        default=False, description="imitate only what an expert or a person did in place of the policy (HG-DAgger)"
    )
    intervention: PathText | None = Field(
        default=None,
        description="who may correct a collector's policy: a person at the keyboard or a spacemouse, or a"
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
        default=1000, le=100_000, description="most episodes of a shard that `embodrl store compact` merges others into"
    )
    poll_s: PositiveFloat = Field(default=1.0, description="seconds between two looks into the store")


def store_settings(config: Config) -> StoreConfig:
    """Return the section ``store``; its defaults where the configuration has no keys of it."""
    return section_in(config, "store", StoreConfig)
