// The main loop of the kernels on the fp32 units: TileM x TileN of NumProducts products that share `a`.
//
// Every element is loaded by itself and widened to fp32 in shared memory, so any stride, alignment and size will do;
// what lies outside the operands counts as zero and is never read. A stage holds TileK of k with k outermost.
// Each thread accumulates ThreadM x ThreadN outputs, spread over the tile in strides of the thread grid.
#pragma once

#include "autodispatch/types.cuh"

template <typename T, WeightLayout Layout, int TileM, int TileN, int TileK, int ThreadM, int ThreadN, int NumProducts>
struct SimtMainloop {
  static constexpr int ThreadsM = TileM / ThreadM;
  static constexpr int ThreadsN = TileN / ThreadN;
  static constexpr int NumThreads = ThreadsM * ThreadsN;
  static constexpr int PitchM = TileM + 1;  // an odd pitch keeps the transposing stores off one bank
  static constexpr int PitchN = TileN + 1;

  static_assert(TileM % ThreadM == 0, "TileM must be a multiple of ThreadM");
  static_assert(TileN % ThreadN == 0, "TileN must be a multiple of ThreadN");
  static_assert(NumThreads % 32 == 0 && NumThreads <= 1024, "threads must fill warps, at most 1024");

  struct Shared {
    float a[TileK][PitchM];
    float b[NumProducts][TileK][PitchN];
  };

  float accumulators[NumProducts][ThreadM][ThreadN];

  // Fills shared[k][i] for i < Extent from element (first + i, depth + k), whose address is i * stride_i + k * stride_k.
  // Neighbouring threads take neighbouring elements of the axis with unit stride.
  template <int Extent, int Pitch, bool UnitK>
  static __device__ __forceinline__ void load_tile(float (&shared)[TileK][Pitch], const T* global, long long first,
                                                   long long depth, long long extent, long long k, long long ld) {
    for (int i = threadIdx.x; i < Extent * TileK; i += NumThreads) {
      const int x = UnitK ? i / TileK : i % Extent;
      const int y = UnitK ? i % TileK : i / Extent;
      const bool inside = first + x < extent && depth + y < k;
      const long long offset = UnitK ? (first + x) * ld + depth + y : (depth + y) * ld + first + x;
      shared[y][x] = inside ? to_float(global[offset]) : 0.0f;
    }
  }

  __device__ __forceinline__ void run(Shared& shared, const T* a, const T* const (&b)[NumProducts], long long tile_m,
                                      long long tile_n, long long m, long long n, long long k, long long lda,
                                      const long long (&ldb)[NumProducts]) {
    const int thread_m = static_cast<int>(threadIdx.x) / ThreadsN;
    const int thread_n = static_cast<int>(threadIdx.x) % ThreadsN;
#pragma unroll
    for (int p = 0; p < NumProducts; ++p)
#pragma unroll
      for (int i = 0; i < ThreadM; ++i)
#pragma unroll
        for (int j = 0; j < ThreadN; ++j) accumulators[p][i][j] = 0.0f;

#pragma unroll 1
    for (long long depth = 0; depth < k; depth += TileK) {
      load_tile<TileM, PitchM, true>(shared.a, a, tile_m * TileM, depth, m, k, lda);
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) {
        load_tile<TileN, PitchN, Layout == nk>(shared.b[p], b[p], tile_n * TileN, depth, n, k, ldb[p]);
      }
      __syncthreads();
#pragma unroll 4
      for (int y = 0; y < TileK; ++y) {
        float left[ThreadM];
#pragma unroll
        for (int i = 0; i < ThreadM; ++i) left[i] = shared.a[y][thread_m + i * ThreadsM];
#pragma unroll
        for (int p = 0; p < NumProducts; ++p)
#pragma unroll
          for (int j = 0; j < ThreadN; ++j) {
            const float right = shared.b[p][y][thread_n + j * ThreadsN];
#pragma unroll
            for (int i = 0; i < ThreadM; ++i) accumulators[p][i][j] = fmaf(left[i], right, accumulators[p][i][j]);
          }
      }
      __syncthreads();
    }
  }

  // Calls visit(row, column, i, j) for each output of this thread that lies inside m x n.
  template <typename Visit>
  __device__ __forceinline__ void for_each(long long tile_m, long long tile_n, long long m, long long n,
                                           Visit visit) const {
    const long long row = tile_m * TileM + static_cast<int>(threadIdx.x) / ThreadsN;
    const long long column = tile_n * TileN + static_cast<int>(threadIdx.x) % ThreadsN;
#pragma unroll
    for (int i = 0; i < ThreadM; ++i)
#pragma unroll
      for (int j = 0; j < ThreadN; ++j) {
        if (row + i * ThreadsM < m && column + j * ThreadsN < n) visit(row + i * ThreadsM, column + j * ThreadsN, i, j);
      }
  }
};
