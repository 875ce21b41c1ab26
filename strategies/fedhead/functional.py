"""FedHEAD's sectors, leaders and communication cost, as pure functions.

The distillation itself is :mod:`flwr_kd.distillation`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flwr_kd.checks import ConfigError
from flwr_kd.server.aggregation import shares
from flwr_kd.server.records import NDArray

__all__ = ["assign_sectors", "communication_cost", "draw_leader", "strays"]

_FEWEST = 3


def assign_sectors(
    keys: Iterable[int], sectors: int, rng: np.random.Generator, known: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Assign clients to sectors at random, as evenly as possible; clients with a sector keep it.

    Source: FedHEAD, appendix H.1, "randomly partitioned into two sectors".

    Parameters
    ----------
    keys : iterable of int
        The connected clients. Their order does not matter.
    sectors : int
        M, at least 1.
    rng : Generator
        Decides the assignment.
    known : mapping, optional
        Sectors that are assigned already, also of clients that are not connected.

    Returns
    -------
    dict
        Sector ``0..M-1`` of each client, including those in ``known``. New clients fill the sectors with the fewest
        connected ones: if nothing is known, sizes differ by at most one, and no sector is empty.

    Raises
    ------
    ConfigError
        If nothing is known and there are fewer clients than sectors, ``sectors`` is below 1, or a known sector is
        out of range.

    Examples
    --------
    >>> assigned = assign_sectors(range(5), 2, np.random.default_rng(0))
    >>> sorted(assigned), sorted(np.bincount(list(assigned.values())).tolist())
    ([0, 1, 2, 3, 4], [2, 3])
    >>> assign_sectors([7], 2, np.random.default_rng(0))
    Traceback (most recent call last):
    flwr_kd.ConfigError: sectors must be at most the number of clients, got 2 sectors for 1 clients
    """
    if sectors < 1:
        raise ConfigError(f"sectors must be at least 1, got {sectors}")
    assigned, connected = dict(known or {}), set(keys)
    new = sorted(connected - set(assigned))
    if assigned and not (min(assigned.values()) >= 0 and max(assigned.values()) < sectors):
        raise ConfigError(f"sectors is {sectors}, but there are clients in sector {max(assigned.values())}")
    if not assigned and len(new) < sectors:
        raise ConfigError(
            f"sectors must be at most the number of clients, got {sectors} sectors for {len(new)} clients"
        )
    present = [sector for key, sector in assigned.items() if key in connected]
    size = np.bincount(np.array(present, dtype=np.int64), minlength=sectors)
    for i in rng.permutation(len(new)):
        sector = int(size.argmin())
        assigned[new[i]] = sector
        size[sector] += 1
    return assigned


def draw_leader(counts: Sequence[int], rng: np.random.Generator, *, leader: str = "random") -> int:
    r"""Return the position of a sector's leader.

    Source: FedHEAD, algorithm 1, step 3: client k with probability :math:`p_{km} / p_m`; ``"largest"`` is the
    fixed choice of Table 7.

    Parameters
    ----------
    counts : sequence of int
        Number of samples of each candidate, at least 0; if all are 0, the candidates are equally likely.
    rng : Generator
        Used with ``leader="random"``.
    leader : str
        ``"random"`` or ``"largest"``, the first of equally large ones.

    Raises
    ------
    ValueError
        If there are no candidates, a count is negative, or ``leader`` is neither.

    Examples
    --------
    >>> draw_leader([10, 30, 20], np.random.default_rng(0), leader="largest")
    1
    >>> draw_leader([0, 5, 0], np.random.default_rng(0))
    1
    """
    if leader not in ("random", "largest"):
        raise ValueError(f"leader must be random or largest, got {leader!r}")
    share = shares(counts)
    return int(np.argmax(share)) if leader == "largest" else int(rng.choice(len(share), p=share))


def communication_cost(method: str, *, sectors: int, clients: int, rounds: int) -> int:
    """Return the round trips between sectors and server, each of unit cost: FedHEAD's Table 1.

    Traffic inside a sector is not counted, as in a deployment with a node per sector. In Flower, which is a star,
    all traffic passes the SuperLink.

    Parameters
    ----------
    method : str
        ``"fedavg"`` (hierarchical averaging), ``"feddf"``, ``"fedhead"`` or ``"fedhead-plus"``.
    sectors, clients, rounds : int
        M, N and T.

    Raises
    ------
    ValueError
        For another method.

    Examples
    --------
    >>> names = ("fedavg", "feddf", "fedhead", "fedhead-plus")
    >>> [communication_cost(name, sectors=2, clients=20, rounds=50) for name in names]
    [100, 1000, 200, 200]
    """
    per_round = {"fedavg": sectors, "feddf": clients, "fedhead": 2 * sectors, "fedhead-plus": 2 * sectors}
    if method not in per_round:
        raise ValueError(f"method must be one of {', '.join(per_round)}, got {method!r}")
    return per_round[method] * rounds


def strays(
    model: Sequence[NDArray],
    center: Sequence[NDArray],
    members: Sequence[Sequence[NDArray]],
    factor: float = 3.0,
) -> bool:
    """Say whether a leader's model is much farther from its sector's mean than the sector's models are.

    Ours, for the robust rules: a leader's model is a whole sector's, for which no rule over the sectors can answer.
    Distances are Euclidean, over all float arrays.

    Parameters
    ----------
    model : sequence of ndarray
        What the leader has distilled.
    center : sequence of ndarray
        The sector's mean, by a robust rule.
    members : sequence of sequence of ndarray
        The models of the sector's clients. Less than half of them may be malicious.
    factor : float
        How many times the median of the members' distances is allowed. Distilled models of honest leaders were at
        0.8 to 2.0 times (MLP, digits).

    Returns
    -------
    bool
        False with fewer than three members, of whom none is in the middle.

    Examples
    --------
    >>> members = [[np.array([value])] for value in (0.0, 1.0, 2.0, 1e6)]
    >>> [strays([np.array([value])], [np.array([1.0])], members) for value in (3.5, 9.0)]
    [False, True]
    """
    if len(members) < _FEWEST:
        return False
    typical = float(np.median([_distance(member, center) for member in members]))
    return _distance(model, center) > factor * typical


def _distance(one: Sequence[NDArray], other: Sequence[NDArray]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if np.asarray(a).dtype.kind == "f"]
    with np.errstate(over="ignore"):
        squares = [float(np.square(a.astype(np.float64) - b, dtype=np.float64).sum()) for a, b in pairs]
    return math.sqrt(sum(squares))
