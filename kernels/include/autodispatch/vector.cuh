// Vectors of 16 bytes from global memory into registers, as fp32 values.
#pragma once

#include "autodispatch/types.cuh"

template <typename T>
struct alignas(16) Vector {
  static constexpr int Elements = 16 / sizeof(T);

  T values[Elements];

  __device__ __forceinline__ float operator[](int i) const { return to_float(values[i]); }
};

// A vector at a multiple of Alignment bytes. With Stream, its line does not stay in L1.
template <int Alignment, bool Stream, typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* pointer) {
  Vector<T> v;
  unsigned* words = reinterpret_cast<unsigned*>(&v);
  if constexpr (Alignment == 16 && Stream) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(pointer));
  } else if constexpr (Alignment == 16) {
    *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(pointer);
  } else if constexpr (Alignment == 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) reinterpret_cast<uint2*>(words)[i] = __ldg(reinterpret_cast<const uint2*>(pointer) + i);
  } else if constexpr (Alignment == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __ldg(reinterpret_cast<const unsigned*>(pointer) + i);
  } else {
#pragma unroll
    for (int i = 0; i < Vector<T>::Elements; ++i) v.values[i] = pointer[i];
  }
  return v;
}

// The first `left` elements of a vector (all, if there are more), and zeros behind; nothing else is touched.
template <int Alignment, bool Stream, typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* pointer, long long left) {
  if (left >= Vector<T>::Elements) return load_vector<Alignment, Stream>(pointer);
  Vector<T> v = {};
#pragma unroll
  for (int i = 0; i < Vector<T>::Elements; ++i) {
    if (i < left) v.values[i] = pointer[i];
  }
  return v;
}

// Elements of N that move as one access at multiples of Alignment bytes.
template <typename T, int N, int Alignment>
constexpr int pack_piece = Alignment / static_cast<int>(sizeof(T)) < N ? Alignment / static_cast<int>(sizeof(T)) : N;

// The first `left` of N elements (all, if there are more) in pieces of Alignment bytes, and zeros behind; nothing else is
// touched.
template <int Alignment, typename T, int N>
__device__ __forceinline__ void load_pack(Pack<T, N>& pack, const T* pointer, long long left) {
  constexpr int Piece = pack_piece<T, N, Alignment>;
#pragma unroll
  for (int i = 0; i < N; i += Piece) {
    if (i + Piece <= left) {
      *reinterpret_cast<Pack<T, Piece>*>(pack.values + i) = *reinterpret_cast<const Pack<T, Piece>*>(pointer + i);
    } else {
#pragma unroll
      for (int e = i; e < i + Piece; ++e) pack.values[e] = e < left ? pointer[e] : T{};
    }
  }
}

// Stores the first `left` of N elements, in pieces of Alignment bytes where all of a piece are among them.
template <int Alignment, typename T, int N>
__device__ __forceinline__ void store_vector(T* pointer, const T (&values)[N], long long left) {
  constexpr int Piece = pack_piece<T, N, Alignment>;
#pragma unroll
  for (int i = 0; i < N; i += Piece) {
    Pack<T, Piece> piece;
#pragma unroll
    for (int e = 0; e < Piece; ++e) piece.values[e] = values[i + e];
    if (i + Piece <= left) {
      *reinterpret_cast<Pack<T, Piece>*>(pointer + i) = piece;
    } else {
#pragma unroll
      for (int e = 0; e < Piece; ++e) {
        if (i + e < left) pointer[i + e] = piece.values[e];
      }
    }
  }
}
