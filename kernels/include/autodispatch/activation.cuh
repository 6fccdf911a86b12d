// Activations of the gate, one struct each, in fp32. `apply` maps the gate's accumulator to its activated value; the
// kernels multiply by the up projection and round once, at the store. A new activation is one more struct here and
// its name in autodispatch/problem.py and autodispatch/reference.py.
#pragma once

// x / (1 + exp(-x)). With h = exp(-|x| / 2) nothing overflows, and the tail toward -inf stays accurate until the
// result itself is subnormal. The limit 0 is taken at -inf (as -0); NaN stays NaN.
struct silu {
  static __device__ __forceinline__ float apply(float x) {
    const float finite = x == -__int_as_float(0x7f800000) ? -3.4028235e38f : x;  // a comparison lets NaN through
    const float h = expf(-0.5f * fabsf(finite));
    const float e = h * h;
    return __fdividef(finite < 0.0f ? (finite * h) * h : finite, 1.0f + e);  // the divisor lies in [1, 2]
  }
};
