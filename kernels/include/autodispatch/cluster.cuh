// Clusters of blocks that write to one another's shared memory (compute capability 9.0 and up). Below it a cluster is one block.
#pragma once

#include "autodispatch/copy.cuh"

#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_OF(blocks)
#endif

// A block may be written to once it has begun, which it says by this, and others know after the next cluster_wait; and until
// it ends.
template <int Blocks>
__device__ __forceinline__ void cluster_begin() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  static_assert(Blocks == 1, "clusters need compute capability 9.0");
#endif
}

// The two halves of a barrier for all threads of the cluster: what was written before arriving, also to other blocks' shared
// memory, is visible after waiting. The threads of a warp wait together.
template <int Blocks>
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
#endif
}

template <int Blocks>
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes to the place in block `rank` of the cluster where `pointer` lies in this block's shared memory.
__device__ __forceinline__ void store_to_block(float4* pointer, const float4& x, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
#endif
}
