"""The registry: every variant, by name. To add one, write its module and list it here."""

from __future__ import annotations

from collections.abc import Iterator

from autodispatch.device import DeviceInfo
from autodispatch.problem import Problem
from autodispatch.variants.base import Call, Candidate, Executable, Variant
from autodispatch.variants.cpu import CpuFused, CpuSplit
from autodispatch.variants.fused_decode import FusedDecode
from autodispatch.variants.fused_gemv import FusedGemv
from autodispatch.variants.fused_mma import FusedMma
from autodispatch.variants.fused_simt import FusedSimt
from autodispatch.variants.fused_wgmma import FusedWgmma
from autodispatch.variants.fused_wgmma_small import FusedWgmmaSmall
from autodispatch.variants.split_cublas import SplitCublas
from autodispatch.variants.split_mma import SplitMma
from autodispatch.variants.split_simt import SplitSimt
from autodispatch.variants.split_wgmma import SplitWgmma

VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        FusedWgmma(),
        FusedWgmmaSmall(),
        FusedDecode(),
        FusedGemv(),
        SplitWgmma(),
        FusedMma(),
        SplitMma(),
        FusedSimt(),
        SplitSimt(),
        SplitCublas(),
        CpuFused(),
        CpuSplit(),
    )
}


class Registry:
    """A set of variants to choose from; tests make their own."""

    def __init__(self, variants: dict[str, Variant] | None = None) -> None:
        self.variants = dict(VARIANTS if variants is None else variants)

    def candidates(self, problem: Problem, device: DeviceInfo) -> Iterator[Candidate]:
        """Every legal candidate for the problem on the device."""
        for variant in self.variants.values():
            yield from variant.candidates(problem, device)

    def defaults(self, problem: Problem, device: DeviceInfo) -> list[Candidate]:
        """The default candidate of each variant that can serve the problem."""
        found = (v.candidate(problem, device) for v in self.variants.values())
        return [c for c in found if c is not None]

    def library(self, problem: Problem, device: DeviceInfo) -> Candidate | None:
        """The candidate of last resort, if its requirements hold."""
        return next((c for c in self.defaults(problem, device) if c.variant.is_library), None)

    def parse(self, variant: str, config: str | None = None) -> Candidate:
        """The candidate of a stored name and config. Raises ValueError for what this version does not know."""
        if variant not in self.variants:
            raise ValueError(f"variant must be one of {', '.join(self.variants)} (got {variant!r})")
        found = self.variants[variant]
        return Candidate(found, found.space.parse(config if config is not None else "{}"))


__all__ = ["VARIANTS", "Call", "Candidate", "Executable", "Registry", "Variant"]
