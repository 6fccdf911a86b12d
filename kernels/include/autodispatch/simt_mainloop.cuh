// The main loop of the kernels on the fp32 units: TileM x TileN of NumProducts products that share `a`.
//
// Elements come in packs of four where the alignment allows it, one by one where not, and are widened to fp32 in shared
// memory; what lies outside the operands counts as zero and is never read. A stage holds TileK of k with k outermost; while
// one is multiplied, the next is on its way into registers, and then into the other half of shared memory.
// A thread accumulates ThreadM x ThreadN outputs, in groups of up to four neighbours that it reads as one vector; the groups
// are spread over the tile.
#pragma once

#include "autodispatch/vector.cuh"

template <typename T, WeightLayout Layout, int TileM, int TileN, int TileK, int ThreadM, int ThreadN, int Alignment,
          int NumProducts>
struct SimtMainloop {
  static constexpr int ThreadsM = TileM / ThreadM;
  static constexpr int ThreadsN = TileN / ThreadN;
  static constexpr int NumThreads = ThreadsM * ThreadsN;
  static constexpr int GroupM = ThreadM < 4 ? ThreadM : 4;
  static constexpr int GroupN = ThreadN < 4 ? ThreadN : 4;
  static constexpr int PitchM = TileM + 4;  // spreads the transposing stores over the banks and keeps vectors aligned
  static constexpr int PitchN = TileN + (Layout == nk ? 4 : 0);

  static_assert(TileM % ThreadM == 0 && ThreadM % GroupM == 0, "TileM must be a multiple of ThreadM, that of its groups");
  static_assert(TileN % ThreadN == 0 && ThreadN % GroupN == 0, "TileN must be a multiple of ThreadN, that of its groups");
  static_assert(NumThreads % 32 == 0 && NumThreads <= 1024, "threads must fill warps, at most 1024");
  static_assert(TileK % 4 == 0, "TileK must be whole packs");

  struct Operands {
    const T* a;
    const T* b[NumProducts];
    long long tile_m, tile_n, m, n, k, lda, ldb[NumProducts];
  };

  // Extent x TileK elements on their way from global memory. UnitK: the packs lie along k, and are transposed.
  template <int Extent, int Pitch, bool UnitK>
  struct Coming {
    static constexpr int PacksAcross = UnitK ? TileK / 4 : Extent / 4;
    static constexpr int Packs = Extent * TileK / 4;
    static constexpr int Count = (Packs + NumThreads - 1) / NumThreads;
    Pack<T, 4> packs[Count];

    __device__ __forceinline__ void fetch(const T* global, long long first, long long depth, long long extent, long long k,
                                          long long ld) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const int index = threadIdx.x + i * NumThreads;
        if (Packs % NumThreads == 0 || index < Packs) {
          const long long row = (UnitK ? first : depth) + index / PacksAcross;
          const long long column = (UnitK ? depth : first) + index % PacksAcross * 4;
          const long long left = row < (UnitK ? extent : k) ? (UnitK ? k : extent) - column : 0;
          load_pack<Alignment>(packs[i], left > 0 ? global + row * ld + column : global, left);
        }
      }
    }

    __device__ __forceinline__ void put(float (&shared)[TileK][Pitch]) const {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const int index = threadIdx.x + i * NumThreads;
        if (Packs % NumThreads == 0 || index < Packs) {
          const int row = index / PacksAcross;
          const int column = index % PacksAcross * 4;
          if constexpr (UnitK) {
#pragma unroll
            for (int e = 0; e < 4; ++e) shared[column + e][row] = to_float(packs[i].values[e]);
          } else {
            *reinterpret_cast<float4*>(&shared[row][column]) =
                make_float4(to_float(packs[i].values[0]), to_float(packs[i].values[1]), to_float(packs[i].values[2]),
                            to_float(packs[i].values[3]));
          }
        }
      }
    }
  };

  struct Shared {
    alignas(16) float a[2][TileK][PitchM];
    alignas(16) float b[2][NumProducts][TileK][PitchN];
  };

  float accumulators[NumProducts][ThreadM][ThreadN];

  // Rows and columns of the tile that this thread's i-th row and j-th column are.
  static __device__ __forceinline__ int row(int i) {
    return i / GroupM * (ThreadsM * GroupM) + static_cast<int>(threadIdx.x) / ThreadsN * GroupM + i % GroupM;
  }
  static __device__ __forceinline__ int column(int j) {
    return j / GroupN * (ThreadsN * GroupN) + static_cast<int>(threadIdx.x) % ThreadsN * GroupN + j % GroupN;
  }

  __device__ __forceinline__ void multiply(const float (&a)[TileK][PitchM], const float (&b)[NumProducts][TileK][PitchN]) {
#pragma unroll
    for (int y = 0; y < TileK; ++y) {
      float left[ThreadM];
#pragma unroll
      for (int i = 0; i < ThreadM; i += GroupM) {
        *reinterpret_cast<Pack<float, GroupM>*>(left + i) = *reinterpret_cast<const Pack<float, GroupM>*>(&a[y][row(i)]);
      }
#pragma unroll
      for (int p = 0; p < NumProducts; ++p)
#pragma unroll
        for (int j = 0; j < ThreadN; j += GroupN) {
          const auto right = *reinterpret_cast<const Pack<float, GroupN>*>(&b[p][y][column(j)]);
#pragma unroll
          for (int i = 0; i < ThreadM; ++i)
#pragma unroll
            for (int e = 0; e < GroupN; ++e) {
              accumulators[p][i][j + e] = fmaf(left[i], right.values[e], accumulators[p][i][j + e]);
            }
        }
    }
  }

  __device__ __forceinline__ void run(Shared& shared, const Operands& x) {
#pragma unroll
    for (int p = 0; p < NumProducts; ++p)
#pragma unroll
      for (int i = 0; i < ThreadM; ++i)
#pragma unroll
        for (int j = 0; j < ThreadN; ++j) accumulators[p][i][j] = 0.0f;

    Coming<TileM, PitchM, true> a;
    Coming<TileN, PitchN, Layout == nk> b[NumProducts];
    const auto fetch = [&](long long depth) {
      a.fetch(x.a, x.tile_m * TileM, depth, x.m, x.k, x.lda);
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) b[p].fetch(x.b[p], x.tile_n * TileN, depth, x.n, x.k, x.ldb[p]);
    };
    const auto put = [&](int half) {
      a.put(shared.a[half]);
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) b[p].put(shared.b[half][p]);
    };
    if (x.k <= 0) return;
    fetch(0);
    put(0);
    __syncthreads();
    int half = 0;
#pragma unroll 1
    for (long long depth = TileK; depth < x.k; depth += TileK) {
      fetch(depth);
      multiply(shared.a[half], shared.b[half]);
      half = 1 - half;
      put(half);
      __syncthreads();
    }
    multiply(shared.a[half], shared.b[half]);
  }

  // Writes value(i, j) of every accumulated output inside m x n to a matrix of C with leading dimension `ld`, whose rows
  // begin at multiples of OutAlignment bytes.
  template <int OutAlignment, typename C, typename Value>
  static __device__ __forceinline__ void store(C* out, const Operands& x, long long ld, Value value) {
#pragma unroll
    for (int i = 0; i < ThreadM; ++i) {
      const long long r = x.tile_m * TileM + row(i);
      if (r >= x.m) continue;
#pragma unroll
      for (int j = 0; j < ThreadN; j += GroupN) {
        const long long c = x.tile_n * TileN + column(j);
        C group[GroupN];
#pragma unroll
        for (int e = 0; e < GroupN; ++e) group[e] = from_float<C>(value(i, j + e));
        store_vector<OutAlignment>(out + r * ld + c, group, x.n - c);
      }
    }
  }
};
