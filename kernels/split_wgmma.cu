// c1 = a @ b1 and c2 = a @ b2 on Hopper in one launch: TMA, wgmma, ping-pong; activation_product.cu then makes out of them.
// Maps: a (m, k), box TileM x 64; b1, b2 (n, k), box TileN x 64 (nk), or (k, n), box 64 x AtomN (kn). c1, c2 (m, n) with
// leading dimension ldc, even. T is f16 or bf16, accumulators fp32; C is float, or bf16 where the caller allowed it.
// The main loop and the turns are those of fused_wgmma.cu over twice as many tiles, those of c1 first; a tile holds one
// product, and lanes store their pairs of columns straight from registers, 32 bytes per four lanes.
// Bound by the tensor cores. Requires 9.0a, NVRTC 12.9, 16-byte alignment of pointers and rows.
// Shared memory: NumStages * (TileM + TileN) * 128 + NumStages * 16 bytes, dynamic.
#include "autodispatch/tile.cuh"
#include "autodispatch/wgmma_pipeline.cuh"

template <typename T, typename C, WeightLayout Layout, int TileM, int TileN, int NumStages, int GroupM>
__global__ void __launch_bounds__(384, 1)
    split_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b1,
                const __grid_constant__ TensorMap b2, C* __restrict__ c1, C* __restrict__ c2, long long m, long long n,
                long long k, long long ldc) {
  using Pipeline = WgmmaPipeline<T, Layout, TileM, TileN, NumStages, 1, 1>;
  extern __shared__ __align__(1024) char shared[];
  Barrier* barriers = reinterpret_cast<Barrier*>(shared + NumStages * Pipeline::StageBytes);
  const Pipeline pipeline{shared, barriers, barriers + NumStages};
  if (threadIdx.x == 0) {
    pipeline.init();
    tma_prefetch(a);
    tma_prefetch(b1);
    tma_prefetch(b2);
  }
  __syncthreads();

  const int tiles_m = static_cast<int>(ceil_div(m, TileM));
  const int tiles_n = static_cast<int>(ceil_div(n, TileN));
  const int half = tiles_m * tiles_n;
  const int k_blocks = static_cast<int>(ceil_div(k, Pipeline::TileK));
  const int group = threadIdx.x / 128;
  if (group == 0) {
    registers_decrease<40>();
    if (threadIdx.x == 0) {
      typename Pipeline::Position position;
      for (int i = blockIdx.x; i < 2 * half; i += gridDim.x) {
        const auto tile = grouped_tile<GroupM, int>(i < half ? i : i - half, tiles_m, tiles_n);
        for (int block = 0; block < k_blocks; ++block) {
          pipeline.template load_block<false>(position, a, {i < half ? &b1 : &b2}, tile.m * TileM, tile.n * TileN, block, 0,
                                              0);
        }
      }
    }
  } else {
    registers_increase<232>();
    multiply_tiles<false>(pipeline, group, 2 * half, k_blocks, [&](typename Pipeline::Accumulators& d, int i) {
      const auto tile = grouped_tile<GroupM, int>(i < half ? i : i - half, tiles_m, tiles_n);
      C* c = i < half ? c1 : c2;
      const int lane = threadIdx.x % 32;
      const long long row0 = static_cast<long long>(tile.m) * TileM + threadIdx.x % 128 / 32 * 16 + lane / 4;
      const long long column0 = static_cast<long long>(tile.n) * TileN + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < Pipeline::RowBlocks; ++r) {
#pragma unroll
        for (int pair = 0; pair < TileN / 4; ++pair) {
          const long long row = row0 + r * 64 + pair % 2 * 8;
          if (row < m) store_pair(c + row * ldc, column0 + pair / 2 * 8, n, d[r][pair * 2], d[r][pair * 2 + 1]);
        }
      }
    });
  }
}
