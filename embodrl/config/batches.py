"""``runner.fit_batches``: batch sizes that divide the rollout, whatever its size."""

from __future__ import annotations

import json
from typing import Any, cast

from embodrl.config.nodes import Node, Origin, from_plain, lookup, put
from embodrl.config.processes import value_or_default
from embodrl.config.schema import Config
from embodrl.specs import LOSSES

KEY = "runner.fit_batches"
BATCH, MICRO = "actor.global_batch_size", "actor.micro_batch_size"
FACTORS = ("env.train.total_num_envs", "algorithm.rollout_epoch")
STEPS, CHUNK = "env.train.max_steps_per_rollout_epoch", "model.num_action_chunks"


def fill_batches(tree: Node, schema: type[Config]) -> None:
    """Lower unset batch sizes to the largest divisors of a rollout if ``runner.fit_batches`` is on."""
    wanted = lookup(tree, KEY)
    if wanted is None or wanted.value is not True:
        return
    defaults: dict[str, Any] = json.loads(schema().model_dump_json())
    loss = value_or_default(tree, defaults, "algorithm.loss_type")
    if isinstance(loss, str) and loss in LOSSES and LOSSES.entry(loss).learns_from_records:
        return  # such losses draw batches from records
    sizes = [value_or_default(tree, defaults, key) for key in (*FACTORS, STEPS, CHUNK, BATCH, MICRO)]
    if any(type(size) is not int or size < 1 for size in sizes):
        return  # the rules report invalid keys
    envs, epochs, steps, chunk, batch, micro = cast(list[int], sizes)
    chunks = envs * epochs * -(-steps // chunk)
    batch = _fit(tree, BATCH, batch, chunks)
    _fit(tree, MICRO, micro, batch)


def _fit(tree: Node, key: str, size: int, whole: int) -> int:
    """Return the largest divisor of ``whole`` up to ``size``, or ``size`` where a user or a run set it."""
    present = lookup(tree, key)
    if present is not None and present.origin.kind not in ("schema", "preset"):
        return size
    fitting = next(number for number in range(min(size, whole), 0, -1) if whole % number == 0)
    if fitting != size:
        put(tree, key, from_plain(fitting, Origin("preset", f"follows from {KEY}")))
    return fitting
