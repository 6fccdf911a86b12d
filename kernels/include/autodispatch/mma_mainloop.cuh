// The main loop of the tensor-core kernels: TileM x TileN of NumProducts products that share `a`, accumulated in fp32.
//
// A stage of shared memory holds TileK of k: a as [TileM][TileK], then each weight as [TileN][TileK] (nk) or
// [TileK][TileN] (kn), swizzled. NumStages - 1 stages are in flight while one is consumed.
// Warps stand WarpsM x WarpsN over the tile; a lane's accumulators are those of m16n8 fragments.
#pragma once

#include "autodispatch/mma.cuh"
#include "autodispatch/tile_copy.cuh"
#include "autodispatch/types.cuh"

template <typename T, WeightLayout Layout, int TileM, int TileN, int TileK, int NumStages, int WarpsM, int WarpsN,
          int NumProducts>
struct MmaMainloop {
  static constexpr int NumThreads = WarpsM * WarpsN * 32;
  static constexpr int WarpM = TileM / WarpsM;
  static constexpr int WarpN = TileN / WarpsN;
  static constexpr int WeightRows = Layout == nk ? TileN : TileK;
  static constexpr int WeightWidth = Layout == nk ? TileK : TileN;
  static constexpr int StageElements = TileM * TileK + NumProducts * TileN * TileK;
  static constexpr int FragmentsM = WarpM / 16;
  static constexpr int FragmentsN = WarpN / 8;

  static_assert(sizeof(T) == 2, "mma.sync here takes 16-bit elements");
  static_assert(WarpM % 16 == 0, "TileM must be a multiple of 16 * WarpsM");
  static_assert(WarpN % 16 == 0, "TileN must be a multiple of 16 * WarpsN");
  static_assert(TileK % 32 == 0, "TileK must be a multiple of 32");
  static_assert(NumStages >= 2, "the pipeline needs two stages");

  float accumulators[NumProducts][FragmentsM][FragmentsN][4];

  static __device__ __forceinline__ void load_stage(T* stage, const T* a, const T* const (&b)[NumProducts],
                                                    long long tile_m, long long tile_n, long long depth, long long m,
                                                    long long n, long long k, long long lda,
                                                    const long long (&ldb)[NumProducts]) {
    const int thread = threadIdx.x;
    copy_tile<TileM, TileK, NumThreads>(thread, stage, a, tile_m * TileM, depth, m, k, lda);
#pragma unroll
    for (int p = 0; p < NumProducts; ++p) {
      T* shared = stage + TileM * TileK + p * TileN * TileK;
      if (Layout == nk) {
        copy_tile<WeightRows, WeightWidth, NumThreads>(thread, shared, b[p], tile_n * TileN, depth, n, k, ldb[p]);
      } else {
        copy_tile<WeightRows, WeightWidth, NumThreads>(thread, shared, b[p], depth, tile_n * TileN, k, n, ldb[p]);
      }
    }
  }

  __device__ __forceinline__ void multiply_stage(const T* stage) {
    const int lane = threadIdx.x % 32;
    const int warp_m = static_cast<int>(threadIdx.x) / 32 / WarpsN * WarpM;
    const int warp_n = static_cast<int>(threadIdx.x) / 32 % WarpsN * WarpN;
#pragma unroll
    for (int step = 0; step < TileK / 16; ++step) {
      unsigned a[FragmentsM][4];
#pragma unroll
      for (int i = 0; i < FragmentsM; ++i) {
        load_matrix_x4(a[i], stage + swizzled<TileK>(warp_m + i * 16 + lane % 16, step * 2 + lane / 16));
      }
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) {
        const T* weights = stage + TileM * TileK + p * TileN * TileK;
#pragma unroll
        for (int j = 0; j < FragmentsN; j += 2) {
          unsigned b[4];
          if (Layout == nk) {
            const int row = warp_n + j * 8 + (lane & 7) + ((lane >> 4) << 3);
            load_matrix_x4(b, weights + swizzled<WeightWidth>(row, step * 2 + ((lane >> 3) & 1)));
          } else {
            const int row = step * 16 + (lane & 15);
            load_matrix_x4_transposed(b, weights + swizzled<WeightWidth>(row, (warp_n + j * 8) / 8 + (lane >> 4)));
          }
#pragma unroll
          for (int i = 0; i < FragmentsM; ++i) {
            mma_m16n8k16<T>(accumulators[p][i][j], a[i], b[0], b[1]);
            mma_m16n8k16<T>(accumulators[p][i][j + 1], a[i], b[2], b[3]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void run(T* shared, const T* a, const T* const (&b)[NumProducts], long long tile_m,
                                      long long tile_n, long long m, long long n, long long k, long long lda,
                                      const long long (&ldb)[NumProducts]) {
#pragma unroll
    for (int p = 0; p < NumProducts; ++p)
#pragma unroll
      for (int i = 0; i < FragmentsM; ++i)
#pragma unroll
        for (int j = 0; j < FragmentsN; ++j)
#pragma unroll
          for (int x = 0; x < 4; ++x) accumulators[p][i][j][x] = 0.0f;

    long long loaded = 0;  // the k at which the next stage to fetch begins
#pragma unroll
    for (int s = 0; s < NumStages - 1; ++s) {
      if (loaded < k) load_stage(shared + s * StageElements, a, b, tile_m, tile_n, loaded, m, n, k, lda, ldb);
      copy_commit();
      loaded += TileK;
    }
    int read = 0;
    int write = NumStages - 1;
#pragma unroll 1
    for (long long depth = 0; depth < k; depth += TileK) {
      copy_wait<NumStages - 2>();
      __syncthreads();  // the stage to read is complete for all, and nobody still reads the stage to overwrite
      if (loaded < k) load_stage(shared + write * StageElements, a, b, tile_m, tile_n, loaded, m, n, k, lda, ldb);
      copy_commit();
      loaded += TileK;
      multiply_stage(shared + read * StageElements);
      read = read + 1 == NumStages ? 0 : read + 1;
      write = write + 1 == NumStages ? 0 : write + 1;
    }
  }

  // Calls visit(row, column, i, j, first) for each pair of neighbouring columns that this lane accumulated:
  // accumulators[p][i][j][first] lies at (row, column) and [first + 1] at (row, column + 1).
  template <typename Visit>
  __device__ __forceinline__ void for_each_pair(long long tile_m, long long tile_n, Visit visit) const {
    const int lane = threadIdx.x % 32;
    const long long row = tile_m * TileM + static_cast<int>(threadIdx.x) / 32 / WarpsN * WarpM + lane / 4;
    const long long column = tile_n * TileN + static_cast<int>(threadIdx.x) / 32 % WarpsN * WarpN + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < FragmentsM; ++i)
#pragma unroll
      for (int j = 0; j < FragmentsN; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) visit(row + i * 16 + half * 8, column + j * 8, i, j, half * 2);
  }
};
