"""The exceptions of autodispatch. A message says what was expected, then what came, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence


class AutodispatchError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedProblemError(AutodispatchError, ValueError):
    """No candidate can compute this problem on this device, or the candidate asked for cannot."""


class NotTunedError(AutodispatchError):
    """A problem was not tuned, and the settings are not to serve it then."""


class DeviceError(AutodispatchError, RuntimeError):
    """A GPU was asked for and CuPy, the driver or the device does not work. The cause is chained."""


class CompileError(AutodispatchError):
    """A kernel did not build.

    Attributes:
        log: the compiler's output.
        expression: the template instance that was asked for.
        options: the options passed to the compiler.
    """

    def __init__(self, message: str, *, log: str = "", expression: str = "", options: Sequence[str] = ()) -> None:
        details = [f"  kernel:  {expression}"] if expression else []
        details += [f"  options: {' '.join(options)}"] if options else []
        details += [f"  log:     {log.strip()}"] if log.strip() else []
        super().__init__("\n".join([message, *details]))
        self.log = log
        self.expression = expression
        self.options = tuple(options)


class LaunchError(AutodispatchError):
    """A kernel or library call could not be launched."""


class VerificationError(AutodispatchError):
    """A candidate's result differs from the reference by more than rounding explains."""


class StoreError(AutodispatchError):
    """A tuning database cannot be read or written as asked."""
