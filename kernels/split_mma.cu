// c1 = a @ b1 and c2 = a @ b2 in one launch; activation_product.cu then makes out of them.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; c1, c2 (m, n), ldc even.
// T is f16 or bf16, accumulators are fp32; C is float, or bf16 where the caller allowed a second rounding.
// The first half of the blocks computes tiles of c1, the second half those of c2, in groups of GroupM tile rows.
// Bound by the tensor cores for large m, by reading the weights for small m.
// Requires 7.5 for f16, 8.0 for bf16; pointers and leading dimensions (in bytes) are multiples of 16.
// Shared memory: NumStages * (TileM + TileN) * TileK * 2 bytes, dynamic.
#include "autodispatch/mma_mainloop.cuh"
#include "autodispatch/tile.cuh"

template <typename T, typename C, WeightLayout Layout, int TileM, int TileN, int TileK, int NumStages, int WarpsM,
          int WarpsN, int GroupM>
__global__ void __launch_bounds__(WarpsM * WarpsN * 32, 1)
    split_mma(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, C* __restrict__ c1,
              C* __restrict__ c2, long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2,
              long long ldc) {
  extern __shared__ uint4 shared[];
  const long long tiles_m = ceil_div(m, TileM);
  const long long tiles_n = ceil_div(n, TileN);
  const bool second = blockIdx.x >= tiles_m * tiles_n;
  const auto tile = grouped_tile<GroupM, long long>(blockIdx.x - (second ? tiles_m * tiles_n : 0), tiles_m, tiles_n);
  C* c = second ? c2 : c1;
  MmaMainloop<T, Layout, TileM, TileN, TileK, NumStages, WarpsM, WarpsN, 1> loop;
  loop.run(reinterpret_cast<T*>(shared), a, {second ? b2 : b1}, tile.m, tile.n, m, n, k, lda, {second ? ldb2 : ldb1});
  loop.for_each_pair(tile.m, tile.n, [&](long long row, long long column, int i, int j, int x) {
    const auto& sum = loop.accumulators[0][i][j];
    if (row < m) store_pair(c + row * ldc, column, n, sum[x], sum[x + 1]);
  });
}
