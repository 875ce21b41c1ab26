#!/usr/bin/env bash
# The tables on FedDKC's page: FedGKT, KKR and SKR, each with both orders at the server, on digits and on 2,000 images
# of Fashion-MNIST padded to 32×32; 5 clients with ResNet2/4/6/10/12, 3 seeds, two degrees of heterogeneity.
# Usage: benchmarks/feddkc.sh [OUT] [DATASET ...]     (about an hour and a half on 2 cores, one data set on each)
set -euo pipefail
out=${1:-runs/feddkc}
shift || true
declare -A settings=(
  [digits]="--rounds 20 --set local-epochs=3 --set server-epochs=3"
  [fashion-mnist]="--rounds 10 --set local-epochs=1 --set server-epochs=1 --limit 2000 --image-size 32"
)
for dataset in "${@:-digits fashion-mnist}"; do
  for name in $dataset; do
    for alpha in 0.1 0.5; do
      for order in pooled client-by-client; do
        # shellcheck disable=SC2086
        flwr-kd compare fedgkt feddkc-kkr feddkc-skr --dataset "$name" --partition "dirichlet:$alpha" --clients 5 \
          --seeds 0,1,2 --backend inline --workers 1 --set batch-size=64 --set "server-order=$order" \
          ${settings[$name]} --out "$out/$name-alpha-$alpha-$order" --force
      done
    done
  done
done
