"""Models that take token ids and a mask, and texts for them: without downloads, and quick to train."""

from __future__ import annotations

import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from flwr_kd.inputs import NamedDataset
from flwr_kd.models.initialisation import DrawFrom

CLASSES, LENGTH, WORDS = 3, 6, 30


class Masked(nn.Module):
    """The mean of the words' vectors where the mask is 1, a hidden layer, and a ``Linear``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
            self.embedding = nn.Embedding(WORDS, 8)
            self.hidden = nn.Linear(8, 8)
            self.classifier = nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask.unsqueeze(2).float()
        mean = (self.embedding(input_ids) * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return self.classifier(torch.relu(self.hidden(mean)))


class MaskedByZeros(Masked):
    """The same of one input: the mask is made of the ids, of which 0 is padding."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, (input_ids > 0).long())


def tokens(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids ``[N, L]``, mask ``[N, L]`` and labels ``[N]``: each class has words of its own."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % CLASSES
    ids = torch.randint(1, 10, (size, LENGTH), generator=generator) + 10 * labels[:, None]
    lengths = torch.randint(2, LENGTH + 1, (size, 1), generator=generator)
    mask = (torch.arange(LENGTH)[None] < lengths).long()
    return ids * mask, mask, labels


def texts(size: int, seed: int) -> NamedDataset:
    ids, mask, labels = tokens(size, seed)
    return NamedDataset({"input_ids": ids, "attention_mask": mask}, labels)


def small_bert(seed: int = 0) -> nn.Module:
    """Return a BERT of Hugging Face with one layer, built from its configuration."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
        model: nn.Module = BertForSequenceClassification(config)
    return model


def node(partition: int = 0) -> Context:
    return Context(1, 17 + partition, {"partition-id": partition}, RecordDict(), {})
