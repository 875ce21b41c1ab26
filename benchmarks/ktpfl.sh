#!/usr/bin/env bash
# The tables on KT-pFL's page: Fashion-MNIST, 10 clients of 600 images (a quarter of them for the test), LeNet and the
# MLP in turn, 500 public samples of mnist-5k per round, 5 local epochs of batches of 32, 10 rounds, 3 seeds. Part "full":
# the paper's 20 clients of 3,000 images, batches of 128 and 3,000 public samples, one seed.
# Usage: benchmarks/ktpfl.sh [OUT] [PART ...]     (parts: see below; some 90 minutes on one core)
set -euo pipefail
out=${1:-runs/ktpfl}
shift || true
[ $# -gt 0 ] || set -- main lenet alone gentle fast sharp blocks precision pfeddf cnn full

common=(--dataset fashion-mnist --clients 10 --seeds 0,1,2 --backend inline --workers 1 --public-limit 1000
  --set local-epochs=5 --set batch-size=32 --set optimizer=sgd --set learning-rate=0.01 --set lr-decay=1)
mixed=(--model lenet,mlp)
public=(--set public-samples=500)

run() { # NAME METHODS... -- OPTIONS...
  local name=$1 methods=()
  shift
  while [ "$1" != -- ]; do methods+=("$1") && shift; done
  shift
  flwr-kd compare "${methods[@]}" "${common[@]}" "$@" --out "$out/$name" --resume
}

for part in "$@"; do
  for case in 1 2; do
    here=(--partition "ktpfl-1:90")
    [ "$case" = 1 ] || here=(--partition "ktpfl-2:300")
    case $part in
      main) run "case-$case" fedmd sim-pfl topk-pfl ktpfl -- "${here[@]}" "${mixed[@]}" "${public[@]}" ;;
      lenet) run "case-$case-lenet" fedavg ktpfl-weights -- "${here[@]}" --model lenet ;;
      alone) run "case-$case-alone" ktpfl -- "${here[@]}" "${mixed[@]}" "${public[@]}" --set distill-epochs=0 ;;
      gentle)
        run "case-$case-gentle" fedmd topk-pfl ktpfl -- "${here[@]}" "${mixed[@]}" "${public[@]}" \
          --set distill-learning-rate=0.003
        ;;
      precision)
        [ "$case" = 2 ] || for precision in float16 uint8; do
          run "case-1-$precision" ktpfl -- "${here[@]}" "${mixed[@]}" "${public[@]}" --set precision=$precision
        done
        ;;
      pfeddf)
        run "case-$case-pfeddf" pfeddf -- "${here[@]}" "${mixed[@]}" --set server-epochs=5 --set finetune-epochs=5 \
          --set weight-decay=0
        ;;
      fast)
        [ "$case" = 2 ] || run case-1-fast ktpfl -- "${here[@]}" "${mixed[@]}" "${public[@]}" \
          --set coefficient-learning-rate=0.1
        ;;
      sharp)
        [ "$case" = 2 ] || run case-1-sharp fedmd topk-pfl ktpfl -- "${here[@]}" "${mixed[@]}" "${public[@]}" \
          --set temperature=1 --set distill-learning-rate=0.001
        ;;
      blocks)
        [ "$case" = 2 ] || run case-1-blocks topk-pfl ktpfl -- "${here[@]}" --model lenet --seeds 0 "${public[@]}"
        ;;
      cnn)
        [ "$case" = 2 ] || run case-1-cnn fedmd topk-pfl ktpfl -- "${here[@]}" "${public[@]}" \
          --model lenet,lenet,lenet,lenet,cnn --rounds 5
        ;;
      full)
        [ "$case" = 2 ] || for epochs in 1 0; do
          name=full methods=(fedmd topk-pfl ktpfl)
          [ "$epochs" = 1 ] || name=full-alone methods=(ktpfl)
          run "$name" "${methods[@]}" -- --partition ktpfl-1 --clients 20 --seeds 0 "${mixed[@]}" \
            --set batch-size=128 --set distill-epochs=$epochs --public-limit 5000
        done
        ;;
    esac
  done
done
