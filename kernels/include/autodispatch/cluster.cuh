// Clusters of blocks that read one another's shared memory (compute capability 9.0 and up). Below it a cluster is one block.
#pragma once

#include "autodispatch/copy.cuh"

#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_OF(blocks)
#endif

// A barrier for all threads of the cluster, which also makes their shared memory visible to one another. A block must not
// exit before others have read its memory.
template <int Blocks>
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

// Two floats at the place in block `rank` of the cluster where `pointer` lies in this block's shared memory.
template <int Blocks>
__device__ __forceinline__ float2 load_of_block(const float* pointer, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) {
    unsigned address;
    float2 pair;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
  }
#endif
  return *reinterpret_cast<const float2*>(pointer);
}
