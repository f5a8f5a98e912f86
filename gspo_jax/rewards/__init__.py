"""Rewards: how good a response is, as one number in [0, 1] or a missing value."""

import importlib
import operator
from collections.abc import Callable
from typing import Any


def load_function(name: str, key: str = "reward") -> Callable[..., Any]:
    """The function that "package.module:function" names; its module is imported.

    key: the setting that holds the name, for messages.

    Raises ValueError, with the remedy, for every way in which the name can be wrong.
    """
    module_name, _, path = name.partition(":")
    if not (module_name and path):
        raise ValueError(f"{key}={name!r} must be 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Not found may be the module itself, a package above it, or something that it imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{key}={name!r}: importing {module_name} failed: {error}; install what it needs"
            ) from error
        raise ValueError(
            f"{key}={name!r}: there is no module {error.name!r}; install it, or name the folder "
            "that holds it in PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as error:  # of any kind: the module's own code runs
        raise ValueError(
            f"{key}={name!r}: importing {module_name} failed with {type(error).__name__}: {error}; "
            "mend the module"
        ) from error
    try:
        function = operator.attrgetter(path)(module)
    except AttributeError:
        known = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise ValueError(
            f"{key}={name!r}: {module_name} ({module.__file__}) has no {path!r}; "
            f"it has {', '.join(known) or 'no function'}"
        ) from None
    if not callable(function):
        raise ValueError(
            f"{key}={name!r} is no function but {function!r:.100} ({type(function).__name__}); "
            "name a function"
        )
    return function
