// out = Activation(a @ b1) * (a @ b2) on the fp32 units, both products of a tile in registers.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; out (m, n).
// T is float, f16 or bf16; products and accumulators are fp32, rounded once at the store.
// One block computes TileM x TileN outputs, a thread ThreadM x ThreadN of them; groups of GroupM tile rows.
// Bound by fp32 arithmetic. Any architecture, stride, size and alignment to the element.
// Shared memory: TileK * (TileM + 1 + 2 * (TileN + 1)) * 4 bytes, static.
#include "autodispatch/activation.cuh"
#include "autodispatch/simt_mainloop.cuh"
#include "autodispatch/tile.cuh"

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int TileK, int ThreadM,
          int ThreadN, int GroupM>
__global__ void __launch_bounds__((TileM / ThreadM) * (TileN / ThreadN), 1)
    fused_simt(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, T* __restrict__ out,
               long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2, long long ldout) {
  using Loop = SimtMainloop<T, Layout, TileM, TileN, TileK, ThreadM, ThreadN, 2>;
  __shared__ typename Loop::Shared shared;
  const auto tile = grouped_tile<GroupM, long long>(blockIdx.x, ceil_div(m, TileM), ceil_div(n, TileN));
  Loop loop;
  loop.run(shared, a, {b1, b2}, tile.m, tile.n, m, n, k, lda, {ldb1, ldb2});
  loop.for_each(tile.m, tile.n, m, n, [&](long long row, long long column, int i, int j) {
    out[row * ldout + column] =
        from_float<T>(Activation::template apply<T>(loop.accumulators[0][i][j]) * loop.accumulators[1][i][j]);
  });
}
