// Activations of the gate, one struct each, in fp32. `apply<T>` maps the gate's accumulator to its activated value, as
// accurately as a result of type T can show: for 16-bit results the hardware's approximations of 2^x and 1 / x do, for float
// they do where the caller allows it, which is `fast<Activation>`. The kernels multiply by the up projection and round once,
// at the store. NaN stays NaN, -inf becomes the limit 0 (as -0).
// docs/numerics.md has the measured errors. A new activation is one more struct here, and its name and float64 form in
// autodispatch/activations.py.
#pragma once

#include "autodispatch/types.cuh"

template <typename T>
constexpr bool approximate = sizeof(T) == 2;

constexpr float Lowest = -3.4028235e38f;
constexpr float Log2E = 1.44269504f;

// 1 / (1 + exp(-x)).
struct sigmoid {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    if constexpr (approximate<T>) {
      return reciprocal(1.0f + exp2_approximate(x * -Log2E));
    } else {
      const float h = expf(-0.5f * fabsf(x));  // of half of x nothing overflows, and the tail stays accurate
      const float e = h * h;
      return __fdividef(x < 0.0f ? e : 1.0f, 1.0f + e);
    }
  }
};

// x * sigmoid(y), whose limit at -inf is 0.
template <typename T>
__device__ __forceinline__ float times_sigmoid(float x, float y) {
  if constexpr (approximate<T>) {
    return x * reciprocal(1.0f + exp2_approximate(y * -Log2E));
  } else {
    const float h = expf(-0.5f * fabsf(y));
    return __fdividef(y < 0.0f ? (x * h) * h : x, 1.0f + h * h);
  }
}

// x * sigmoid(x). With T of 16 bits it is zero below a gate of -88.
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

// x * P(X <= x) of the normal distribution.
struct gelu {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    const float finite = at_least(x, Lowest);
    if constexpr (approximate<T>) {
      return approximation(finite);
    } else {
      return finite * normcdff(finite);
    }
  }

  // With t = |x| / sqrt(2), exp(t^2) * erfc(t) / 2 is a polynomial in s = 1 / (1 + 0.52 t) to a relative 1.2e-6 (fitted for
  // least relative error up to t = 10): the tail keeps its relative accuracy.
  static __device__ __forceinline__ float approximation(float x) {
    const float s = reciprocal(fmaf(0.36769552f, fabsf(x), 1.0f));
    float q = fmaf(0.0483109f, s, -0.17357246f);
    q = fmaf(q, s, 0.1554558f);
    q = fmaf(q, s, 0.04068272f);
    q = fmaf(q, s, 0.13678603f);
    q = fmaf(q, s, 0.14560096f);
    q = fmaf(q, s, 0.14673661f);
    const float tail = q * s * exp2_approximate(x * x * (-0.5f * Log2E));
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};

struct relu {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    return at_least(x, 0.0f);
  }
};

// The form for 16-bit results, whatever the type.
template <typename Activation>
struct fast {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    return Activation::template apply<f16>(x);
  }
};
