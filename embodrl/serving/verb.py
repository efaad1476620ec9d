"""`embodrl serve`: a policy behind the protocols of robots and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from embodrl.config import LoadedConfig
from embodrl.config.policy_card import policy_directory, shipped_policy
from embodrl.config.schema import Config
from embodrl.processes.ending import leave, owns_process
from embodrl.runs.policies import PolicySource
from embodrl.serving.server import PolicyServer
from embodrl.specs import MODELS
from embodrl.trainer.files import PUBLISHED_DIR
from embodrl.trainer.provenance import compute_text
from embodrl.workers.parts import make_acting, prepare_acting
from embodrl.workers.policy import build_policy, check_policy_decoding


def describe(config: Config, source: PolicySource | None) -> Iterator[str]:
    """Yield lines that describe the served policy."""
    model = config.model
    env = config.env
    if source is not None and source.checkpoint is not None:
        origin = f"of {source.checkpoint.path}"
    elif model.model_path is not None:
        origin = f"of {model.model_path}"
    elif (directory := policy_directory(model)) is not None and directory == shipped_policy(model.model_type):
        origin = "as shipped: a tiny one that pushes a cube in the simulator; name a run or a policy to serve yours"
    else:
        origin = "with random weights" if model.warm_start is None else f"of {model.warm_start}"
    yield f"serving: a policy {model.model_type} {origin}"
    if MODELS.entry(model.model_type).kind == "text":
        return
    yield f"actions: chunks of {model.num_action_chunks} x {model.action_dim}"
    cameras = ", ".join(f"{camera.name} {camera.height} x {camera.width}" for camera in env.cameras)
    state = f"as {env.env_type} gives it (env.state={env.state})" if env.include_state else "none (env.include_state)"
    yield f"cameras: {cameras or 'none'}; state: {state}"


def serve(
    loaded: LoadedConfig,
    source: PolicySource | None = None,
    *,
    say: Callable[[str], None],
) -> int:
    """`embodrl serve`: answer observations until a signal; return the exit code.

    The environment of ``loaded`` only names the cameras and is not started. ``source`` may be a run whose newer weights
    are followed; None for ``config.model``.

    Raises:
        MissingDependencyError: a protocol's library is not installed.
        ServingError: an address is not available.
        EmbodrlError: the policy can't be built.
    """
    config = loaded.config
    run_dir = None if source is None else source.run_dir
    weights_dir = run_dir / PUBLISHED_DIR if run_dir is not None and config.serve.follow else None
    make_policy = build_policy if source is None else source.make_policy
    for line in describe(config, source):
        say(line)

    async def run() -> int:
        prepare_acting(config, loaded.deployment, config.serve.decoding, simulates=False)
        policy = make_policy(config)
        check_policy_decoding(config, policy, config.serve.decoding)
        engine = make_acting(config, policy)
        say(compute_text(config))
        server = PolicyServer(engine, config, weights_dir, say)
        code = await server.run()
        if owns_process():
            leave(code)  # a normal exit would wait for a hung thread, and takes seconds on busy cores
        return code

    return asyncio.run(run())
