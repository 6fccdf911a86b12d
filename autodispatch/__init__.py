"""out = SiLU(a @ b1) * (a @ b2), as fast as the GPU allows: tuned per GPU model and shape, picked at run time.

    from autodispatch import dispatcher

    out = dispatcher.run(a, b1, b2)

Importing this package imports neither CuPy nor a database library, opens nothing and creates no CUDA context.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "Dispatcher": "dispatcher",
    "Explanation": "explanation",
    "autotune": "dispatcher",
    "configure": "dispatcher",
    "counters": "dispatcher",
    "explain": "dispatcher",
    "run": "dispatcher",
    "warmup": "dispatcher",
    "Counters": "metrics",
    "Origin": "selection",
    "Selection": "selection",
    "Problem": "problem",
    "Settings": "settings",
    "DeviceInfo": "device",
    "Candidate": "variants",
    "Registry": "variants",
    "Variant": "variants",
    "Tuner": "tuner",
    "tune": "fleet",
    "TuningStore": "store",
    "AutodispatchError": "errors",
    "CompileError": "errors",
    "DeviceError": "errors",
    "LaunchError": "errors",
    "NotTunedError": "errors",
    "StoreError": "errors",
    "UnsupportedProblemError": "errors",
    "VerificationError": "errors",
}
_MODULES = ("dispatcher", "errors", "settings", "tuner", "variants")

__all__ = sorted([*_NAMES, "dispatcher"])


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"autodispatch.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"autodispatch.{name}")
    raise AttributeError(f"module 'autodispatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
