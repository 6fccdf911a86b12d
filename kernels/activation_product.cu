// out = Activation(c1) * c2: the second step of every split variant.
// c1, c2 (m, n) with leading dimension ldc, a multiple of 8, their rows padded to it; out (m, n) with leading dimension
// ldout. Where k was shared out, c1 and c2 are the sums of NumPartials matrices that lie 2 * m * ldc elements apart, added
// in their order.
// C is float, or bf16 where the caller allowed a second rounding; arithmetic is fp32, rounded once to T at the store.
// A thread takes 16 bytes of `out` in RowsPerThread rows, all their operands in flight before the first is used. Columns lie
// on grid.x, rows on grid.y. Rows of `out` begin at multiples of Alignment bytes.
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

template <typename C, typename T, typename Activation, int RowsPerThread, int NumPartials, int Alignment>
__global__ void __launch_bounds__(Threads, 1)
    activation_product(const C* __restrict__ c1, const C* __restrict__ c2, T* __restrict__ out, long long m,
                       long long n, long long ldc, long long ldout) {
  constexpr int Columns = 16 / sizeof(T);
  const long long column = (static_cast<long long>(blockIdx.x) * Threads + threadIdx.x) * Columns;
  if (column >= n) return;
  const long long partial_stride = 2 * m * ldc;
  const long long step = static_cast<long long>(gridDim.y) * RowsPerThread;
  for (long long first = static_cast<long long>(blockIdx.y) * RowsPerThread; first < m; first += step) {
    float gate[RowsPerThread][Columns], up[RowsPerThread][Columns];
#pragma unroll
    for (int r = 0; r < RowsPerThread; ++r) {
      const long long offset = (first + r < m ? first + r : m - 1) * ldc + column;
      sum_partials<NumPartials>(gate[r], c1 + offset, partial_stride);
      sum_partials<NumPartials>(up[r], c2 + offset, partial_stride);
    }
#pragma unroll
    for (int r = 0; r < RowsPerThread; ++r) {
      if (first + r >= m) break;
      T result[Columns];
#pragma unroll
      for (int i = 0; i < Columns; ++i) result[i] = from_float<T>(Activation::template apply<T>(gate[r][i]) * up[r][i]);
      store_vector<Alignment>(out + (first + r) * ldout + column, result, n - column);
    }
  }
}
