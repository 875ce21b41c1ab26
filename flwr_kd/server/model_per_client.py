"""The server half of methods whose server keeps a model for each client, all of one architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord

from flwr_kd.checks import whole_number
from flwr_kd.config import ConfigT
from flwr_kd.learning.weights import with_prefix
from flwr_kd.server.model_store import MODEL_MEMORY, ModelStore
from flwr_kd.server.parameters import in_model
from flwr_kd.server.records import NDArray, Node
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.transport.payload import PayloadT
from flwr_kd.transport.template import ArrayTemplate

__all__ = ["ModelPerClient"]

_PREFIX = "models"


class ModelPerClient(KDStrategy[ConfigT, PayloadT]):
    """Base of strategies that keep a model for each client. There is no global model.

    The architecture is that of ``initial_arrays``, or without any that of most clients. A resumed run has that of
    its checkpoint.

    Parameters
    ----------
    config : MethodConfig, optional
        The hyper-parameters.
    model_memory : int
        Bytes of the clients' models that are kept in memory. The others are in a file without a name in
        ``checkpoint_dir`` or, without one, in the system's folder for temporary files. It is gone when the process
        ends.
    **options
        See :class:`flwr_kd.KDStrategy`.

    Attributes
    ----------
    models : ModelStore
        The models by their clients' keys; empty before the first replies. A round's new models are put into a copy,
        which takes its place when the round is sure not to be void.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed.
    """

    reply_arrays = frozenset({"train"})
    sends_weights = False
    averages_models = False
    uses_initial_arrays = True

    def __init__(
        self, config: ConfigT | None = None, *, model_memory: int = MODEL_MEMORY, **options: Any
    ) -> None:
        super().__init__(config, **options)
        self.model_memory = whole_number("model_memory", model_memory, 0, 2**62)
        self.models = self._no_models()

    @property
    def architecture(self) -> ArrayTemplate:
        """The names and shapes that all clients' models have; empty before a run."""
        return self.models.template

    def begin(self, nodes: list[Node]) -> None:
        """Fix the architecture."""
        super().begin(nodes)
        expected = self._expected(nodes[0])
        common = self.template if self.template.names else self.common(lambda node: node.template, nodes[0])
        # A checkpoint has its arrays in another order, which would change the rounding of sums over them, and no
        # constants, such as the -inf of a mask.
        self.models = self.models.in_order_of(expected if expected.difference(common) else common)

    def template_of(self, node: Node) -> ArrayTemplate:
        """Return the common architecture."""
        return self.architecture

    def accept_node(self, node: Node) -> str | None:
        """Refuse a client whose model differs from the others'."""
        return self._expected(node).difference(node.template)

    def first(self, node: Node, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """Return the model that is kept for a client, else that of ``initial_arrays``; None without either."""
        if node.key in self.models:
            return self.models.record(node.key)
        return ArrayRecord({name: arrays[name] for name in self.architecture.names}) if arrays else None

    def held_parameters(self) -> int:
        """Return the parameters of all clients' models."""
        return len(self.models) * in_model(self, self.architecture)

    def state_arrays(self) -> dict[str, NDArray]:
        """Return the models; nothing before the first replies."""
        return with_prefix(_PREFIX, self.models.state_arrays())

    def reset(self) -> None:
        """Begin without models."""
        self.models = self._no_models()

    def load_state_arrays(self, state: Mapping[str, NDArray]) -> None:
        """Restore the models.

        Raises
        ------
        ValueError
            If the arrays are not such a state.
        """
        models = {name.partition("/")[2]: value for name, value in state.items() if self.is_model(name)}
        if len(models) < len(state):
            super().load_state_arrays({n: v for n, v in state.items() if not self.is_model(n)})
        self.models = ModelStore.from_state(models, memory=self.model_memory, folder=self.checkpoint_dir)

    @staticmethod
    def is_model(name: str) -> bool:
        """Return whether an array of the state is one of a client's model."""
        return name.startswith(f"{_PREFIX}/")

    def _no_models(self) -> ModelStore:
        return ModelStore(memory=self.model_memory, folder=self.checkpoint_dir)

    def _expected(self, node: Node) -> ArrayTemplate:
        """Return the architecture: of the restored models, of ``initial_arrays``, or of most clients."""
        if len(self.models) or not self.template.names:
            known = self.architecture
            return known if known.names else self.common(lambda other: other.template, node, shown=_described)
        return self.template


def _described(template: ArrayTemplate) -> str:
    sizes = dict(zip(template.names, template.shapes, strict=True))
    return f"{len(sizes)} arrays, the last {list(sizes.items())[-1:]}"
