// c1 = a @ b1 and c2 = a @ b2 in one launch; activation_product.cu then makes out of them.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; c1, c2 (m, n).
// T is f16 or bf16, or float with products in tf32; accumulators are fp32; C is float, or bf16 where the caller allowed a
// second rounding. The first half of the blocks computes tiles of c1, the second half those of c2, in groups of GroupM tile
// rows. With more than one row of blocks each covers a share of k and writes its own c1 and c2, 2 * m * ldc elements apart: the
// next kernel adds them up.
// Bound by the tensor cores for large m, by reading the weights for small m.
// Requires 7.5 for f16, 8.0 for the others; pointers and leading dimensions (in bytes) are multiples of 16.
// Shared memory: NumStages * (TileM + TileN) * TileK elements, dynamic; the tile on its way out reuses it.
#include "autodispatch/mma_mainloop.cuh"
#include "autodispatch/tile.cuh"

template <typename T, typename C, WeightLayout Layout, int TileM, int TileN, int TileK, int NumStages, int WarpsM,
          int WarpsN, int GroupM>
__global__ void __launch_bounds__(WarpsM * WarpsN * 32,
                             MmaMainloop<T, Layout, TileM, TileN, TileK, NumStages, WarpsM, WarpsN, 1>::BlocksPerSm)
    split_mma(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, C* __restrict__ c1,
              C* __restrict__ c2, long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2,
              long long ldc) {
  extern __shared__ __align__(128) char shared[];
  using Loop = MmaMainloop<T, Layout, TileM, TileN, TileK, NumStages, WarpsM, WarpsN, 1>;
  const long long tiles_m = ceil_div(m, TileM);
  const long long tiles_n = ceil_div(n, TileN);
  const bool second = blockIdx.x >= tiles_m * tiles_n;
  const auto tile = grouped_tile<GroupM, long long>(blockIdx.x - (second ? tiles_m * tiles_n : 0), tiles_m, tiles_n);
  const typename Loop::Operands x = {a, {second ? b2 : b1}, tile.m, tile.n, m, n, k, lda, {second ? ldb2 : ldb1}};
  const long long share = ceil_div(ceil_div(k, TileK), gridDim.y) * TileK;
  const long long begin = blockIdx.y * share;
  Loop loop;
  loop.run(reinterpret_cast<T*>(shared), x, begin, begin + share < k ? begin + share : k);
  Loop::store(shared, (second ? c2 : c1) + blockIdx.y * 2 * m * ldc, x, ldc,
              [&](int i, int j, int e) { return loop.first(i, j, e); });
}
