"""A small BERT of Hugging Face on 20 Newsgroups, under FedAvg, FedProto or FedHKD, in one process.

The model takes two inputs, ``input_ids`` and ``attention_mask``, and its output has ``logits``; the clients need no
code for either. Words become ids by a hash, so no tokenizer is downloaded, and the model is built from its
configuration, with random weights. The texts come from scikit-learn, which downloads them once (14 MB).

    pip install "flwr-kd[simulation]" transformers
    python examples/bert_20newsgroups.py --method fedhkd --clients 5 --rounds 5
"""

from __future__ import annotations

import argparse
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch.utils.data import Subset
from transformers import BertConfig, BertForSequenceClassification

from flwr_kd import InlineGrid, KDResult
from flwr_kd.data import partition, split
from flwr_kd.inputs import NamedDataset
from flwr_kd.registry import get

VOCABULARY, LENGTH = 5000, 64
METHODS = ("fedavg", "fedproto", "fedhkd")


class Texts(NamedTuple):
    """Texts, and the number of each text's class."""

    texts: Sequence[str]
    labels: torch.Tensor
    num_classes: int


def newsgroups(categories: Sequence[str] | None = None, folder: str | None = None) -> Texts:
    """Return the training part of 20 Newsgroups; downloaded where ``folder`` does not have it."""
    from sklearn.datasets import fetch_20newsgroups

    found = fetch_20newsgroups(
        data_home=folder, subset="train", categories=categories, remove=("headers", "footers", "quotes")
    )
    return Texts(found.data, torch.as_tensor(found.target), len(found.target_names))


def ids_of(text: str, length: int = LENGTH) -> list[int]:
    """Return ids of the first words, 1..VOCABULARY-1; not ``hash``, which differs between processes."""
    words = re.findall(r"\w+", text.lower())[:length]
    return [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]


def tokenised(texts: Sequence[str], labels: torch.Tensor, length: int = LENGTH) -> NamedDataset:
    """Return the model's two inputs ``[N, L]``; a text without words has one unknown word."""
    rows = [ids_of(text, length) or [1] for text in texts]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return NamedDataset({"input_ids": ids, "attention_mask": (ids > 0).long()}, labels)


def bert(num_classes: int, seed: int = 0) -> BertForSequenceClassification:
    """Return a BERT of two layers with 64 features."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=num_classes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification(config)


def run(source: Texts, method: str, *, clients: int, rounds: int, seed: int = 0, **hyper: Any) -> KDResult:
    """Divide the texts among clients with other mixes of classes, and run a method."""
    data, model, chosen = tokenised(source.texts, source.labels), bert(source.num_classes, seed), get(method)
    parts = partition(source.labels, "dirichlet:0.5", num_clients=clients, seed=seed)
    splits = [split(source.labels, part, test_fraction=0.25, seed=seed) for part in parts]

    def client_fn(context: Context) -> Any:
        train, test = splits[int(context.node_config["partition-id"])]
        make: Any = chosen.client
        return make(
            model, Subset(data, train.tolist()), Subset(data, test.tolist()), context=context
        ).to_client()

    strategy: Any = chosen.strategy(seed=seed, min_available_nodes=clients, **hyper)
    arrays = ArrayRecord(model.state_dict() if strategy.sends_weights else {})
    grid = InlineGrid(ClientApp(client_fn=client_fn), clients)
    result: KDResult = strategy.start(grid, arrays, num_rounds=rounds)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example, and print each round's mean accuracy on the clients' own test texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="fedhkd")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where scikit-learn keeps the texts; its own by default")
    parser.add_argument("--categories", nargs="*", help="some of the newsgroups; all by default")
    options = parser.parse_args(arguments)
    source = newsgroups(options.categories or None, options.folder)
    hyper = {"local_epochs": 2, "batch_size": 32, "optimizer": "adam", "learning_rate": 1e-3}
    result = run(source, options.method, clients=options.clients, rounds=options.rounds, **hyper)
    for number, stats in enumerate(result.rounds, start=1):
        print(f"round {number}: local accuracy {stats.local_accuracy:.3f}, loss {stats.train_loss:.3f}")


if __name__ == "__main__":
    main()
