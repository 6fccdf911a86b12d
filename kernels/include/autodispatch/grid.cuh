// What a grid knows of the one before it in the stream: programmatic dependent launch, from compute capability 9.0.
#pragma once

// A kernel that calls this first may be launched before the grid before it is done: its blocks then come up while the results
// of that one, and of all before it, are written back, and wait here for them. Launched the ordinary way, and below 9.0, it
// does nothing. Reads must not go through the read-only cache, which takes memory to be constant while the kernel runs.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
