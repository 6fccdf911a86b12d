// out = Activation(a @ b1) * (a @ b2) on Hopper by TMA and wgmma. Maps: a (m, k), box TileM x 64; b1, b2 (n, k), box
// TileN x 64 (nk), or (k, n), box 64 x AtomN (kn); out (m, n), box 64 x TileN. T is f16 or bf16, accumulators fp32.
// 3 warpgroups. 0: one thread loads the stages of the block's tiles in order. 1 and 2 multiply: the first half of d[r] is the gate
// and the second the up projection of the same elements of 64 rows, so that activation and product need no exchange.
// Ping-pong: they take whole tiles by turns, and while one multiplies the other stores; named barriers 1 and 2 pass the
// turn. Cooperative: each takes half the rows of every tile. Either stores 64 rows at a time, by stmatrix to shared memory
// and from there by TMA; named barriers 3 and 4 are within a storing group.
// The grid is persistent: block i takes tiles i, i + grid, ... in groups of GroupM tile rows.
// L2Hints: keep a in L2, stream the weights; pays where the weights are read about once.
// Bound by the tensor cores from m of about 300, below it by reading the weights. Requires 9.0a, NVRTC 12.9, 16-byte
// alignment of pointers and rows, n and k in multiples of 8.
// Shared memory: 1024 + NumStages * (TileM + 2 * LoadedN) * 128 + 2 * TileN * 128 + NumStages * 16 bytes, dynamic.
#include "autodispatch/activation.cuh"
#include "autodispatch/mma.cuh"
#include "autodispatch/tile.cuh"
#include "autodispatch/wgmma_pipeline.cuh"

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

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int NumStages, int GroupM,
          int L2Hints, int Cooperative>
__global__ void __launch_bounds__(384, 1)
    fused_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b1,
                const __grid_constant__ TensorMap b2, const __grid_constant__ TensorMap out, long long m, long long n,
                long long k) {
  using Pipeline = WgmmaPipeline<T, Layout, TileM, TileN, NumStages, 2, Cooperative ? 2 : 1>;
  extern __shared__ char unaligned[];
  char* shared = align_1024(unaligned);
  char* blocks = shared + NumStages * Pipeline::StageBytes;
  Barrier* barriers = reinterpret_cast<Barrier*>(blocks + 2 * TileN * 128);
  const Pipeline pipeline{shared, barriers, barriers + NumStages};
  if (threadIdx.x == 0) {
    pipeline.init();
    tma_prefetch(a);
    tma_prefetch(b1);
    tma_prefetch(b2);
    tma_prefetch(out);
  }
  __syncthreads();

  const int tiles_m = static_cast<int>(ceil_div(m, TileM));
  const int tiles_n = static_cast<int>(ceil_div(n, TileN));
  const int tiles = tiles_m * tiles_n;
  const int k_blocks = static_cast<int>(ceil_div(k, Pipeline::TileK));
  const int grid = gridDim.x;
  const int group = threadIdx.x / 128;
  typename Pipeline::Position position;
  if (group == 0) {
    registers_decrease<40>();
    if (threadIdx.x == 0) {
      const CachePolicy keep = policy_evict_last();
      const CachePolicy stream = policy_evict_first();
      for (int i = blockIdx.x; i < tiles; i += grid) {
        const auto tile = grouped_tile<GroupM, int>(i, tiles_m, tiles_n);
        pipeline.template produce<L2Hints != 0>(position, a, {&b1, &b2}, tile.m * TileM, tile.n * TileN, k_blocks, keep,
                                                stream);
      }
    }
  } else {
    registers_increase<232>();
    const int reader = Cooperative ? group - 1 : 0;
    const int first = blockIdx.x + (Cooperative ? 0 : (group - 1) * grid);
    char* block = blocks + (group - 1) * TileN * 128;
    if (!Cooperative && group == 2) position.advance(k_blocks);
    for (int i = first; i < tiles; i += Cooperative ? grid : 2 * grid) {
      typename Pipeline::Accumulators d;
      Pipeline::clear(d);
      if (!Cooperative && i != static_cast<int>(blockIdx.x)) named_barrier_sync(group, 256);  // the first waits for nobody
      const int last = pipeline.multiply(position, d, k_blocks, reader);
      if (!Cooperative && i + grid < tiles) named_barrier_arrive(3 - group, 256);
      wgmma_wait<0>();
      if (threadIdx.x % 128 == 0) barrier_arrive(pipeline.empty + last);
      if (!Cooperative) position.advance(k_blocks);  // past the other group's tile
      const auto tile = grouped_tile<GroupM, int>(i, tiles_m, tiles_n);
#pragma unroll
      for (int r = 0; r < Pipeline::RowBlocks; ++r) {
        pin_registers(d[r]);
        store_block<T, Activation, TileN, Pipeline::ProductN / 2>(
            block, d[r], out, tile.m * TileM + (reader * Pipeline::RowBlocks + r) * 64,
                                          tile.n * TileN, group);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
  }
}
