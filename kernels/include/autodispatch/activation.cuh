// Activations of the gate, one struct each, in fp32. `apply<T>` maps the gate's accumulator to its activated value, as
// accurately as a result of type T can show: for 16-bit results the hardware's approximations of 2^x and 1 / x do, for float
// they do where the caller allows it, which is `fast<Activation>`. The kernels multiply by the up projection and round once,
// at the store. NaN stays NaN, -inf becomes the limit 0, of either sign.
// docs/numerics.md has the measured errors. A new activation is one more struct here, its name in autodispatch/problem.py,
// and its float64 form in autodispatch/activations.py.
#pragma once

#include "autodispatch/types.cuh"

struct approximate_float {
  float value;
};

template <typename T>
constexpr bool is_exact_float = false;
template <>
constexpr bool is_exact_float<float> = true;

constexpr float Lowest = -3.4028235e38f;
constexpr float Log2E = 1.44269504f;

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return is_exact_float<T> ? expf(x) : exp2_approximate(x * Log2E);
}

template <typename T>
__device__ __forceinline__ float quotient(float x, float y) {
  return is_exact_float<T> ? __fdividef(x, y) : x * reciprocal(y);
}

// x / (1 + exp(-y)). With T of 16 bits it is zero below a y of -87; else h = exp(-|y| / 2) keeps the tail accurate until the
// result itself is subnormal.
template <typename T>
__device__ __forceinline__ float times_sigmoid(float x, float y) {
  if constexpr (sizeof(T) == 2) {
    return x * reciprocal(1.0f + exp2_approximate(y * -Log2E));
  } else {
    const float h = exponential<T>(-0.5f * fabsf(y));
    return quotient<T>(y < 0.0f ? (x * h) * h : x, 1.0f + h * h);
  }
}

struct sigmoid {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    return times_sigmoid<T>(1.0f, x);
  }
};

// x * sigmoid(x).
struct silu {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    const float finite = at_least(x, Lowest);
    return times_sigmoid<T>(finite, finite);
  }
};

// x * sigmoid(2 y) with y = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / 2 * (1 + tanh(y)).
struct gelu_tanh {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    const float finite = at_least(x, Lowest);
    const float y = finite * fmaf(0.0713548163f * finite, finite, 1.59576912f);
    return times_sigmoid<T>(finite, at_least(y, Lowest));
  }
};

// x * P(X <= x) of the normal distribution. The tail beyond |x| keeps its relative accuracy.
struct gelu {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    const float finite = at_least(x, Lowest);
    if constexpr (is_exact_float<T>) {
      return exact(finite);
    } else {
      return approximation(finite);
    }
  }

  // The tail is exp(-t^2 / 2) * erfcx(t / sqrt(2)) / 2; half of it is multiplied last, so that no factor is subnormal before
  // the result is. What t * t loses in rounding is made up for.
  static __device__ __forceinline__ float exact(float x) {
    const float t = fabsf(x) > 30.0f ? 30.0f : fabsf(x);
    const float square = t * t;
    const float lost = fmaf(t, t, -square);
    const float h = expf(-0.25f * square);
    float tail = 0.5f * erfcxf(0.70710678f * t);
    tail = fmaf(tail, -0.5f * lost, tail);
    return x < 0.0f ? ((x * tail) * h) * h : x * fmaf(-tail * h, h, 1.0f);
  }

  // With t = |x| / sqrt(2), exp(t^2) * erfc(t) / 2 is a polynomial in s = 1 / (1 + 0.52 t) to a relative 1.2e-6 (fitted for
  // least relative error up to t = 10).
  static __device__ __forceinline__ float approximation(float x) {
    const float s = reciprocal(fmaf(0.36769552f, fabsf(x), 1.0f));
    float q = fmaf(0.0483109f, s, -0.17357246f);
    q = fmaf(q, s, 0.1554558f);
    q = fmaf(q, s, 0.04068272f);
    q = fmaf(q, s, 0.13678603f);
    q = fmaf(q, s, 0.14560096f);
    q = fmaf(q, s, 0.14673661f);
    const float e = exp2_approximate(x * x * (-0.5f * Log2E));
    return x < 0.0f ? x * (q * s) * e : x * (1.0f - q * s * e);
  }
};

struct relu {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    return at_least(x, 0.0f);
  }
};

// The approximation, for float results.
template <typename Activation>
struct fast {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    return Activation::template apply<approximate_float>(x);
  }
};
