// What a grid knows of the one before it in the stream: programmatic dependent launch, from compute capability 9.0.
#pragma once

// A kernel of which every thread calls this before it reads or writes global memory may be launched before the grid before it
// is done: its blocks then come up while that one ends, and wait here for its results. Launched the ordinary way, and below
// 9.0, it does nothing. Reads must not go through the read-only cache, which takes memory to be constant while the kernel runs.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
