// Tiles of 16- or 32-bit elements from global to shared memory. Rows are cut into 16-byte chunks whose place is swizzled by
// the row, so that the eight rows an ldmatrix reads fall into different banks.
#pragma once

#include "autodispatch/copy.cuh"
#include "autodispatch/types.cuh"

// The largest power of two, up to `most`, that divides x.
constexpr int power_of_two_in(int x, int most) { return (x & -x) < most ? x & -x : most; }

// The offset in elements of 16-byte chunk `chunk` of row `row` in a tile with rows of `Width` elements. Chunks trade places
// within the largest power of two, up to 8, that divides their number. With Pairs, neighbouring rows of eight chunks and more
// differ by two.
template <int Width, int ElementBytes = 2, bool Pairs = false>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int Elements = 16 / ElementBytes;
  constexpr int Chunks = Width / Elements;
  static_assert(Chunks >= 1 && Width % Elements == 0, "a tile row must be whole chunks of 16 bytes");
  constexpr int Unit = power_of_two_in(Chunks, 8);
  const int phase = row / (8 / Unit) & (Unit - 1);
  return row * Width + (chunk ^ (Pairs && Unit == 8 ? (phase << 1 & 7) | phase >> 2 : phase)) * Elements;
}

constexpr int power_of_two_below(int x) { return x < 2 ? x : 2 * power_of_two_below(x / 2); }

// Calls visit(i, offset, source, bytes) for each chunk that `thread`, one of NumThreads, takes of Rows x Width elements from
// (row, column) of a matrix of `rows` x `columns` with leading dimension `ld`: the i-th, its offset in the tile, where
// to read it, and how many bytes lie inside; where these are none, the source may be no address of the matrix. A thread keeps to
// one chunk of the width and steps down the rows; a width that is no power of two is taken in parts that are.
template <int Rows, int Width, int NumThreads, bool Pairs = false, int Pitch = Width, int Before = 0, typename T, typename Visit>
__device__ __forceinline__ void for_each_chunk(int thread, const T* global, long long row, long long column, long long rows,
                                               long long columns, long long ld, Visit visit, int index = 0) {
  constexpr int Elements = 16 / sizeof(T);
  constexpr int Chunks = power_of_two_below(Width / Elements);
  constexpr int RowStep = NumThreads / Chunks;
  static_assert(NumThreads % Chunks == 0, "a thread must keep to one chunk of a tile row");
  const int first = thread / Chunks;
  const int chunk = Before + thread % Chunks;
  const long long left = columns - column - chunk * Elements;
  const int bytes = left >= Elements ? 16 : left > 0 ? static_cast<int>(left * sizeof(T)) : 0;
  const int inside = rows - row < Rows ? static_cast<int>(rows - row) : Rows;
  const T* source = global + (row + first) * ld + column + chunk * Elements;
#pragma unroll
  for (int r = 0; r < Rows; r += RowStep) {
    if (Rows % RowStep == 0 || first + r < Rows) {
      const int valid = first + r < inside ? bytes : 0;
      visit(index + r / RowStep, swizzled<Pitch, sizeof(T), Pairs>(first + r, chunk), source, valid);
      source += RowStep * ld;
    }
  }
  if constexpr (Width > Chunks * Elements) {
    for_each_chunk<Rows, Width - Chunks * Elements, NumThreads, Pairs, Pitch, Before + Chunks>(
        thread, global, row, column, rows, columns, ld, visit, index + (Rows + RowStep - 1) / RowStep);
  }
}

// Copies a tile; what lies outside the matrix becomes zero. Rows begin at multiples of Alignment bytes.
template <int Rows, int Width, int NumThreads, int Alignment = 16, bool Pairs = false, typename T, typename... Policy>
__device__ __forceinline__ void copy_tile(int thread, T* shared, const T* global, long long row, long long column,
                                          long long rows, long long columns, long long ld, Policy... policy) {
  for_each_chunk<Rows, Width, NumThreads, Pairs>(
      thread, global, row, column, rows, columns, ld, [&](int, int offset, const T* source, int bytes) {
        copy_chunk<Alignment>(shared + offset, source, bytes, policy...);
      });
}

__device__ __forceinline__ constexpr bool is_wanted(bool wanted) { return wanted; }
__device__ __forceinline__ constexpr bool is_wanted(Constant<1>) { return true; }

#if __CUDA_ARCH__ >= 800
// A whole chunk, or zeros where it is not wanted; without a policy, or under that of a line, the rest of its line comes into L2
// with it.
__device__ __forceinline__ void copy_async_if(Constant<1>, void* shared, const void* global) { copy_async_whole(shared, global); }

__device__ __forceinline__ void copy_async_if(bool wanted, void* shared, const void* global) {
  asm volatile("{\n  .reg .pred p;\n  setp.eq.b32 p, %2, 0;\n  cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;\n}" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(static_cast<int>(wanted))
               : "memory");
}

__device__ __forceinline__ void copy_async_if(bool wanted, void* shared, const void* global, CachePolicy policy) {
  asm volatile(
      "{\n  .reg .pred p;\n  setp.eq.b32 p, %2, 0;\n  cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, p, %3;\n}" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(static_cast<int>(wanted)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_async_if(bool wanted, void* shared, const void* global, LinePolicy line) {
  asm volatile(
      "{\n  .reg .pred p;\n  setp.eq.b32 p, %2, 0;\n"
      "  cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, p, %3;\n}" ::"r"(shared_address(shared)),
      "l"(global), "r"(static_cast<int>(wanted)), "l"(line.policy)
      : "memory");
}
#endif

// Keeps a value that all threads of a warp share out of a uniform register: a copy that adds one to its address in shared memory
// was refused as an illegal instruction (ptxas 13.0, compute capability 9.0).
__device__ __forceinline__ void keep_in_vector(int& value) { asm("" : "+r"(value)); }

// The tiles of one operand, stage after stage, copied by NumThreads threads: the block, or with InGroups each group of so many.
// `fetch` takes a tile whose wanted rows lie inside the matrix, from where the last one ended; `fetch_clipped` takes any tile.
// From compute capability 8.0 both copy asynchronously; below it a tile is on its way through registers, `put` writes it, and
// a thread can multiply between the two.
template <int Rows, int Width, int NumThreads, bool Pairs, typename T, bool InGroups = false, int Pitch = Width, int Before = 0>
struct TileCopy {
  static constexpr int Elements = 16 / sizeof(T);
  static constexpr int Chunks = power_of_two_below(Width / Elements);
  static constexpr int RowStep = NumThreads / Chunks;
  static constexpr int Count = (Rows + RowStep - 1) / RowStep;
  static constexpr int Period = 8 / power_of_two_in(RowStep, 8);  // steps after which the swizzle, which has eight rows, repeats

  const T* source;  // of this thread's next chunk
#if __CUDA_ARCH__ < 800
  uint4 staged[Count];
#endif
  TileCopy<Rows, Width - Chunks * Elements, NumThreads, Pairs, T, InGroups, Pitch, Before + Chunks> rest;

  static __device__ __forceinline__ int thread() { return InGroups ? threadIdx.x % NumThreads : threadIdx.x; }
  static __device__ __forceinline__ int first() { return thread() / Chunks; }
  static __device__ __forceinline__ int chunk() { return Before + thread() % Chunks; }
  static __device__ __forceinline__ T* place(T* shared, int r) {
    return shared + swizzled<Pitch, sizeof(T), Pairs>(first() + r % Period * RowStep, chunk()) +
           r / Period * Period * RowStep * Pitch;
  }

  __device__ __forceinline__ void begin(const T* global, long long row, long long column, long long ld) {
    source = global + (row + first()) * ld + column + chunk() * Elements;
    rest.begin(global, row, column, ld);
  }

  // The next tile begins `next` elements further on. Rows r for which not wanted(r), a bool or Constant<1>, are not read.
  template <typename Wanted, typename... Policy>
  __device__ __forceinline__ void fetch(T* shared, long long ld, long long next, Wanted wanted, Policy... policy) {
#pragma unroll
    for (int r = 0; r < Count; ++r) {
      const int row = first() + r * RowStep;
      if (Rows % RowStep == 0 || row < Rows) {
#if __CUDA_ARCH__ >= 800
        copy_async_if(wanted(row), place(shared, r), source, policy...);
#else
        if (is_wanted(wanted(row))) staged[r] = *reinterpret_cast<const uint4*>(source);
#endif
      }
      source += r + 1 < Count ? RowStep * ld : next - (Count - 1) * RowStep * ld;
      keep_as_sum(source);
    }
    rest.fetch(shared, ld, next, wanted, policy...);
  }

  __device__ __forceinline__ void fetch_clipped(T* shared, const T* global, long long row, long long column, long long rows,
                                                long long columns, long long ld) {
    for_each_chunk<Rows, Chunks * Elements, NumThreads, Pairs, Pitch, Before>(
        thread(), global, row, column, rows, columns, ld, [&](int r, int offset, const T* from, int bytes) {
#if __CUDA_ARCH__ >= 800
          copy_chunk<16>(shared + offset, from, bytes);
#else
          staged[r] = read_chunk<16>(from, bytes);
#endif
        });
    rest.fetch_clipped(shared, global, row, column, rows, columns, ld);
  }

  __device__ __forceinline__ void put(T* shared) {
#if __CUDA_ARCH__ < 800
#pragma unroll
    for (int r = 0; r < Count; ++r) {
      if (Rows % RowStep == 0 || first() + r * RowStep < Rows) *reinterpret_cast<uint4*>(place(shared, r)) = staged[r];
    }
    rest.put(shared);
#endif
  }
};

template <int Rows, int NumThreads, bool Pairs, typename T, bool InGroups, int Pitch, int Before>
struct TileCopy<Rows, 0, NumThreads, Pairs, T, InGroups, Pitch, Before> {
  __device__ __forceinline__ void begin(const T*, long long, long long, long long) {}
  template <typename Wanted, typename... Policy>
  __device__ __forceinline__ void fetch(T*, long long, long long, Wanted, Policy...) {}
  __device__ __forceinline__ void fetch_clipped(T*, const T*, long long, long long, long long, long long, long long) {}
  __device__ __forceinline__ void put(T*) {}
};
