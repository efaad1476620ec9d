"""Env servers at addresses ``tcp://HOST:PORT``, and the command that runs one."""

from __future__ import annotations

from embodrl.specs import EnvServerSpec, VerbSpec

TCP = EnvServerSpec(
    name="tcp",
    target="embodrl.envs.env_server.relay:probe",
    description="`embodrl env serve`",
    relay="embodrl.envs.env_server.relay",
)
VERB = VerbSpec(
    name="env.serve",
    target="embodrl.cli.env_serve:serve",
    description="Run simulators for training runs on other machines (env.remote), until Ctrl-C or SIGTERM.",
)
