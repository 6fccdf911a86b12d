"""The CUDA kernels: one `.cu` file per kernel, PTX and shared parts in `include/autodispatch`."""
