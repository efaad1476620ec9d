"""Presets and notes that fix findings of an audit of the algorithms; docs/algorithms.md lists all of them."""

from __future__ import annotations

import pytest

from embodrl.config import load_config


def codes(*arguments: str) -> set[str]:
    return {note.code for note in load_config([*arguments]).notes}


def test_reinforce_pp_trains_on_whole_episodes() -> None:
    """D2: what the end of a rollout cut off counted as failed."""
    config = load_config(["env=maniskill", "model=openvla", "algorithm=reinforce_pp"]).config
    assert not config.env.train.auto_reset
    assert config.env.train.max_steps_per_rollout_epoch == config.env.max_episode_steps


def test_dense_rewards_that_pay_for_waiting_are_noted() -> None:
    """D7: at 0.97 a chunk, hovering at 0.8 earns 35, and success in the fourth chunk 20.6."""
    line = ("env=maniskill", "model=openvla", "env.reward_mode=dense")
    assert "waiting-may-pay" in codes(*line)
    assert "waiting-may-pay" not in codes(*line, "env.train.ignore_terminations=true")
    assert "waiting-may-pay" not in codes("env=maniskill", "model=openvla")


@pytest.mark.parametrize(("method", "noted"), [("flow_sde", True), ("cfm", True), ("flow_noise", False)])
def test_an_entropy_bonus_without_a_gradient_is_noted(method: str, noted: bool) -> None:
    """D12: the entropy of Flow-SDE depends on no weight."""
    line = ("env=toy", "model=pi0", "algorithm.entropy_bonus=0.01", f"model.flow.method={method}")
    assert ("entropy-is-constant" in codes(*line)) == noted


@pytest.mark.parametrize(("preset", "bootstrap"), [("ppo", "none"), ("ppo_gaussian", "truncation")])
def test_an_episode_that_the_step_limit_ends_has_failed_in_ppo(preset, bootstrap):
    """A critic that knows little would credit it with an average success."""
    model = "openvla" if preset == "ppo" else "mlp"
    assert load_config([f"algorithm={preset}", f"model={model}"]).config.algorithm.bootstrap_type == bootstrap


def test_critics_from_random_weights_are_told_what_solved_the_tasks() -> None:
    code = "critics-learned-from-the-dense-reward"
    assert code in codes("env=maniskill_push", "model=mlp", "algorithm=sac")
    assert code not in codes("experiment=push_cube_sac")
    assert code not in codes("env=maniskill_push", "model=mlp", "algorithm=dagger")
