// out = Activation(c1) * c2: the second step of every split variant.
// c1, c2 (m, n) with leading dimension ldc; out (m, n) with leading dimension ldout.
// C is float, or bf16 where the caller allowed a second rounding; arithmetic is fp32, rounded once to T at the store.
// A block takes TileM rows, a warp one row of 32 * Vector columns at a time; rows lie on grid.x, columns on grid.y.
// Bound by memory. Vector > 1 requires Vector-element alignment of c1, c2 and out and of their leading dimensions.
// Shared memory: none.
#include "autodispatch/activation.cuh"
#include "autodispatch/types.cuh"

template <typename C, typename T, typename Activation, int TileM, int Vector>
__global__ void __launch_bounds__(TileM * 32, 1)
    activation_product(const C* __restrict__ c1, const C* __restrict__ c2, T* __restrict__ out, long long m,
                       long long n, long long ldc, long long ldout) {
  const long long row = static_cast<long long>(blockIdx.x) * TileM + threadIdx.x / 32;
  if (row >= m) return;
  const long long step = static_cast<long long>(gridDim.y) * 32 * Vector;
  for (long long column = (blockIdx.y * 32ll + threadIdx.x % 32) * Vector; column < n; column += step) {
    if (column + Vector <= n) {
      const auto gate = *reinterpret_cast<const Pack<C, Vector>*>(c1 + row * ldc + column);
      const auto up = *reinterpret_cast<const Pack<C, Vector>*>(c2 + row * ldc + column);
      Pack<T, Vector> result;
#pragma unroll
      for (int i = 0; i < Vector; ++i) {
        result.values[i] = from_float<T>(Activation::template apply<T>(to_float(gate.values[i])) * to_float(up.values[i]));
      }
      *reinterpret_cast<Pack<T, Vector>*>(out + row * ldout + column) = result;
    } else {
      for (long long x = column; x < n; ++x) {
        out[row * ldout + x] =
            from_float<T>(Activation::template apply<T>(to_float(c1[row * ldc + x])) * to_float(c2[row * ldc + x]));
      }
    }
  }
}
