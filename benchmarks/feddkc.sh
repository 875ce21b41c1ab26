#!/usr/bin/env bash
# The tables on FedDKC's page with T = 0.6 and E = 1.5, the light models and ResNet20's stages at the server; benchmarks/
# controls.py has the default settings. FedGKT, KKR and SKR, each with both orders at the server, on digits and on 2,000
# images of Fashion-MNIST padded to 32×32; 5 clients with ResNet2/4/6/10/12, 3 seeds, two degrees of heterogeneity. On digits
# also each client alone (beta=0: nobody learns from the other side) and features in float16.
# Usage: benchmarks/feddkc.sh [OUT] [DATASET ...]     (an hour and a half on 2 cores, with one data set on each)
set -euo pipefail
out=${1:-runs/feddkc}
shift || true
[ $# -gt 0 ] || set -- digits fashion-mnist

run() { # NAME METHODS... -- OPTIONS...
  local name=$1 methods=()
  shift
  while [ "$1" != -- ]; do methods+=("$1") && shift; done
  shift
  flwr-kd compare "${methods[@]}" --clients 5 --seeds 0,1,2 --backend inline --workers 1 --set batch-size=64 "$@" \
    --model resnet2-pooled,resnet4-pooled,resnet6-pooled,resnet10-pooled,resnet12-pooled \
    --set predictor=basic --set target-peak=0.6 --set target-entropy=1.5 \
    --out "$out/$name" --resume
}

for dataset in "$@"; do
  case $dataset in
    digits) common=(--dataset digits --rounds 20 --set local-epochs=3 --set server-epochs=3) ;;
    *) common=(--dataset "$dataset" --rounds 10 --limit 2000 --test-limit 333 --image-size 32) ;;
  esac
  for alpha in 0.1 0.5; do
    here=("${common[@]}" --partition "dirichlet:$alpha")
    for order in pooled client-by-client; do
      run "$dataset-alpha-$alpha-$order" fedgkt feddkc-kkr feddkc-skr -- "${here[@]}" --set "server-order=$order"
    done
    if [ "$dataset" = digits ]; then
      run "$dataset-alpha-$alpha-alone" fedgkt -- "${here[@]}" --set beta=0
    fi
  done
  if [ "$dataset" = digits ]; then
    run digits-alpha-0.1-float16 fedgkt feddkc-kkr feddkc-skr -- "${common[@]}" --partition dirichlet:0.1 \
      --set server-order=pooled --set feature-dtype=float16
  fi
done
