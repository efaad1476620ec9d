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


def test_the_task_decides_which_goal_counts():
    env = ToyVectorEnv(num_envs=2)
    observation = env.reset(np.array([5, 5]), np.array([0, 1], np.int32), np.arange(2))
    np.testing.assert_array_equal(observation.images[0], observation.images[1])
    assert observation.instruction[0] != observation.instruction[1]
    env.position[:], env.goals[:] = 0.0, [[0.5, 0.0], [-0.5, 0.0]]
    first, second = env.call("expert_actions", {})
    np.testing.assert_array_equal([first[0], second[0]], [1, -1])
