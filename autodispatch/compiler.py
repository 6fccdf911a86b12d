"""Source and template values to a loaded kernel through CuPy's RawModule; through NVRTC alone where there is no GPU."""

from __future__ import annotations

import io
import logging
import re
import threading
from dataclasses import dataclass
from typing import Any

from autodispatch.device import DeviceInfo, import_cupy, on_device
from autodispatch.driver import PackedLaunch, launch_kernel
from autodispatch.errors import CompileError
from autodispatch.launch import LaunchConfig
from autodispatch.settings import keep_kernels_in_memory
from autodispatch.source import KernelSource, include_folder

_log = logging.getLogger("autodispatch")


@dataclass(frozen=True)
class KernelSpec:
    """One instance of a kernel template.

    Attributes:
        source: the file.
        values: the template arguments by parameter name.
        architecture_features: compile for the architecture itself with its specific features, as `sm_90a`; code that
            uses wgmma, setmaxnreg or the like needs it.
    """

    source: KernelSource
    values: tuple[tuple[str, object], ...]
    architecture_features: bool = False

    @property
    def expression(self) -> str:
        return self.source.expression(dict(self.values))

    def options(self, compute_capability: tuple[int, int]) -> tuple[str, ...]:
        """The compiler's options, each one element, so that blanks in a path do no harm.

        `-arch` is there only where the variant asks for it: RawModule appends the device's own architecture, and NVRTC
        from 12.9 on keeps the features of a preceding `sm_90a`.
        """
        arch = (f"-arch={architecture(compute_capability)}a",) if self.architecture_features else ()
        return ("-std=c++17", f"-I{include_folder()}", *arch)


@dataclass(frozen=True)
class Resources:
    """What a built kernel uses: registers per thread, spilled bytes per thread, static shared memory in bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel loaded on one device."""

    function: Any
    resources: Resources
    expression: str

    def __call__(self, launch: LaunchConfig, arguments: tuple[Any, ...], stream: Any) -> None:
        if launch.programmatic:
            packed = self.pack(launch, arguments, stream.ptr)
            if launch_kernel()(*packed.addresses, None) == 0:
                return
        # CuPy's own launch, which also says what is wrong with one that failed
        self.function(
            (*launch.grid, 1), (launch.threads, 1, 1), arguments, shared_mem=launch.shared_bytes, stream=stream
        )

    def pack(self, launch: LaunchConfig, arguments: tuple[Any, ...], stream: int) -> PackedLaunch:
        """The same launch, ready to be repeated on a stream."""
        function = getattr(self.function, "kernel", self.function)  # of a RawKernel, or the function itself
        return PackedLaunch(function.ptr, launch, arguments, stream)


def architecture(compute_capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*compute_capability)


_kernels: dict[tuple[int | None, KernelSpec, int], CompiledKernel] = {}
_kernels_lock = threading.Lock()


def compile_kernel(spec: KernelSpec, device: DeviceInfo, shared_bytes: int = 0) -> CompiledKernel:
    """The kernel, built or taken from CuPy's cache, loaded on the device, and allowed `shared_bytes` of dynamic shared
    memory.

    Raises CompileError with log, options and expression; a register spill counts as a failed build.
    """
    key = (device.index, spec, shared_bytes)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _build(spec, device, shared_bytes)
        with _kernels_lock:
            kernel = _kernels.setdefault(key, kernel)
    return kernel


def number_of_kernels() -> int:
    """How many kernels this process has built, or taken from the cache on disk, so far."""
    return len(_kernels)


def _build(spec: KernelSpec, device: DeviceInfo, shared_bytes: int) -> CompiledKernel:
    cupy = import_cupy()
    check_architecture(device, cupy.cuda.nvrtc.getSupportedArchs())
    expression = spec.expression
    options = spec.options(device.compute_capability)
    log = io.StringIO()
    try:
        with on_device(device.index):
            module = _module(cupy, spec.source.code, options, expression, log)
            kernel = module.get_function(expression)
            if shared_bytes > 0:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
            resources = Resources(kernel.num_regs, kernel.local_size_bytes, kernel.shared_size_bytes)
            function = kernel.kernel
    except Exception as cause:
        text = log.getvalue() or str(cause)
        raise CompileError(
            f"{spec.source.name} must build for {device.name} (got {type(cause).__name__})",
            log=text,
            expression=expression,
            options=options,
        ) from cause
    if resources.spill_bytes:
        raise CompileError(
            f"{spec.source.name} must not spill registers (got {resources.spill_bytes} bytes per thread)",
            log=log.getvalue(),
            expression=expression,
            options=options,
        )
    return CompiledKernel(function, resources, expression)


def _module(cupy: Any, code: str, options: tuple[str, ...], expression: str, log: io.StringIO) -> Any:
    """The compiled module; where CuPy's cache cannot be read or written after all, once more without it."""
    module = cupy.RawModule(code=code, options=options, name_expressions=[expression])
    try:
        module.compile(log_stream=log)
    except OSError as cause:
        _log.warning("the kernel cache cannot be used (%s); kernels are compiled in every process", cause)
        keep_kernels_in_memory()
        module = cupy.RawModule(code=code, options=options, name_expressions=[expression])
        module.compile(log_stream=log)
    return module


def check_architecture(device: DeviceInfo, supported: list[int]) -> None:
    """Raises CompileError if this NVRTC knows no code for the device: too old a card, or too old an NVRTC."""
    major, minor = device.compute_capability
    if 10 * major + minor in supported:
        return
    raise CompileError(
        f"the compute capability must be one that NVRTC {'.'.join(map(str, device.nvrtc_version))} "
        f"({nvrtc_file()}) builds for: {', '.join(f'{x // 10}.{x % 10}' for x in supported)} "
        f"(got {major}.{minor}, {device.name}); install the CuPy extra of a CUDA version that knows the card"
    )


def nvrtc_file() -> str:
    """The path of the NVRTC library in use; empty if it cannot be told."""
    try:
        from cuda import pathfinder

        return str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except Exception:
        return ""


@dataclass(frozen=True)
class Build:
    """What NVRTC made without a GPU: the machine code, its PTX, the log, and what ptxas reported."""

    cubin: bytes
    ptx: str
    log: str
    resources: Resources


def build_without_gpu(spec: KernelSpec, compute_capability: tuple[int, int]) -> Build:
    """Builds the same source with the same options as `compile_kernel` for any architecture; loads nothing.

    Needs cuda-bindings and an NVRTC. Raises CompileError.
    """
    from cuda.bindings import nvrtc

    options = spec.options(compute_capability)
    if not spec.architecture_features:
        options += (f"-arch={architecture(compute_capability)}",)
    # the rest of what CuPy passes, and ptxas's report
    options += ("-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v")
    expression = spec.expression
    _, program = nvrtc.nvrtcCreateProgram(spec.source.code.encode(), f"{spec.source.name}.cu".encode(), 0, [], [])
    try:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            name = architecture(compute_capability)
            raise CompileError(
                f"{spec.source.name} must build for {name} (got {status})",
                log=log,
                expression=expression,
                options=options,
            )
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Build(cubin, ptx, log.strip("\0"), _resources(log))


def _read(size: Any, content: Any, program: Any) -> bytes:
    _, n = size(program)
    buffer: bytes = b" " * n
    content(program, buffer)
    return buffer


def _resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, log))

    return Resources(number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem"))
