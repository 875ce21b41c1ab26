#!/usr/bin/env bash
# What a GPU does in a second: bare loop, in-process, Ray, and stacked clients. JSON on the standard output.
# Usage: benchmarks/gpu.sh [OPTIONS of benchmarks/gpu.py]     (under 8 minutes; --quick: under 2, on any machine)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$here/../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$here/gpu.py" "$@"
