import numpy as np

from embodrl.envs.toy.env import ToyVectorEnv


def expert_chunk(env):
    return env.call("expert_actions", {})[:, None]


def test_expert_solves_both_tasks():
    env = ToyVectorEnv(num_envs=6, auto_reset=False)
    env.reset(np.arange(6), np.arange(6, dtype=np.int32) % 2, np.arange(6))
    active = np.ones(6, bool)
    for _ in range(20):
        step = env.chunk_step(expert_chunk(env), active)
        active &= ~step.done
    assert step.success.all()
    assert not active.any()


def test_reward_is_the_way_gained_plus_the_bonus():
    env = ToyVectorEnv(num_envs=1, tasks=["reach-red"], auto_reset=False)
    env.reset(np.array([3]), np.array([0], np.int32), np.array([0]))
    env.position[:], env.goals[0, 0] = [[0.0, 0.0]], [0.52, 0.0]
    env._potential[:] = -0.52
    actions = np.zeros((1, 4, 7), np.float32)
    actions[0, :, 0] = [1.0, 1.0, 1.0, 1.0]
    step = env.chunk_step(actions, np.ones(1, bool))
    np.testing.assert_allclose(step.reward, [[0.15, 0.15, 1.15, 0.0]], atol=1e-6)  # distances 0.52 0.37 0.22 0.07
    np.testing.assert_array_equal(step.valid, [[True, True, True, False]])
    np.testing.assert_array_equal(step.terminated, [[False, False, True, False]])
    np.testing.assert_array_equal(step.episode_length, [3])


def test_truncation_hands_out_the_last_observation_and_starts_again():
    env = ToyVectorEnv(num_envs=2, max_episode_steps=3, include_state=True)
    env.reset(np.array([1, 2]), np.zeros(2, np.int32), np.arange(2))
    start = env.position.copy()
    step = env.chunk_step(np.zeros((2, 5, 7), np.float32), np.ones(2, bool))
    np.testing.assert_array_equal(step.truncated, [[False, False, True, False, False]] * 2)
    np.testing.assert_array_equal(step.valid.sum(axis=1), [3, 3])
    np.testing.assert_array_equal(step.final_observation.state, start)
    assert not np.array_equal(step.observation.state, start)
    np.testing.assert_array_equal(step.episode_seed, [1, 2])


def test_inactive_rows_stand_still():
    env = ToyVectorEnv(num_envs=2, include_state=True)
    before = env.reset(np.array([1, 2]), np.zeros(2, np.int32), np.arange(2))
    step = env.chunk_step(np.ones((2, 2, 7), np.float32), np.array([False, True]))
    np.testing.assert_array_equal(step.observation.state[0], before.state[0])
    assert not np.array_equal(step.observation.state[1], before.state[1])
    assert not step.valid[0].any() and not step.reward[0].any()


def test_the_task_decides_which_goal_counts():
    env = ToyVectorEnv(num_envs=2)
    observation = env.reset(np.array([5, 5]), np.array([0, 1], np.int32), np.arange(2))
    np.testing.assert_array_equal(observation.images[0], observation.images[1])
    assert observation.instruction[0] != observation.instruction[1]
    env.position[:], env.goals[:] = 0.0, [[0.5, 0.0], [-0.5, 0.0]]
    first, second = env.call("expert_actions", {})
    np.testing.assert_array_equal([first[0], second[0]], [1, -1])
