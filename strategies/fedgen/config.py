"""FedGen's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper


@dataclass(frozen=True, kw_only=True)
class FedGenConfig(MethodConfig):
    """FedGen; the defaults are those of FedHKD's comparison (appendix A.1), else of the authors' code."""

    generator_hidden: int = hyper(512, "hidden units of the generator", ge=2)
    generator_epochs: int = hyper(5, "steps of the generator per round (authors' code: 50)", ge=1)
    generator_batch: int = hyper(32, "labels per batch of the generator, at the server and at clients", ge=2)
    generator_learning_rate: float = hyper(1e-4, "learning rate of the generator (Adam) in round 1", gt=0)
    generator_lr_decay: float = hyper(0.98, "factor on it after each round", gt=0, le=1)
    generator_weight_decay: float = hyper(1e-2, "L2 penalty of the generator", ge=0)
    ensemble_weight: float = hyper(1.0, "α, weight of the clients' heads in the generator's loss", ge=0)
    diversity_weight: float = hyper(1.0, "η, weight of the diversity of generated features", ge=0)
    label_weight: float = hyper(
        10.0, "a_0, weight at clients of the cross-entropy on generated features", ge=0
    )
    prediction_weight: float = hyper(
        10.0, "b_0, weight at clients of the distance to predictions on generated features", ge=0
    )
    guidance_decay: float = hyper(0.98, "factor on these two weights after each round", gt=0, le=1)
    guided_epochs: int = hyper(20, "local epochs of a round in which the two terms count", ge=0)

    def guidance_at(self, server_round: int) -> tuple[float, float]:
        """Return a_r and b_r in a round, counted from 1; they are at least 1e-4, unless their weight is 0.

        >>> [round(a, 3) for a, _ in map(FedGenConfig().guidance_at, (1, 2, 50))]
        [10.0, 9.8, 3.716]
        >>> FedGenConfig(label_weight=0.0).guidance_at(1000)
        (0.0, 0.0001)
        """
        factor = self.guidance_decay ** (server_round - 1)
        label, prediction = (
            max(_LEAST, weight * factor) if weight else 0.0
            for weight in (self.label_weight, self.prediction_weight)
        )
        return label, prediction


_LEAST = 1e-4
