#!/usr/bin/env bash
# How FedHyb's defaults were chosen, but for the server's epochs and learning rate, which `grids.py fedhyb-server`
# searches at the last round: one value changed at a time, on validation data (a fifth of the training part) and
# seeds that no table uses, from a = η = ν = 1 and 5 epochs at the server. The server's values with FedHyb3, the
# clients' with FedHyb2, so that each is seen alone.
# Usage: benchmarks/fedhyb_search.sh [OUT]     (about 15 minutes on one core)
set -euo pipefail
out=${1:-runs/fedhyb-search}

run() { # NAME METHOD SETTINGS...
  local name=$1 method=$2 settings=()
  shift 2
  for setting in batch-size=16 self-weight=1 feature-weight=1 server-epochs=5 server-learning-rate=1e-3 "$@"; do settings+=(--set "$setting"); done
  [ -e "$out/$name/result.json" ] && return
  flwr-kd simulate "$method" --validation --dataset digits --model cnn --clients 10 --rounds 4 --seeds 10,11 \
    --partition inner-dirichlet:0.5 --backend inline --workers 1 --no-arrays "${settings[@]}" --out "$out/$name"
}

run server fedhyb-3
run server-feature-0 fedhyb-3 feature-weight=0
run server-feature-10 fedhyb-3 feature-weight=10
run server-logits-0 fedhyb-3 logits-weight=0
run server-rate-1e-4 fedhyb-3 server-learning-rate=1e-4
run server-rate-3e-3 fedhyb-3 server-learning-rate=3e-3
run server-epochs-1 fedhyb-3 server-epochs=1
run server-epochs-20 fedhyb-3 server-epochs=20
run server-epochs-20-feature-0.1 fedhyb-3 server-epochs=20 feature-weight=0.1
run client fedhyb-2
run client-a-0 fedhyb-2 self-weight=0
run client-a-0.1 fedhyb-2 self-weight=0.1
run client-a-3 fedhyb-2 self-weight=3
run client-width-0.25 fedhyb-2 min-width=0.25
run client-width-0.8 fedhyb-2 min-width=0.8
run client-views-30 fedhyb-2 degrees=30 min-scale=0.7 max-scale=1.4
run client-views-5 fedhyb-2 degrees=5 min-scale=0.95 max-scale=1.05
run client-target-not-detached fedhyb-2 detach-target=false
run client-weight-not-detached fedhyb-2 detach-weight=false
