"""Kernel sources: what Python reads off a `.cu` file is what the file says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from autodispatch import launch, resources, source
from autodispatch.problem import Problem
from autodispatch.variants import VARIANTS
from autodispatch.variants.activation_product import activation_product_spec
from tests.fakes import H200

KERNELS = sorted(p.stem for p in resources.kernels().glob("*.cu"))


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_file_holds_one_template_and_opens_with_its_formula(name: str) -> None:
    found = source.load(name)
    assert len(set(found.parameters)) == len(found.parameters) > 0
    head = found.text.split("#include")[0]
    assert all(line.startswith("//") for line in head.strip().splitlines())
    assert len(head.strip().splitlines()) <= 15
    assert "Shared memory:" in head
    assert "asm" not in found.text


def test_every_kernel_is_launched_by_a_variant_or_the_check_and_every_source_exists() -> None:
    used = {name for v in VARIANTS.values() for name in v.sources}
    assert used | {"compare"} == set(KERNELS)


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.sources and not v.is_library])
def test_template_values_cover_the_parameters_in_both_directions(name: str) -> None:
    variant = VARIANTS[name]
    problem = Problem(64, 64, 64, "float16")
    for config in variant.space.legal(problem, H200):
        spec = variant.spec(config, problem)  # type: ignore[attr-defined]
        assert set(dict(spec.values)) == set(spec.source.parameters)
        by_name = {source.camel_to_snake(p): value for p, value in spec.values}
        for tunable, value in config.__dict__.items():
            if tunable not in ("split_k", "intermediate"):  # which the kernel takes as its grid, and as C
                assert by_name[tunable] == value
    assert set(dict(activation_product_spec(problem, "float32").values)) == set(
        source.load("activation_product").parameters
    )


def test_a_missing_or_unknown_template_value_is_refused() -> None:
    kernel = source.load("fused_simt")
    with pytest.raises(ValueError, match=r"missing .*'TileM'.*unknown .*'TileX'"):
        kernel.expression({"TileX": 1})


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_parameters_are_pointers_and_64_bit_sizes_only(name: str) -> None:
    types = source.load(name).arguments
    pointers = {"T*", "C*", "float*"} if name != "compare" else {"T*", "int*", "double*"}
    assert set(types) <= {*pointers, "long long", "TensorMap"}
    assert launch.pointer(2**63).dtype == np.uint64
    assert launch.size(2**31 + 1).dtype == np.int64


@pytest.mark.parametrize(
    "name",
    [
        "fused_decode",
        "fused_gemv",
        "fused_mma",
        "fused_simt",
        "fused_wgmma",
        "fused_wgmma_small",
        "split_mma",
        "split_simt",
        "split_wgmma",
        "activation_product",
    ],
)
def test_argument_tuples_match_the_signatures(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from autodispatch.compiler import CompiledKernel, Resources
    from autodispatch.problem import Matrix, Operands
    from autodispatch.variants import base, wgmma
    from autodispatch.variants.executables import OneKernelExecutable

    launched: list[tuple[str, tuple[object, ...]]] = []

    def fake(spec: object, device: object, shared: int = 0) -> CompiledKernel:
        kernel = spec.source.name  # type: ignore[attr-defined]
        return CompiledKernel(
            lambda grid, block, arguments, shared_mem, stream: launched.append((kernel, arguments)),
            Resources(32, 0, 0),
            kernel,
        )

    for module in ("activation_product", "executables", "split_wgmma"):
        monkeypatch.setattr(f"autodispatch.variants.{module}.compile_kernel", fake)
    encoded = np.zeros(128, np.uint8).view("V128")
    monkeypatch.setattr(wgmma, "tensor_map", lambda *_: encoded)
    problem = Problem(1 if name == "fused_gemv" else 64, 64, 64, "float16")
    variant = VARIANTS[name if name != "activation_product" else "split_simt"]
    x = Matrix(4096, 64, 64, 64, 1, "float16", 0, None)
    candidate = variant.candidate(problem, H200)
    assert candidate is not None
    executable, operands = candidate.executable(problem, H200), Operands(x, x, x, x)
    if isinstance(executable, OneKernelExecutable):
        arguments = executable.arguments(operands)
    else:
        executable(base.Call(operands, 8192, None))
        arguments = dict(launched)[name]
    dtypes = {"long long": np.dtype(np.int64), "TensorMap": np.dtype("V128")}
    expected = [dtypes.get(t, np.dtype(np.uint64)) for t in source.load(name).arguments]
    assert [a.dtype for a in arguments] == expected  # type: ignore[attr-defined]


def test_the_digest_covers_the_text_and_every_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = source.load("fused_mma")
    assert {n for n, _ in original.headers} >= {"autodispatch/activation.cuh", "autodispatch/copy.cuh"}
    assert original.digest in original.code
    changed = source.parse("fused_mma", original.text + "\n", original.headers)
    assert changed.digest != original.digest
    for i, (name, text) in enumerate(original.headers):
        headers = (*original.headers[:i], (name, text + " "), *original.headers[i + 1 :])
        assert source.parse("fused_mma", original.text, headers).digest != original.digest


def test_ptx_stands_in_headers_that_are_named_by_role() -> None:
    with_ptx = {
        p.stem for p in (source.include_folder() / "autodispatch").glob("*.cuh") if re.search(r"\basm\b", p.read_text())
    }
    assert with_ptx == {"types", "copy", "tile_copy", "mma", "barrier", "cluster", "grid", "tma", "vector", "wgmma"}


def test_kernels_need_no_header_of_a_toolkit() -> None:
    files = [*resources.kernels().glob("*.cu"), *(source.include_folder() / "autodispatch").glob("*.cuh")]
    includes = {i for f in files for i in re.findall(r"#\s*include\s+(\S+)", f.read_text())}
    assert all(i.startswith('"autodispatch/') for i in includes), includes


def test_kernels_are_found_as_package_resources() -> None:
    import autodispatch.kernels
    import autodispatch.tuning_db

    assert resources.kernels() == Path(autodispatch.kernels.__path__[0]).resolve()
    assert resources.schema().is_file()
    assert autodispatch.tuning_db.__doc__
