"""Simulators: ``python benchmarks/envs.py [FILE.json [NAME|SETTING ...]]``; without names ``embodrl bench envs``.

A SETTING is one of `embodrl train` and goes to all simulators: ``env.python=/path/to/python`` say.
"""

import sys
from pathlib import Path

from embodrl.tools.bench.envs import CASES, main

if __name__ == "__main__":
    given = sys.argv[2:]
    names = tuple(word for word in given if "=" not in word)
    settings = tuple(word for word in given if "=" in word)
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, names or tuple(CASES), settings))
