// out = Activation(a @ b1) * (a @ b2) on Hopper by TMA and wgmma. Maps: a (m, k), box TileM x 64; b1, b2 (n, k), box
// TileN x 64 (nk), or (k, n), box 64 x AtomN (kn); out (m, n), box 64 x TileN. T is f16 or bf16, accumulators fp32.
// Warpgroup 0: one thread loads the stages of the block's tiles in order. 1 and 2 multiply, see multiply_tiles: the first half of
// d[r] is the gate and the second the up projection of the same elements of 64 rows, so that activation and product need no
// exchange. Each stores 64 rows at a time, by stmatrix to shared memory and from there by TMA; named barriers 3 and 4 are
// within a storing group.
// The grid is persistent: block i takes tiles i, i + grid, ... in groups of GroupM tile rows. Cooperative 2: there are no more tiles
// than blocks, and the tile on its way out reuses the stages.
// L2Hints: keep a in L2, stream the weights; pays where the weights are read about once.
// Bound by the tensor cores from m of about 300, below it by reading the weights. Requires 9.0a, NVRTC 12.9, 16-byte
// alignment of pointers and rows, n and k in multiples of 8.
// Shared memory: NumStages * (TileM + 2 * LoadedN) * 128 + 2 * TileN * 128 (unless Cooperative is 2) + NumStages * 16 bytes, dynamic.
#include "autodispatch/grid.cuh"
#include "autodispatch/tile.cuh"
#include "autodispatch/wgmma_pipeline.cuh"
#include "autodispatch/wgmma_store.cuh"

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int NumStages, int GroupM,
          int L2Hints, int Cooperative>
__global__ void __launch_bounds__(384, 1)
    fused_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b1,
                const __grid_constant__ TensorMap b2, const __grid_constant__ TensorMap out, long long m, long long n,
                long long k) {
  using Pipeline = WgmmaPipeline<T, Layout, TileM, TileN, NumStages, 2, Cooperative ? 2 : 1>;
  extern __shared__ __align__(1024) char shared[];
  char* ring_end = shared + NumStages * Pipeline::StageBytes;
  char* blocks = Cooperative == 2 ? shared : ring_end;
  Barrier* barriers = reinterpret_cast<Barrier*>(ring_end + (Cooperative == 2 ? 0 : 2 * TileN * 128));
  const Pipeline pipeline{shared, barriers, barriers + NumStages};
  if (threadIdx.x == 0) {
    pipeline.init();
    tma_prefetch(a);
    tma_prefetch(b1);
    tma_prefetch(b2);
    tma_prefetch(out);
  }
  wait_for_previous_grid();
  __syncthreads();

  const int tiles_m = static_cast<int>(ceil_div(m, TileM));
  const int tiles_n = static_cast<int>(ceil_div(n, TileN));
  const int tiles = tiles_m * tiles_n;
  const int k_blocks = static_cast<int>(ceil_div(k, Pipeline::TileK));
  const int group = threadIdx.x / 128;
  if (group == 0) {
    registers_decrease<40>();
    if (threadIdx.x == 0) {
      const CachePolicy keep = policy_evict_last();
      const CachePolicy stream = policy_evict_first();
      typename Pipeline::Position position;
      for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const auto tile = grouped_tile<GroupM, int>(i, tiles_m, tiles_n);
        for (int block = 0; block < k_blocks; ++block) {
          pipeline.template load_block<L2Hints != 0>(position, a, {&b1, &b2}, tile.m * TileM, tile.n * TileN, block, keep,
                                                     stream);
        }
      }
    }
  } else {
    registers_increase<232>();
    char* block = blocks + (group - 1) * TileN * 128;
    multiply_tiles<Cooperative != 0>(pipeline, group, tiles, k_blocks, [&](typename Pipeline::Accumulators& d, int i) {
      const auto tile = grouped_tile<GroupM, int>(i, tiles_m, tiles_n);
      const int row = tile.m * TileM + (Cooperative ? (group - 1) * Pipeline::RowBlocks * 64 : 0);
      if (Cooperative == 2) named_barrier_sync(1, 256);  // both have read their stages
#pragma unroll
      for (int r = 0; r < Pipeline::RowBlocks; ++r) {
        store_block<T, Activation, TileN, Pipeline::ProductN / 2>(block, d[r], out, row + r * 64, tile.n * TileN, group);
      }
    });
    if (threadIdx.x % 128 == 0) tma_store_wait();
  }
}
