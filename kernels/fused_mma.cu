// out = Activation(a @ b1) * (a @ b2), both products of a tile in registers.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; out (m, n).
// T is f16 or bf16, or float with products in tf32; accumulators are fp32, rounded once at the store.
// One block computes TileM x TileN outputs; its warps stand WarpsM x WarpsN. Blocks walk the tiles in groups of GroupM.
// Bound by the tensor cores for large m, by reading the weights for small m.
// Requires 7.5 for f16, 8.0 for the others; pointers and leading dimensions (in bytes) are multiples of 16.
// Shared memory: NumStages * (TileM + 2 * TileN) * TileK elements, dynamic; the tile on its way out reuses it, and behind it
// TileM * TileN * 4 bytes where warps with one product each trade.
#include "autodispatch/activation.cuh"
#include "autodispatch/mma_mainloop.cuh"
#include "autodispatch/tile.cuh"

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int TileK, int NumStages,
          int WarpsM, int WarpsN, int GroupM>
__global__ void __launch_bounds__(WarpsM * WarpsN * 32,
                             MmaMainloop<T, Layout, TileM, TileN, TileK, NumStages, WarpsM, WarpsN, 2>::BlocksPerSm)
    fused_mma(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, T* __restrict__ out,
              long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2, long long ldout) {
  extern __shared__ __align__(128) char shared[];
  using Loop = MmaMainloop<T, Layout, TileM, TileN, TileK, NumStages, WarpsM, WarpsN, 2>;
  const auto tile = grouped_tile<GroupM, long long>(blockIdx.x, ceil_div(m, TileM), ceil_div(n, TileN));
  const typename Loop::Operands x = {a, {b1, b2}, tile.m, tile.n, m, n, k, lda, {ldb1, ldb2}};
  Loop loop;
  loop.run(reinterpret_cast<T*>(shared), x, 0, k);
  loop.exchange(shared + TileM * TileN * sizeof(T));
  Loop::store(shared, out, x, ldout, [&](int i, int j, int e) {
    return Activation::template apply<T>(loop.first(i, j, e)) * loop.second(i, j, e);
  });
}
