// Clusters of blocks that write to one another's shared memory (compute capability 9.0 and up). Below it a cluster is one block.
#pragma once

#include "autodispatch/barrier.cuh"

#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_OF(blocks)
#endif

// A block may be sent to once it has begun: it expects `bytes` in all, which complete the first phase of `received`. All threads
// call this, then, before they send, cluster_wait, which tells them that all blocks have begun. Others need to see the barrier, and
// its own fence sees to that; not what it expects: its phase cannot end before this block's arrival, and bytes that come earlier
// count below zero. So the arrival is relaxed: with release it would wait for all copies that are on their way.
template <int Blocks>
__device__ __forceinline__ void cluster_begin(Barrier* received, int bytes) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) {
    if (threadIdx.x == 0) {
      barrier_init(received, 1);
      barrier_init_fence();
      barrier_arrive_expect(received, bytes);
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
#else
  static_assert(Blocks == 1, "clusters need compute capability 9.0");
#endif
}

template <int Blocks>
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Blocks > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes to the place in block `rank` of the cluster where `pointer` lies in this block's shared memory, and counts the bytes
// towards what that block expects. Nobody waits here; whoever waits for the block's phase sees them.
__device__ __forceinline__ void send_to_block(float4* pointer, const float4& x, Barrier* received, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  unsigned address, barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(received)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
#endif
}
