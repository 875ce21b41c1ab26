#!/usr/bin/env bash
# The table beside the README's first command, by that command.
# Usage: benchmarks/readme.sh [OUT]     (two minutes on 2 cores)
set -euo pipefail
out=${1:-runs/readme}
flwr-kd compare fedavg fedproto --dataset digits --clients 10 --rounds 20 --seeds 0,1,2 --out "$out/first"
