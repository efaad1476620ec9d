"""A package of somebody else brings a part of every kind, each with settings of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from runs import Outcome, embodrl, start

GUEST = Path(__file__).parents[1] / "helpers" / "guest"
RUN = """
env:
  env_type: guest_world
  slope: 2.0
  tasks: [reach-red]
  max_episode_steps: 4
  state: full
  include_state: true
  cameras: [{height: 16, width: 16}]
  pin_cpus: false
  train: {total_num_envs: 2, max_steps_per_rollout_epoch: 4}
  eval: {total_num_envs: 2, num_episodes: 2, decoding: greedy}
  video: {enabled: false}
model: {model_type: guest_policy, width: 8, warm_start: null, num_action_chunks: 2, add_value_head: false}
algorithm:
  adv_type: guest_returns
  loss_type: guest_loss
  guest_returns: {scale: 0.5}
  guest_loss: {tilt: 3.0}
actor:
  training_backend: guest_engine
  guest_engine: {shrink: 0.5}
  global_batch_size: 4
  micro_batch_size: 2
  precision: fp32
  optim: {critic_warmup_iterations: 0}
rollout: {precision: fp32}
cluster:
  device: cpu
  num_threads: 1
  launcher: guest_launcher
  guest_launcher: {note: written}
  component_placement: {actor: '0:0-1', rollout: 0, env: 0}
runner:
  max_iterations: 1
  eval_interval: 0
  logger: {tensorboard: false, console: plain}
"""


def guest(*args: object) -> Outcome:
    return embodrl(*args, search_path=GUEST)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "guest.yaml"
    path.write_text(RUN)
    return path


def test_a_run_of_their_parts_alone(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment, model, estimator, loss, engine and launcher, in two training processes."""
    notes = tmp_path / "notes"
    monkeypatch.setenv("GUEST_NOTES", str(notes))
    outcome = guest("train", "--config", config, f"runner.output_dir={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/tilt_max"] == 3.0 and rows[-1]["train/num_updates"] > 0
    assert notes.read_text().splitlines() == ["actor written"] * 2


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("env.slope=-1", "config-range"),
        ("env.slpe=1", "config-unknown-key"),
        ("model.width=0", "config-range"),
        ("algorithm.guest_returns.scale=0", "config-range"),
        ("algorithm.guest_loss.tlt=1", "config-unknown-key"),
        ("actor.guest_engine.shrink=2", "config-range"),
        ("cluster.guest_launcher.notes=x", "config-unknown-key"),
        ("model.small_actor.kind=guest_actr", "config-choice"),
    ],
)
def test_their_settings_are_checked_like_all_others(setting: str, code: str, config: Path) -> None:
    outcome = guest("config", "validate", "--config", config, setting)
    assert outcome.code == 2 and f"code:     {code}" in outcome.stderr


def test_their_rules_run(config: Path) -> None:
    both = ("actor.guest_engine.shrink=0.25", "algorithm.guest_loss.tilt=0.25")
    outcome = guest("config", "validate", "--config", config, *both)
    assert outcome.code == 2 and "code:     guest-numbers-differ" in outcome.stderr


COMMON = (
    *("env=toy", "model=mlp", "env.state=full", "env.cameras=[{height: 16, width: 16}]", "env.pin_cpus=false"),
    *("cluster.num_threads=1", "model.gaussian.hidden_sizes=[8]"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that was imitated for two steps."""
    directory = tmp_path_factory.mktemp("base")
    data, sft = directory / "data", directory / "sft"
    outcome = guest("collect", *COMMON[:-1], "collect.num_episodes=2", f"collect.output_dir={data}")
    assert outcome.code == 0, outcome.stderr
    outcome = guest("sft", *COMMON, f"sft.data_dir={data}", "sft.max_steps=2", f"sft.output_dir={sft}")
    assert outcome.code == 0, outcome.stderr
    return sft / "policy"


@pytest.mark.long
def test_their_small_actor_learns_on_a_frozen_policy(base: Path, tmp_path: Path) -> None:
    actor = ["algorithm=residual", "model.small_actor.kind=guest_actor", "model.guest_actor.limit=0.5"]
    actor += [f"model.warm_start={base}", "algorithm.off_policy.warm_up=10", "runner.max_iterations=1"]
    actor += ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=20"]
    actor += [
        "env.video.enabled=false",
        "env.eval.num_episodes=4",
        "env.eval.decoding=greedy",
        "runner.eval_interval=0",
    ]
    outcome = guest("train", *COMMON, *actor, f"runner.output_dir={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/num_updates"] > 0


def test_their_verb_has_its_section_and_its_place_in_the_help() -> None:
    assert "greet" in guest("--help").stdout
    assert guest("greet", "greet.name=Ada", "--loud").stdout.strip() == "hello ADA"
    assert guest("greet", "greet.nme=Ada").code == 2


def test_their_protocol_is_served(base: Path) -> None:
    """By the verb, with its settings."""
    aiohttp = pytest.importorskip("aiohttp")
    chosen = ("serve.protocols=[guest_protocol]", "serve.guest_protocol.greeting=servus")
    server = start("serve", base, *chosen, "serve.port=0", "serve.token=secret-token", search_path=GUEST)
    try:
        assert server.stdout is not None
        lines = itertools.takewhile(lambda line: line != "ready\n", server.stdout)
        (url,) = (line.split()[-1] for line in lines if line.startswith("listening: guest_protocol"))

        async def greeted() -> str:
            headers = {"Authorization": "Bearer secret-token"}
            async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=headers) as socket:
                return await socket.receive_str()

        assert asyncio.run(greeted()) == "servus 0"
    finally:
        server.kill()
        server.communicate()


def test_their_protocol_s_settings_are_checked() -> None:
    served = ("serve.protocols=[guest_protocol]", "serve.guest_protocol.greeting=servus")
    outcome = guest("config", "validate", "env=toy", "model=mlp", *served)
    assert outcome.code == 0, outcome.stderr
    outcome = guest(
        "config", "validate", "env=toy", "serve.protocols=[guest_protocol]", "serve.guest_protocol.greting=x"
    )
    assert outcome.code == 2 and "code:     config-unknown-key" in outcome.stderr
