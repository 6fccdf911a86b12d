"""Variant, Candidate and Executable: the protocol behind which every implementation of the operation stands."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from autodispatch.compiler import KernelSpec, Resources
from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.driver import PackedLaunch
from autodispatch.errors import UnsupportedProblemError
from autodispatch.problem import Operands, Problem
from autodispatch.source import KernelSource, camel_to_snake, load

SPLIT, FUSED = "split", "fused"
KERNEL_TYPES = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}  # in kernels/include/autodispatch/types.cuh


def activation_type(problem: Problem) -> str:
    """The struct of kernels/include/autodispatch/activation.cuh that a problem asks for; the approximation where the
    exact form is another."""
    approximate = problem.math == "fast" and problem.dtype == "float32" and problem.activation != "relu"
    return f"fast<{problem.activation}>" if approximate else problem.activation


class Call(NamedTuple):
    """What an executable works on: the operands, scratch memory of the size it asked for, and the stream."""

    operands: Operands
    workspace: int
    stream: Any


class Unit(Enum):
    """What the products run on."""

    WGMMA = "tensor cores by wgmma, stores overlapped"
    WGMMA_COOPERATIVE = "tensor cores by wgmma, stores between the tiles"
    WGMMA_SMALL = "tensor cores by wgmma, several blocks per SM"
    TENSOR = "tensor cores by mma.sync"
    DECODE = "tensor cores by mma.sync, streaming the weights"
    GEMV = "fp32 units, streaming the weights"
    FP32 = "fp32 units"
    LIBRARY = "the library's choice"
    CPU = "the processor"


class Work(NamedTuple):
    """How a candidate cuts the products: `blocks` of tile_m x tile_n outputs, each for `products` of the two.

    A block goes through k in `steps`, of `step_bytes` each, and reads the weights in contiguous pieces of `row_bytes`;
    0 steps and whole lines where nothing is known. `loaded_n` are the columns it reads, where these are more than
    tile_n; `stages` are those of its ring, and `sharers` the blocks that share a tile's k. Warps that have one product
    each are `apart`, and trade. `registers` of a thread, where known; else they are estimated from its outputs. Where
    the blocks beyond whole rounds are cut into small ones, `blocks` counts them as if whole, and `tail` is the share
    of a round that they take.
    """

    unit: Unit
    blocks: int
    tile_m: int
    tile_n: int
    products: int
    threads: int
    shared_bytes: int
    launches: int
    steps: int = 0
    row_bytes: int = 128
    loaded_n: int = 0
    stages: int = 0
    sharers: int = 1
    step_bytes: int = 128
    apart: bool = False
    tail: float = 0.0
    registers: int = 0


class Executable(ABC):
    """A candidate bound to one problem on one device: compiled, with its launch computed."""

    workspace_bytes: int = 0
    resources: Resources | None = None  # of the main kernel
    shared_bytes: int = 0  # static and dynamic, of the main kernel

    @abstractmethod
    def __call__(self, call: Call) -> None:
        """Enqueues the work on the call's stream. The device of the operands must be current."""

    def prepare(self) -> None:
        """Does ahead what a thread's first call would have to do beside launching. The device must be current."""
        return

    def pack(self, call: Call) -> PackedLaunch | None:
        """The call as a launch that can be repeated as long as its memory is there; None where it is not one launch."""
        return None


class Variant(ABC):
    """One implementation of the operation.

    Attributes:
        name: unique; also the name of its module, and of its kernel.
        path: `split` or `fused`.
        kind: the kind of device it runs on, `cuda` or `cpu`.
        space: its tunables.
        requirements: what the problem and device must fulfil, whatever the config.
        sources: names of the kernels it launches; the first is named as the variant, if it has one of its own.
        architecture_features: whether its own kernel needs instructions of one architecture alone, as wgmma.
        is_library: whether it needs no kernel of ours for the products, and so serves as the last resort.
    """

    name: str
    path: str
    kind: str
    space: ConfigSpace
    requirements: tuple[Restriction, ...] = ()
    sources: tuple[str, ...] = ()
    architecture_features: bool = False
    is_library: bool = False

    @abstractmethod
    def executable(self, config: Any, problem: Problem, device: DeviceInfo) -> Executable:
        """Compiles and binds. Raises CompileError, or UnsupportedProblemError where no launch is possible."""

    @abstractmethod
    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        """The config to start from; legal wherever the requirements hold."""

    @abstractmethod
    def work(self, config: Any, problem: Problem) -> Work:
        """What the cost model needs to know of the products."""

    def workspace_bytes(self, config: Any, problem: Problem) -> int:
        return 0

    def spec(self, config: Any, problem: Problem) -> KernelSpec:
        """The instance of the variant's own kernel, each template parameter filled by its name: `TileM` is the config's
        `tile_m`, the others come from the problem."""
        source = load(self.name)
        given = {
            "T": KERNEL_TYPES[problem.dtype],
            "C": KERNEL_TYPES[getattr(config, "intermediate", "float32")],
            "Layout": problem.layout,
            "Alignment": problem.alignment,
            "Activation": activation_type(problem),
        }
        values = {p: given[p] if p in given else getattr(config, camel_to_snake(p)) for p in source.parameters}
        return KernelSpec(source, tuple(values.items()), self.architecture_features)

    @cached_property
    def digest(self) -> str:
        """What a stored record must match: the digests of all kernels, or of the module for one without any."""
        h = hashlib.sha256()
        for source in self.kernel_sources():
            h.update(source.digest.encode())
        if not self.sources:
            h.update(inspect.getsource(inspect.getmodule(type(self)) or type(self)).encode())
        return h.hexdigest()[:16]

    def kernel_sources(self) -> tuple[KernelSource, ...]:
        return tuple(load(name) for name in self.sources)

    def unmet(self, problem: Problem, device: DeviceInfo) -> list[str]:
        """Why the variant cannot serve this problem on this device; empty if it can."""
        if device.kind != self.kind:
            return [f"runs on {self.kind} devices"]
        return [r.message for r in self.requirements if not r.holds(None, problem, device)]

    def candidates(self, problem: Problem, device: DeviceInfo) -> Iterator[Candidate]:
        """All legal candidates of this variant."""
        if not self.unmet(problem, device):
            for config in self.space.legal(problem, device):
                yield Candidate(self, config)

    def candidate(self, problem: Problem, device: DeviceInfo) -> Candidate | None:
        """The default candidate, or None where the requirements do not hold."""
        return None if self.unmet(problem, device) else Candidate(self, self.default(problem, device))


@dataclass(frozen=True)
class Candidate:
    """A variant with a config."""

    variant: Variant
    config: Config

    @property
    def key(self) -> tuple[str, str]:
        """How a candidate is stored: the variant's name and the config as JSON."""
        return self.variant.name, self.config.to_json()

    @property
    def tile(self) -> tuple[object, ...]:
        """What configs of a variant share that differ in other tunables than the tile."""
        tunables = vars(self.config)
        return self.variant.name, tunables.get("tile_m"), tunables.get("tile_n", self.config)

    def violations(self, problem: Problem, device: DeviceInfo) -> list[str]:
        """Why the candidate is not legal for the problem on the device; empty if it is."""
        return self.variant.unmet(problem, device) or self.variant.space.violations(self.config, problem, device)

    def is_legal(self, problem: Problem, device: DeviceInfo) -> bool:
        return not self.violations(problem, device)

    def check(self, problem: Problem, device: DeviceInfo) -> None:
        """Raises UnsupportedProblemError if the candidate is not legal for the problem on the device."""
        why = self.violations(problem, device)
        if why:
            raise UnsupportedProblemError(f"{self.variant.name} requires {'; '.join(why)} (got {problem})")

    def executable(self, problem: Problem, device: DeviceInfo) -> Executable:
        """See `Variant.executable`; an illegal candidate is refused first, as by `check`."""
        self.check(problem, device)
        return self.variant.executable(self.config, problem, device)

    def __str__(self) -> str:
        text = str(self.config)
        return f"{self.variant.name}({text})" if text else self.variant.name
