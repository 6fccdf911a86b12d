// out = Activation(a @ b1) * (a @ b2) on Hopper: TMA, wgmma, ping-pong. Maps: a (m, k), box TileM x 64; b1, b2 (n, k),
// box TileN x 64 (nk), or (k, n), box 64 x AtomN (kn); out (m, n), box 64 x TileN. T is f16 or bf16, accumulators fp32.
// 3 warpgroups. 0: one thread loads the stages of the block's tiles in order. 1 and 2 take the tiles by turns and each own
// a whole tile: d[r][0..TileN/2) is the gate and the rest the up projection of the same elements of row block r, so that
// activation and product need no exchange. While one multiplies, the other stores: out goes to shared memory by stmatrix
// and from there by TMA, 64 rows at a time. Named barriers 1 and 2 pass the turn; 3 and 4 are within a storing group.
// The grid is persistent: block i takes tiles i, i + grid, ... in groups of GroupM tile rows.
// L2Hints: keep a in L2, stream the weights; pays where the weights are read about once.
// Bound by the tensor cores from m of about 300, below it by reading the weights. Requires 9.0a, NVRTC 12.9, 16-byte
// alignment of pointers and rows.
// Shared memory: 1024 + NumStages * (TileM + 2 * TileN) * 128 + 2 * TileN * 128 + NumStages * 16 bytes, dynamic.
#include "autodispatch/activation.cuh"
#include "autodispatch/mma.cuh"
#include "autodispatch/tile.cuh"
#include "autodispatch/wgmma_pipeline.cuh"

// The byte offset of 16-byte chunk `chunk` of row `row` of a 64 x TileN block for TMA; 128-byte rows are swizzled.
template <int TileN>
__device__ __forceinline__ int out_offset(int row, int chunk) {
  return row * TileN * 2 + ((TileN == 64 ? chunk ^ (row & 7) : chunk) << 4);
}

template <typename T, typename Activation, int TileN>
__device__ __forceinline__ void store_block(char* shared, const float (&d)[TileN], const TensorMap& out, int row,
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
      pairs[chunk % 2 * 2 + half] = pack_pair<T>(Activation::apply(d[i]) * d[TileN / 2 + i],
                                                 Activation::apply(d[i + 1]) * d[TileN / 2 + i + 1]);
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
          int L2Hints>
__global__ void __launch_bounds__(384, 1)
    fused_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b1,
                const __grid_constant__ TensorMap b2, const __grid_constant__ TensorMap out, long long m, long long n,
                long long k) {
  using Pipeline = WgmmaPipeline<T, Layout, TileM, TileN, NumStages, 2>;
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

  const long long tiles_m = ceil_div(m, TileM);
  const long long tiles_n = ceil_div(n, TileN);
  const int tiles = static_cast<int>(tiles_m * tiles_n);
  const int k_blocks = static_cast<int>(ceil_div(k, Pipeline::TileK));
  const int group = threadIdx.x / 128;
  typename Pipeline::Position position;
  if (group == 0) {
    registers_decrease<40>();
    if (threadIdx.x == 0) {
      const CachePolicy keep = policy_evict_last();
      const CachePolicy stream = policy_evict_first();
      for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const Tile tile = grouped_tile<GroupM>(i, tiles_m, tiles_n);
        pipeline.template produce<L2Hints != 0>(position, a, {&b1, &b2}, static_cast<int>(tile.m) * TileM,
                                                static_cast<int>(tile.n) * TileN, k_blocks, keep, stream);
      }
    }
  } else {
    registers_increase<232>();
    char* block = blocks + (group - 1) * TileN * 128;
    if (group == 2) position.advance(k_blocks);
    for (int i = blockIdx.x + (group - 1) * gridDim.x; i < tiles; i += 2 * gridDim.x) {
      typename Pipeline::Accumulators d;
      if (i != static_cast<int>(blockIdx.x)) named_barrier_sync(group, 256);  // the very first tile waits for nobody
      const int last = pipeline.multiply(position, d, k_blocks);
      if (i + static_cast<int>(gridDim.x) < tiles) named_barrier_arrive(3 - group, 256);
      wgmma_wait<0>();
      if (threadIdx.x % 128 == 0) barrier_arrive(pipeline.empty + last);
      position.advance(k_blocks);  // past the other group's tile
      const Tile tile = grouped_tile<GroupM>(i, tiles_m, tiles_n);
#pragma unroll
      for (int r = 0; r < Pipeline::RowBlocks; ++r) {
        pin_registers(d[r]);
        store_block<T, Activation, TileN>(block, d[r], out, static_cast<int>(tile.m) * TileM + r * 64,
                                          static_cast<int>(tile.n) * TileN, group);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
  }
}
