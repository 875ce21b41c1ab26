#!/usr/bin/env bash
# Builds the sdist, and from it the wheel, into dist/, and checks both. Needs a network for packages.
# Usage: .ci/packages.sh [UV]
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-uv}
. .ci/uv-env.sh

rm -rf dist build
"$uv" build --quiet --out-dir dist .
python3 .ci/wheel_contents.py dist/*.whl
"$uv" tool run --quiet twine check --strict dist/*
# W002, files that are the same: the licence of an app that `flwr-kd app` writes is ours.
"$uv" tool run --quiet check-wheel-contents --ignore W002 dist/*.whl
