"""split_cublas: two library products, then the activation product. It serves every problem, and is the last resort."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch import cublas
from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo, is_capturing
from autodispatch.errors import LaunchError
from autodispatch.launch import ceil_div, round_up
from autodispatch.problem import Problem
from autodispatch.variants.activation_product import ActivationProduct, Intermediate, intermediate_dtypes
from autodispatch.variants.base import SPLIT, Call, Executable, Unit, Variant, Work


@dataclass(frozen=True)
class CublasConfig(Config):
    """Tunables of split_cublas; `intermediate` is the type of c1 and c2."""

    intermediate: str


class SplitCublas(Variant):
    name = "split_cublas"
    path = SPLIT
    kind = "cuda"
    space = ConfigSpace(
        CublasConfig,
        {"intermediate": ("float32", "bfloat16")},
        (
            Restriction(
                lambda c, p, d: c.intermediate in intermediate_dtypes(p), 'math="fast" for bfloat16 intermediates'
            ),
        ),
    )
    requirements = (
        Restriction(
            lambda c, p, d: p.dtype != "bfloat16" or d.compute_capability >= (8, 0),
            "compute capability 8.0 for bfloat16",
        ),
    )
    sources = ("activation_product",)
    is_library = True

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return CublasConfig("float32")

    def work(self, config: CublasConfig, problem: Problem) -> Work:
        tile_m = 64 if problem.m <= 64 else 128  # cuBLAS picks its own tiles; these are typical
        blocks = 2 * ceil_div(problem.m, tile_m) * ceil_div(problem.n, 128)
        return Work(Unit.LIBRARY, blocks, tile_m, 128, 1, 256, 96 << 10, 3)

    def workspace_bytes(self, config: CublasConfig, problem: Problem) -> int:
        return Intermediate(problem, config.intermediate).total_bytes

    def executable(self, config: CublasConfig, problem: Problem, device: DeviceInfo) -> Executable:
        return _SplitCublas(config, problem, device)


class _SplitCublas(Executable):
    def __init__(self, config: CublasConfig, problem: Problem, device: DeviceInfo) -> None:
        self._device = device
        self._layout = problem.layout
        self._tf32 = problem.precision == "tf32"
        self._intermediate = Intermediate(problem, config.intermediate)
        self._activation_product = ActivationProduct(problem, device, self._intermediate)
        self._scratch = round_up(self._intermediate.total_bytes, 256)
        self.workspace_bytes = self._scratch + cublas.workspace_bytes(device)

    def prepare(self) -> None:
        cublas.handle(self._device)

    def __call__(self, call: Call) -> None:
        a, b1, b2, out = call.operands
        c = self._intermediate
        if not cublas.has_handle(self._device) and is_capturing(call.stream.ptr):
            raise LaunchError(
                "a thread's first cuBLAS call must be made outside CUDA graph capture (got a capturing stream)"
            )
        for b, address in ((b1, call.workspace), (b2, call.workspace + c.matrix_bytes)):
            cublas.product(
                self._device,
                call.stream.ptr,
                call.workspace + self._scratch,
                a,
                b,
                self._layout,
                address,
                c.dtype,
                c.leading_dimension,
                tf32=self._tf32,
            )
        self._activation_product(call.workspace, out, call.stream)
