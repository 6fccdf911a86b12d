// Element types and their conversion to and from the fp32 accumulator. No toolkit header is included, so that
// every kernel builds wherever NVRTC is installed, whatever headers lie beside it.
#pragma once

struct f16 {
  unsigned short bits;
};

struct bf16 {
  unsigned short bits;
};

// Where the weights' unit stride lies: along n for row-major (K, N) storage, along k for (N, K) storage.
enum WeightLayout { kn, nk };

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const unsigned bits = __float_as_uint(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even
  y.bits = is_nan ? 0x7fffu : static_cast<unsigned short>(rounded >> 16);
#endif
  return y;
}

template <typename T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

#if __CUDA_ARCH__ >= 800
// Two values rounded to 16 bits, the first in the lower half.
template <typename T>
__device__ __forceinline__ unsigned pack_pair(float first, float second) {
  unsigned pair;
  if constexpr (is_bf16<T>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}
#endif

// The larger of two values; NaN stays NaN, unlike with fmaxf.
__device__ __forceinline__ float at_least(float x, float bound) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(bound));
  return y;
#else
  return x < bound ? bound : x;
#endif
}

// 2^x and 1 / x to about 2 and 1 units in the last place; subnormal values count as zero.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <bool Holds, typename IfSo, typename Else>
struct ConditionalType {
  using type = IfSo;
};
template <typename IfSo, typename Else>
struct ConditionalType<false, IfSo, Else> {
  using type = Else;
};
template <bool Holds, typename IfSo, typename Else>
using Conditional = typename ConditionalType<Holds, IfSo, Else>::type;

// A number that a generic lambda can take as a constant.
template <int Value>
struct Constant {
  static constexpr int value = Value;
};

// Calls body(Constant<0>), ..., body(Constant<Count - 1>), whatever the compiler thinks of unrolling.
template <int Count, int First = 0, typename Body>
__device__ __forceinline__ void unrolled(const Body& body) {
  if constexpr (First < Count) {
    body(Constant<First>{});
    unrolled<Count, First + 1>(body);
  }
}

// N consecutive elements that move as one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

// Stores two neighbouring elements as one access where both lie inside the row, else those that do. `column` is even
// and rows begin at a multiple of two elements.
template <typename T>
__device__ __forceinline__ void store_pair(T* row, long long column, long long columns, float first, float second) {
  if (column + 1 < columns) {
    *reinterpret_cast<Pack<T, 2>*>(row + column) = {{from_float<T>(first), from_float<T>(second)}};
  } else if (column < columns) {
    row[column] = from_float<T>(first);
  }
}
