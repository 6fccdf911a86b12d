// Copies from global to shared memory in chunks of 16 bytes: asynchronous from compute capability 8.0, through registers
// below it. The tail past the valid bytes is filled with zeros and never read.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// How L2 treats what a copy brings: a policy in the form that copies and the copy engine take.
using CachePolicy = unsigned long long;

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ CachePolicy policy_evict_first() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ CachePolicy policy_evict_last() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A whole chunk; the rest of its line comes into L2 with it.
__device__ __forceinline__ void copy_async_whole(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// Pieces of 4 or 8 bytes go through L1, those of 16 do not.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(Bytes),
                 "r"(valid)
                 : "memory");
  }
}

template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid, CachePolicy policy) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(Bytes), "r"(valid), "l"(policy)
                 : "memory");
  }
}
#endif

// The same policy for pieces of a line of which a neighbour wants the rest: it comes into L2 with them.
struct LinePolicy {
  CachePolicy policy;
};

#if __CUDA_ARCH__ >= 800
template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid, LinePolicy line) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid), "l"(line.policy)
                 : "memory");
  } else {
    copy_async<Bytes>(shared, global, valid, line.policy);
  }
}
#endif

// Keeps the compiler from making a product of an address that comes from repeated addition: the sum is one instruction less.
template <typename T>
__device__ __forceinline__ void keep_as_sum(T*& address) {
  asm("" : "+l"(address));
}

// The `valid` bytes (0 to 16, a multiple of 2) of a chunk, and zeros behind. The source begins at a multiple of Alignment
// bytes and is not touched past the valid bytes.
template <int Alignment>
__device__ __forceinline__ uint4 read_chunk(const void* global, int valid) {
  if (Alignment >= 16 && valid == 16) return *static_cast<const uint4*>(global);
  uint4 data = {0u, 0u, 0u, 0u};
  const unsigned short* halves = static_cast<const unsigned short*>(global);
  unsigned* words = &data.x;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (2 * i < valid) words[i / 2] |= static_cast<unsigned>(halves[i]) << (16 * (i % 2));
  }
  return data;
}

// Copies a chunk, asynchronously where the architecture and the alignment allow it.
template <int Alignment, typename... Policy>
__device__ __forceinline__ void copy_chunk(void* shared, const void* global, int valid, Policy... policy) {
#if __CUDA_ARCH__ >= 800
  if constexpr (Alignment >= 4) {
    constexpr int Bytes = Alignment < 16 ? Alignment : 16;
#pragma unroll
    for (int i = 0; i < 16; i += Bytes) {
      const int left = valid - i < 0 ? 0 : valid - i < Bytes ? valid - i : Bytes;
      copy_async<Bytes>(static_cast<char*>(shared) + i, static_cast<const char*>(global) + (left > 0 ? i : 0), left, policy...);
    }
    return;
  }
#endif
  *static_cast<uint4*>(shared) = read_chunk<Alignment>(global, valid);
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
