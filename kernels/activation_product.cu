// out = Activation(c1) * c2: the second step of every split variant.
// c1, c2 (m, n) with leading dimension ldc, a multiple of 8, their rows padded to it; out (m, n) with leading dimension
// ldout. Where k was shared out, c1 and c2 are the sums of NumPartials matrices that lie 2 * m * ldc elements apart, added
// in their order.
// C is float, or bf16 where the caller allowed a second rounding; arithmetic is fp32, rounded once to T at the store.
// A thread takes 16 bytes of a row of `out` at a time, all their operands in flight before the first is used. Columns lie on
// grid.x, rows on grid.y. Rows of `out` begin at multiples of Alignment bytes.
// Bound by memory. Shared memory: none.
#include "autodispatch/activation.cuh"
#include "autodispatch/vector.cuh"

constexpr int Threads = 128;

template <int NumPartials, int Columns, typename C>
__device__ __forceinline__ void sum_partials(float (&sum)[Columns], const C* c, long long stride) {
  Vector<C> parts[NumPartials][Columns / Vector<C>::Elements];
#pragma unroll
  for (int s = 0; s < NumPartials; ++s)
#pragma unroll
    for (int i = 0; i < Columns; i += Vector<C>::Elements) {
      parts[s][i / Vector<C>::Elements] = load_vector<16, true>(c + s * stride + i);
    }
#pragma unroll
  for (int i = 0; i < Columns; ++i) {
    sum[i] = parts[0][i / Vector<C>::Elements][i % Vector<C>::Elements];
#pragma unroll
    for (int s = 1; s < NumPartials; ++s) sum[i] += parts[s][i / Vector<C>::Elements][i % Vector<C>::Elements];
  }
}

template <typename C, typename T, typename Activation, int NumPartials, int Alignment>
__global__ void __launch_bounds__(Threads, 1)
    activation_product(const C* __restrict__ c1, const C* __restrict__ c2, T* __restrict__ out, long long m,
                       long long n, long long ldc, long long ldout) {
  constexpr int Columns = 16 / sizeof(T);
  const long long column = (static_cast<long long>(blockIdx.x) * Threads + threadIdx.x) * Columns;
  if (column >= n) return;
  const long long partial_stride = 2 * m * ldc;
  for (long long row = blockIdx.y; row < m; row += gridDim.y) {
    float gate[Columns], up[Columns];
    sum_partials<NumPartials>(gate, c1 + row * ldc + column, partial_stride);
    sum_partials<NumPartials>(up, c2 + row * ldc + column, partial_stride);
    T result[Columns];
#pragma unroll
    for (int i = 0; i < Columns; ++i) result[i] = from_float<T>(Activation::template apply<T>(gate[i]) * up[i]);
    store_vector<Alignment>(out + row * ldout + column, result, n - column);
  }
}
