"""Verbs imported on demand, besides the ones in ``main``. GROUP.NAME is a subcommand of a group."""

from __future__ import annotations

VERBS = {
    "compare": "embodrl.tools.compare.spec:VERB",
    "convert": "embodrl.tools.converters.spec:VERB",
    "data": "embodrl.tools.data_check.spec:VERB",
    "doctor": "embodrl.tools.doctor.spec:VERB",
    "env": "embodrl.tools.env_install.spec:VERB",
    "env.serve": "embodrl.envs.env_server.spec:VERB",
    "explain": "embodrl.tools.explain.spec:VERB",
    "export": "embodrl.tools.export.spec:VERB",
    "import": "embodrl.tools.importers.spec:VERB",
    "join": "embodrl.store.spec:JOIN",
    "label": "embodrl.workers.rewards.spec:LABEL",
    "list": "embodrl.tools.listing.spec:VERB",
    "model": "embodrl.tools.model_tools.spec:VERB",
    "model.token": "embodrl.models.small_actors.spec:VERB",
    "parity": "embodrl.tools.parity.spec:VERB",
    "pipeline": "embodrl.tools.pipeline_show.spec:VERB",
    "plan": "embodrl.tools.plan.spec:VERB",
    "profile": "embodrl.tools.profile.spec:VERB",
    "reward": "embodrl.workers.rewards.spec:REWARD",
    "run": "embodrl.tools.recipe.spec:VERB",
    "serve": "embodrl.serving.spec:VERB",
    "store": "embodrl.store.spec:VERB",
    "sweep": "embodrl.tools.sweep.spec:VERB",
    "watch": "embodrl.tools.watch.spec:VERB",
}
