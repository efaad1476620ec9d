"""`embodrl model check`: whether a model fulfils the contract of every policy (contract.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.hybrid_engines.training.precision import resolve_precision
from embodrl.models import registry
from embodrl.models.base import OPTIONAL, VLAPolicy, lacking
from embodrl.tools.model_tools.contract import CHECKS, HALF_PRECISION, Subject, stir
from embodrl.types import Observation, SamplingParams
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.policy import build_policy, configure_torch, param_dtype

logger = logging.getLogger(__name__)

ROWS = 3
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class CheckResult:
    """Result of a check, or an optional feature that the model lacks.

    Attributes:
        promise: docstring of the check, or the missing feature.
        offered: the model has the checked feature.
    """

    name: str
    promise: str
    problems: tuple[str, ...] = ()
    offered: bool = True


def check_model(loaded: LoadedConfig, show: Callable[[CheckResult], None]) -> list[CheckResult]:
    """Check the configured model on observations of the configured environment.

    ``show`` gets each result; missing optional features come last.

    Raises:
        EmbodrlError: the model can't be built, or the simulator can't run.
    """
    config = loaded.config
    device = configure_torch(config, loaded.deployment.of("rollout")[0])
    policy = build_policy(config, device)
    observation = observe(config)
    stir(policy)

    def load(directory: Path) -> VLAPolicy:
        section = config.model.model_copy(update={"warm_start": str(directory), "model_path": None, "lora_path": None})
        found, _ = registry.build_policy(section, device=device, dtype=param_dtype(config), seed=config.runner.seed + 1)
        return found

    sampling = config.algorithm.sampling
    params = SamplingParams(sampling.temperature, sampling.top_k)
    tolerance = TOLERANCES[config.actor.param_dtype]
    subject = Subject(policy, observation, params, load, tolerance, config.sft.lr)
    results: list[CheckResult] = []
    is_half = resolve_precision(config.actor.precision, device) == "bf16"
    absent = [_not_offered(feature, missing) for feature in OPTIONAL if (missing := lacking(policy, feature))]
    skipped = {result.name for result in absent}
    for name, check in ((HALF_PRECISION if is_half else {}) | CHECKS).items():
        if name in skipped:
            continue
        promise = (check.__doc__ or "").strip().replace("``", "")
        try:
            problems = tuple(check(subject))
        except Exception as error:  # user code, which may raise anything
            logger.debug("check %s", name, exc_info=True)
            problems = (f"{type(error).__name__}: {error}",)
        results.append(CheckResult(name, promise, problems))
        show(results[-1])
    for result in absent:
        show(result)
    return results + absent


def _not_offered(feature: str, methods: list[str]) -> CheckResult:
    return CheckResult(feature, f"not offered: define {' and '.join(methods)} where it is needed.", offered=False)


def observe(config: Config) -> Observation:
    """Return observations of ``ROWS`` environments after some random actions, so that rows differ."""
    check_simulator(config)
    env = config.env.model_copy(update={"num_processes": 1})
    chunk = config.model.num_action_chunks
    random = np.random.default_rng(0)
    with make_pool(config.model_copy(update={"env": env}), ROWS) as pool:
        tasks = np.arange(ROWS, dtype=np.int32) % len(pool.spec.tasks)
        pool.reset(np.arange(ROWS) + env.eval.seed, tasks)
        actions = random.uniform(-1, 1, (ROWS, chunk, pool.spec.action_dim)).astype(np.float32)
        step = pool.step(actions, np.ones(ROWS, np.bool_))
        return step.observation.select(np.arange(ROWS))
