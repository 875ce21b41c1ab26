"""Functions of a user's own that an option names as ``package.module:function``.

Importing runs the user's code, so only this machine's own command line and Python API may name one. What comes in a
message must never get here: see :func:`refuse_in_messages`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr_kd.checks import ConfigError
from flwr_kd.text import first_line

__all__ = ["call_with", "import_function", "names_function", "refuse_in_messages"]

_OTHER_FORMS = ("csv:", "hf:")
"""What begins the names of data in files and on the hub, which are no modules."""
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def names_function(name: object) -> bool:
    """Return whether a text has the form ``package.module:function``.

    >>> names_function("my_project.models:build"), names_function("csv:table"), names_function("lenet")
    (True, False, False)
    """
    return isinstance(name, str) and not name.startswith(_OTHER_FORMS) and _NAME.fullmatch(name) is not None


def import_function(name: str, option: str) -> Callable[..., Any]:
    """Return the function that an option names.

    Modules of the working directory are found as well, also by the installed command.

    Parameters
    ----------
    name : str
        ``package.module:function``.
    option : str
        Name of the option in errors.

    Raises
    ------
    ConfigError
        If the module cannot be imported, or has no such function.

    Examples
    --------
    >>> import_function("math:sqrt", "model")(4.0)
    2.0
    >>> import_function("math:square", "model")
    Traceback (most recent call last):
    flwr_kd.ConfigError: model 'math:square': the module math has no function square
    """
    module, _, function = name.partition(":")
    top, here = module.partition(".")[0], os.getcwd()
    if (Path(here, f"{top}.py").is_file() or Path(here, top).is_dir()) and here not in sys.path:
        # Behind all others, so that no installed package is hidden.
        sys.path.append(here)
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # A user's module may raise anything.
        raise ConfigError(
            f"{option} {name!r}: the module {module} cannot be imported "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    found = getattr(loaded, function, None)
    if not callable(found):
        raise ConfigError(f"{option} {name!r}: the module {module} has no function {function}")
    return found  # type: ignore[no-any-return]


def call_with(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with those of the values that its parameters name; with all of them if it has ``**``.

    >>> call_with(lambda num_classes: num_classes + 1, {"num_classes": 2, "seed": 0})
    3
    """
    parameters = inspect.signature(function).parameters
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return function(**{name: value for name, value in values.items() if every or name in parameters})


def refuse_in_messages(name: str, option: str) -> None:
    """Refuse a name from a run config, which another machine may have sent, if it names code to import.

    Raises
    ------
    ConfigError
        If it does.

    Examples
    --------
    >>> refuse_in_messages("os:abort", "model")
    Traceback (most recent call last):
    flwr_kd.ConfigError: model in a run config must not name a function to import, got 'os:abort': ...
    """
    if names_function(name):
        raise ConfigError(
            f"{option} in a run config must not name a function to import, got {name!r}: a message would decide "
            "which code runs here; build it in the app's own files"
        )
