#!/usr/bin/env bash
# The tables and curves on FedHKD's page: digits, 10 clients, 20 rounds, 3 seeds, two degrees of heterogeneity.
# Usage: benchmarks/fedhkd_digits.sh [OUT]     (about ten minutes on 2 cores)
set -euo pipefail
out=${1:-runs/fedhkd-digits}
common=(--dataset digits --clients 10 --rounds 20 --seeds 0,1,2 --backend inline --workers 1 --resume)
for alpha in 0.1 0.5; do
  flwr-kd compare fedavg fedprox fedproto fedhkd-star fedhkd \
    --partition "inner-dirichlet:$alpha" "${common[@]}" --out "$out/alpha-$alpha"
  flwr-kd compare fedhkd-star fedhkd --set noise=none \
    --partition "inner-dirichlet:$alpha" "${common[@]}" --out "$out/alpha-$alpha-no-noise"
done
