// out = Activation(a @ b1) * (a @ b2) on the fp32 units, both products of a tile in registers.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; out (m, n). Pointers and rows
// are multiples of Alignment bytes.
// T is float, f16 or bf16; products and accumulators are fp32, rounded once at the store.
// One block computes TileM x TileN outputs, a thread ThreadM x ThreadN of them; groups of GroupM tile rows.
// Bound by fp32 arithmetic. Any architecture, stride, size and alignment to the element.
// Shared memory: 2 * TileK * (TileM + 4 + 2 * (TileN + 4)) * 4 bytes, static; without the 4 beside TileN for kn.
#include "autodispatch/activation.cuh"
#include "autodispatch/simt_mainloop.cuh"
#include "autodispatch/tile.cuh"

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int TileK, int ThreadM,
          int ThreadN, int GroupM, int Alignment>
__global__ void __launch_bounds__((TileM / ThreadM) * (TileN / ThreadN), 1)
    fused_simt(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, T* __restrict__ out,
               long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2, long long ldout) {
  using Loop = SimtMainloop<T, Layout, TileM, TileN, TileK, ThreadM, ThreadN, Alignment, 2>;
  __shared__ typename Loop::Shared shared;
  const auto tile = grouped_tile<GroupM, long long>(blockIdx.x, ceil_div(m, TileM), ceil_div(n, TileN));
  const typename Loop::Operands x = {a, {b1, b2}, tile.m, tile.n, m, n, k, lda, {ldb1, ldb2}};
  Loop loop;
  loop.run(shared, x);
  Loop::template store<Alignment>(out, x, ldout, [&](int i, int j) {
    return Activation::template apply<T>(loop.accumulators[0][i][j]) * loop.accumulators[1][i][j];
  });
}
