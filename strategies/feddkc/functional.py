r"""FedDKC's maths: refining a client's logits so that all clients' knowledge has one peak or one entropy.

Source: Wu, Sun, Wang, Liu, Zhang, Liu, "Exploring the Distributed Knowledge Congruence in Proxy-data-free
Federated Distillation", ACM TIST 2022. Equation numbers are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["check_entropy", "check_kernel", "check_peak", "entropy_bits", "refine_entropy", "refine_peak"]

Kernel = Callable[[Tensor], Tensor]
_BLOCK = 2**21  # Logits per block: bounds the memory, and is large enough to hide the overhead of calls.
_STEPS = 200
_REACH = 20.0  # Bound of |ln(1/t)|.


def refine_peak(
    logits: Tensor, peak: float, *, kernel: Kernel | None = None, tolerance: float = 1e-6
) -> Tensor:
    r"""Return probabilities whose largest entry is T: kernel-based refinement, KKR.

    Without a kernel, equation 14, the closed form for :math:`\sigma(x) = kx + b`, with v = softmax(z):

    .. math:: \varphi_i = \frac{(CT - 1) v_i + v_m - T}{C v_m - 1}
        = T - \left(T - \frac{1}{C}\right) \frac{v_i / v_m - 1}{\operatorname{mean}_j (v_j / v_m - 1)}

    The second form is computed, since it loses no digits where v is nearly uniform. A row with a negative entry
    (Theorem 1) is rectified: T for the maximum, (1 - T) / (C - 1) for all others.

    With a kernel, equation 9, its 1/t found by bisection on equation 10 for all rows at once (section 5.2).

    Parameters
    ----------
    logits : Tensor
        ``[N, C]``, finite, at least 2 classes.
    peak : float
        T in (1/C, 1).
    kernel : callable, optional
        σ, elementwise on tensors of float64; see :func:`check_kernel` for its conditions.
    tolerance : float
        ε of equation 22: with a kernel the peak is within ε/2 of T. Not used without one.

    Returns
    -------
    Tensor
        ``[N, C]``: float64 for float64, else float32. Rows sum to 1, equal logits have equal probabilities, and
        a larger logit never has a smaller probability.

    Raises
    ------
    ValueError
        If the shape, the peak, the tolerance or the kernel is not allowed, or a logit is not finite.

    Notes
    -----
    Where the paper is silent:

    - All logits equal (:math:`C v_m = 1`, 0/0 in equation 14): the row stays uniform, the only vector that
      keeps ties. It is not the limit of neighbouring rows, which all have peak T.
    - k tied maxima in a row that needs rectification: each gets min(T, 1/k), the others share the rest.
    - With a kernel, a row in which no t > 0 solves equation 10 (for a linear one :math:`v_m < T`), or none
      that float64 can represent, is rectified in the same way.

    Examples
    --------
    >>> refine_peak(torch.tensor([[2.0, 1.0, 0.0], [0.2, 0.1, 0.0]]), 0.5)
    tensor([[0.5000, 0.2888, 0.2112],
            [0.5000, 0.3279, 0.1721]])
    """
    _check_logits(logits)
    check_peak(peak, logits.shape[1])
    _check_tolerance(tolerance)
    ratios = torch.expm1(_below_maximum(logits.double()))  # v_i / v_m - 1
    total = ratios.sum(dim=1, keepdim=True)
    if kernel is None:
        # Divide by the sum, not by the mean, which may underflow to 0.
        below = ratios / total * logits.shape[1]
        refined = peak - (peak - 1 / logits.shape[1]) * below
        broken = (refined < -1e-12).any(dim=1)
        refined = refined.clamp_min(0.0)
    else:
        check_kernel(kernel)
        refined, broken = _by_kernel(ratios + 1, peak, kernel, tolerance)
    refined = torch.where(broken[:, None], _rectified(ratios == 0, peak), refined)
    return torch.where(total == 0, 1 / logits.shape[1], refined).to(_result_dtype(logits))


def refine_entropy(logits: Tensor, entropy: float, *, tolerance: float = 1e-3) -> Tensor:
    r"""Return softmax(z / θ) whose entropy is E: searching-based refinement, SKR (equations 17 to 20).

    θ is bracketed for each row, and solved for all rows at once by bisection; two times out of three, Newton's step
    replaces the midpoint where it falls inside the bracket.

    Parameters
    ----------
    logits : Tensor
        ``[N, C]``, finite, at least 2 classes.
    entropy : float
        E in bits, in (0, log2 C).
    tolerance : float
        ε: the entropy is within ε/2 of E.

    Returns
    -------
    Tensor
        ``[N, C]``: float64 for float64, else float32. Rows sum to 1, the order of the entries is kept.

    Raises
    ------
    ValueError
        If the shape, the entropy or the tolerance is not allowed, or a logit is not finite.

    Notes
    -----
    Theorem 2 assumes a unique maximum. With k tied maxima the entropy is at least log2 k: if that is at
    least E, the row is the limit θ → 0, 1/k for each maximum, which is the nearest possible. A row of equal logits
    (k = C) stays uniform. Logits whose difference float64 cannot represent count as equal.

    Examples
    --------
    >>> refined = refine_entropy(torch.tensor([[5.0, 1.0, 0.0], [0.02, 0.01, 0.0]]), 1.0)
    >>> entropy_bits(refined).sub(1.0).abs().max().item() < 5e-4
    True
    >>> refine_entropy(torch.tensor([[3.0, 3.0, 0.0]]), 0.5)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    _check_logits(logits)
    check_entropy(entropy, logits.shape[1])
    _check_tolerance(tolerance)
    rows = max(1, _BLOCK // logits.shape[1])
    blocks = [_by_entropy(block, entropy, tolerance) for block in torch.split(logits, rows)]
    return torch.cat(blocks) if blocks else logits.to(_result_dtype(logits))


def entropy_bits(probabilities: Tensor) -> Tensor:
    """Return the Shannon entropy in bits ``[...]`` of probabilities ``[..., C]``; 0 · log 0 counts as 0.

    >>> entropy_bits(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    tensor([1., 0.])
    """
    nats: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return nats / math.log(2)


def check_peak(peak: float, num_classes: int) -> None:
    """Raise ValueError, naming the range, if T is not in (1/C, 1) (equation 54)."""
    _check_number(num_classes)
    if not 1 / num_classes < peak < 1:
        raise ValueError(
            f"peak must be in (1/C, 1) = ({1 / num_classes:g}, 1) for C = {num_classes} classes, got {peak}"
        )


def check_entropy(entropy: float, num_classes: int) -> None:
    """Raise ValueError, naming the range, if E is not in (0, log2 C) (equation 32)."""
    _check_number(num_classes)
    if not 0 < entropy < math.log2(num_classes):
        raise ValueError(
            f"entropy must be in (0, log2 C) = (0, {math.log2(num_classes):g}) bits for C = {num_classes} "
            f"classes, got {entropy}"
        )


def check_kernel(kernel: Kernel) -> None:
    """Raise ValueError, naming the condition, if σ breaks one of section 5.1.

    The conditions are checked at points in (0, e^20], the range of the search for t; v_i / (t v_m) is positive.
    Beyond 10 the kernel may overflow float64, as exp does at 709. Powers x^p, of which the direct proportion is
    one, are refused: t cancels in equation 10, which then has no solution.

    >>> check_kernel(lambda x: x**2 + 1)
    >>> check_kernel(lambda x: 2 * x)
    Traceback (most recent call last):
    ValueError: the kernel is a direct proportion or another power of x, on which t has no effect (section 5.1)
    """
    points = torch.cat([torch.logspace(-9, -2, 71), torch.linspace(0.02, 30, 1500)]).double()
    points = torch.cat([points, torch.linspace(math.log(30.5), _REACH, 200).double().exp()])
    values = kernel(points)
    if not isinstance(values, Tensor) or values.shape != points.shape:
        raise ValueError("the kernel must return a tensor of its argument's shape: it works elementwise")
    finite = int(torch.isfinite(values).long().cumprod(0).sum())
    if finite < int((points <= 10).sum()):
        raise ValueError("the kernel is not finite everywhere in (0, 10]")
    points, values = points[:finite], values[:finite]
    ratios = (kernel(2 * points) / values)[values != 0]
    if torch.allclose(ratios, ratios[:1], rtol=1e-6, atol=0.0) and bool((values != values[0]).any()):
        raise ValueError(
            "the kernel is a direct proportion or another power of x, on which t has no effect (section 5.1)"
        )
    if (values.diff() < 0).any() or not values[-1] > values[0]:
        raise ValueError("the kernel is not monotonically increasing (section 5.1)")
    if not (values > 0).all():
        raise ValueError("the kernel is not consistently positive (section 5.1)")
    # Halve each interval repeatedly, keeping the half with the larger step: a step that remains is a jump.
    steps = values.diff()
    low, high = points[:-1].clone(), points[1:].clone()
    for _ in range(60):
        middle = (low + high) / 2
        at_low, at_middle, at_high = kernel(low), kernel(middle), kernel(high)
        left = at_middle - at_low > at_high - at_middle
        low, high = torch.where(left, low, middle), torch.where(left, middle, high)
    jumps = (kernel(high) - kernel(low) > 1e-3 * steps) & (steps > 1e-9 * values[1:])
    if jumps.any():
        raise ValueError(f"the kernel is not continuous at {float(low[jumps][0]):g} (section 5.1)")


def _by_kernel(ratios: Tensor, peak: float, kernel: Kernel, tolerance: float) -> tuple[Tensor, Tensor]:
    """Solve equation 10 per row; return the refined rows, and a mask of those without a solution."""

    def residual(x: Tensor, point: Tensor) -> tuple[Tensor, None]:
        scale = point.exp()
        share = kernel(scale) / kernel(x * scale).sum(dim=0)
        # On overflow (a convex kernel at a large argument) the root, if any, is at a smaller argument.
        return torch.where(torch.isfinite(share), peak - share, -1.0), None

    # The peak may not be monotone in t (for a kernel that saturates): the first change of sign brackets the root.
    x = ratios.T.contiguous()
    low, high = torch.full_like(x[0], -_REACH), torch.full_like(x[0], _REACH)
    solvable, below = torch.zeros_like(low, dtype=torch.bool), residual(x, low)[0] > 0
    for bound in torch.linspace(-_REACH, _REACH, 81)[1:].tolist():
        above = residual(x, torch.full_like(low, bound))[0] < 0
        crosses = below & above & ~solvable
        low, high = torch.where(crosses, bound - _REACH / 40, low), torch.where(crosses, bound, high)
        solvable, below = solvable | crosses, ~above
    point, converged = _search(x, low, high, residual, tolerance / 2)
    values = kernel(x * point.exp())
    return (values / values.sum(dim=0)).T, ~(solvable & converged)


def _by_entropy(logits: Tensor, entropy: float, tolerance: float) -> Tensor:
    classes = logits.shape[1]
    # float32 is precise enough unless the tolerance, or the gap between a row's two largest logits, is extreme.
    fast = logits.dtype != torch.float64 and tolerance >= 1e-4
    x, gap = _in_range(logits.float() if fast else logits.double() / 2)
    if fast and not bool(((gap > 1e-30) | torch.isinf(gap)).all()):
        x, gap = _in_range(logits.double() / 2)
    ties = (x == 0).sum(dim=1, dtype=x.dtype)
    reachable = ties.log2() < entropy
    # The bounds of ln(1/θ): at the lower one the entropy is above E (the KL to uniform is at most 1/(8θ²) nats on a
    # range of 1), at the upper one the entries that are not maximal have a share of less than e^-40.
    enough = math.sqrt(8 * math.log(2) * (math.log2(classes) - entropy))
    high = ((math.log(classes) + 40) / gap.clamp(1e-300, 1.0)).log()
    low = high.clamp(max=math.log(enough))
    target = entropy * math.log(2)

    def residual(x: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
        scaled = (x * point.exp()).clamp_(min=-1000.0)
        weights = scaled.exp()
        total = weights.sum(dim=0)
        weighted = weights.mul_(scaled)
        mean = weighted.sum(dim=0) / total
        variance = weighted.mul_(scaled).sum(dim=0) / total - mean.square()
        return total.log() - mean - target, -variance

    columns = x.T.contiguous()
    point, _ = _search(columns, low, high, residual, tolerance / 2 * math.log(2))
    # In float64: a float32 softmax over 1,000 classes may sum to 1 - 5e-6.
    refined = torch.softmax((columns.double() * point.double().exp()).T, dim=1)
    if not bool(reachable.all()):
        refined = torch.where(reachable[:, None], refined, (x == 0) / ties[:, None].double())
    return refined.to(_result_dtype(logits))


def _in_range(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows to [-1, 0], so that θ is relative to a row's range; return them and the gap below their maxima.

    The gap is infinite in a row whose entries are all equal, and 0 or NaN if the dtype's range is too small.
    """
    below = _below_maximum(logits)
    width = -below.amin(dim=1)
    gap = -below.masked_fill(below == 0, -torch.inf).amax(dim=1) / width
    return below.div_(width.clamp_min(torch.finfo(below.dtype).tiny)[:, None]), gap


def _search(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    residual: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Find, for each column of ``x``, the zero of a residual that is positive at ``low`` and negative at ``high``.

    Return the points ``[N]``, and whether the residual is within the tolerance there, ``[N]``. Converged columns
    are removed from the computation once they are half of it.
    """
    points, done_rows = low.clone(), torch.zeros_like(low, dtype=torch.bool)
    rows = torch.arange(len(low), device=low.device)
    point = (low + high) / 2
    for step in range(_STEPS):
        value, slope = residual(x, point)
        done = value.abs() < tolerance
        points[rows], done_rows[rows] = point, done
        remaining = int((~done).sum())
        if not remaining:
            break
        low, high = torch.where(value > 0, point, low), torch.where(value > 0, high, point)
        middle = (low + high) / 2
        if slope is None or step % 3 == 2:
            following = middle
        else:
            newton = point - value / slope
            following = torch.where((newton > low) & (newton < high), newton, middle)
        point = torch.where(done, point, following)
        if 2 * remaining <= len(rows):
            keep = ~done
            rows, x, low, high, point = rows[keep], x[:, keep], low[keep], high[keep], point[keep]
    return points, done_rows


def _below_maximum(logits: Tensor) -> Tensor:
    """Return z_i - z_m."""
    return logits - logits.amax(dim=1, keepdim=True)


def _rectified(maxima: Tensor, peak: float) -> Tensor:
    ties = maxima.sum(dim=1, keepdim=True).double()
    share = torch.minimum(1 / ties, torch.full_like(ties, peak))
    others = (maxima.shape[1] - ties).clamp_min(1)
    return torch.where(maxima, share, (1 - ties * share).clamp_min(0) / others)


def _result_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floats [N, C] with C >= 2, got {logits.dtype} {list(logits.shape)}")
    if not torch.isfinite(logits).all():
        raise ValueError("logits must be finite")


def _check_number(num_classes: int) -> None:
    if num_classes < 2:
        raise ValueError(f"there must be at least 2 classes, got {num_classes}")


def _check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be positive and finite, got {tolerance}")
