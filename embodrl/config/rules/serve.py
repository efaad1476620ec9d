"""The policy server of `embodrl serve`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from embodrl.config.policy_card import trained_delay
from embodrl.config.rules.base import Context, note, path_kind, rule
from embodrl.config.schema import GrootKeysConfig, WireKeysConfig
from embodrl.rule_set import Finding
from embodrl.specs import MODELS, SERVE_PROTOCOLS

LEAST_TOKEN = 8


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serving(context: Context) -> bool:
    return context.verb == "serve"


@rule("serve.protocols", "serve.port")
def served_protocols_have_ports(context: Context) -> Iterator[Finding]:
    """Each protocol is named once and has a port."""
    serve = context.config.serve
    if len(set(serve.protocols)) < len(serve.protocols):
        yield Finding("serve.protocols", "a protocol is named twice", "name each once")
    if serve.port and serve.port + len(serve.protocols) - 1 > 65535:
        message = f"{len(serve.protocols)} protocols use ports from {serve.port} on, but the last port is 65535"
        yield Finding("serve.port", message, "take a lower one", others=("serve.protocols",))


@rule("serve.protocols", "model.model_type")
def protocols_carry_what_the_policy_writes(context: Context) -> Iterator[Finding]:
    """Messages and actions have protocols of their own."""
    family = context.config.model.model_type
    if not _serving(context) or family not in MODELS:
        return
    writes_text = MODELS.entry(family).kind == "text"
    fitting = [spec.name for spec in SERVE_PROTOCOLS.all() if spec.serves_text == writes_text]
    for name in context.config.serve.protocols:
        if name not in fitting:
            message = f"{name} carries {'actions' if writes_text else 'messages'}, which '{family}' does not write"
            hint = f"set protocol={fitting[0] if writes_text else 'openpi'}"
            yield Finding("serve.protocols", message, hint, ", ".join(fitting), others=("model.model_type",))


@rule("serve", "env.cameras", "model.action_dim")
def wire_keys_fit(context: Context) -> Iterator[Finding]:
    """There is a key for each camera, and GR00T's action parts add up to an action."""
    config = context.config
    if not _serving(context):
        return
    for name in config.serve.protocols:
        keys = getattr(config.serve, name, None)
        if not isinstance(keys, WireKeysConfig):
            continue
        if keys.images and len(keys.images) < len(config.env.cameras):
            message = f"names {len(keys.images)} images, but env.cameras has {len(config.env.cameras)}"
            yield Finding(f"serve.{name}.images", message, "name one for each camera", others=("env.cameras",))
        if isinstance(keys, GrootKeysConfig) and keys.actions:
            sizes = [int(dims) if dims.isdigit() else 0 for dims in (text.rpartition(":")[2] for text in keys.actions)]
            if 0 in sizes or sum(sizes) != config.model.action_dim:
                message = f"has parts of {sizes} values, but an action has {config.model.action_dim}"
                hint = "write each part as NAME:DIMS"
                yield Finding(f"serve.{name}.actions", message, hint, others=("model.action_dim",))


@note("serve.rtc_max_guidance_weight", "model.model_type", "model.flow.rtc_max_delay")
def guidance_without_effect(context: Context) -> Iterator[Finding]:
    """Only flow policies continue the chunk that a robot is executing."""
    key = "serve.rtc_max_guidance_weight"
    family = context.config.model.model_type
    if context.by_user(key) and family in MODELS and MODELS.entry(family).kind != "flow":
        yield Finding(key, f"has no effect: '{family}' is not a flow policy", "leave it out")
    elif context.by_user(key) and trained_delay(context.config.model):
        message = "has no effect: the policy was trained to continue chunks, so it is not guided"
        yield Finding(key, message, "leave it out, or set model.flow.rtc_max_delay=0")


@rule("serve.execution_horizon", "model.num_action_chunks")
def executed_actions_are_predicted(context: Context) -> Iterator[Finding]:
    """No more actions of a chunk are executed than the chunk has."""
    horizon = context.config.serve.execution_horizon
    chunk = context.config.model.num_action_chunks
    if horizon is not None and horizon > chunk:
        message = f"{horizon} actions are to be executed from each chunk of {chunk}"
        yield Finding(
            "serve.execution_horizon", message, f"set it to at most {chunk}", others=("model.num_action_chunks",)
        )


@rule("serve.tls_cert", "serve.tls_key")
def tls_has_both_files(context: Context) -> Iterator[Finding]:
    """A certificate comes with its key, and both are files."""
    serve = context.config.serve
    if (serve.tls_cert is None) != (serve.tls_key is None):
        key = "serve.tls_key" if serve.tls_key is None else "serve.tls_cert"
        yield Finding(key, "is missing: TLS needs a certificate and its key", "give both, or neither")
    for key, path in (("serve.tls_cert", serve.tls_cert), ("serve.tls_key", serve.tls_key)):
        if path is not None and path_kind(path) != "file":
            yield Finding(key, f"there is no file '{path}'", "give a file in PEM")
    if serve.tls_cert is None:
        return
    if plain := [name for name in serve.protocols if not SERVE_PROTOCOLS.entry(name).has_tls]:
        message = f"clients of {' and '.join(plain)} have no TLS"
        yield Finding("serve.tls_cert", message, "serve it in a separate process", others=("serve.protocols",))


@rule("serve.token")
def token_is_a_secret(context: Context) -> Iterator[Finding]:
    """A given token is hard to guess, and valid in a header."""
    token = context.config.serve.token
    if token not in ("auto", "none") and (len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable()):
        message = f"it has {len(token)} characters, or some that are not printable ASCII"
        yield Finding("serve.token", message, f"take {LEAST_TOKEN} or more, or auto", f"auto, none, or {LEAST_TOKEN}+")


@note("serve")
def protocols_are_served(context: Context) -> Iterator[Finding]:
    """Settings of protocols that are not served."""
    if not _serving(context):
        return
    serve = context.config.serve
    idle = [name for name in SERVE_PROTOCOLS if name not in serve.protocols]
    keys = {f"serve.{name}": name for name in idle}
    if "vla_eval" in idle:
        keys["serve.execution_horizon"] = "vla_eval"
    for key, name in keys.items():
        if context.by_user(key):
            yield Finding(key, f"has no effect: serve.protocols lacks {name}", "leave it out, or add the protocol")


@note("serve.host", "serve.token", "serve.tls_cert")
def served_to_other_machines(context: Context) -> Iterator[Finding]:
    """Exposure of a server that listens beyond this machine."""
    serve = context.config.serve
    if not _serving(context) or is_loopback(serve.host):
        return
    if serve.token == "none":
        message = f"is none, and {serve.host} can be reached from other machines, and all of them may query the policy"
        yield Finding("serve.token", message, "leave it at auto", others=("serve.host",))
    elif serve.tls_cert is None:
        message = f"'{serve.host}' can be reached from other machines, and the token travels unencrypted"
        yield Finding("serve.host", message, "set serve.tls_cert and serve.tls_key, or tunnel the port through SSH")
