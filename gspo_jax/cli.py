"""What the commands share: what a user can mend is said in one message, without a traceback."""

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from gspo_jax import processes


def run(main: Callable[[Sequence[str]], None], *errors: type[Exception]) -> None:
    """Parses the flags, meets the other processes, calls `main` with the arguments that are none.

    Args:
      errors: what `main` raises with a message for the user, besides ValueError and OSError. With
        --verbosity=1 the traceback is shown as well.
    """
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"
    # A terminated process unwinds like an interrupted one, so that it finishes its saves.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def guarded(argv: Sequence[str]) -> None:
        if not any(argument.startswith(("--verbosity", "-v")) for argument in sys.argv):
            logging.set_verbosity(logging.WARNING)  # absl's default is libraries' every step
            # Of a checkpoint that cannot be read or written `checkpoint` tells, in one line.
            logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
            sys.excepthook = _only_ours
        try:
            with processes.together():
                main(argv[1:])
        except KeyboardInterrupt as stop:
            left = "interrupted: what was saved is intact, the same command goes on"
            print(str(stop) or left, file=sys.stderr)
            sys.exit(processes.STOPPED)
        except (ValueError, OSError, *errors) as error:
            logging.debug("raised here:", exc_info=True)
            sys.exit(f"error: {error}")

    app.run(guarded, flags_parser=_parse)


def _only_ours(*exception: Any) -> None:
    """Shows what nothing caught, but for callbacks of the storage libraries' own threads."""
    if threading.current_thread() is threading.main_thread():
        sys.__excepthook__(*exception)


def _parse(argv: Sequence[str]) -> Sequence[str]:
    try:
        return flags.FLAGS(argv, known_only=True)
    except flags.Error as error:
        sys.exit(f"error: {error}; --help lists the flags")


class StopRequest:
    """Notes SIGINT and SIGTERM, so that the loop ends between steps; the second one interrupts.

    Attributes:
      signal: the name of the first one; "" before.
    """

    def __init__(self):
        self.signal = ""
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # others must not handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        print(f"\n{self.signal}: stopping after this step; once more stops at once", flush=True)
