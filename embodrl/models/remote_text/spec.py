"""A language model behind a server with OpenAI's API: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import ModelConfig, NonNegativeInt, PositiveFloat, PositiveInt
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec

FAMILY = "remote_text"
ACTS = "embodrl.workers.workflows.workflow:ChunkWorkflow"
"""A workflow that asks for actions."""


class RemoteTextConfig(ModelConfig):
    """A language model that runs on a server."""

    url: str | None = Field(
        default=None,
        description="base URL of OpenAI's API, http://HOST:PORT/v1 of vLLM, SGLang, TGI or `embodrl serve"
        " protocol=openai`; its key is read from the environment variable EMBODRL_TOKEN",
    )
    served_model: str | None = Field(default=None, description="model of the server; null: the only one that it lists")
    max_new_tokens: PositiveInt = Field(default=256, description="tokens of a message that the server may write")
    answer_timeout_s: PositiveFloat = Field(default=60.0, description="seconds until the next part of an answer")
    retries: NonNegativeInt = Field(
        default=3, description="further requests where the server does not answer, is busy (429), or fails (5xx)"
    )


RULES = RuleSet()


@RULES.rule("model.model_type", "model.url")
def remote_text_has_a_url(context: Context) -> Iterator[Finding]:
    """The base URL is of HTTP, and holds no secrets: URLs stand in logs and in a run's configuration."""
    url = context.model(RemoteTextConfig).url
    allowed = "http://HOST:PORT/v1, https://HOST/v1"
    if url is None:
        yield Finding("model.url", "no server is named", "give the base URL of a server of OpenAI's API", allowed)
        return
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        plain = complete and "@" not in parts.netloc and not parts.query and not parts.fragment
    except ValueError:
        plain = False
    if not plain:
        message = "it is not the base URL of a server, or has more than scheme, host, port and path"
        hint = "give the URL alone; a key stands in the environment variable EMBODRL_TOKEN"
        yield Finding("model.url", message, hint, allowed)


@RULES.rule("model.model_type", "rollout.workflow")
def remote_text_needs_a_workflow(context: Context) -> Iterator[Finding]:
    """What a language model writes becomes actions only by a workflow's tools."""
    if context.verb in ("serve", "record"):
        message = f"{FAMILY} is evaluated by workflows: it has a server already, and acts only through tools"
        yield Finding("model.model_type", message, "use it with `embodrl eval`", "a family of embodrl")
    elif context.verb == "eval" and context.config.rollout.workflow in (None, ACTS):
        message = f"model.model_type={FAMILY} writes text, and nothing turns it into actions"
        hint = "name a workflow that calls engine.generate, as examples/planner does"
        yield Finding("rollout.workflow", message, hint, "module:Class", others=("model.model_type",))


@RULES.rule("model")
def remote_text_has_its_own_weights(context: Context) -> Iterator[Finding]:
    """Weights are the server's, and a message is one chunk."""
    model = context.config.model
    wanted = (
        *((name, getattr(model, name), None) for name in ("model_path", "stats_path", "unnorm_key", "lora_path")),
        *(("num_action_chunks", model.num_action_chunks, 1), ("condition", model.condition, None)),
        *((name, getattr(model, name), False) for name in ("center_crop", "random_weights", "freeze_vision")),
        ("trainable", model.trainable, "all"),
    )
    for name, value, only in wanted:
        if value != only:
            allowed = "null" if only is None else str(only).lower()
            message = "has no effect on messages of a server"
            yield Finding(f"model.{name}", message, f"set it to {allowed}", allowed, others=("model.model_type",))


SPEC = ModelSpec(
    name=FAMILY,
    target="embodrl.models.remote_text.policy:build_remote_text",
    description="a language model behind a server with OpenAI's API (vLLM, SGLang, TGI), for eval by a workflow",
    settings=RemoteTextConfig,
    rules=(RULES,),
    kind="text",
    value_head=False,
    uses_state=False,
    uses_images=False,
    sizes="as on the server",
    actions="none: text, of which a workflow makes actions",
    checkpoint="the server's",
    rl="none: no gradients",
    only_acts="behind a server",
)
