"""Load a configuration, train three iterations, evaluate, and show where the videos are.

python examples/quickstart.py                                     # the built-in toy environment: a minute
python examples/quickstart.py env=maniskill model=openvla         # push a cube; any settings of the command line
"""

import sys

import embodrl


def main(overrides: list[str]) -> None:
    """Train, evaluate and load the policy again."""
    loaded = embodrl.load_config(["env=toy", "model.warm_start=null", "runner.max_iterations=3", *overrides])
    trained = embodrl.train(loaded)
    for row in trained.metrics:
        print(row["iteration"], row["env_steps"], row.get("rollout/success_rate"), row.get("eval/success_rate"))

    result = embodrl.evaluate(policy=trained.run_dir)
    low, high = result.interval
    print(f"success rate {result.success_rate:.0%} ({low:.0%} to {high:.0%}), {len(result.episodes)} episodes")
    print("report:", result.report)
    print("videos:", [str(path) for path in result.videos] or "none: this environment draws none")

    policy = embodrl.load_policy(trained.run_dir)
    camera = loaded.config.env.cameras[0]
    actions = policy.predict(
        images=_black(camera.height, camera.width),
        instruction=result.episodes[0].instruction,
    )
    print("actions:", actions.shape)


def _black(height: int, width: int):
    import numpy as np

    return np.zeros((height, width, 3), np.uint8)


if __name__ == "__main__":
    main(sys.argv[1:])
