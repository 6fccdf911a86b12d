// out = Activation(a @ b1) * (a @ b2) on Hopper by TMA and wgmma, for few rows: the job is to read the weights once.
// Maps: a (m, k), box TileM x 64; b1, b2 (n, k), box TileN x 64 (nk), or (k, n), box 64 x AtomN (kn); out (m, n), box 64 (or
// TileM, if less) x TileN. T is f16 or bf16, accumulators fp32. A block computes one tile, by one warpgroup per 64 rows; the first half of d[r] is the
// gate and the second the up projection of the same elements. BlocksPerSm small blocks share an SM, so that one loads while
// another starts or stores, and the bytes in flight do not depend on how evenly the tiles fill the SMs. There is no
// producer: thread 0 refills a stage as soon as all have released it. a stays in L2, the weights are streamed.
// Tiles of the same columns are neighbours, so that global memory sees the weights once.
// Bound by global memory up to m of about 200. Requires 9.0a, NVRTC 12.9, 16-byte alignment of pointers and rows, n and k
// in multiples of 8.
// Shared memory: NumStages * ((TileM + 2 * LoadedN) * 128 + 16) bytes, dynamic; the tile on its way out reuses the stages.
#include "autodispatch/grid.cuh"
#include "autodispatch/tile.cuh"
#include "autodispatch/wgmma_pipeline.cuh"
#include "autodispatch/wgmma_store.cuh"

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int NumStages, int BlocksPerSm>
__global__ void __launch_bounds__(TileM <= 64 ? 128 : TileM * 2, BlocksPerSm)
    fused_wgmma_small(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b1,
                      const __grid_constant__ TensorMap b2, const __grid_constant__ TensorMap out, long long m, long long n,
                      long long k) {
  using Pipeline = WgmmaPipeline<T, Layout, TileM, TileN, NumStages, 2, TileM <= 64 ? 1 : TileM / 64>;
  static_assert(NumStages * Pipeline::StageBytes >= (TileM <= 64 ? 64 : TileM) * TileN * 2, "the tile must fit into the stages");
  extern __shared__ __align__(1024) char shared[];
  Barrier* barriers = reinterpret_cast<Barrier*>(shared + NumStages * Pipeline::StageBytes);
  const Pipeline pipeline{shared, barriers, barriers + NumStages};
  const int tiles_m = static_cast<int>(ceil_div(m, TileM));
  const int tiles_n = static_cast<int>(ceil_div(n, TileN));
  const auto tile = grouped_tile<8, int>(blockIdx.x, tiles_m, tiles_n);
  const int row = tile.m * TileM;
  const int column = tile.n * TileN;
  const int k_blocks = static_cast<int>(ceil_div(k, Pipeline::TileK));
  const CachePolicy keep = policy_evict_last();
  const CachePolicy stream = policy_evict_first();
  typename Pipeline::Position loading, reading;
  const auto refill = [&](int block) {
    if (threadIdx.x == 0 && block < k_blocks) {
      pipeline.template load_block<true>(loading, a, {&b1, &b2}, row, column, block, keep, stream);
    }
    __syncwarp();
  };
  if (threadIdx.x == 0) pipeline.init();
  wait_for_previous_grid();
#pragma unroll 1
  for (int block = 0; block < NumStages; ++block) refill(block);
  __syncthreads();  // the barriers are there

  const int reader = threadIdx.x / 128;
  typename Pipeline::Accumulators d;
  Pipeline::clear(d);
  pipeline.multiply(reading, d, k_blocks, reader, [&](int block) { refill(block + NumStages); });
  wgmma_wait<0>();
  pin_registers(d[0]);
  __syncthreads();  // all have read their stages
  store_block<T, Activation, TileN, Pipeline::ProductN / 2>(shared + reader * TileN * 128, d[0], out, row + reader * 64, column,
                                                            reader + 1);
  if (threadIdx.x % 128 == 0) tma_store_wait();
}
