// Activations of the gate, one struct each, in fp32. `apply<T>` maps the gate's accumulator to its activated value, as
// accurately as a result of type T can show; the kernels multiply by the up projection and round once, at the store. A
// new activation is one more struct here, and its name in autodispatch/problem.py and autodispatch/variants/cpu.py.
#pragma once

#include "autodispatch/types.cuh"

// x / (1 + exp(-x)), with the limit 0 at -inf (as -0). NaN stays NaN.
struct silu {
  template <typename T>
  static __device__ __forceinline__ float apply(float x) {
    const float finite = at_least(x, -3.4028235e38f);
    if constexpr (sizeof(T) == 2) {
      // a relative error of about 1e-6, far below half a unit of 16-bit types; zero below a gate of -88
      return finite * reciprocal(1.0f + exp2_approximate(finite * -1.44269504f));
    } else {
      // with h = exp(-|x| / 2) nothing overflows, and the tail stays accurate until the result itself is subnormal
      const float h = expf(-0.5f * fabsf(finite));
      const float e = h * h;
      return __fdividef(finite < 0.0f ? (finite * h) * h : finite, 1.0f + e);
    }
  }
};
