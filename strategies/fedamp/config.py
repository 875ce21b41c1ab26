"""FedAMP's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper

ATTENTIONS = ("cosine", "distance")


@dataclass(frozen=True, kw_only=True)
class FedAMPConfig(MethodConfig):
    """FedAMP and HeurFedAMP, with the values of the authors' code where the paper has none."""

    attention: str = hyper(
        "cosine",
        "how the mixtures' weights are computed: by the softmax of cosine similarities (HeurFedAMP), or from the "
        "distances between models",
        choices=ATTENTIONS,
    )
    cosine_scale: float = hyper(25.0, "σ of the softmax, with attention=cosine", ge=0)
    attention_alpha: float = hyper(
        0.0,
        "α of the weights with attention=distance; 0 takes σ/N, with which each of N clients keeps at least 1/N of "
        "its own",
        ge=0,
    )
    proximal_lambda: float = hyper(1.0, "λ, weight of the squared distance from the client's mixture", ge=0)
    alpha: float = hyper(1e4, "α in λ/(2α), the factor of that distance, in round 1", gt=0)
    alpha_decay: float = hyper(0.1, "factor on α every alpha-decay-every rounds", gt=0, le=1)
    alpha_decay_every: int = hyper(30, "rounds between two decays of α", ge=1)

    def proximal_mu_at(self, server_round: int) -> float:
        """Return λ/α in a round, counted from 1: the distance's gradient is that times w - u.

        >>> [FedAMPConfig().proximal_mu_at(r) for r in (1, 30, 31)]
        [0.0001, 0.0001, 0.001]
        """
        decay = self.alpha_decay ** ((server_round - 1) // self.alpha_decay_every)
        return self.proximal_lambda / (self.alpha * decay)
