"""Refuse an environment that would break later: CUDA libraries beside a CPU torch, or torchvision.

Usage: check_install.py cpu|cuda
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions

REASONS = {
    "torchvision": "its default build needs CUDA libraries, and without them `import transformers` fails",
    "triton": "it is of no use without a GPU",
}


def unwanted(names: list[str], kind: str) -> dict[str, str]:
    """Return name -> why it must not be there. nvidia-ml-py only asks the driver and is harmless."""
    found: dict[str, str] = {}
    if kind != "cpu":
        return found
    for name in sorted({name.lower().replace("_", "-") for name in names}):
        if name in REASONS:
            found[name] = REASONS[name]
        elif name.startswith("nvidia-") and name != "nvidia-ml-py":
            found[name] = "it is a CUDA library of no use on this machine"
    return found


def main(kind: str) -> int:
    """Check the interpreter that runs this file."""
    installed = {dist.name: dist.version for dist in distributions()}
    problems = unwanted(list(installed), kind)
    if kind == "cpu" and not installed.get("torch", "").endswith("+cpu"):
        problems["torch"] = f"version {installed.get('torch', 'none')} is not a CPU build"
    for name, reason in problems.items():
        print(f"error: {name} is installed, but {reason}", file=sys.stderr)
    if problems:
        print("  hint: rm -rf .venv && make setup; if it persists, a dependency asks for it", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
