"""Kernel sources: text, included headers, digest, template parameters and signature, read from the `.cu` file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autodispatch import resources

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
# template <...> __global__ void [__launch_bounds__(...)] name(...): the last parenthesis of the head is the signature
_KERNEL = re.compile(r"template\s*<([^>]*)>\s*__global__\s+void\s+(.*?)\{", re.DOTALL)


@dataclass(frozen=True)
class KernelSource:
    """One `.cu` file with one templated kernel of the same name.

    Attributes:
        name: stem of the file and name of the kernel.
        text: the file.
        headers: the files it includes, directly or not, by their path below `include`.
        parameters: names of the template parameters, in order.
        arguments: C types of the kernel's parameters, in order.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
    parameters: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the text and every header, so that no edit goes unnoticed."""
        h = hashlib.sha256(self.text.encode())
        for name, text in self.headers:
            h.update(b"\0" + name.encode() + b"\0" + text.encode())
        return h.hexdigest()

    @property
    def waits(self) -> bool:
        """Whether the kernel itself waits for the grid before it; see kernels/include/autodispatch/grid.cuh."""
        return "wait_for_previous_grid();" in self.text

    @property
    def code(self) -> str:
        """What is compiled: the text, led by the digest, since CuPy's cache does not look into headers."""
        return f"// {self.name} {self.digest}\n{self.text}"

    def expression(self, values: Mapping[str, object]) -> str:
        """The template instance for values given by parameter name, `fused_mma<f16, silu, ...>`.

        Raises ValueError if a parameter has no value or a value no parameter.
        """
        if set(values) != set(self.parameters):
            missing = [p for p in self.parameters if p not in values]
            unknown = [v for v in values if v not in self.parameters]
            raise ValueError(f"{self.name} takes {', '.join(self.parameters)} (missing {missing}, unknown {unknown})")
        return f"{self.name}<{', '.join(str(values[p]) for p in self.parameters)}>"


def include_folder() -> Path:
    return resources.kernels() / "include"


@cache
def load(name: str) -> KernelSource:
    """The kernel source of this name. Raises FileNotFoundError, or ValueError for a file not of the expected form."""
    text = (resources.kernels() / f"{name}.cu").read_text(encoding="utf-8")
    return parse(name, text, _headers(text))


def parse(name: str, text: str, headers: tuple[tuple[str, str], ...] = ()) -> KernelSource:
    """A KernelSource out of its text; see `load`."""
    found = _KERNEL.search(text)
    if not found or not re.search(rf"\b{name}\s*\(", found.group(2)):
        raise ValueError(f"{name}.cu must hold 'template <...> __global__ void {name}(...)'")
    parameters = tuple(p.split()[-1] for p in found.group(1).split(","))
    signature = found.group(2)[found.group(2).index(f"{name}(") + len(name) + 1 : found.group(2).rindex(")")]
    return KernelSource(name, text, headers, parameters, tuple(_type(a) for a in signature.split(",")))


def camel_to_snake(name: str) -> str:
    """`TileM` in CUDA is `tile_m` in Python."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = (include_folder() / name).read_text(encoding="utf-8")
            pending += _INCLUDE.findall(found[name])
    return tuple(sorted(found.items()))


def _type(argument: str) -> str:
    words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", "", argument).replace("*", " * ").split()
    return " ".join(words[:-1]).replace(" *", "*")
