// Tensor-core products of a warpgroup (wgmma, compute capability 9.0a): both operands from shared memory by descriptor,
// m64nWidthk16 with fp32 accumulators in registers. One instruction spans [gate tile | up tile] lying side by side.
#pragma once

#include "autodispatch/copy.cuh"
#include "autodispatch/types.cuh"

enum Swizzle { swizzle_none = 0, swizzle_128 = 1, swizzle_64 = 2, swizzle_32 = 3 };

using Descriptor = unsigned long long;

// A matrix in shared memory. `leading` is the stride in bytes between swizzle atoms along the unit-stride axis (not used
// for a K-major operand with one atom), `stride` that between groups of 8 rows. Bytes divided by 16 may be added to it.
__device__ __forceinline__ Descriptor matrix_descriptor(const void* shared, int leading, int stride, Swizzle swizzle) {
  const unsigned address = shared_address(shared) & 0x3ffff;
  return (static_cast<Descriptor>(swizzle) << 62) | (static_cast<Descriptor>(stride >> 4) << 32) |
         (static_cast<Descriptor>(leading >> 4) << 16) | (address >> 4);
}

// Orders register accesses before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` committed groups are still under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving accesses to the accumulators across this point.
template <int Count>
__device__ __forceinline__ void pin_registers(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Wgmma<Width>::multiply<T, TransposeB>(d, a, b): d += a * b for a 64 x 16 `a` and a 16 x Width `b`. Lane l of warp w holds
// in d[4 t + i] the element at row 16 w + l / 4 + 8 (i / 2) and column 8 t + 2 (l % 4) + i % 2.
template <int Width>
struct Wgmma;

// Operand lists in groups of eight registers, so that a width of 16 n takes the first n groups.
#define WGMMA_REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_REGISTERS_2 WGMMA_REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_REGISTERS_3 WGMMA_REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_REGISTERS_4 WGMMA_REGISTERS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_5 WGMMA_REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_REGISTERS_6 WGMMA_REGISTERS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_REGISTERS_7 WGMMA_REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_REGISTERS_8 WGMMA_REGISTERS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_REGISTERS_9 WGMMA_REGISTERS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_REGISTERS_10 WGMMA_REGISTERS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_REGISTERS_11 WGMMA_REGISTERS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_REGISTERS_12 WGMMA_REGISTERS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_REGISTERS_13 WGMMA_REGISTERS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_REGISTERS_14 WGMMA_REGISTERS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_REGISTERS_15 WGMMA_REGISTERS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_REGISTERS_16 WGMMA_REGISTERS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_GROUP(g)                                                                                   \
  "+f"(d[8 * g]), "+f"(d[8 * g + 1]), "+f"(d[8 * g + 2]), "+f"(d[8 * g + 3]), "+f"(d[8 * g + 4]),        \
      "+f"(d[8 * g + 5]), "+f"(d[8 * g + 6]), "+f"(d[8 * g + 7])
#define WGMMA_OPERANDS_1 WGMMA_GROUP(0)
#define WGMMA_OPERANDS_2 WGMMA_OPERANDS_1, WGMMA_GROUP(1)
#define WGMMA_OPERANDS_3 WGMMA_OPERANDS_2, WGMMA_GROUP(2)
#define WGMMA_OPERANDS_4 WGMMA_OPERANDS_3, WGMMA_GROUP(3)
#define WGMMA_OPERANDS_5 WGMMA_OPERANDS_4, WGMMA_GROUP(4)
#define WGMMA_OPERANDS_6 WGMMA_OPERANDS_5, WGMMA_GROUP(5)
#define WGMMA_OPERANDS_7 WGMMA_OPERANDS_6, WGMMA_GROUP(6)
#define WGMMA_OPERANDS_8 WGMMA_OPERANDS_7, WGMMA_GROUP(7)
#define WGMMA_OPERANDS_9 WGMMA_OPERANDS_8, WGMMA_GROUP(8)
#define WGMMA_OPERANDS_10 WGMMA_OPERANDS_9, WGMMA_GROUP(9)
#define WGMMA_OPERANDS_11 WGMMA_OPERANDS_10, WGMMA_GROUP(10)
#define WGMMA_OPERANDS_12 WGMMA_OPERANDS_11, WGMMA_GROUP(11)
#define WGMMA_OPERANDS_13 WGMMA_OPERANDS_12, WGMMA_GROUP(12)
#define WGMMA_OPERANDS_14 WGMMA_OPERANDS_13, WGMMA_GROUP(13)
#define WGMMA_OPERANDS_15 WGMMA_OPERANDS_14, WGMMA_GROUP(14)
#define WGMMA_OPERANDS_16 WGMMA_OPERANDS_15, WGMMA_GROUP(15)

// `A`, `B`, `Trans` are the numbers of the operands behind the registers.
#define WGMMA_INSTRUCTION(Width, Groups, Type, A, B, Trans)                                              \
  asm volatile(                                                                                          \
      "{\n"                                                                                              \
      ".reg .pred p;\n"                                                                                  \
      "setp.ne.b32 p, 1, 0;\n"                                                                           \
      "wgmma.mma_async.sync.aligned.m64n" #Width "k16.f32." Type "." Type                                \
      " {" WGMMA_REGISTERS_##Groups "}, %" #A ", %" #B ", p, 1, 1, 0, %" #Trans ";\n"                    \
      "}"                                                                                                \
      : WGMMA_OPERANDS_##Groups                                                                          \
      : "l"(a), "l"(b), "n"(TransposeB))

#define WGMMA_DEFINE(Width, Groups, A, B, Trans)                                                         \
  template <>                                                                                            \
  struct Wgmma<Width> {                                                                                  \
    template <typename T, int TransposeB>                                                                \
    static __device__ __forceinline__ void multiply(float* d, Descriptor a, Descriptor b) { \
      if constexpr (is_bf16<T>) {                                                                        \
        WGMMA_INSTRUCTION(Width, Groups, "bf16", A, B, Trans);                                           \
      } else {                                                                                           \
        WGMMA_INSTRUCTION(Width, Groups, "f16", A, B, Trans);                                            \
      }                                                                                                  \
    }                                                                                                    \
  };

WGMMA_DEFINE(32, 2, 16, 17, 18)
WGMMA_DEFINE(48, 3, 24, 25, 26)
WGMMA_DEFINE(64, 4, 32, 33, 34)
WGMMA_DEFINE(80, 5, 40, 41, 42)
WGMMA_DEFINE(96, 6, 48, 49, 50)
WGMMA_DEFINE(112, 7, 56, 57, 58)
WGMMA_DEFINE(128, 8, 64, 65, 66)
WGMMA_DEFINE(144, 9, 72, 73, 74)
WGMMA_DEFINE(160, 10, 80, 81, 82)
WGMMA_DEFINE(192, 12, 96, 97, 98)
WGMMA_DEFINE(208, 13, 104, 105, 106)
WGMMA_DEFINE(224, 14, 112, 113, 114)
WGMMA_DEFINE(256, 16, 128, 129, 130)

#undef WGMMA_DEFINE
#undef WGMMA_INSTRUCTION
