"""Values that are valid numbers but hardly intended: far too large, or far outside the usual range."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, note, rule, value_of
from embodrl.config.schema import Config
from embodrl.rule_set import Finding

MOST_PIXELS = 4_194_304
MOST_IMAGE_BYTES = 64 * 2**30
USUAL: dict[str, tuple[float, float]] = {
    "actor.optim.lr": (1e-9, 1e-1),
    "actor.optim.value_lr": (1e-9, 1.0),
    "sft.lr": (1e-9, 1e-1),
    "algorithm.sampling.temperature": (0.05, 10.0),
    "algorithm.clip_ratio_low": (0.0, 1.0),
    "algorithm.clip_ratio_high": (0.0, 10.0),
    "algorithm.update_epoch": (1, 100),
    "model.lora.rank": (1, 1024),
    "env.step_timeout_s": (0.1, 86_400.0),
    "env.reset_timeout_s": (0.1, 86_400.0),
    "env.start_timeout_s": (1.0, 86_400.0),
    "env.max_abs_reward": (1e-2, float("inf")),
}
"""Ranges of published runs, with a wide margin."""


def number_of(config: Config, key: str) -> float | None:
    """Return the number at a dotted key; None if it is null."""
    value = value_of(config, key)
    return value if isinstance(value, int | float) else None


@rule("env.cameras", "env.train.total_num_envs", "env.eval.total_num_envs")
def images_fit_in_memory(context: Context) -> Iterator[Finding]:
    """The images of one step of all environments take less than 64 GiB, and those of one camera 4 megapixels."""
    env = context.config.env
    for index, camera in enumerate(env.cameras):
        if camera.height * camera.width > MOST_PIXELS:
            yield Finding(
                f"env.cameras.{index}.height",
                f"{camera.width} x {camera.height} pixels per image",
                "policies take 64 to 448 pixels per side; set height and width to your policy's size",
                f"at most {MOST_PIXELS} pixels per image",
                others=(f"env.cameras.{index}.width",),
                at="env.cameras",
            )
            return
    pixels = sum(camera.height * camera.width for camera in env.cameras)
    environments = max(env.train.total_num_envs, env.eval.total_num_envs)
    needed = 3 * pixels * environments
    if needed > MOST_IMAGE_BYTES:
        yield Finding(
            "env.train.total_num_envs",
            f"the images of {environments} environments take {needed / 2**30:.0f} GiB per step",
            f"use fewer environments (at most {MOST_IMAGE_BYTES // (3 * pixels)}) or smaller images",
            others=("env.cameras",),
        )


@note(*USUAL)
def values_are_usual(context: Context) -> Iterator[Finding]:
    """A learning rate, temperature, clip range, epoch count or limit is far outside the range of published runs."""
    for key, (low, high) in USUAL.items():
        value = number_of(context.config, key)
        if value is not None and context.by_user(key) and not low <= value <= high:
            usual = f"{low:g} to {high:g}" if high < float("inf") else f"at least {low:g}"
            yield Finding(key, f"{value:g} is far outside the usual range", "check the exponent and the unit", usual)
