"""Robust means of knowledge: of prototypes, soft predictions, and the outputs of an ensemble's teachers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_kd.checks import ConfigError
from flwr_kd.server.aggregation.rules import RULES, Rule

__all__ = ["KNOWLEDGE_RULES", "knowledge_rule", "outlying_rows", "robust_average"]

KNOWLEDGE_RULES = ("mean", "median", "trimmed-mean")
"""Names of the rules for knowledge: those that look at each coordinate."""
_NEARLY_HALF = 0.5 - 1e-9
_DISTRIBUTION = 1e-3
_TYPICAL = 0.9


def knowledge_rule(text: object) -> Rule:
    """Read a rule for knowledge.

    Raises
    ------
    ConfigError
        If it is none of ``mean``, ``median`` and ``trimmed-mean:SHARE``.

    Examples
    --------
    >>> knowledge_rule("trimmed-mean:0.2").share
    0.2
    """
    if str(text).partition(":")[0] not in KNOWLEDGE_RULES:
        forms = ", ".join(RULES[name] for name in KNOWLEDGE_RULES)
        raise ConfigError(f"knowledge_aggregation must be one of {forms}, got {text!r}")
    return Rule.parse(text, "knowledge_aggregation")


def robust_average(values: Tensor, rule: Rule, weights: Tensor | None = None) -> Tensor:
    r"""Return the weighted median or trimmed mean of each coordinate.

    Source: Yin et al., ICML 2018, with weights: of the values in ascending order, the share S of the total weight
    is cut off at each end, if need be a part of a value's. With equal weights and a whole number of values to cut
    it is their trimmed mean. The median is the limit of S = 1/2.

    Where the rows of all clients are distributions, the result's are divided by their sums and so are again.

    Parameters
    ----------
    values : Tensor
        ``[K, ...]``, finite, K at least 1.
    rule : Rule
        ``median`` or ``trimmed-mean``.
    weights : Tensor, optional
        At least 0, of a shape that expands to that of the values. All alike if None. Where they are all 0, the
        result is 0.

    Returns
    -------
    Tensor
        ``[...]``, float64.

    Examples
    --------
    >>> values = torch.tensor([[0.0], [1.0], [50.0]])
    >>> robust_average(values, Rule("median")).tolist()
    [1.0]
    >>> robust_average(values, Rule("median"), torch.tensor([[1.0], [0.0], [1.0]])).round().tolist()
    [25.0]
    """
    exact = values.double()
    among = torch.ones_like(exact) if weights is None else weights.double().expand_as(exact)
    ascending, order = exact.sort(dim=0, stable=True)
    sorted_weights = among.gather(0, order)
    total = sorted_weights.sum(dim=0)
    ends = sorted_weights.cumsum(dim=0) / total.clamp(min=torch.finfo(torch.float64).tiny)
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    share = _NEARLY_HALF if rule.name == "median" else rule.share
    kept = (ends.clamp(max=1 - share) - begins.clamp(min=share)).clamp(min=0)
    # Clipping leaves a mass of 1 - 2 S, but for the rounding of the sums.
    kept = kept / kept.sum(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
    average = torch.where(total > 0, (kept * ascending).sum(dim=0), 0.0)
    return _as_distributions(average) if _are_distributions(exact) else average


def _are_distributions(values: Tensor) -> bool:
    if values.ndim < 3 or values.shape[-1] < 2 or not values.numel():
        return False
    sums = values.sum(dim=-1)
    # A row of zeros stands for a class that a client does not know.
    whole = (sums - 1).abs().le(_DISTRIBUTION) | sums.eq(0)
    return bool((values >= 0).all()) and bool(whole.all()) and bool(sums.gt(0).any())


def _as_distributions(values: Tensor) -> Tensor:
    sums = values.sum(dim=-1, keepdim=True)
    return torch.where(sums > 0, values / sums.clamp(min=torch.finfo(torch.float64).tiny), values)


def outlying_rows(clients: Sequence[Tensor], factor: float = 3.0) -> list[Tensor]:
    r"""Return which rows of each client lie outside a robust range of the others'.

    The centre of the range is, of each coordinate, the median over the clients of their means. A row's distance is
    its root mean square deviation from the centre. A client's typical distance is the 0.9 quantile over its rows. A
    row is outlying if it is farther than ``factor`` times the median of the other clients' typical distances.

    Parameters
    ----------
    clients : sequence of Tensor
        ``[N_k, D]``, finite, each with at least one row.
    factor : float
        Above 0.

    Returns
    -------
    list of Tensor
        ``[N_k]`` bool. With fewer than three clients nothing is outlying: the others' range would be one client's.

    Examples
    --------
    >>> honest = [torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [3.0]])]
    >>> [rows.tolist() for rows in outlying_rows([*honest, torch.tensor([[65000.0], [1.0]])])]
    [[False, False], [False, False], [True, False]]
    """
    rows = [client.double().reshape(len(client), -1) for client in clients]
    if len(rows) < 3:
        return [torch.zeros(len(client), dtype=torch.bool) for client in rows]
    centre = torch.quantile(torch.stack([client.mean(dim=0) for client in rows]), 0.5, dim=0)
    distances = [(client - centre).square().mean(dim=1).sqrt() for client in rows]
    typical = torch.stack([torch.quantile(own, _TYPICAL) for own in distances])
    outlying = []
    for k, own in enumerate(distances):
        others = torch.cat([typical[:k], typical[k + 1 :]])
        outlying.append(own > factor * torch.quantile(others, 0.5))
    return outlying
