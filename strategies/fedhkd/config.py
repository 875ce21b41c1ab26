"""FedHKD's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.checks import ConfigError
from flwr_kd.config import MethodConfig, hyper, knowledge_control
from flwr_kd.wording import assignment


@dataclass(frozen=True, kw_only=True)
class FedHKDConfig(MethodConfig):
    """FedHKD; the defaults are the paper's (sections 4.2 and 4.3, appendix A.1)."""

    classifier_weight: float = hyper(
        0.05, "λ, weight of the classifier's distance (2nd term of eq. 11)", ge=0
    )
    gamma: float = hyper(0.05, "γ, weight of the features' distance (3rd term of eq. 11)", ge=0)
    temperature: float = hyper(0.5, "T of the soft predictions", gt=0)
    threshold: float = hyper(
        0.25, "ν, minimum share of a class in a client's data for its knowledge to be shared", ge=0
    )
    threshold_scale: str = hyper(
        "absolute",
        "unit of the threshold: the client's data (the paper), or an even share of it, 1/C; relative to it 1 "
        "asks for as many samples of a class as with even classes",
        choices=("absolute", "relative"),
    )
    client_knowledge: str = knowledge_control(
        "what the clients learn from beside the labels: the global hyper-knowledge; as controls, the same mean "
        "representation and a uniform prediction for all classes, or representations of other classes"
    )
    noise: str = hyper(
        "representations",
        "what the noise is added to: the mean representations (the paper), the mean predictions as well, or "
        "nothing",
        choices=("representations", "all", "none"),
    )
    sigma: float = hyper(7.0, "σ of the Gaussian mechanism", ge=0)
    clip: float = hyper(3.0, "ζ, clipping bound of each element of a representation", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold_scale == "absolute" and self.threshold > 1:
            raise ConfigError(
                f"threshold must be <= 1, the whole of a client's data, got {self.threshold:g}; in units of an "
                f"even share it may be larger: {assignment('threshold_scale', 'relative')}"
            )

    def check_classes(self, num_classes: int) -> None:
        """Refuse a relative threshold above C, which no class can reach."""
        super().check_classes(num_classes)
        if self.share_needed(num_classes) > 1:
            raise ConfigError(
                f"threshold must be <= C = {num_classes} with threshold-scale=relative, got {self.threshold:g}: "
                "a client whose data is one class alone has C times an even share"
            )

    def share_needed(self, num_classes: int) -> float:
        """Return the share of a client's data from which a class is shared, with C classes.

        >>> FedHKDConfig().share_needed(10), FedHKDConfig(threshold_scale="relative").share_needed(10)
        (0.25, 0.025)
        """
        return self.threshold / num_classes if self.threshold_scale == "relative" else self.threshold
