// Vectors of 16 bytes from global memory into registers, as fp32 values.
#pragma once

#include "autodispatch/types.cuh"

template <typename T>
struct alignas(16) Vector {
  T values[16 / sizeof(T)];

  __device__ __forceinline__ float operator[](int i) const { return to_float(values[i]); }
};

// Loads the first `left` elements (all, if there are more) of a vector, zeros behind. `pointer` is a multiple of Alignment bytes
// and is not touched where `left` is 0 or less. With Stream, the line does not stay in L1.
template <int Alignment, bool Stream, typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* pointer, long long left) {
  constexpr int Elements = 16 / sizeof(T);
  Vector<T> v = {};
  if (Alignment == 16 && left >= Elements) {
    uint4& words = reinterpret_cast<uint4&>(v);
    if constexpr (Stream) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "l"(pointer));
    } else {
      words = __ldg(reinterpret_cast<const uint4*>(pointer));
    }
  } else if (Alignment == 8 && left >= Elements) {
    uint2* pairs = reinterpret_cast<uint2*>(&v);
#pragma unroll
    for (int i = 0; i < 2; ++i) pairs[i] = __ldg(reinterpret_cast<const uint2*>(pointer) + i);
  } else if (Alignment == 4 && sizeof(T) == 2 && left >= Elements) {
    unsigned* words = reinterpret_cast<unsigned*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __ldg(reinterpret_cast<const unsigned*>(pointer) + i);
  } else {
#pragma unroll
    for (int i = 0; i < Elements; ++i) {
      if (i < left) v.values[i] = pointer[i];
    }
  }
  return v;
}

template <int Alignment, typename T>
__device__ __forceinline__ Vector<T> load(const T* pointer, long long left) {
  return load_vector<Alignment, false>(pointer, left);
}

template <int Alignment, typename T>
__device__ __forceinline__ Vector<T> load_stream(const T* pointer, long long left) {
  return load_vector<Alignment, true>(pointer, left);
}
