// Tensor copies between global and shared memory by the copy engine (TMA).
#pragma once

#include "autodispatch/barrier.cuh"

// The driver's 128 opaque bytes that describe a matrix and the box that one copy moves; a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  char bytes[128];
};

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box at (column, row) and counts its bytes on the barrier. What lies outside the matrix arrives as zeros.
__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, int column, int row, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, int column, int row, Barrier* barrier,
                                         CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Stores the box at (column, row); what lies outside the matrix is not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* shared, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(shared_address(shared))
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read their shared memory, or are complete.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Makes this thread's ordinary writes to shared memory visible to the copy engine; a barrier must follow.
__device__ __forceinline__ void fence_before_tma_store() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
