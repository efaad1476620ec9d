"""End-to-end benchmark: ``python benchmarks/e2e.py [FILE.json]``; the same as ``embodrl bench e2e``."""

import sys
from pathlib import Path

from embodrl.bench.e2e import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
