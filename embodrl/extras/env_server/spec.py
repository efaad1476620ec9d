"""Env servers at addresses ``tcp://HOST:PORT``, and the command that is one."""

from __future__ import annotations

from embodrl.specs import EnvServerSpec, VerbSpec

TCP = EnvServerSpec(
    name="tcp",
    target="embodrl.extras.env_server.relay:probe",
    description="`embodrl env serve`",
    relay="embodrl.extras.env_server.relay",
)
VERB = VerbSpec(
    name="env.serve",
    target="embodrl.extras.env_server.cli:serve",
    description="Run simulators for training runs on other machines (env.remote), until Ctrl-C or SIGTERM.",
)
