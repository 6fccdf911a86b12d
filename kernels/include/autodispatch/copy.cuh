// Copies from global to shared memory, 16 bytes at a time: asynchronous from compute capability 8.0, through
// registers below it. The tail past the valid bytes is filled with zeros and never read.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies `valid` bytes (0 to 16, a multiple of 2) and clears the rest. Both addresses are 16-byte aligned; the
// source is not touched where `valid` is 0.
__device__ __forceinline__ void copy_16(void* shared, const void* global, int valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
               : "memory");
#else
  uint4 data = {0u, 0u, 0u, 0u};
  if (valid == 16) {
    data = *static_cast<const uint4*>(global);
  } else {
    const unsigned short* halves = static_cast<const unsigned short*>(global);
    unsigned* words = &data.x;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (2 * i < valid) words[i / 2] |= static_cast<unsigned>(halves[i]) << (16 * (i % 2));
    }
  }
  *static_cast<uint4*>(shared) = data;
#endif
}

__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `Pending` of the committed groups are still under way.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}
