"""Rules about ``store``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from embodrl.config.rules.base import Context, path_kind, value_of
from embodrl.config.rules.real_time import person_can_correct
from embodrl.config.rules.rollout import agents_played
from embodrl.config.schema import DEVICES, Config
from embodrl.envs.robot.spec import EXPERT
from embodrl.errors import StoreError
from embodrl.names import nearest, without_password
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import LOSSES
from embodrl.store.config import store_settings
from embodrl.store.urls import PASSWORD, REDIS, redis_place, scheme_of

RULES = RuleSet()
URL = "store.url"
NEEDS: tuple[tuple[str, object, str], ...] = (
    ("rollout.backend", "native", "evaluates in the main process"),
    ("rollout.own_process", None, "evaluates in the main process"),
    ("rollout.replay", None, "has no rollouts of its own"),
    ("rollout.publish_weights", False, "publishes its weights in the store"),
    ("model.small_actor.kind", None, "reads executed actions"),
    ("env.train.start_from_demos", None, "starts no episodes"),
    ("env.train.task_curriculum.parts", (), "starts no episodes"),
    ("env.train.failed_seed_fraction", 0, "has no list of failed seeds"),
    ("env.enable_offload", False, "has no simulators while it trains"),
    ("algorithm.off_policy.intervention_device", None, "is corrected where collectors are (store.intervention)"),
    ("rollout.pipeline_stages", 1, "has no rollouts of its own"),
    ("rollout.streaming", False, "takes whole rollouts"),
    ("rollout.min_running_shards", None, "has no rollouts of its own"),
    ("runner.save_rollouts", False, "has its rollouts in the store"),
)
"""What a training run from a store needs of other settings, and why."""
OF_EPISODES: tuple[tuple[str, object, str], ...] = (
    ("runner.max_staleness", 0, "takes episodes of any weights"),
    ("rollout.workflow", None, "has no rollouts of its own"),
    ("algorithm.group_size", 1, "compares no episodes"),
    ("reward.fn", None, "takes its rewards from the collectors"),
    ("reward.judge.url", None, "takes its rewards from the collectors"),
    ("reward.model", None, "takes its rewards from the collectors"),
    ("algorithm.srpo.enabled", False, "takes its rewards from the collectors"),
)
"""The same, if it fills a replay buffer."""

OF_ROBOTS: tuple[tuple[str, object, str], ...] = (
    ("runner.eval_interval", 0, "does not evaluate on a robot that its collector drives"),
    ("runner.eval_at_start", False, "does not evaluate on a robot that its collector drives"),
)
"""The same, if collectors drive real robots."""


@RULES.rule(URL)
def store_url_is_valid(context: Context) -> Iterator[Finding]:
    """A store has a kind of URL that is known, and its URL no password, which files of settings would show."""
    url = store_settings(context.config).url or ""
    shown = without_password(url)
    if scheme_of(url) in REDIS:
        if shown != url:
            message = "has a password, which the configuration's copies and logs would show"
            yield Finding(URL, message, f"set the environment variable {PASSWORD} instead", shown)
        try:
            redis_place(url)
        except StoreError as error:
            yield Finding(URL, error.message, error.hint, "redis://HOST:PORT/DB/PREFIX")
    elif importlib.util.find_spec("fsspec") is not None:
        import fsspec

        known = {*fsspec.available_protocols(), *REDIS}
        for scheme in scheme_of(url).split("::"):
            if scheme and scheme not in known:
                near = nearest(scheme, sorted(known))
                hint = "give a directory or a URL such as s3://BUCKET/PREFIX or redis://HOST:PORT/0/PREFIX"
                yield Finding(URL, f"'{shown}' is no kind of URL that stores have", hint, nearest=near and f"{near}://")


@RULES.rule(URL, machine_specific=True)
def store_library_is_installed(context: Context) -> Iterator[Finding]:
    """What opens a store is installed."""
    url = store_settings(context.config).url
    if url is None:
        return
    if importlib.util.find_spec("fsspec") is None:
        yield Finding(URL, "a store needs the package fsspec, which is not installed", "pip install 'embodrl[store]'")
        return
    scheme = scheme_of(url)
    if scheme in REDIS:
        if importlib.util.find_spec("redis") is None:
            message = f"{scheme}:// needs the package redis, which is not installed"
            yield Finding(URL, message, "pip install 'embodrl[redis]'")
        return
    import fsspec

    for one in scheme.split("::"):
        try:
            if one in fsspec.available_protocols():
                fsspec.get_filesystem_class(one)
        except ImportError as error:
            yield Finding(URL, f"{one}:// needs a library that is not installed", str(error))


@RULES.rule(URL, "algorithm", "rollout", "reward", "runner", "model", "env", "cluster")
def training_from_a_store_is_possible(context: Context) -> Iterator[Finding]:
    """`embodrl train` learns from episodes or rollouts of a store; what it would ignore is refused."""
    config = context.config
    if context.verb not in ("train", "plan") or store_settings(config).url is None:
        return
    loss = LOSSES.entry(config.algorithm.loss_type) if config.algorithm.loss_type in LOSSES else None
    if loss is not None and (loss.parts is not None or loss.imitates):
        message = f"is set, and loss_type '{loss.name}' does not learn by reward from what others gather"
        hint = "choose algorithm=ppo, grpo, sac or rlpd, or imitate what is solved: `embodrl store train`"
        yield Finding(URL, message, hint, "null", others=("algorithm.loss_type",))
    is_replayed = loss is not None and loss.off_policy
    beside_a_robot = OF_ROBOTS if config.trains_beside_a_robot else ()
    for key, wanted, reason in (*NEEDS, *(OF_EPISODES if is_replayed else ()), *beside_a_robot):
        if value_of(config, key) != wanted:
            shown = "null" if wanted is None else str(wanted).lower()
            yield Finding(key, f"training from a store {reason}", f"set it to {shown}", shown, others=(URL,))
    if not is_replayed:
        yield from _new_weights_come_in_time(config)
        yield from _a_rollout_has_a_row_for_each_environment(config)
    if is_replayed and config.env.reward_mode == "potential" and config.model.num_action_chunks > 1:
        message = "is discounted by chunks in rollouts, and by actions in what collectors record"
        hint = "set model.num_action_chunks=1, or another reward"
        yield Finding("env.reward_mode", message, hint, "dense_delta, dense, sparse", others=(URL,))
    if context.gathers_in_processes:
        message = "training from a store evaluates in the main process"
        hint = "keep the default placement of rollout, and cluster.launcher=process"
        yield Finding("cluster.component_placement", message, hint, others=(URL,))


def _new_weights_come_in_time(config: Config) -> Iterator[Finding]:
    most = config.runner.max_staleness + 1
    if not 1 <= config.runner.save_interval <= most:
        message = f"weights reach the store with each checkpoint, but rollouts may be {most - 1} updates old at most"
        hint = f"set it to {most} or less, or raise runner.max_staleness"
        yield Finding("runner.save_interval", message, hint, f"1 to {most}", others=(URL, "runner.max_staleness"))


def _a_rollout_has_a_row_for_each_environment(config: Config) -> Iterator[Finding]:
    if agents := agents_played(config):
        message = f"has the agents {', '.join(agents)}, but an update from a store counts environments by rows"
        hint = "leave store.url out, or name a workflow of one agent"
        yield Finding("rollout.workflow", message, hint, others=(URL,))


@RULES.rule("store.intervention", "env.real_time", "env.env_type", "env.tasks", "algorithm.dagger")
def intervention_is_possible(context: Context) -> Iterator[Finding]:
    """The intervening expert exists, and a stand-in has a rule for when to intervene."""
    config = context.config
    name = store_settings(context.config).intervention
    if name is None:
        return
    key = "store.intervention"
    spec = context.simulator
    if name in DEVICES:
        yield from person_can_correct(context, key, name)
        return
    if name == EXPERT:
        tasks = None if spec is None else spec.expert_tasks
        missing = [] if tasks is None else [task for task in config.env.tasks if task not in tasks]
        if missing:
            message = f"{config.env.env_type} has no scripted expert of {', '.join(missing)}"
            yield Finding(key, message, "name a policy, keyboard, spacemouse or browser", others=("env.tasks",))
    elif path_kind(name) != "directory":
        allowed = f"{EXPERT}, {', '.join(DEVICES)}, or the directory of a policy"
        yield Finding(key, f"no such directory: {name}", "correct the name", allowed)
    if config.algorithm.dagger.gate_threshold is None:
        message = "no rule says when a stand-in for a person intervenes"
        hint = "add algorithm=hg_dagger, or set algorithm.dagger.gate_threshold"
        yield Finding("algorithm.dagger.gate_threshold", message, hint, "above 0", others=(key,))
