"""Clock and temperature of a CUDA device by NVML, matched by UUID, never by index.

NVML counts devices in its own order and knows nothing of CUDA_VISIBLE_DEVICES. It may be missing or broken (after a
driver update, say) while CUDA works: every reading is optional.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_log = logging.getLogger("autodispatch")


@dataclass(frozen=True)
class Reading:
    """One look at a device: its SM clock in MHz and its temperature in degrees Celsius."""

    sm_clock_mhz: int
    temperature_c: int


class Nvml:
    """NVML for one device; `read` returns None where NVML cannot tell."""

    def __init__(self, uuid: str, module: Any = None) -> None:
        self._module = module
        self._handle: Any = None
        if not uuid:
            return
        try:
            if self._module is None:
                import pynvml

                self._module = pynvml
            self._module.nvmlInit()
            self._handle = self._find(uuid)
        except Exception as cause:
            _warn_once(f"{type(cause).__name__}: {cause}")

    def _find(self, uuid: str) -> Any:
        """The handle of the GPU or the MIG slice with this UUID, or None. A slice never yields its parent's."""
        for prefix in ("GPU-", "MIG-"):
            try:
                return self._module.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}")
            except self._module.NVMLError:
                continue
        return None

    def read(self) -> Reading | None:
        if self._handle is None:
            return None
        n = self._module
        try:
            return Reading(
                sm_clock_mhz=int(n.nvmlDeviceGetClockInfo(self._handle, n.NVML_CLOCK_SM)),
                temperature_c=int(n.nvmlDeviceGetTemperature(self._handle, n.NVML_TEMPERATURE_GPU)),
            )
        except Exception as cause:
            _warn_once(f"{type(cause).__name__}: {cause}")
            return None

    def busy_percent(self) -> int | None:
        """The share of the last second or less in which some kernel of anybody ran."""
        if self._handle is None:
            return None
        try:
            return int(self._module.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except Exception:  # not on every card, and not for MIG slices
            return None


@lru_cache(maxsize=1)
def _warn_once(cause: str) -> None:
    _log.warning("NVML cannot be read (%s); going on without clocks", cause)
