"""Options that several commands have, and what they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autodispatch import shapes
from autodispatch.device import DeviceInfo, cpu_device, cuda_device, default_device
from autodispatch.problem import ACTIVATIONS, Problem
from autodispatch.settings import Settings

Shapes = Annotated[list[str] | None, typer.Argument(metavar="M,N,K...", help="Shapes: out is M x N, a is M x K.")]
Ms = Annotated[str | None, typer.Option("--m", help="Values of M, as 1,16,128; with --n and --k or --hf-config.")]
N = Annotated[int | None, typer.Option("--n", min=1, help="N for the values of --m.")]
K = Annotated[int | None, typer.Option("--k", min=1, help="K for the values of --m.")]
ShapesFile = Annotated[Path | None, typer.Option("--shapes", help="A file of M,N,K, one a line; # begins a comment.")]
HfConfig = Annotated[Path | None, typer.Option("--hf-config", help="A Hugging Face config.json to read N and K from.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32, float16 or bfloat16; may be repeated.")]
Layouts = Annotated[list[str] | None, typer.Option("--layout", help="kn or nk; may be repeated.")]
Activation = Annotated[
    str | None,
    typer.Option("--activation", help=f"{', '.join(ACTIVATIONS)}; default that of --hf-config, or silu."),
]
Math = Annotated[str, typer.Option("--math", help="exact, or fast to allow bfloat16 intermediates and approximations.")]
Precision = Annotated[str, typer.Option("--precision", help="ieee, or tf32 to allow it for float32.")]
Alignment = Annotated[
    int | None, typer.Option("--alignment", help="Bytes that divide pointers and rows; default that of packed arrays.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda:INDEX.")]
Database = Annotated[Path | None, typer.Option("--database", help="The tuning database; default $AUTODISPATCH_DB.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Effort = Annotated[str, typer.Option("--effort", help="quick tries likely winners, full all that may win.")]


def problems_of(
    device: DeviceInfo,
    shape: list[str] | None,
    shapes_file: Path | None,
    ms: str | None,
    n: int | None,
    k: int | None,
    hf_config: Path | None,
    dtypes: list[str] | None,
    layouts: list[str] | None,
    activation: str | None,
    math: str,
    precision: str,
    alignment: int | None,
) -> list[Problem]:
    """The problems that the options name. Raises BadParameter."""
    try:
        found = [shapes.parse_shape(s) for s in shape or []]
        if shapes_file is not None:
            found += shapes.from_file(shapes_file)
        if hf_config is not None:
            n, k, activation = shapes.from_hf_config(hf_config, activation)
        if ms is not None or hf_config is not None:
            if n is None or k is None:
                raise ValueError("--m must come with --n and --k, or with --hf-config")
            found += [(m, n, k) for m in (shapes.parse_sizes(ms) if ms else shapes.LADDER)]
        if not found:
            raise ValueError("give shapes as M,N,K, or --m with --n and --k, or --hf-config, or --shapes")
        default = "float32" if device.kind == "cpu" else "bfloat16"
        names = (activation or ACTIVATIONS[0], math, precision)
        return shapes.problems(found, dtypes or [default], layouts or ["kn"], *names, alignment)
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause


def device_of(name: str) -> DeviceInfo:
    if name == "auto":
        return default_device()
    if name == "cpu":
        return cpu_device()
    if name.startswith("cuda:") and name[5:].isdigit():
        return cuda_device(int(name[5:]))
    raise typer.BadParameter(f"must be auto, cpu or cuda:INDEX (got {name!r})", param_hint="--device")


def settings_of(database: Path | None) -> Settings:
    try:
        settings = Settings.from_environment()
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause
    return settings if database is None else replace(settings, database=database)
