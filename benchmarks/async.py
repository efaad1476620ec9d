"""Asynchrony benchmark: ``python benchmarks/async.py [FILE.json]``; the same as ``embodrl bench async``."""

import sys
from pathlib import Path

from embodrl.bench.asynchrony import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
