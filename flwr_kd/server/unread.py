"""What a caller is told about settings that have no effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flwr_kd.config import MethodConfig, meant
from flwr_kd.text import shown

__all__ = ["unread_in_start", "without_global_model"]


def unread_in_start(
    config: MethodConfig,
    given: Mapping[str, Mapping[str, Any]],
    *,
    strategy: str,
    reserved: Collection[str] = (),
) -> list[str]:
    """Return a line for each scalar of ``train_config`` or ``evaluate_config`` that no client reads.

    Parameters
    ----------
    config : MethodConfig
        The run's hyper-parameters, which win over scalars of the same names.
    given : mapping
        By the argument's name, what the caller passed to ``start``.
    strategy : str
        The strategy's class, as a user writes it.
    reserved : collection of str
        Names that the run itself sets in each message.

    Examples
    --------
    >>> lines = unread_in_start(MethodConfig(), {"train_config": {"lr": 0.05}}, strategy="FedAvg")
    >>> lines[0].partition("Then ")
    ("train_config: 'lr' is not read: did you mean the hyper-parameter learning_rate? ", 'Then ',
    'write FedAvg(learning_rate=...); its value is 0.001')
    """
    own = config.to_wire()
    lines = []
    for argument, scalars in given.items():
        for name, value in scalars.items():
            if name in reserved:
                lines.append(
                    f"{argument}: {name!r} is set by the run itself; the value {shown(value)} is not used"
                )
                continue
            ours = meant(name, own)
            if ours is None:
                lines.append(
                    f"{argument}: {name!r} is no hyper-parameter of {strategy}, and its clients do not read it; "
                    f"a client of your own finds it in task.extra[{name!r}]"
                )
                continue
            option = ours.replace("-", "_")
            lines.append(
                f"{argument}: {name!r} is not read: did you mean the hyper-parameter {option}? Then write "
                f"{strategy}({option}=...); its value is {own[ours]!r}"
            )
    return lines


def without_global_model(strategy: str, initial_arrays: bool, evaluate_fn: bool) -> str | None:
    """Say what a caller gets who expects a global model of a method that has none; None if nothing is expected.

    Parameters
    ----------
    strategy : str
        The strategy's class.
    initial_arrays, evaluate_fn : bool
        Whether the caller passed arrays that are not used, or a function.

    Examples
    --------
    >>> without_global_model("FedProto", False, True)
    'FedProto has no global model, since each client has its own: result.arrays is empty, evaluate_fn is not called'
    >>> without_global_model("FedProto", False, False)
    """
    if not initial_arrays and not evaluate_fn:
        return None
    consequences = ["result.arrays is empty", *(["evaluate_fn is not called"] if evaluate_fn else [])]
    return f"{strategy} has no global model, since each client has its own: {', '.join(consequences)}"
