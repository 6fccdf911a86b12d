// out = Activation(a @ b1) * (a @ b2), both products of a tile in registers.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; out (m, n).
// T is f16 or bf16, or float with products in tf32; accumulators are fp32, rounded once at the store.
// One block computes TileM x TileN outputs; its warps stand WarpsM x WarpsN. Blocks walk the tiles in groups of GroupM.
// With TailM, the columns of tiles from `columns` on are cut into TailM x TileN / 2 instead, which the last blocks compute: a
// last round of few whole tiles would leave most SMs without work. Without it, `columns` are all.
// Bound by the tensor cores for large m, by reading the weights for small m.
// Requires 7.5 for f16, 8.0 for the others; pointers and leading dimensions (in bytes) are multiples of 16.
// Shared memory: NumStages * (TileM + 2 * TileN) * TileK elements, dynamic, of which small tiles need no more; the tile on its way
// out reuses it, and behind it TileM * TileN * 4 bytes where warps with one product each trade.
#include "autodispatch/activation.cuh"
#include "autodispatch/mma_mainloop.cuh"
#include "autodispatch/tile.cuh"

template <typename Activation, typename Loop, typename T>
__device__ __forceinline__ void compute(T* shared, T* out, long long ldout, const typename Loop::Operands& x) {
  Loop loop;
  loop.run(shared, x, 0, x.k);
  loop.exchange(shared + Loop::TileElements);
  Loop::store(shared, out, x, ldout, [&](int i, int j, int e) {
    return Activation::template apply<T>(loop.first(i, j, e)) * loop.second(i, j, e);
  });
}

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int TileK, int NumStages,
          int WarpsM, int WarpsN, int GroupM, int TailM>
__global__ void __launch_bounds__(WarpsM * WarpsN * 32,
                             MmaMainloop<T, Layout, TileM, TileN, TileK, NumStages, WarpsM, WarpsN, 2>::BlocksPerSm)
    fused_mma(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, T* __restrict__ out,
              long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2, long long ldout,
              long long columns) {
  extern __shared__ __align__(128) char memory[];
  T* shared = reinterpret_cast<T*>(memory);
  const long long whole = ceil_div(m, TileM) * columns;
  if (TailM == 0 || blockIdx.x < whole) {
    using Loop = MmaMainloop<T, Layout, TileM, TileN, TileK, NumStages, WarpsM, WarpsN, 2>;
    const auto tile = grouped_tile<GroupM, long long>(blockIdx.x, ceil_div(m, TileM), columns);
    compute<Activation, Loop>(shared, out, ldout, {a, {b1, b2}, tile.m, tile.n, m, n, k, lda, {ldb1, ldb2}});
  } else if constexpr (TailM != 0) {
    using Loop = MmaMainloop<T, Layout, TailM, TileN / 2, 2 * TileK, NumStages, WarpsM, WarpsN, 2>;
    const auto tile = grouped_tile<GroupM>(blockIdx.x - whole, ceil_div(m, TailM), ceil_div(n, TileN / 2) - 2 * columns);
    compute<Activation, Loop>(shared, out, ldout,
                              {a, {b1, b2}, tile.m, 2 * columns + tile.n, m, n, k, lda, {ldb1, ldb2}});
  }
}
