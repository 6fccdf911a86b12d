// Tiles of 16-bit elements from global to shared memory. Rows are cut into 16-byte chunks whose place is swizzled by the row,
// so that the eight rows an ldmatrix reads fall into different banks.
#pragma once

#include "autodispatch/copy.cuh"

// The element offset of 16-byte chunk `chunk` of row `row` in a tile with rows of `Width` elements.
template <int Width>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int Chunks = Width / 8;
  static_assert(Chunks >= 1 && (Chunks & (Chunks - 1)) == 0, "a tile row must be a power of two of at least 8 elements");
  constexpr int RowsPerLine = Chunks >= 8 ? 1 : 8 / Chunks;  // of 128 bytes
  constexpr int Phases = Chunks >= 8 ? 8 : Chunks;
  return row * Width + ((chunk ^ (row / RowsPerLine & (Phases - 1))) << 3);
}

// Copies Rows x Width elements from (row, column) of a matrix of `rows` x `columns` with leading dimension `ld`; what lies
// outside becomes zero. `thread` is one of NumThreads; it keeps to one chunk of the width and steps down the rows. Rows
// begin at multiples of Alignment bytes.
template <int Rows, int Width, int NumThreads, int Alignment = 16, typename T, typename... Policy>
__device__ __forceinline__ void copy_tile(int thread, T* shared, const T* global, long long row, long long column,
                                          long long rows, long long columns, long long ld, Policy... policy) {
  constexpr int Chunks = Width / 8;
  constexpr int RowStep = NumThreads / Chunks;
  static_assert(NumThreads % Chunks == 0, "a thread must keep to one chunk of a tile row");
  const int first = thread / Chunks;
  const int chunk = thread % Chunks;
  const long long left = columns - column - chunk * 8;
  const int bytes = left >= 8 ? 16 : left > 0 ? static_cast<int>(left) * 2 : 0;
  const int inside = rows - row < Rows ? static_cast<int>(rows - row) : Rows;
  const T* source = global + (row + first) * ld + column + chunk * 8;
#pragma unroll
  for (int r = 0; r < Rows; r += RowStep) {
    if (Rows % RowStep == 0 || first + r < Rows) {
      const int valid = first + r < inside ? bytes : 0;
      copy_chunk<Alignment>(shared + swizzled<Width>(first + r, chunk), valid > 0 ? source : global, valid, policy...);
      source += RowStep * ld;
    }
  }
}
