"""Weight sync: ``python benchmarks/weight_sync.py [FILE.json]``; the same as ``embodrl bench weight-sync``."""

import sys
from pathlib import Path

from embodrl.bench.weight_sync import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
