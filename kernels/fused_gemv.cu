// out = Activation(a @ b1) * (a @ b2) for one or a few rows on the fp32 units: nothing but streaming the weights.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; out (m, n), m is TileM.
// T is float, f16 or bf16; products and sums are fp32, in a fixed order, rounded once at the store.
// nk: a warp computes one column, its lanes share k in vectors of 16 bytes, Unroll of them from each weight under way.
// kn: a lane has the columns of one vector, LanesN lanes stand side by side, and all the block's LanesN-wide lanes share k, Unroll
// consecutive rows of each weight under way; their sums are added through shared memory.
// Bound by global memory. Every stride and alignment is taken; vectors of 16 bytes want pointers and rows that are multiples of it.
// Shared memory: kn: static, Warps * 32 / LanesN * 2 * TileM * LanesN * 16 / sizeof(T) * 4 bytes.
#include "autodispatch/activation.cuh"
#include "autodispatch/grid.cuh"
#include "autodispatch/tile.cuh"
#include "autodispatch/vector.cuh"

// Sums over lanes that differ in their lane number's lower bits.
__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

template <typename T, typename Activation, WeightLayout Layout, int TileM, int Warps, int Unroll, int Alignment>
__global__ void __launch_bounds__(Warps * 32, 1)
    fused_gemv(const T* a, const T* __restrict__ b1, const T* __restrict__ b2, T* __restrict__ out,
               long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2, long long ldout) {
  constexpr int Elements = Vector<T>::Elements;
  wait_for_previous_grid();
  if constexpr (Layout == nk) {
    constexpr int Step = 32 * Elements;  // of a warp in k, for one vector per lane
    const int lane = threadIdx.x % 32;
    const long long column = static_cast<long long>(blockIdx.x) * Warps + threadIdx.x / 32;
    if (column >= n) return;
    const T* gate_row = b1 + column * ldb1;
    const T* up_row = b2 + column * ldb2;
    float gate[TileM] = {};
    float up[TileM] = {};
    const auto add = [&](const Vector<T>& x, const Vector<T>& g, const Vector<T>& u, int r) {
#pragma unroll
      for (int e = 0; e < Elements; ++e) {
        gate[r] = fmaf(x[e], g[e], gate[r]);
        up[r] = fmaf(x[e], u[e], up[r]);
      }
    };
    long long depth = lane * Elements;
#pragma unroll 1
    for (; depth + (Unroll - 1) * Step + Elements <= k; depth += Unroll * Step) {
      Vector<T> g[Unroll], u[Unroll];
#pragma unroll
      for (int i = 0; i < Unroll; ++i) {
        g[i] = load_vector<Alignment, true>(gate_row + depth + i * Step);
        u[i] = load_vector<Alignment, true>(up_row + depth + i * Step);
      }
#pragma unroll
      for (int i = 0; i < Unroll; ++i) {
#pragma unroll
        for (int r = 0; r < TileM; ++r) add(load_vector<Alignment, false>(a + r * lda + depth + i * Step), g[i], u[i], r);
      }
    }
#pragma unroll 1
    for (; depth < k; depth += Step) {
      const Vector<T> g = load_vector<Alignment, true>(gate_row + depth, k - depth);
      const Vector<T> u = load_vector<Alignment, true>(up_row + depth, k - depth);
#pragma unroll
      for (int r = 0; r < TileM; ++r) add(load_vector<Alignment, false>(a + r * lda + depth, k - depth), g, u, r);
    }
#pragma unroll
    for (int r = 0; r < TileM; ++r) {
      const float g = sum_over_warp(gate[r]);
      const float u = sum_over_warp(up[r]);
      if (lane == 0) out[r * ldout + column] = from_float<T>(Activation::template apply<T>(g) * u);
    }
  } else {
    constexpr int LanesN = 16;
    constexpr int LanesK = Warps * 32 / LanesN;
    constexpr int TileN = LanesN * Elements;
    __shared__ float sums[LanesK][2][TileM][TileN];
    const int own_k = threadIdx.x / LanesN;
    const int own_n = threadIdx.x % LanesN * Elements;
    const long long first = static_cast<long long>(blockIdx.x) * TileN;
    const long long column = first + own_n;
    float gate[TileM][Elements] = {};
    float up[TileM][Elements] = {};
    const auto add = [&](long long depth, const Vector<T>& g, const Vector<T>& u) {
#pragma unroll
      for (int r = 0; r < TileM; ++r) {
        const float x = to_float(a[r * lda + depth]);
#pragma unroll
        for (int e = 0; e < Elements; ++e) {
          gate[r][e] = fmaf(x, g[e], gate[r][e]);
          up[r][e] = fmaf(x, u[e], up[r][e]);
        }
      }
    };
    long long depth = own_k * Unroll;
    if (column + Elements <= n) {
#pragma unroll 1
      for (; depth + Unroll <= k; depth += LanesK * Unroll) {
        Vector<T> g[Unroll], u[Unroll];
#pragma unroll
        for (int i = 0; i < Unroll; ++i) {
          g[i] = load_vector<Alignment, true>(b1 + (depth + i) * ldb1 + column);
          u[i] = load_vector<Alignment, true>(b2 + (depth + i) * ldb2 + column);
        }
#pragma unroll
        for (int i = 0; i < Unroll; ++i) add(depth + i, g[i], u[i]);
      }
    }
#pragma unroll 1
    for (; depth < k; depth += LanesK * Unroll) {
#pragma unroll 1
      for (long long d = depth; d < k && d < depth + Unroll; ++d) {
        add(d, load_vector<Alignment, true>(b1 + d * ldb1 + column, n - column),
            load_vector<Alignment, true>(b2 + d * ldb2 + column, n - column));
      }
    }
#pragma unroll
    for (int r = 0; r < TileM; ++r) {
#pragma unroll
      for (int e = 0; e < Elements; ++e) {
        sums[own_k][0][r][own_n + e] = gate[r][e];
        sums[own_k][1][r][own_n + e] = up[r][e];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TileM * TileN; i += Warps * 32) {
      const int r = i / TileN;
      const int c = i % TileN;
      if (first + c >= n) continue;
      float g = 0.0f;
      float u = 0.0f;
#pragma unroll
      for (int s = 0; s < LanesK; ++s) {
        g += sums[s][0][r][c];
        u += sums[s][1][r][c];
      }
      out[r * ldout + first + c] = from_float<T>(Activation::template apply<T>(g) * u);
    }
  }
}
