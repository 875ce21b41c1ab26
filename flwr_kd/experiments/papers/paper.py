"""What holds for all of a paper: ``paper.toml``."""

from __future__ import annotations

from dataclasses import dataclass, field

from flwr_kd.experiments.run_form import Named

__all__ = ["Control", "Finding", "NotRun", "Paper"]


@dataclass(frozen=True, kw_only=True)
class Control(Named):
    """A row that runs beside a paper's methods, and has no number in the paper.

    It shows what is left of a claim without what the method adds: each client alone, or the same method whose
    knowledge is replaced by rows that hold none.

    Attributes
    ----------
    of : tuple of str
        The rows whose claims it is a control of; all if empty.
    """

    of: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the paper's own numbers contradict."""

    about: str
    text: str


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """A table or figure without a result."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper.

    Attributes
    ----------
    id : str
        What its experiments are called by, such as the ``fedhkd`` of ``fedhkd/table-1``.
    title, authors, venue : str
        As the paper has them.
    code : str
        What was read of the authors' code.
    findings : tuple of Finding
        What the paper's own numbers contradict.
    not_run : tuple of NotRun
        Tables and figures without a result.
    controls : dict of Control
        By name, rows that its experiments may run beside the paper's.
    """

    id: str
    title: str
    authors: str
    venue: str = ""
    code: str = ""
    findings: tuple[Finding, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    controls: dict[str, Control] = field(default_factory=dict)
