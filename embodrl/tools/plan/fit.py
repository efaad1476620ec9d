"""`embodrl plan train --fit`: settings with which a run fits the available memory.

Tries a fixed sequence of plans, least intrusive first: placement and sharding, then activation checkpointing and
smaller micro-batches, which do not change the training; then bf16 weights with a float32 copy in the optimizer; last
adapters in place of full weights, which learn something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.errors import ConfigError
from embodrl.preflight.run_memory import HEADROOM
from embodrl.tools.plan.plan import Plan, make_plan, spread

ADAPTERS = ("model.trainable=lora", "actor.param_dtype=bf16")
CHECKPOINTING = "actor.gradient_checkpointing=true"
MICRO_BATCH = "actor.micro_batch_size="


@dataclass(frozen=True)
class Fit:
    """A fit.

    Attributes:
        overrides: settings to add; () if the run fits as it is, or the size of its model is unknown.
        adapters: trains adapters where all weights were to be trained.
    """

    overrides: tuple[str, ...]
    loaded: LoadedConfig
    plan: Plan
    adapters: bool = False

    @property
    def speed(self) -> int:
        """Rank of a fit among equivalent ones: halving the micro-batch beats computing activations twice."""
        return self.plan.batches.micro_batch * (1 if CHECKPOINTING in self.overrides else 2)


def find_fit(load: Callable[[tuple[str, ...]], LoadedConfig]) -> Fit | None:
    """Return settings with which a run fits, or None if none of the tried ones does.

    ``load`` loads the run with further overrides, for the verb plan.

    Raises:
        ConfigError: the run is invalid without overrides.
        EmbodrlError: see ``make_plan``.
    """
    load = cache(load)
    loaded = load(())
    plan = make_plan(loaded)
    if plan.fits or plan.memory.not_estimated:
        return Fit((), loaded, plan)
    for structures in _structures(loaded, plan):
        fits = [fit for one in structures if (fit := _with_micro_batches(load, one)) is not None]
        if fits:
            return max(fits, key=lambda fit: fit.speed)
    return None


def _structures(loaded: LoadedConfig, plan: Plan) -> Iterator[list[tuple[str, ...]]]:
    """Yield groups of overrides, without the micro-batch size; the fastest fit of a group is best."""
    config = loaded.config
    placements = [spread(config, plan.deployment), ()]
    recomputed = [()] if config.actor.gradient_checkpointing else [(), (CHECKPOINTING,)]
    trained: list[tuple[str, ...]] = [()] if config.model.trainable != "all" else [(), ADAPTERS]
    if config.actor.param_dtype == "fp32":
        trained.insert(1, ADAPTERS[1:])
    for adapters in trained:
        for placement in dict.fromkeys(placements):
            yield [(*placement, *checkpointing, *adapters) for checkpointing in recomputed]


def _with_micro_batches(load: Callable[[tuple[str, ...]], LoadedConfig], overrides: tuple[str, ...]) -> Fit | None:
    """Return the fit with the largest micro-batch that divides the batch of a training process."""
    limit: int | None = None
    while limit is None or limit >= 1:
        if limit is not None:
            overrides = (*(text for text in overrides if not text.startswith(MICRO_BATCH)), f"{MICRO_BATCH}{limit}")
        try:
            loaded = load(overrides)
        except ConfigError:  # not a candidate if a rule refuses it
            return None
        plan = make_plan(loaded)
        if plan.fits:
            return Fit(overrides, loaded, plan, ADAPTERS[0] in overrides)
        limit = _next_size(loaded.config, plan)
    return None


def _next_size(config: Config, plan: Plan) -> int:
    """Return the largest smaller micro-batch that may fit, or 0; activations scale with it."""
    now = config.actor.micro_batch_size
    rows = config.actor.micro_batch_size - 1
    for memory in plan.memory.memories:
        activations = memory.needed.get("activations", 0)
        if not memory.fits and activations:
            rest = HEADROOM * memory.available - (memory.total - activations)
            rows = min(rows, int(rest * now / activations))
    # A process whose micro-batch is its whole batch keeps no whole gradients, so a larger one may need less memory.
    share = plan.batches.batch_per_actor
    return next((size for size in range(min(rows, share), 0, -1) if share % size == 0), 0)
