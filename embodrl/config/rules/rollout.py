"""Rollouts: workflows and backends."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, note, rule
from embodrl.errors import EmbodrlError
from embodrl.names import import_workflow
from embodrl.rule_set import Finding

KEY = "rollout.workflow"
BACKEND = "rollout.backend"
NATIVE = "set rollout.backend=native"


@rule(KEY)
def workflow_exists(context: Context) -> Iterator[Finding]:
    """The workflow can be imported and constructed."""
    path = context.config.rollout.workflow
    if path is not None:
        try:
            import_workflow(path)
        except EmbodrlError as error:
            hint = error.hint or "put the module's directory on PYTHONPATH, or correct the name"
            yield Finding(KEY, error.message, hint, "module:Class, or null")


@rule(KEY, "env.train.auto_reset", "rollout.pipeline_stages", "runner.max_staleness")
def workflows_play_single_episodes(context: Context) -> Iterator[Finding]:
    """A workflow starts and ends episodes itself, each in a waiting environment."""
    config = context.config
    if config.rollout.workflow is None:
        return
    if config.env.train.auto_reset:
        message = "a workflow starts episodes itself, but the environments would start the next ones on their own"
        yield Finding("env.train.auto_reset", message, "set env.train.auto_reset=false", "false", others=(KEY,))
    if config.rollout.pipeline_stages > 1 and config.runner.max_staleness == 0:
        message = f"{config.rollout.pipeline_stages} stages have no effect on workflow episodes without staleness"
        hint = "set rollout.pipeline_stages=1, or runner.max_staleness to 1 or more"
        yield Finding("rollout.pipeline_stages", message, hint, "1", others=(KEY, "runner.max_staleness"))


@note("env.eval")
def evaluations_play_no_workflow(context: Context) -> Iterator[Finding]:
    """An evaluation steps all environments in lockstep, whatever the training workflow."""
    path = context.config.rollout.workflow
    # A workflow on the command line is reported by its own note.
    if context.verb == "eval" and path is not None and context.origin(KEY).kind != "argument":
        message = f"{KEY}={path} is not used: evaluations observe, act and execute chunks in all environments at once"
        yield Finding(
            "env.eval", message, "compare evaluations only with each other, not with the success rate of training"
        )


REMOTE = "rollout.remote.urls"


@rule(BACKEND, REMOTE, "rollout.publish_weights", "runner.max_staleness", "rollout.own_process")
def remote_rollouts_have_servers(context: Context) -> Iterator[Finding]:
    """Policy servers act for one training run in lockstep, which publishes its weights."""
    config = context.config
    deployment = context.deployment
    if config.rollout.backend != "remote":
        return
    urls = config.rollout.remote.urls
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        message = f"has {len(urls)} server URLs, or some that are not http:// or https://"
        yield Finding(REMOTE, message, "start `embodrl serve protocol=http`, and name it", "http://HOST:PORT, ...")
    if context.verb not in ("train", "plan", None):
        hint = f"{NATIVE}; to evaluate a server, set model=remote"
        yield Finding(BACKEND, f"`embodrl {context.verb}` has no rollout servers", hint, "native")
    if not config.rollout.publish_weights:
        message = "is false, but the servers load the published weights"
        yield Finding("rollout.publish_weights", message, "set it to true, or add rollout=remote", "true")
    if config.runner.max_staleness > 0:
        message = "the servers act with the newest weights, in lockstep with the run"
        yield Finding("runner.max_staleness", message, f"set it to 0, or {NATIVE}", "0", others=(BACKEND,))
    if deployment is not None and deployment.rolls_out_in_processes:
        message = "rollouts are in separate processes, but servers act for the main process"
        yield Finding(BACKEND, message, f"{NATIVE}, or leave out rollout.own_process", "native")
