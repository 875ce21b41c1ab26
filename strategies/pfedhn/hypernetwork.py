"""The hypernetwork: from a client's embedding to the parameters of the client's model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flwr_kd.models.initialisation import DrawFrom
from flwr_kd.seeding import torch_generator

__all__ = ["HyperNetwork"]


class HyperNetwork(nn.Module):
    """h(v; φ): hidden layers, a ``Linear`` for each array of the clients' model, and the clients' embeddings v.

    Each embedding is a parameter of its own: a step of one client has no gradient in the others', so that an
    optimiser leaves them, and what it remembers of them, as they are.

    Parameters
    ----------
    target : sequence of sequence of int
        Shapes of the arrays to produce.
    embedding, hidden, layers : int
        Size of an embedding, width of the hidden layers, and number of those after the first.
    seed : int
        The initial weights, and the embedding of each client, depend on it.

    Examples
    --------
    >>> network = HyperNetwork([(3, 2), (3,)], embedding=2, seed=0)
    >>> network.add([7])
    >>> [tuple(array.shape) for array in network(7)], network.clients
    ([(3, 2), (3,)], [7])
    """

    def __init__(
        self,
        target: Sequence[Sequence[int]],
        *,
        embedding: int,
        hidden: int = 100,
        layers: int = 3,
        seed: int,
    ) -> None:
        super().__init__()
        self._target, self._embedding, self._seed = [tuple(shape) for shape in target], embedding, seed
        with torch.device("cpu"), DrawFrom(torch_generator(seed, "hypernetwork")):
            deep = [nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden)) for _ in range(layers)]
            self.hidden = nn.Sequential(nn.Linear(embedding, hidden), *deep)
            self.heads = nn.ModuleList(nn.Linear(hidden, math.prod(shape)) for shape in self._target)
        self.embeddings = nn.ParameterDict()

    @property
    def clients(self) -> list[int]:
        """Keys of the clients that have an embedding, in the order in which they were added."""
        return [int(key) for key in self.embeddings]

    def add(self, clients: Sequence[int]) -> None:
        """Add embeddings of clients; those that have one keep it."""
        device = next(self.parameters()).device
        for client in clients:
            if str(client) not in self.embeddings:
                self.embeddings[str(client)] = nn.Parameter(self._first_embedding(client).to(device))

    def forward(self, client: int) -> list[Tensor]:
        """Return θ, a client's parameters; one that was not added has the embedding with which it would be."""
        key = str(client)
        if key in self.embeddings:
            embedding: Tensor = self.embeddings[key]
        else:
            embedding = self._first_embedding(client).to(next(self.parameters()).device)
        deep = self.hidden(embedding)
        return [head(deep).view(shape) for head, shape in zip(self.heads, self._target, strict=True)]

    def _first_embedding(self, client: int) -> Tensor:
        """Return v as it is drawn, from N(0, 1): by the client, so that the order of arrival does not matter."""
        draw = torch_generator(self._seed, "embedding", client)
        return torch.randn(self._embedding, generator=draw, device="cpu")
