// The main loop of the tensor-core kernels: TileM x TileN of one or two products that share `a`, accumulated in fp32.
// T is f16, bf16, or float, of which the products are tf32.
//
// A stage of shared memory holds TileK of k: a as [TileM][TileK], then each weight as [TileN][TileK] (nk) or
// [TileK][TileN] (kn), swizzled. NumStages - 1 stages are in flight while one is consumed.
// Warps stand WarpsM x WarpsN over the tile; a lane's accumulators are those of m16n8 fragments. Each warp has both products of
// its elements, or, where their columns cannot be cut into eights among all warps, one: the left half of the warps the first,
// the right half the second, until `exchange`. A step is 32 bytes of k; in it, the weights' fragments come in groups of two:
// gate and up of the same eight columns, or two neighbours of one product, of which the last may be alone.
// While a group is multiplied the next one is on its way from shared memory, and with the step's last group the next step's
// fragments of `a`, across the barrier between two stages too: the tensor cores need not wait for either. Where a warp has
// four or more fragments of `a`, each takes the registers of the one that has just been multiplied for the last time.
#pragma once

#include "autodispatch/mma.cuh"
#include "autodispatch/tile.cuh"
#include "autodispatch/tile_copy.cuh"
#include "autodispatch/types.cuh"

// The blocks that an SM is to have room for: three where its registers (of which ptxas needs more from 10.0 on) and its shared
// memory allow it, else two, or one of eight warps. `registers` are those of a thread.
constexpr int blocks_per_sm(int threads, int registers, int shared_bytes) {
#if __CUDA_ARCH__ >= 1200 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 860
  constexpr int Shared = 100 * 1024;
#elif __CUDA_ARCH__ >= 900
  constexpr int Shared = 228 * 1024;
#elif __CUDA_ARCH__ >= 800
  constexpr int Shared = 164 * 1024;
#else
  constexpr int Shared = 64 * 1024;
#endif
#if __CUDA_ARCH__ >= 1000
  registers += 40;
#endif
  if (3 * threads * registers <= 65536 && 3 * (shared_bytes + 1024) <= Shared) return 3;
  return threads <= 192 ? 2 : 1;
}

template <typename T, WeightLayout Layout, int TileM, int TileN, int TileK, int NumStages, int WarpsM, int WarpsN,
          int NumProducts>
struct MmaMainloop {
  static constexpr int TileElements = TileM * TileN;
  static constexpr int NumThreads = WarpsM * WarpsN * 32;
  static constexpr int WarpM = TileM / WarpsM;
  static constexpr bool Apart = NumProducts == 2 && WarpsN % 2 == 0 && TileN % (8 * WarpsN) != 0;
  static constexpr int WarpProducts = Apart ? 1 : NumProducts;
  static constexpr int WarpN = TileN * NumProducts / WarpProducts / WarpsN;
  static constexpr int WeightRows = Layout == nk ? TileN : TileK;
  static constexpr int WeightWidth = Layout == nk ? TileK : TileN;
  static constexpr int WeightElements = TileN * TileK;
  static constexpr int StageElements = TileM * TileK + NumProducts * WeightElements;
  static constexpr int StageBytes = StageElements * sizeof(T);
  static constexpr int FragmentsM = WarpM / 16;
  static constexpr int FragmentsN = WarpN / 8;
  static constexpr int Groups = (WarpProducts * FragmentsN + 1) / 2;
  static constexpr int GroupColumns = WarpProducts == 2 ? 8 : 16;
  static constexpr int FinishedM = FragmentsM / (Apart ? 2 : 1);  // fragments of rows of which a warp finishes the outputs
  static constexpr int StepK = 32 / sizeof(T);
  static constexpr int Steps = TileK / StepK;
  static constexpr int BuffersOfA = FragmentsM < 4 ? 2 : 1;
  static constexpr int Registers = WarpProducts * FragmentsM * FragmentsN * 4 + 80;
  static constexpr int BlocksPerSm = blocks_per_sm(NumThreads, Registers, NumStages * StageBytes);
  static constexpr int WeightsAt = Layout == nk && Steps * Groups > 2 ? 1 : 0;  // the group behind which a stage's weights are copied
  static constexpr bool WordsOfB = sizeof(T) == 4 && Layout == kn;  // ldmatrix transposes 16-bit elements only

  static_assert(WarpM % 16 == 0, "TileM must be a multiple of 16 * WarpsM");
  static_assert(WarpN % 8 == 0 && WarpN * WarpsN * WarpProducts == TileN * NumProducts, "a warp's columns are a multiple of 8");
  static_assert(!Apart || FragmentsM % 2 == 0, "a warp that has one product finishes half of its rows");
  static_assert(Steps % 2 == 0, "TileK must be a multiple of 64 bytes");
  static_assert(NumStages >= 2, "the pipeline needs two stages");

  // Where the operands lie: `tile_m` and `tile_n` count tiles, the loop covers k from `begin` to `end`.
  struct Operands {
    const T* a;
    const T* b[NumProducts];
    long long tile_m, tile_n, m, n, k, lda, ldb[NumProducts];
  };

  // The stages on their way from global memory.
  struct Loader {
    using A = TileCopy<TileM, TileK, NumThreads, false, T>;
    using B = TileCopy<WeightRows, WeightWidth, NumThreads, WordsOfB, T>;
    const Operands& x;
    A a;
    B b[NumProducts];

    __device__ __forceinline__ Loader(const Operands& operands, long long begin) : x(operands) {
      a.begin(x.a, x.tile_m * TileM, begin, x.lda);
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) b[p].begin(x.b[p], weight_row(begin), weight_column(begin), x.ldb[p]);
    }

    __device__ __forceinline__ long long weight_row(long long depth) const { return Layout == nk ? x.tile_n * TileN : depth; }
    __device__ __forceinline__ long long weight_column(long long depth) const { return Layout == nk ? depth : x.tile_n * TileN; }

    // Whether all rows and columns of the tile lie inside the operands.
    __device__ __forceinline__ bool whole() const { return (x.tile_m + 1) * TileM <= x.m && (x.tile_n + 1) * TileN <= x.n; }

    // The next stage, which lies inside the operands, if it is wanted: `a`, then the weights.
    template <typename Wanted>
    __device__ __forceinline__ void fetch_a(T* stage, Wanted wanted) {
      a.fetch(stage, x.lda, TileK, [&](int) { return wanted; });
    }
    template <typename Wanted>
    __device__ __forceinline__ void fetch_b(T* stage, Wanted wanted) {
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) {
        b[p].fetch(stage + TileM * TileK + p * WeightElements, x.ldb[p], Layout == nk ? TileK : TileK * x.ldb[p],
                   [&](int) { return wanted; });
      }
    }

    __device__ __forceinline__ void fetch_clipped(T* stage, long long depth) {
      a.fetch_clipped(stage, x.a, x.tile_m * TileM, depth, x.m, x.k, x.lda);
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) {
        b[p].fetch_clipped(stage + TileM * TileK + p * WeightElements, x.b[p], weight_row(depth), weight_column(depth),
                           Layout == nk ? x.n : x.k, Layout == nk ? x.k : x.n, x.ldb[p]);
      }
    }

    __device__ __forceinline__ void put(T* stage) {
      a.put(stage);
#pragma unroll
      for (int p = 0; p < NumProducts; ++p) b[p].put(stage + TileM * TileK + p * WeightElements);
    }
  };

  float accumulators[WarpProducts][FragmentsM][FragmentsN][4];

  static __device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) / 32 / WarpsN * WarpM; }
  static __device__ __forceinline__ int warp_column() {
    return static_cast<int>(threadIdx.x) / 32 % WarpsN % (WarpsN / (Apart ? 2 : 1)) * WarpN;
  }
  // Which product a warp has, of those that are apart.
  static __device__ __forceinline__ int warp_product() {
    return Apart && static_cast<int>(threadIdx.x) / 32 % WarpsN >= WarpsN / 2 ? 1 : 0;
  }

  // The byte in a stage at which this lane's part of the first step's fragments of `a` begins; later steps flip bits of it.
  static __device__ __forceinline__ unsigned lane_of_a() {
    const int lane = threadIdx.x % 32;
    return swizzled<TileK, sizeof(T)>(warp_row() + lane % 16, lane / 16) * sizeof(T);
  }

  static __device__ __forceinline__ void load_a(unsigned (&a)[4], unsigned lane, int step, int i) {
    load_matrix_x4(a, (lane ^ (step * 32)) + i * 16 * TileK * static_cast<int>(sizeof(T)));
  }

  // Lanes from 16 on read the second fragment of a group.
  static __device__ __forceinline__ unsigned lane_of_b() {
    const int lane = threadIdx.x % 32;
    const int second = lane / 16;
    const int base = TileM * TileK + (WarpProducts == 2 ? second : warp_product()) * WeightElements;
    const int next = WarpProducts == 2 ? 0 : second * 8;
    if constexpr (Layout == nk) {
      return (base + swizzled<TileK, sizeof(T)>(warp_column() + next + lane % 8, lane / 8 % 2)) * sizeof(T);
    } else {
      return base * sizeof(T);
    }
  }

  static __device__ __forceinline__ void load_b(unsigned (&b)[4], unsigned stage, unsigned lane_offset, int step, int group) {
    const int lane = threadIdx.x % 32;
    const int column = warp_column() + group * GroupColumns;
    const bool alone = WarpProducts == 1 && 2 * group + 1 == FragmentsN;
    if constexpr (WordsOfB) {
#pragma unroll
      for (int x = 0; x < (alone ? 2 : 4); ++x) {
        const int c = column + lane / 4 + (WarpProducts == 2 ? 0 : x / 2 * 8);
        const int base = TileM * TileK + (WarpProducts == 2 ? x / 2 : warp_product()) * WeightElements;
        const int offset = swizzled<TileN, 4, true>(step * 8 + lane % 4 + x % 2 * 4, c / 4) + c % 4;
        b[x] = load_word(stage + (base + offset) * 4);
      }
    } else if constexpr (Layout == kn) {
      const int chunk = column / 8 + (WarpProducts == 2 || alone ? 0 : lane / 16);
      const unsigned row = stage + lane_offset + swizzled<TileN>(step * 16 + lane % 16, chunk) * 2;
      alone ? load_matrix_x2_transposed(b, row) : load_matrix_x4_transposed(b, row);
    } else {
      const unsigned row = ((stage + lane_offset) ^ (step * 32)) + group * GroupColumns * TileK * static_cast<int>(sizeof(T));
      alone ? load_matrix_x2(b, row) : load_matrix_x4(b, row);
    }
  }

  // Accumulates k from `begin` to `end`; `begin` is a multiple of TileK. `shared` is aligned to 128 bytes.
  __device__ __forceinline__ void run(T* shared, const Operands& x, long long begin, long long end) {
#pragma unroll
    for (int p = 0; p < WarpProducts; ++p)
#pragma unroll
      for (int i = 0; i < FragmentsM; ++i)
#pragma unroll
        for (int j = 0; j < FragmentsN; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) accumulators[p][i][j][e] = 0.0f;

    Loader loader(x, begin);
    const int stages = begin < end ? static_cast<int>(ceil_div(end - begin, TileK)) : 0;
    const int whole_stages = loader.whole() && begin < end ? static_cast<int>((end - begin) / TileK) : 0;
    int fetched = NumStages - 1;
    if (whole_stages < NumStages - 1) {
#pragma unroll 1
      for (int s = 0; s < NumStages - 1; ++s) {
        if (s < stages) {
          loader.fetch_clipped(shared + s * StageElements, begin + static_cast<long long>(s) * TileK);
          loader.put(shared + s * StageElements);
        }
        copy_commit();
      }
    } else {
#pragma unroll
      for (int s = 0; s < NumStages - 1; ++s) {
        loader.fetch_a(shared + s * StageElements, Constant<1>{});
        loader.fetch_b(shared + s * StageElements, Constant<1>{});
        loader.put(shared + s * StageElements);
        copy_commit();
      }
    }
    copy_wait<NumStages - 2>();
    __syncthreads();

    const unsigned base = shared_address(shared);
    const unsigned a_lane = lane_of_a();
    const unsigned b_lane = lane_of_b();
    unsigned a[BuffersOfA][FragmentsM][4];
    unsigned b[2][4];
    unsigned stage = base;
    int read = 0;
    int write = NumStages - 1;
#pragma unroll
    for (int i = 0; i < FragmentsM; ++i) load_a(a[0][i], stage + a_lane, 0, i);
    load_b(b[0], stage, b_lane, 0, 0);

    // Multiplies one stage, and fetches another if there is one: a whole one, or what is left of it.
    const auto turn = [&](auto kind) __attribute__((always_inline)) {
      constexpr bool Whole = decltype(kind)::value != 0;
      T* target = shared + write * StageElements;
      const bool more = fetched < stages;
      unrolled<Steps * Groups>([&](auto position) __attribute__((always_inline)) {
        constexpr int index = decltype(position)::value;
        constexpr int step = index / Groups;
        constexpr int group = index % Groups;
        constexpr int now = index % 2;
        if (group + 1 < Groups) {
          load_b(b[1 - now], stage, b_lane, step, group + 1);
        } else {
          if (step + 1 == Steps) {
            if (more) loader.put(target);
            copy_wait<NumStages - 2>();
            __syncthreads();  // the next stage is there for all, and nobody still reads this one
            read = read + 1 == NumStages ? 0 : read + 1;
            stage = base + read * StageBytes;
          }
          load_b(b[1 - now], stage, b_lane, (step + 1) % Steps, 0);
          if constexpr (BuffersOfA == 2) {
#pragma unroll
            for (int i = 0; i < FragmentsM; ++i) load_a(a[(step + 1) % 2][i], stage + a_lane, (step + 1) % Steps, i);
          }
        }
        if constexpr (Whole && index == 0) loader.fetch_a(target, more);
        if constexpr (Whole && index == WeightsAt) loader.fetch_b(target, more);
        if (!Whole && index == WeightsAt && more) {
          loader.fetch_clipped(target, begin + static_cast<long long>(fetched) * TileK);
        }
        if (index == WeightsAt) copy_commit();
        if (group == 0) {
#pragma unroll
          for (int i = 0; i < FragmentsM; ++i) round_fragment<T>(a[step % BuffersOfA][i]);
        }
        round_fragment<T>(b[now]);
#pragma unroll
        for (int i = 0; i < FragmentsM; ++i) {
          constexpr int next = WarpProducts == 2 ? group : 2 * group + 1;
          float (&first)[4] = accumulators[0][i][WarpProducts == 2 ? group : 2 * group];
          mma_m16n8<T>(first, a[step % BuffersOfA][i], b[now][0], b[now][1]);
          if constexpr (next < FragmentsN) {
            mma_m16n8<T>(accumulators[WarpProducts - 1][i][next], a[step % BuffersOfA][i], b[now][2], b[now][3]);
          }
          if (BuffersOfA == 1 && group + 1 == Groups) load_a(a[0][i], stage + a_lane, (step + 1) % Steps, i);
        }
      });
      ++fetched;
      write = write + 1 == NumStages ? 0 : write + 1;
    };
    int turns = 0;
    const int fast = whole_stages == stages ? stages : whole_stages - (NumStages - 1);
#pragma unroll 1
    for (; turns < fast; ++turns) turn(Constant<1>{});
#pragma unroll 1
    for (; turns < stages; ++turns) turn(Constant<0>{});
    copy_wait<0>();
    __syncthreads();  // shared memory is free
  }

  // Products of the same element, for i below FinishedM.
  __device__ __forceinline__ float first(int i, int j, int e) const { return accumulators[0][i][j][e]; }
  __device__ __forceinline__ float second(int i, int j, int e) const {
    return Apart ? accumulators[0][FinishedM + i][j][e] : accumulators[WarpProducts - 1][i][j][e];
  }

  // Where products are apart: two warps that have one each of the same elements trade, so that the first has both of the upper
  // half of the rows, the second of the lower. `shared` holds 4 * TileM * TileN bytes.
  __device__ __forceinline__ void exchange(void* shared) {
    if constexpr (Apart) {
      constexpr int Slots = FinishedM * FragmentsN * 32;
      const int lane = threadIdx.x % 32;
      const int warp = threadIdx.x / 32;
      const int pair = warp / WarpsN * (WarpsN / 2) + warp % (WarpsN / 2);
      float4* sent = static_cast<float4*>(shared) + pair * 2 * Slots + lane;
      const auto trade = [&](auto product, auto visit) __attribute__((always_inline)) {
#pragma unroll
        for (int i = 0; i < FinishedM; ++i)
#pragma unroll
          for (int j = 0; j < FragmentsN; ++j) {
            visit(accumulators[0][decltype(product)::value == 0 ? FinishedM + i : i][j], (i * FragmentsN + j) * 32);
          }
      };
      const auto give = [&](float (&d)[4], int slot) { sent[slot + warp_product() * Slots] = {d[0], d[1], d[2], d[3]}; };
      const auto take = [&](float (&d)[4], int slot) {
        const float4 other = sent[slot + (1 - warp_product()) * Slots];
        d[0] = other.x, d[1] = other.y, d[2] = other.z, d[3] = other.w;
      };
      warp_product() == 0 ? trade(Constant<0>{}, give) : trade(Constant<1>{}, give);
      __syncthreads();
      warp_product() == 0 ? trade(Constant<0>{}, take) : trade(Constant<1>{}, take);
    }
  }

  // Writes value(i, j, e) of every output that this warp finishes to (tile_m, tile_n) of an m x n matrix of C, through shared
  // memory, in vectors of 16 bytes. Rows of `out` begin at multiples of 16 bytes.
  template <typename C, typename Value>
  static __device__ __forceinline__ void store(void* shared, C* out, const Operands& x, long long ld, Value value) {
    constexpr int Elements = 16 / sizeof(C);
    constexpr int Chunks = TileN / Elements;
    C* tile = static_cast<C*>(shared);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < FinishedM; ++i)
#pragma unroll
      for (int j = 0; j < FragmentsN; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row() + (warp_product() * FinishedM + i) * 16 + half * 8 + lane / 4;
          const int column = warp_column() + j * 8 + lane % 4 * 2;
          const int offset = swizzled<TileN, sizeof(C)>(row, column / Elements) + column % Elements;
          *reinterpret_cast<Pack<C, 2>*>(tile + offset) = {
              {from_float<C>(value(i, j, half * 2)), from_float<C>(value(i, j, half * 2 + 1))}};
        }
    __syncthreads();
    const long long rows = x.m - x.tile_m * TileM;
    const long long columns = x.n - x.tile_n * TileN;
    C* corner = out + x.tile_m * TileM * ld + x.tile_n * TileN;
#pragma unroll 4
    for (int index = threadIdx.x; index < TileM * Chunks; index += NumThreads) {
      const int row = index / Chunks;
      const int column = index % Chunks * Elements;
      if (row >= rows) break;
      const C* vector = tile + swizzled<TileN, sizeof(C)>(row, index % Chunks);
      C* target = corner + row * ld + column;
      if (__builtin_expect(column + Elements <= columns, 1)) {
        *reinterpret_cast<Pack<C, Elements>*>(target) = *reinterpret_cast<const Pack<C, Elements>*>(vector);
      } else {
#pragma unroll 1
        for (int e = 0; column + e < columns; ++e) target[e] = vector[e];
      }
    }
  }
};
