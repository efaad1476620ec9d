"""Entry point of a process in another interpreter: ``python bootstrap.py MODULE SOCKET_FD`` runs ``MODULE.main``.

Loads package ``embodrl`` from this file's location without adding the surrounding site-packages to the path: the
interpreter may belong to the virtual environment of a simulator or of lerobot, whose packages must take precedence.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Load embodrl and serve."""
    package = Path(__file__).resolve().parents[1]
    # Python puts a script's directory first, where ``trace.py`` would hide the standard library's.
    sys.path.pop(0)
    spec = importlib.util.spec_from_file_location(
        "embodrl", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["embodrl"] = module
    spec.loader.exec_module(module)
    importlib.import_module(sys.argv[1]).main(int(sys.argv[2]))


if __name__ == "__main__":
    main()
