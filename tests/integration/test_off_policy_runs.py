"""Whole off-policy runs on the toy environment: they learn, and a killed one continues bit-exactly."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from runs import embodrl, metrics
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.long]

TOY = """
presets: {env: toy, model: mlp, algorithm: sac}
env:
  state: full
  pin_cpus: false
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 16, max_steps_per_rollout_epoch: 20}
  eval: {num_episodes: 64, decoding: greedy}
model: {gaussian: {max_state_dim: 4, hidden_sizes: [64, 64]}}
algorithm:
  gamma: 0.97
  off_policy: {critic_hidden_sizes: [64, 64], warm_up: 300, alpha: 0.01, alpha_lr: 3.0e-4, tau: 0.005, utd: 1.0}
actor:
  global_batch_size: 64
  micro_batch_size: 64
  optim: {lr: 3.0e-4, value_lr: 3.0e-4, lr_scheduler: constant}
cluster: {num_threads: 1}
collect: {num_episodes: 20}
runner:
  max_iterations: 12
  eval_interval: 12
  save_interval: 2
  logger: {tensorboard: false, console: plain}
extensions: [stop_at]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "sac.yaml"
    path.write_text(TOY)
    return path


@pytest.fixture(scope="module")
def demos(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demos") / "toy"
    outcome = embodrl("collect", "--config", config, f"collect.output_dir={directory}")
    assert outcome.code == 0, outcome.stderr
    return directory


@pytest.fixture(scope="module")
def base(config: Path, demos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that was imitated for a short time."""
    directory = tmp_path_factory.mktemp("base") / "sft"
    few = ["sft.max_steps=80", "sft.lr_warmup_steps=5"]
    outcome = embodrl("sft", "--config", config, f"sft.data_dir={demos}", *few, f"sft.output_dir={directory}")
    assert outcome.code == 0, outcome.stderr
    return directory / "policy"


def on(base: Path) -> list[object]:
    small = ["hidden_sizes=[64,64]", "scale=0.5"]
    return [f"model.warm_start={base}", "algorithm.off_policy.num_q=4", *(f"model.small_actor.{key}" for key in small)]


def settings(algorithm: str, config: Path, demos: Path, iterations: int, run_dir: Path) -> list[object]:
    given = [f"algorithm.off_policy.demos={demos}"] if algorithm in ("rlpd", "hil_serl") else []
    chosen = [f"algorithm={algorithm}", *given, "algorithm.off_policy.warm_up=300", f"runner.output_dir={run_dir}"]
    return ["train", "--config", config, *chosen, f"runner.max_iterations={iterations}"]


def rows_of(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["sac", "rlpd"])
def test_it_learns_the_toy(algorithm: str, config: Path, demos: Path, tmp_path: Path) -> None:
    outcome = embodrl(*settings(algorithm, config, demos, 18, tmp_path / "run"))
    assert outcome.code == 0, outcome.stderr
    rows = rows_of(tmp_path / "run")
    assert rows[0]["eval/success_rate"] < 0.3  # as random weights act
    assert rows[-1]["eval/success_rate"] > 0.8
    assert rows[-1]["train/demo_share"] == (0.5 if algorithm == "rlpd" else 0)
    assert rows[-1]["replay/size"] == rows[-1]["env_steps"]
    names = ("q_mean", "critic_loss", "alpha", "entropy", "policy_loss")
    assert all(isinstance(rows[-1][f"train/{name}"], float) for name in names)


def test_a_residual_learns_beyond_the_frozen_base(config: Path, demos: Path, base: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    outcome = embodrl(*settings("residual", config, demos, 12, run_dir), *on(base))
    assert outcome.code == 0, outcome.stderr
    rows = rows_of(run_dir)
    assert rows[0]["eval/success_rate"] < 0.4  # as the base acts
    assert rows[-1]["eval/success_rate"] > 0.8
    before, after = (load_file(path / "model.safetensors") for path in (base, run_dir / "policy"))
    assert all(after[name].equal(before[name]) for name in before)
    found = tmp_path / "eval.json"
    exported = ["--config", config, f"model.warm_start={run_dir / 'policy'}", "-o", tmp_path / "eval"]
    assert embodrl("eval", *exported, "--json", found).code == 0, "the policy says itself that it has a small actor"
    assert json.loads(found.read_text())["success_rate"] == rows[-1]["eval/success_rate"]


FLOW = """
presets: {env: toy, model: pi0}
env:
  state: full
  include_state: true
  pin_cpus: false
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 16, max_steps_per_rollout_epoch: 20}
  eval: {num_episodes: 64, decoding: greedy}
model:
  num_action_chunks: 1
  warm_start: null
  pi:
    image_size: 16
    siglip: {width: 16, depth: 1, num_heads: 2, mlp_dim: 32}
    depth: 2
    num_heads: 2
    head_dim: 16
    vlm_width: 32
    vlm_mlp_dim: 64
    expert_width: 32
    expert_mlp_dim: 64
    max_action_dim: 8
    action_horizon: 1
  small_actor: {hidden_sizes: [64, 64], scale: 1.0}
algorithm: {off_policy: {critic_hidden_sizes: [64, 64], warm_up: 300, num_q: 4}}
actor: {global_batch_size: 64, micro_batch_size: 64}
cluster: {num_threads: 1}
runner:
  max_iterations: 12
  eval_interval: 12
  logger: {tensorboard: false, console: plain}
"""


def test_chosen_noise_makes_a_frozen_flow_policy_better(demos: Path, tmp_path: Path) -> None:
    config, base, run_dir = tmp_path / "flow.yaml", tmp_path / "sft", tmp_path / "run"
    config.write_text(FLOW)
    few = [f"sft.data_dir={demos}", "sft.max_steps=300", "sft.lr=1.0e-3", "sft.batch_size=32", f"sft.output_dir={base}"]
    assert embodrl("sft", "--config", config, *few).code == 0
    given = ["algorithm=dsrl", f"model.warm_start={base / 'policy'}", f"runner.output_dir={run_dir}"]
    outcome = embodrl("train", "--config", config, *given)
    assert outcome.code == 0, outcome.stderr
    rows = rows_of(run_dir)
    assert rows[0]["eval/success_rate"] < 0.4 and rows[-1]["eval/success_rate"] > 0.6


def test_rlt_is_resumed_bit_exactly_and_acts_as_it_was_saved(demos: Path, tmp_path: Path) -> None:
    """SIGKILL within an update: the token is that of the warm start, actor and critics are those of the checkpoint."""
    config, base, token = tmp_path / "flow.yaml", tmp_path / "sft", tmp_path / "token"
    config.write_text(FLOW.replace(", scale: 1.0", "") + "extensions: [stop_at]\n")
    few = [f"sft.data_dir={demos}", "sft.max_steps=20", "sft.batch_size=32", f"sft.output_dir={base}"]
    assert embodrl("sft", "--config", config, *few).code == 0
    outcome = embodrl("model", "token", base, demos, "--output", token, "--size", "16", "--steps", "20")
    assert outcome.code == 0, outcome.stderr
    given = ["algorithm=rlt", f"model.warm_start={token}", "runner.max_iterations=4", "runner.eval_interval=4"]
    given += ["runner.save_interval=1", "algorithm.off_policy.critic_warm_up=50"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    outcome = embodrl("train", "--config", config, *given, f"runner.output_dir={whole}")
    assert outcome.code == 0, outcome.stderr
    killed = embodrl(
        "train", "--config", config, *given, f"runner.output_dir={run_dir}", stop_at="learn_rlt:150:SIGKILL"
    )
    assert killed.code == -signal.SIGKILL
    assert embodrl("resume", run_dir).code == 0
    assert metrics(run_dir) == metrics(whole)
    found = tmp_path / "eval.json"
    exported = [f"model.warm_start={run_dir / 'policy'}", "-o", tmp_path / "eval", "--json", found]
    assert embodrl("eval", "--config", config, *exported).code == 0, "the policy says itself that it has a small actor"
    assert json.loads(found.read_text())["success_rate"] == rows_of(run_dir)[-1]["eval/success_rate"]


@pytest.mark.parametrize("algorithm", ["dagger", "hg_dagger"])
def test_an_expert_teaches_the_toy(algorithm: str, config: Path, demos: Path, tmp_path: Path) -> None:
    arguments = settings(algorithm, config, demos, 6, tmp_path / "run")
    arguments.append("algorithm.off_policy.warm_up=0")
    outcome = embodrl(*arguments, stop_at="act:50:SIGKILL")
    assert outcome.code == -signal.SIGKILL
    assert embodrl("resume", tmp_path / "run").code == 0
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["eval/success_rate"] > 0.8
    steps = rows[-1]["env_steps"]
    assert rows[-1]["dagger/labels"] == steps if algorithm == "dagger" else rows[-1]["dagger/labels"] < steps
    first, last = (row["dagger/expert_share"] for row in (rows[1], rows[-1]))
    assert last < (0.5 if algorithm == "dagger" else first)  # episodes are as short as an intervention


def test_interventions_teach_the_toy_and_become_rare(config: Path, demos: Path, tmp_path: Path) -> None:
    gate = ["algorithm.dagger.gate_threshold=0.7", "algorithm.dagger.gate_steps=1"]  # episodes have about four steps
    outcome = embodrl(*settings("hil_serl", config, demos, 12, tmp_path / "run"), *gate)
    assert outcome.code == 0, outcome.stderr
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["eval/success_rate"] > 0.8
    shares = [float(str(row["replay/expert_share"])) for row in rows[1:]]
    assert 2 * shares[-1] < shares[0]
    by_expert = [share * float(str(row["replay/added"])) for share, row in zip(shares, rows[1:], strict=True)]
    recorded = float(str(rows[1]["replay/demos"])) - by_expert[0]
    assert rows[-1]["replay/demos"] == pytest.approx(recorded + sum(by_expert))


KILLED = [
    *[("sac", "act:71"), ("rlpd", "store:5"), ("hil_serl", "learn:400"), ("sac", "learn:400")],
    *[("dagger", "act:71"), ("residual", "learn:400")],
]


@pytest.mark.parametrize(("algorithm", "when"), KILLED)
def test_a_killed_run_is_resumed_bit_exactly(
    algorithm: str, when: str, config: Path, demos: Path, base: Path, tmp_path: Path
) -> None:
    more = on(base) if algorithm == "residual" else []
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert embodrl(*settings(algorithm, config, demos, 5, whole), *more).code == 0
    killed = embodrl(*settings(algorithm, config, demos, 5, run_dir), *more, stop_at=f"{when}:SIGKILL")
    assert killed.code == -signal.SIGKILL
    assert len(rows_of(run_dir)) in (3, 4, 5), "it was killed after the first checkpoint"
    outcome = embodrl("resume", run_dir)
    assert outcome.code == 0 and "starts over" not in outcome.stderr, outcome.stderr
    assert metrics(run_dir) == metrics(whole)
    for path in sorted((whole / "policy").glob("*.safetensors")):
        left, right = load_file(path), load_file(run_dir / "policy" / path.name)
        assert all(left[name].equal(right[name]) for name in left) and left.keys() == right.keys()


def test_demonstrations_that_changed_are_refused_when_a_run_is_resumed(
    config: Path, demos: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert embodrl(*settings("rlpd", config, demos, 4, run_dir), stop_at="store:4:SIGKILL").code == -signal.SIGKILL
    other = tmp_path / "other"
    assert embodrl("collect", "--config", config, "collect.seed=9", f"collect.output_dir={other}").code == 0
    outcome = embodrl("resume", run_dir, f"algorithm.off_policy.demos={other}")
    assert outcome.code == 1 and "replay-other-demos" in outcome.stderr


TWO = (
    *("actor=fsdp", "cluster.device=cpu", "cluster.component_placement={actor: '0:0-1', rollout: 0, env: 0}"),
    "actor.micro_batch_size=32",
)
COMPARED = ("train/critic_loss", "train/q_mean", "train/critic_grad_norm", "train/policy_loss", "train/grad_norm")


@pytest.fixture(scope="module")
def flow_token(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The configuration of a flow policy, one that was imitated for a short time, and an RL token of it."""
    directory = tmp_path_factory.mktemp("flow")
    config, base, token = directory / "flow.yaml", directory / "sft", directory / "token"
    config.write_text(FLOW.replace(", scale: 1.0", ""))
    few = [f"sft.data_dir={demos}", "sft.max_steps=10", "sft.batch_size=32", f"sft.output_dir={base}"]
    assert embodrl("sft", "--config", config, *few).code == 0
    assert embodrl("model", "token", base, demos, "--output", token, "--size", "16", "--steps", "10").code == 0
    return config, base / "policy", token


@pytest.mark.parametrize("algorithm", ["sac", "rlpd", "residual", "dsrl", "rlt"])
def test_two_processes_have_the_first_numbers_of_one(
    algorithm: str, config: Path, demos: Path, base: Path, flow_token: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    flow, frozen, token = flow_token
    chosen, more = (flow, []) if algorithm in ("dsrl", "rlt") else (config, [])
    more = on(base) if algorithm == "residual" else more
    more = [f"model.warm_start={frozen if algorithm == 'dsrl' else token}"] if chosen == flow else more
    found: list[dict[str, object]] = []
    for name, engine in (("one", ()), ("two", TWO)):
        run_dir = tmp_path / name
        short = [*more, "algorithm.off_policy.utd=0.2", "runner.eval_interval=0", *engine]
        outcome = embodrl(*settings(algorithm, chosen, demos, 2, run_dir), *short)
        assert outcome.code == 0, outcome.stderr
        found.append(next(row for row in rows_of(run_dir) if row.get("train/critic_loss") is not None))
    one, two = found
    assert two["train/num_updates"] == one["train/num_updates"] and one["train/num_updates"] > 1
    for name in COMPARED:
        if one.get(name) is not None:
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), name
