"""`embodrl serve`: a policy behind the protocols of robots and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.models.base import VLAPolicy
from embodrl.processes.ending import leave, owns_process
from embodrl.runs.files import PUBLISHED_DIR
from embodrl.runs.provenance import compute_text
from embodrl.serving.server import PolicyServer
from embodrl.workers.policy import build_policy, check_memory, configure_torch, num_threads


def serve(
    loaded: LoadedConfig,
    make_policy: Callable[[Config], VLAPolicy] = build_policy,
    run_dir: Path | None = None,
    *,
    say: Callable[[str], None],
) -> int:
    """`embodrl serve`: answer observations until a signal; return the exit code.

    Args:
        loaded: the policy's configuration; its environment says which cameras there are, and is not started.
        make_policy: returns the policy; by default the one that ``config.model`` names.
        run_dir: of the run that the policy is of, whose newer weights are taken up; None for none.
        say: gets the lines that tell what happens.

    Raises:
        MissingDependencyError: a protocol's library is not installed.
        ServingError: an address is not available.
        EmbodrlError: the policy can't be built.
    """
    config = loaded.config
    weights_dir = run_dir / PUBLISHED_DIR if run_dir is not None and config.serve.follow else None

    async def run() -> int:
        device = configure_torch(config, loaded.deployment.of("rollout")[0])
        check_memory(config, loaded.deployment, training=False, device=device)
        engine = make_rollout_engine(config, make_policy(config), num_threads(config))
        say(compute_text(config))
        server = PolicyServer(engine, config, weights_dir, say)
        code = await server.run()
        if owns_process():
            leave(code)  # the interpreter would wait for a thread that hangs, and take seconds on busy cores
        return code

    return asyncio.run(run())
