// Compares a candidate's result with the reference in one pass, and looks at the guards around it.
// `buffer` holds `size` elements: `start` of guard, m rows of which the first n of `stride` elements are the result and the
// rest is guard, and guard again. Guards must still be all ones. Row r has its reference in row slots[r] of `expected` and
// `tolerance` (., n), or none where that is negative. What counts as right is said in autodispatch/reference.py.
// Blocks take turns over the rows, and each writes one tally of Fields numbers, to be added up in their order.
// Bound by memory. Shared memory: a tally per thread.
#include "autodispatch/types.cuh"

constexpr int Threads = 256, Fields = 7;
constexpr double LargestDouble = 1.7976931348623157e308;

__device__ __forceinline__ bool is_finite(double x) { return fabs(x) <= LargestDouble; }

template <typename T>
__device__ __forceinline__ bool is_right(double actual, double expected, double tolerance) {
  constexpr double Largest = sizeof(T) == 4 || is_bf16<T> ? 3.4028234663852886e38 : 65504.0;
  if (actual != actual || expected != expected) return actual != actual && expected != expected;
  if (is_finite(actual)) {
    if (!is_finite(expected)) return false;
    return is_finite(tolerance) ? fabs(actual - expected) <= tolerance : actual == expected;
  }
  const bool may_overflow = is_finite(tolerance) && fabs(expected) + tolerance >= Largest;
  return actual == expected || (may_overflow && (actual > 0) == (expected > 0) && expected != 0);
}

template <typename T>
__device__ __forceinline__ bool is_untouched(T x) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(x) == 0xffffffffu;
  } else {
    return x.bits == 0xffffu;
  }
}

template <typename T>
__global__ void __launch_bounds__(Threads)
    compare(const T* __restrict__ buffer, long long size, long long start, long long stride, long long m, long long n,
            const int* __restrict__ slots, const double* __restrict__ expected,
            const double* __restrict__ tolerance, double* __restrict__ tallies) {
  double touched = 0, wrong = 0, first = LargestDouble, finite = 0, squares = 0, off_squares = 0, most_off = 0;
  // the guards before and after the rows count as a row each
  for (long long row = static_cast<long long>(blockIdx.x) - 1; row <= m; row += gridDim.x) {
    const long long begin = row < 0 ? 0 : start + row * stride;
    const long long length = row < 0 ? start : row < m ? stride : size - begin;
    const bool is_result = row >= 0 && row < m;
    const long long slot = is_result ? slots[row] : 0;
    for (long long column = threadIdx.x; column < length; column += Threads) {
      const T value = buffer[begin + column];
      if (!is_result || column >= n) {
        touched += !is_untouched(value);
        continue;
      }
      if (slot < 0) continue;
      const long long at = slot * n + column;
      const double actual = to_float(value), wanted = expected[at];
      if (!is_right<T>(actual, wanted, tolerance[at])) {
        wrong += 1;
        first = fmin(first, static_cast<double>(at));
      }
      if (is_finite(actual) && is_finite(wanted)) {
        const double off = fabs(actual - wanted);
        finite += 1;
        squares += wanted * wanted;
        off_squares += off * off;
        most_off = fmax(most_off, off);
      }
    }
  }
  __shared__ double shared[Threads][Fields];
  const double tally[Fields] = {touched, wrong, first, finite, squares, off_squares, most_off};
#pragma unroll
  for (int f = 0; f < Fields; ++f) shared[threadIdx.x][f] = tally[f];
  for (int half = Threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x >= half) continue;
#pragma unroll
    for (int f = 0; f < Fields; ++f) {
      double& mine = shared[threadIdx.x][f];
      const double other = shared[threadIdx.x + half][f];
      mine = f == 2 ? fmin(mine, other) : f == 6 ? fmax(mine, other) : mine + other;
    }
  }
  if (threadIdx.x < Fields) tallies[blockIdx.x * Fields + threadIdx.x] = shared[0][threadIdx.x];
}
