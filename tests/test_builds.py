"""Every kernel builds by NVRTC, without spills or warnings, for every architecture that is claimed."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

import pytest

from autodispatch.compiler import KernelSpec, build_without_gpu
from autodispatch.device import DeviceInfo
from autodispatch.errors import CompileError
from autodispatch.problem import ACTIVATIONS, Problem
from autodispatch.source import load, parse
from autodispatch.variants import VARIANTS
from autodispatch.variants.activation_product import activation_product_spec
from autodispatch.variants.base import KERNEL_TYPES
from tests.fakes import A100, GPUS, H200

BASE = Problem(4096, 4096, 4096, "float32", precision="tf32")
FORMS = [(dtype, layout) for dtype in ("float16", "bfloat16", "float32") for layout in ("kn", "nk")]
TEMPLATED = [n for n, v in VARIANTS.items() if v.sources and not v.is_library]


SHARES = {(7, 5): 2, (8, 0): 4, (9, 0): 3}  # of the configs, one in so many is built; elsewhere one in eight


def specs(name: str, device: DeviceInfo, *, all_forms: bool, every: bool = False) -> list[KernelSpec]:
    """The configs of a variant. Types and layouts take turns over them, unless all are asked for."""
    variant = VARIANTS[name]
    found = []
    for i, (dtype, layout) in enumerate(FORMS):
        # bfloat16 may have its intermediates rounded; with the exact forms of the others all of them are built
        problem = replace(BASE, dtype=dtype, layout=layout, math="fast" if dtype == "bfloat16" else "exact")
        some = [replace(problem, m=m) for m in (1, 2, 8, 16, 32, 64, 150, 400, BASE.m)]
        some.append(replace(problem, m=64, n=256))  # so narrow that blocks share k
        some += [replace(problem, m=m, n=(device.sm_count + 4) * 64) for m in (64, 128)]  # with a tail of few tiles
        built = (variant.spec(c.config, problem) for p in some for c in variant.candidates(p, device))  # type: ignore[attr-defined]
        instances = list(dict.fromkeys(built))
        usable = [f for f in FORMS if not variant.unmet(replace(BASE, m=1, dtype=f[0], layout=f[1]), device)]
        found += [s for j, s in enumerate(instances) if all_forms or usable[j % len(usable)] == FORMS[i]]
    found = list(dict.fromkeys(found))
    share = SHARES.get(device.compute_capability, 8)
    shared_k = [s for s in found if dict(s.values).get("ClusterK", 1) > 1]
    tails = [s for s in found if dict(s.values).get("TailM", 0)]
    return found if every else list(dict.fromkeys((*found[::share], *shared_k[::2], *tails[::2])))


def assert_builds_cleanly(all_specs: list[KernelSpec], device: DeviceInfo) -> None:
    assert all_specs
    with ThreadPoolExecutor(2) as pool:
        builds = pool.map(lambda s: build_without_gpu(s, device.compute_capability), all_specs)
        for spec, build in zip(all_specs, builds, strict=True):
            assert build.cubin.startswith(b"\x7fELF"), spec.expression
            assert build.resources.spill_bytes == 0, spec.expression
            assert 0 < build.resources.registers <= 255, spec.expression
            # C75xx: ptxas had to serialise wgmma
            assert not re.search(r"warning|\(C75\d\d\)", build.log, re.IGNORECASE), f"{spec.expression}: {build.log}"


@pytest.mark.parametrize("device", GPUS, ids=lambda d: "sm_{}{}".format(*d.compute_capability))
@pytest.mark.parametrize("name", TEMPLATED)
def test_configs_build_on_every_architecture(name: str, device: DeviceInfo, pytestconfig: pytest.Config) -> None:
    every = pytestconfig.getoption("--all-builds")
    if not any(not VARIANTS[name].unmet(replace(BASE, m=1, dtype=dtype), device) for dtype, _ in FORMS):
        assert "wgmma" in name or (name, device.compute_capability) == ("fused_decode", (7, 5))
        assert not specs(name, device, all_forms=False)
        return
    assert_builds_cleanly(specs(name, device, all_forms=False, every=every), device)


@pytest.mark.parametrize("name", ["fused_simt", "split_simt"])
def test_every_type_and_layout_builds(name: str) -> None:
    assert_builds_cleanly(specs(name, A100, all_forms=True), A100)


@pytest.mark.parametrize("device", GPUS, ids=lambda d: "sm_{}{}".format(*d.compute_capability))
def test_the_activation_product_builds_in_every_form(device: DeviceInfo) -> None:
    found = {
        activation_product_spec(replace(BASE, dtype=dtype, alignment=alignment), intermediate)
        for dtype in ("float16", "bfloat16", "float32")
        for alignment in (4, 16)
        for intermediate in ("float32", "bfloat16")
        if intermediate == "float32" or dtype == "bfloat16"
    }
    assert len(found) == 8
    activations = {
        activation_product_spec(replace(BASE, dtype=dtype, activation=activation, math=math), "float32")
        for activation in ACTIVATIONS
        for dtype, math in (("float16", "exact"), ("float32", "exact"), ("float32", "fast"))
    }
    shares = {
        activation_product_spec(replace(BASE, dtype=dtype), "float32", partials)
        for dtype in ("float16", "float32")
        for partials in (2, 4, 8)
    }
    assert_builds_cleanly(sorted(found | activations | shares, key=lambda s: s.expression), device)


@pytest.mark.parametrize("device", GPUS, ids=lambda d: "sm_{}{}".format(*d.compute_capability))
def test_the_check_builds_for_every_type(device: DeviceInfo) -> None:
    assert_builds_cleanly([KernelSpec(load("compare"), (("T", t),)) for t in KERNEL_TYPES.values()], device)


def disassembled(cubin: bytes, folder: Path) -> str:
    tool = next(f for f in files("nvidia-cuda-nvdisasm") or () if f.stem == "nvdisasm").locate()
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize(("name", "every"), [("fused_decode", 35), ("fused_mma", 12)])
def test_no_copy_is_an_instruction_that_hopper_refuses(name: str, every: int, layout: str, tmp_path: Path) -> None:
    problems = [Problem(m, 8960, 1536, "bfloat16", layout) for m in (8, 33, 128, 512)]
    if name == "fused_decode":  # which also copies rows that are not at multiples of 16 bytes
        problems += [Problem(33, 65, 47, "float16", layout, alignment) for alignment in (2, 4, 8, 16)]
    variant = VARIANTS[name]
    chosen = [(c, p) for p in problems for c in list(variant.candidates(p, H200))[::every]]
    found = dict.fromkeys(variant.spec(c.config, p) for c, p in chosen)  # type: ignore[attr-defined]
    assert len(found) >= 8, len(found)
    copies = 0
    for spec in found:
        code = disassembled(build_without_gpu(spec, (9, 0)).cubin, tmp_path)
        copies += code.count("LDGSTS")
        # a descriptor is a pair of uniform registers and begins at an even one; ptxas 13.0 has made others
        assert not re.search(r"desc\[UR\d*[13579]\]", code), spec.expression
    assert copies


WAITING = ["fused_wgmma", "fused_wgmma_small", "fused_decode", "fused_gemv"]  # for the grid before them


def test_the_kernels_that_wait_are_known() -> None:
    assert {n for n in TEMPLATED if load(n).waits} == set(WAITING)


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("name", WAITING)
def test_a_kernel_that_waits_touches_nothing_before_and_reads_nothing_as_constant(name: str, layout: str) -> None:
    problems = [Problem(1, 4096, 4096, "bfloat16", layout)]
    if name == "fused_gemv":
        problems.append(Problem(1, 4096, 4096, "float32", layout))
    if name == "fused_decode":
        problems.append(Problem(64, 256, 4096, "bfloat16", layout))  # for kn in clusters
    for problem in problems:
        candidates = VARIANTS[name].candidates(problem, H200)
        candidate = max(candidates, key=lambda c: getattr(c.config, "cluster_k", 1))
        spec = VARIANTS[name].spec(candidate.config, problem)
        ptx = build_without_gpu(spec, (9, 0)).ptx
        assert ptx.count("griddepcontrol.wait;") == 1
        assert ".nc." not in ptx
        before = ptx.partition("griddepcontrol.wait;")[0].partition(".entry")[2]
        assert not re.findall(r"\b(?:ld|st|red|atom)\.(?!param|shared)\S*|\bcp\.async\S*", before)
    if not spec.architecture_features:
        older = VARIANTS[name].spec(VARIANTS[name].default(problems[0], A100), problems[0])
        assert "griddepcontrol" not in build_without_gpu(older, A100.compute_capability).ptx


def test_a_failed_build_carries_expression_options_and_log() -> None:
    broken = parse("broken", "template <int Value>\n__global__ void broken(int* out) { out[0] = missing; }")
    with pytest.raises(CompileError) as error:
        build_without_gpu(KernelSpec(broken, (("Value", 1),)), (8, 0))
    assert error.value.expression == "broken<1>"
    assert "-std=c++17" in error.value.options
    assert "missing" in error.value.log
    assert "broken must build for sm_80" in str(error.value)


def test_architecture_specific_code_builds_only_with_its_features() -> None:
    text = 'template <int Value>\n__global__ void fence(int* out) { asm volatile("wgmma.fence.sync.aligned;"); }'
    spec = KernelSpec(parse("fence", text), (("Value", 1),), architecture_features=True)
    assert "-arch=sm_90a" in spec.options((9, 0))
    assert build_without_gpu(spec, (9, 0)).resources.spill_bytes == 0
    with pytest.raises(CompileError, match="must build for sm_90"):
        build_without_gpu(replace(spec, architecture_features=False), (9, 0))


def test_options_are_separate_words_whatever_the_path_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from pathlib import Path

    from autodispatch import compiler

    folder = Path(str(tmp_path)) / "Zoë 空 x" / "include"
    monkeypatch.setattr(compiler, "include_folder", lambda: folder)
    options = KernelSpec(load("fused_simt"), ()).options((8, 0))
    assert f"-I{folder}" in options
