"""Rollout backends: ``python benchmarks/rollout_backends.py [FILE.json]``; the same as ``embodrl bench rollout``."""

import sys
from pathlib import Path

from embodrl.bench.rollout_backends import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
