"""FedHKD's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.config import MethodConfig, hyper


@dataclass(frozen=True, kw_only=True)
class FedHKDConfig(MethodConfig):
    """FedHKD; the defaults are the paper's (sections 4.2 and 4.3, appendix A.1)."""

    classifier_weight: float = hyper(
        0.05, "λ, weight of the classifier's distance (2nd term of eq. 11)", ge=0
    )
    gamma: float = hyper(0.05, "γ, weight of the features' distance (3rd term of eq. 11)", ge=0)
    temperature: float = hyper(0.5, "T of the soft predictions", gt=0)
    threshold: float = hyper(
        0.25, "ν, minimum share of a class in a client's data for its knowledge to be shared", ge=0, le=1
    )
    noise: str = hyper(
        "representations",
        "what the noise is added to: the mean representations (the paper), the mean predictions as well, or "
        "nothing",
        choices=("representations", "all", "none"),
    )
    sigma: float = hyper(7.0, "σ of the Gaussian mechanism", ge=0)
    clip: float = hyper(3.0, "ζ, clipping bound of each element of a representation", gt=0)
