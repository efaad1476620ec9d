"""Evaluate a run while it trains, from outside: python follow.py outputs/RUN [VERSIONS]

Start the run with ``rollout.publish_weights=true``. This process may be on another machine that shares the directory.
It loads the newest weights, runs the evaluation episodes, and waits for newer ones.
"""

import sys

import embodrl


def follow(run_dir: str, versions: int | None) -> None:
    """Evaluate so many versions, or until no new one has come for ten minutes."""
    for version, result in embodrl.follow_weights(run_dir, versions):
        print(f"version {version}: success {result.success_rate:.1%} of {len(result.episodes)}", flush=True)


if __name__ == "__main__":
    follow(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
