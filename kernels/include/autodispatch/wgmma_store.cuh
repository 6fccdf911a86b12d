// What the fused Hopper kernels do with 64 rows of accumulators: activation, product, one rounding, and the store.
#pragma once

#include "autodispatch/activation.cuh"
#include "autodispatch/mma.cuh"
#include "autodispatch/tma.cuh"

// The byte offset of 16-byte chunk `chunk` of row `row` of a 64 x TileN block for TMA; 128-byte rows are swizzled.
template <int TileN>
__device__ __forceinline__ int out_offset(int row, int chunk) {
  return row * TileN * 2 + ((TileN == 64 ? chunk ^ (row & 7) : chunk) << 4);
}

// The up projection stands `Up` registers behind the gate.
template <typename T, typename Activation, int TileN, int Up>
__device__ __forceinline__ void store_block(char* shared, const float (&d)[2 * Up], const TensorMap& out, int row,
                                            int column, int group) {
  const int thread = threadIdx.x % 128;
  if (thread == 0) tma_store_wait_read();
  named_barrier_sync(2 + group, 128);  // the last store has read the buffer
  const int shared_row = thread / 32 * 16 + thread % 16;
  unsigned pairs[4];
#pragma unroll
  for (int chunk = 0; chunk < TileN / 8; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = chunk * 4 + half * 2;
      pairs[chunk % 2 * 2 + half] = pack_pair<T>(Activation::template apply<T>(d[i]) * d[Up + i],
                                                 Activation::template apply<T>(d[i + 1]) * d[Up + i + 1]);
    }
    if (chunk % 2 == 1) {
      store_matrix_x4(shared + out_offset<TileN>(shared_row, chunk - 1 + thread % 32 / 16), pairs);
    } else if (chunk + 1 == TileN / 8) {
      store_matrix_x2(shared + out_offset<TileN>(shared_row, chunk), pairs[0], pairs[1]);
    }
  }
  fence_before_tma_store();
  named_barrier_sync(2 + group, 128);
  if (thread == 0) tma_store(out, shared, column, row);
}
