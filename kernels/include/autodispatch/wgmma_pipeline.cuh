// The producer and the products of the Hopper kernels: TMA into a ring of stages, wgmma out of it.
//
// A stage holds 64 of k: TileM rows of a (K-major, 128-byte swizzle), then each weight's TileN columns, side by side, so
// that one wgmma of width NumProducts * TileN spans them. Weights stored (n, k) are K-major like a. Weights stored (k, n)
// are MN-major: they come in atoms of AtomN columns by 64 of k, one TMA box each, and the hardware transposes them. Where
// whole atoms hold more than TileN columns, the rest belongs to a neighbouring tile (and comes out of L2); the weights then
// do not touch, and each has a wgmma of its own, of a width rounded up to 16 columns.
// A tile of fewer than 64 rows: wgmma reads 64 all the same, the same 8 again or what follows in the stage, and the caller
// drops those rows of the result.
// `full[s]` completes when a stage's bytes have arrived, `empty[s]` when the warpgroup that read it is done.
#pragma once

#include "autodispatch/tma.cuh"
#include "autodispatch/wgmma.cuh"

// A place in the ring: the stage, and the parity of the phase it is in.
template <int NumStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int count) {
    stage += count;
    parity ^= static_cast<unsigned>(stage / NumStages) & 1u;
    stage %= NumStages;
  }

  __device__ __forceinline__ void next() {
    if (++stage == NumStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// NumReaders warpgroups share a tile, each with its part of the rows.
template <typename T, WeightLayout Layout, int TileM, int TileN, int NumStages, int NumProducts, int NumReaders>
struct WgmmaPipeline {
  static constexpr int TileK = 64;
  static constexpr int RowBlocks = TileM < 64 ? 1 : TileM / 64 / NumReaders;  // of one warpgroup
  static constexpr int AtomN = (TileN + 63) / 64 * 64 == (TileN + 31) / 32 * 32 ? 64 : 32;  // of MN-major weights
  static constexpr int LoadedN = Layout == nk ? TileN : (TileN + AtomN - 1) / AtomN * AtomN;
  static constexpr bool Spanning = LoadedN == TileN;  // one wgmma spans all products
  static constexpr int ProductN = Spanning ? TileN : (TileN + 15) / 16 * 16;
  static constexpr int Width = NumProducts * ProductN;
  static constexpr int WeightBytes = LoadedN * TileK * 2;
  static constexpr int StageBytes = TileM * TileK * 2 + NumProducts * WeightBytes;

  static_assert(sizeof(T) == 2, "wgmma here takes 16-bit elements");
  static_assert(TileM <= 256 && (TileM % (64 * NumReaders) == 0 || (NumReaders == 1 && (TileM == 8 || StageBytes >= 8192))),
                "TileM must be a multiple of 64 rows per reader, or fewer for one reader");
  static_assert(TileN % 8 == 0, "TileN must be a multiple of 8");
  static_assert(NumStages >= 2, "the ring needs two stages");

  using Position = RingPosition<NumStages>;
  using Accumulators = float[RowBlocks][Width / 2];

  char* stages;  // aligned to 1024 bytes
  Barrier* full;
  Barrier* empty;

  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int s = 0; s < NumStages; ++s) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, NumReaders);
    }
    barrier_init_fence();
  }

  // Loads `block`, the next 64 of k of one tile, when its stage is free, by one thread. `b` are the maps of the weights, and
  // `column` is the tile's first in each.
  template <bool L2Hints>
  __device__ __forceinline__ void load_block(Position& position, const TensorMap& a, const TensorMap* const (&b)[NumProducts],
                                             int row, int column, int block, CachePolicy keep, CachePolicy stream) const {
    barrier_wait(empty + position.stage, position.parity ^ 1u);
    Barrier* barrier = full + position.stage;
    char* stage = stages + position.stage * StageBytes;
    barrier_arrive_expect(barrier, StageBytes);
    const int depth = block * TileK;
    load<L2Hints>(stage, a, depth, row, barrier, keep);
    char* weights = stage + TileM * TileK * 2;
#pragma unroll
    for (int p = 0; p < NumProducts; ++p) {
      if constexpr (Layout == nk) {
        load<L2Hints>(weights + p * WeightBytes, *b[p], depth, column, barrier, stream);
      } else {
#pragma unroll
        for (int atom = 0; atom < LoadedN / AtomN; ++atom) {
          char* shared = weights + p * WeightBytes + atom * AtomN * TileK * 2;
          load<L2Hints>(shared, *b[p], column + atom * AtomN, depth, barrier, stream);
        }
      }
    }
    position.next();
  }

  static __device__ __forceinline__ void clear(Accumulators& d) {
#pragma unroll
    for (int r = 0; r < RowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < Width / 2; ++i) d[r][i] = 0.0f;
  }

  // Adds one tile's products to cleared accumulators, by one warpgroup, the `reader`-th of those that share the tile. Calls
  // `released(block)` when this warpgroup has released the stage of a block. Returns the last stage, which the caller
  // releases after wgmma_wait<0>.
  template <typename Released>
  __device__ __forceinline__ int multiply(Position& position, Accumulators& d, int k_blocks, int reader,
                                          Released released) const {
    constexpr int Leading = Layout == nk ? 0 : AtomN * TileK * 2;
    constexpr int Stride = Layout == nk ? 1024 : AtomN * 16;
    constexpr Swizzle WeightSwizzle = Layout == nk || AtomN == 64 ? swizzle_128 : swizzle_64;
    constexpr int WeightStep = Layout == nk ? 2 : AtomN * 2;  // 16 of k, in units of 16 bytes
    const Descriptor a0 = matrix_descriptor(stages + reader * RowBlocks * 8192, 0, TileM == 8 ? 0 : 1024, swizzle_128);
    const Descriptor b0 = matrix_descriptor(stages + TileM * TileK * 2, Leading, Stride, WeightSwizzle);
#pragma unroll
    for (int r = 0; r < RowBlocks; ++r) pin_registers(d[r]);
    int previous = 0;
    for (int block = 0; block < k_blocks; ++block) {
      barrier_wait(full + position.stage, position.parity);
      const Descriptor offset = static_cast<Descriptor>(position.stage * (StageBytes >> 4));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < TileK / 16; ++step) {
#pragma unroll
        for (int r = 0; r < RowBlocks; ++r) {
          const Descriptor left = a0 + offset + r * 512 + step * 2;
          const Descriptor right = b0 + offset + step * WeightStep;
          if constexpr (Spanning) {
            Wgmma<Width>::template multiply<T, Layout == kn>(d[r], left, right);
          } else {
#pragma unroll
            for (int p = 0; p < NumProducts; ++p) {
              Wgmma<ProductN>::template multiply<T, Layout == kn>(d[r] + p * ProductN / 2, left,
                                                                  right + p * (WeightBytes >> 4));
            }
          }
        }
      }
      wgmma_commit();
      wgmma_wait<1>();  // the previous block's products are done
      if (block > 0) {
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + previous);
        released(block - 1);
      }
      previous = position.stage;
      position.next();
    }
    return previous;
  }

 private:
  template <bool L2Hints>
  static __device__ __forceinline__ void load(void* shared, const TensorMap& map, int column, int row, Barrier* barrier,
                                              CachePolicy policy) {
    if constexpr (L2Hints) {
      tma_load(shared, map, column, row, barrier, policy);
    } else {
      tma_load(shared, map, column, row, barrier);
    }
  }
};

// What warpgroup `group` (1 or 2) of a block does beside the producer's: multiplies tiles of a persistent grid, and hands the
// accumulators of each with its number to `store`. Ping-pong: the groups take whole tiles by turns, and while one multiplies
// the other stores; named barriers 1 and 2 pass the turn. Cooperative: each takes its part of the rows of every tile.
template <bool Cooperative, typename Pipeline, typename Store>
__device__ __forceinline__ void multiply_tiles(const Pipeline& pipeline, int group, int tiles, int k_blocks, Store store) {
  const int grid = gridDim.x;
  const int own = blockIdx.x;
  typename Pipeline::Position position;
  if (!Cooperative && group == 2) position.advance(k_blocks);
  for (int i = own + (Cooperative ? 0 : (group - 1) * grid); i < tiles; i += Cooperative ? grid : 2 * grid) {
    typename Pipeline::Accumulators d;
    Pipeline::clear(d);
    if (!Cooperative && i != own) named_barrier_sync(group, 256);  // the first waits for nobody
    const int last = pipeline.multiply(position, d, k_blocks, Cooperative ? group - 1 : 0, [](int) {});
    if (!Cooperative && i + grid < tiles) named_barrier_arrive(3 - group, 256);
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(pipeline.empty + last);
    if (!Cooperative) position.advance(k_blocks);  // past the other group's tile
#pragma unroll
    for (int r = 0; r < Pipeline::RowBlocks; ++r) pin_registers(d[r]);
    store(d, i);
  }
}
