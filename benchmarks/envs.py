"""Simulators: ``python benchmarks/envs.py [FILE.json [NAME ...]]``; without names ``embodrl bench envs``."""

import sys
from pathlib import Path

from embodrl.bench.envs import CASES, main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2:] or tuple(CASES)))
