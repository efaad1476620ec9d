"""PPO, written out: the steps of `embodrl train`, one by one, on any simulator, model and deployment.

python examples/training_loop/ppo.py                                  # the built-in toy environment: a minute
python examples/training_loop/ppo.py env=maniskill model=openvla      # push a cube; any settings of the command line
"""

import json
import sys
from pathlib import Path

import embodrl

TOY = ["env=toy", "model=mlp", "env.state=full", "runner.max_iterations=10", "runner.output_dir=outputs/ppo_by_hand"]


def main(overrides: list[str]) -> list[dict]:
    """Train, and return a row of metrics for each iteration."""
    rows = []
    with embodrl.Session(overrides or TOY) as session:
        runner = session.config.runner
        print(f"before: {session.evaluate().success_rate:.0%} of the episodes succeed")

        while session.iteration < runner.max_iterations:
            # Every simulator plays; the batch has (time, environment) chunks with observations, actions and log-probs.
            batch = session.rollout()
            # GAE with the settings of `algorithm`; or make embodrl.Advantages of your own.
            advantages = session.advantages(batch)
            # Epochs of minibatches with the clipped loss, on whatever backend holds the weights.
            learned = session.train(batch, advantages)
            # The rollouts act with the new weights from here on.
            row = session.sync()
            rows.append(row)
            print(
                f"{row['iteration']:3d}  {row['env_steps']} steps  success {row['rollout/success_rate'] or 0:.2f}"
                f"  return {batch.rewards.sum(0).mean():.2f}  advantages {advantages.advantages.std():.2f}"
                f"  loss {learned['train/policy_loss']:.4f}"
            )
        print(f"after: {session.evaluate().success_rate:.0%}")
        directory = Path(runner.output_dir)
        session.save(directory / "policy")
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
