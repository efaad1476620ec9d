"""The rollout backend remote, for the configuration: no torch here."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import PositiveFloat, Section, section_in
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import EngineSpec

BACKEND = "rollout.backend"
URLS = "rollout.remote.urls"
NATIVE = "set rollout.backend=native"
RULES = RuleSet()


class RemoteRolloutConfig(Section):
    """Policy servers, for rollout.backend remote."""

    urls: tuple[str, ...] = Field(
        default=(), description="one or several `embodrl serve protocol=http`, all serving the same model"
    )
    weights_dir: str | None = Field(
        default=None, description="DIR/weights of the run, as the servers see it; null: the same path as for the run"
    )
    timeout_s: PositiveFloat = Field(default=600.0, description="seconds that a run waits if no server answers")
    request_timeout_s: PositiveFloat = Field(default=120.0, description="seconds per request to a server")


@RULES.rule(BACKEND, "rollout")
def remote_rollouts_have_servers(context: Context) -> Iterator[Finding]:
    """Policy servers act for one training run, which publishes its weights."""
    config = context.config
    deployment = context.deployment
    urls = section_in(config.rollout, "remote", RemoteRolloutConfig).urls
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        message = f"has {len(urls)} server URLs, or some that are not http:// or https://"
        yield Finding(URLS, message, "start `embodrl serve protocol=http`, and name it", "http://HOST:PORT, ...")
    if context.verb not in ("train", "plan", "store", None):
        hint = f"{NATIVE}; to evaluate a server, set model=remote"
        yield Finding(BACKEND, f"`embodrl {context.verb}` has no rollout servers", hint, "native")
    if not config.rollout.publish_weights and context.verb != "store":  # which finds them in the store
        message = "is false, but the servers load the published weights"
        yield Finding("rollout.publish_weights", message, "set it to true, or add rollout=remote", "true")
    if deployment is not None and deployment.rolls_out_in_processes:
        message = "rollouts are in separate processes, but servers act for the main process"
        yield Finding(BACKEND, message, f"{NATIVE}, or leave out rollout.own_process", "native")


ENGINE = EngineSpec(
    name="remote",
    rollout="embodrl.hybrid_engines.rollout.remote.engine:make_remote",
    rollout_settings=RemoteRolloutConfig,
    rules=(RULES,),
    in_processes=False,
    description="acts through policy servers, which load the published weights",
)
