// c1 = a @ b1 and c2 = a @ b2 on the fp32 units in one launch; activation_product.cu then makes out of them.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; c1, c2 (m, n) in fp32. Pointers
// and rows are multiples of Alignment bytes, those of c1 and c2 of 16.
// T is float, f16 or bf16; products and accumulators are fp32.
// The first half of the blocks computes tiles of c1, the second half those of c2, in groups of GroupM tile rows.
// Bound by fp32 arithmetic. Any architecture, stride, size and alignment to the element.
// Shared memory: 2 * TileK * (TileM + 4 + TileN + 4) * 4 bytes, static; without the 4 beside TileN for kn.
#include "autodispatch/simt_mainloop.cuh"
#include "autodispatch/tile.cuh"

template <typename T, WeightLayout Layout, int TileM, int TileN, int TileK, int ThreadM, int ThreadN, int GroupM,
          int Alignment>
__global__ void __launch_bounds__((TileM / ThreadM) * (TileN / ThreadN), 1)
    split_simt(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, float* __restrict__ c1,
               float* __restrict__ c2, long long m, long long n, long long k, long long lda, long long ldb1,
               long long ldb2, long long ldc) {
  using Loop = SimtMainloop<T, Layout, TileM, TileN, TileK, ThreadM, ThreadN, Alignment, 1>;
  __shared__ typename Loop::Shared shared;
  const long long tiles_m = ceil_div(m, TileM);
  const long long tiles_n = ceil_div(n, TileN);
  const bool second = blockIdx.x >= tiles_m * tiles_n;
  const auto tile = grouped_tile<GroupM, long long>(blockIdx.x - (second ? tiles_m * tiles_n : 0), tiles_m, tiles_n);
  const typename Loop::Operands x = {a, {second ? b2 : b1}, tile.m, tile.n, m, n, k, lda, {second ? ldb2 : ldb1}};
  Loop loop;
  loop.run(shared, x);
  Loop::template store<16>(second ? c2 : c1, x, ldc, [&](int i, int j) { return loop.accumulators[0][i][j]; });
}
