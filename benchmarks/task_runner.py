"""Task benchmark: ``python benchmarks/task_runner.py [FILE.json]``; the same as ``embodrl bench tasks``."""

import sys
from pathlib import Path

from embodrl.bench.tasks import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
