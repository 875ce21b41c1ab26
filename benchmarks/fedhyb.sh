#!/usr/bin/env bash
# The tables on FedHyb's page, α = 0.5, 3 seeds: digits (the CNN) with 10 and 20 clients, 1,500 images of Fashion-MNIST
# (LeNet) with 10; long tails of Fashion-MNIST; random noise and flipped labels from 2 and 4 of 10 clients on the digits.
# Usage: benchmarks/fedhyb.sh [OUT] [PART ...]     (parts: see below; some two hours on one core)
set -euo pipefail
out=${1:-runs/fedhyb}
shift || true
[ $# -gt 0 ] || set -- digits-10 digits-20 fashion-mnist-10 gaussian label-flip tail

all=(fedavg feddf fedhkd fedhyb fedhyb-star fedhyb-1 fedhyb-2 fedhyb-3)
four=(fedavg feddf fedhkd fedhyb)
common=(--partition inner-dirichlet:0.5 --rounds 10 --seeds 0,1,2 --backend inline --workers 1 --public-limit 500
  --set local-epochs=5 --set lr-decay=1 --set weight-decay=0 --set server-epochs=10 --set server-learning-rate=1e-3)
digits=(--dataset digits --model cnn --set batch-size=16)
images=(--dataset fashion-mnist --model lenet --set batch-size=32)

run() { # NAME METHODS... -- OPTIONS...
  local name=$1 methods=()
  shift
  while [ "$1" != -- ]; do methods+=("$1") && shift; done
  shift
  flwr-kd compare "${methods[@]}" "${common[@]}" "$@" --out "$out/$name" --resume
}

for part in "$@"; do
  case $part in
    digits-10) run "$part" "${all[@]}" -- "${digits[@]}" --clients 10 ;;
    digits-20) run "$part" "${four[@]}" -- "${digits[@]}" --clients 20 ;;
    fashion-mnist-10) run "$part" "${all[@]}" -- "${images[@]}" --clients 10 --limit 1500 --test-limit 250 ;;
    gaussian | label-flip)
      for attackers in 2 4; do
        attack=$part
        [ "$part" = label-flip ] || attack=gaussian:0.5
        run "$part-$attackers" "${four[@]}" -- "${digits[@]}" --clients 10 --attack "$attack" --attackers "$attackers"
      done
      ;;
    tail)
      for factor in 10 100; do
        run "tail-$factor" "${four[@]}" -- "${images[@]}" --clients 10 --limit 4000 --test-limit 667 --imbalance "$factor"
      done
      ;;
  esac
done
