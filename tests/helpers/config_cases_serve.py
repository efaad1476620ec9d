"""Wrong settings of policy servers; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

SERVE = [
    Wrong(
        "more protocols than ports are left",
        "serve.port",
        "served-protocols-have-ports",
        ("serve.port=65535", "serve.protocols=[openpi,http]"),
        names="65535",
    ),
    Wrong(
        "more actions than a chunk has",
        "serve.execution_horizon",
        "executed-actions-are-predicted",
        ("serve.execution_horizon=99",),
        names="99",
    ),
    Wrong(
        "certificate that is not there",
        "serve.tls_cert",
        "tls-has-both-files",
        ("serve.tls_cert=nothing.pem", "serve.tls_key=nothing.key"),
        more=("serve.tls_key",),
    ),
    Wrong(
        "rollout servers without a URL",
        "rollout.remote.urls",
        "remote-rollouts-have-servers",
        ("rollout.remote.urls=[host:8000]", "rollout.backend=remote", "rollout.publish_weights=true"),
        names="http://",
    ),
    Wrong(
        "evaluations beside training by a rollout server",
        "runner.eval_async",
        "evaluations-beside-can-run",
        ("runner.eval_async=true", "rollout=remote", "rollout.remote.urls=[http://127.0.0.1:8000]"),
    ),
    Wrong(
        "env server without a port, and an interpreter of this machine",
        "env.remote",
        "env-servers-run-the-simulators",
        ("env.remote=[desk]", "env.python=python3.10"),
        names="tcp://HOST:PORT",
        more=("env.python",),
    ),
    Wrong(
        "mean of actions without an order",
        "serve.decoding",
        "decodings-exist",
        ("serve.decoding=mean", "model=pi0_fast"),
        names="greedy, sampled",
    ),
    Wrong(
        "mean of actions that follow a flow",
        "env.eval.decoding",
        "decodings-exist",
        ("env.eval.decoding=mean", "model=pi0"),
        names="greedy, sampled",
    ),
    Wrong(
        "mean of actions that follow a flow, on the way",
        "env.eval.decoding_on_the_way",
        "decodings-exist",
        ("env.eval.decoding_on_the_way=mean", "model=pi0"),
        names="greedy, sampled",
    ),
    Wrong("token that can be guessed", "serve.token", "token-is-a-secret", ("serve.token=abc",), names="auto"),
]
