#!/usr/bin/env bash
# Runs the checks for a machine with one CUDA GPU in about twelve minutes, and again only those that have no result yet.
#
#   scripts/gpu_checks.sh OUTPUT_DIR [--limit SECONDS] [--only NAME,...] [--device cpu] [--recordings DIR] [--list]
#
# OUTPUT_DIR gets results.jsonl, one line per check (name, ok, seconds, status, figures, reason; the first has hardware
# and versions), and checks.log with the output of all commands. --device cpu rehearses the list at tiny sizes.
#
#   EMBODRL_PYTHON=/path/to/python   an interpreter that finds embodrl's packages (otherwise .venv's, else python3)
#
# Nothing is installed: scripts/offline_bundle.sh collects what a machine without registries lacks.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${EMBODRL_PYTHON:-}
[[ -z "$python" && -x "$root/.venv/bin/python" ]] && python=$root/.venv/bin/python
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${python:-python3}" "$root/scripts/gpu_checks.py" "$@"
