// out = Activation(a @ b1) * (a @ b2) for few rows: the job is to stream the weights once.
// a (m, k) with leading dimension lda; b1, b2 (k, n), stored (k, n) for kn or (n, k) for nk; out (m, n).
// T is f16 or bf16, accumulators are fp32, rounded once at the store.
// The weights are the left operand of mma.sync: an m16 tile is eight gate columns above the same eight up columns, so that both
// sums of an output lie in one thread, and the rows of a are n8 tiles: no product is wasted on rows that are not there.
// A block computes TileN columns by TileM rows. Its warps stand ColumnWarps x GroupsK: a group of warps has its own ring of
// NumStages stages of 64 in k, takes every GroupsK-th of them, and waits for nobody else until the sums of all groups, each left
// where its ring was, are added in a fixed order. Where there are too few tiles, a cluster of ClusterK blocks shares k: each
// adds up its own sums and, once all have begun, sends them to the blocks that finish them, a part of the tile each.
// Bound by global memory up to m of about 32, by L2 (which feeds a to every block) above. Requires 8.0, clusters 9.0.
// Shared memory: GroupsK * NumStages * (2 * TileN + TileM) * 128 bytes, and in a cluster TileM * TileN * 8 + 128 for what the
// blocks send; dynamic.
#include "autodispatch/activation.cuh"
#include "autodispatch/barrier.cuh"
#include "autodispatch/cluster.cuh"
#include "autodispatch/grid.cuh"
#include "autodispatch/mma.cuh"
#include "autodispatch/tile.cuh"
#include "autodispatch/tile_copy.cuh"

__device__ __forceinline__ void add(float4& sum, const float4& x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

template <typename T, typename Activation, WeightLayout Layout, int TileM, int TileN, int ColumnWarps, int GroupsK,
          int NumStages, int ClusterK, int Alignment>
__global__ void CLUSTER_OF(ClusterK) __launch_bounds__(ColumnWarps * GroupsK * 32, 1)
    fused_decode(const T* __restrict__ a, const T* __restrict__ b1, const T* __restrict__ b2, T* __restrict__ out,
                 long long m, long long n, long long k, long long lda, long long ldb1, long long ldb2, long long ldout) {
  constexpr int TileK = 64;
  constexpr int GroupThreads = ColumnWarps * 32;
  constexpr int Columns = TileN / 8 / ColumnWarps;  // m16 tiles of one warp
  constexpr int Rows = TileM / 8;                   // n8 tiles
  constexpr int WeightRows = Layout == nk ? TileN : TileK;
  constexpr int WeightWidth = Layout == nk ? TileK : TileN;
  constexpr int WeightElements = TileN * TileK;
  constexpr int StageElements = 2 * WeightElements + TileM * TileK;
  constexpr int RingElements = NumStages * StageElements;  // of one group
  // A pair is rows 2r and 2r + 1 of one column c, index r * TileN + c: their sums lie in one lane.
  constexpr int Pairs = TileM * TileN / 2;
  constexpr int Share = Pairs / ClusterK;  // that a block finishes
  static_assert(TileM % 8 == 0 && TileN % (8 * ColumnWarps) == 0, "tiles are multiples of 8, in columns also per warp");
  static_assert(NumStages >= 2, "the ring needs two stages");
  static_assert(Pairs % (2 * ClusterK) == 0, "blocks of a cluster finish equal parts of a tile, two lanes at a time");
  static_assert(RingElements * sizeof(T) >= Pairs * sizeof(float4), "a group's sums take the place of its stages");

  extern __shared__ __align__(128) uint4 shared[];
  const int lane = threadIdx.x % 32;
  const int group = threadIdx.x / GroupThreads;
  const int thread = threadIdx.x % GroupThreads;
  const int warp_column = thread / 32 * Columns * 8;
  const unsigned rank = blockIdx.x % ClusterK;
  const long long row = blockIdx.y * TileM;
  const long long column = static_cast<long long>(blockIdx.x / ClusterK) * TileN;
  float4* sent = reinterpret_cast<float4*>(shared);  // to this block: [ClusterK][Share] of two gate and two up sums
  Barrier* received = reinterpret_cast<Barrier*>(sent + Pairs);
  T* rings = reinterpret_cast<T*>(shared + (ClusterK > 1 ? Pairs + 8 : 0));  // their rows begin at multiples of 128 bytes
  T* ring = rings + group * RingElements;
  const Conditional<Layout == kn && TileN * sizeof(T) < 128, LinePolicy, CachePolicy> stream{policy_evict_first()};
  const CachePolicy keep = policy_evict_last();

  // Any stage: of 64 in k from `block` * 64 on, with zeros for what lies outside.
  const auto load = [&](int stage, int block) {
    keep_in_vector(stage);
    T* weights = ring + stage * StageElements;
    const long long depth = static_cast<long long>(block) * TileK;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const T* b = p == 0 ? b1 : b2;
      const long long ldb = p == 0 ? ldb1 : ldb2;
      T* target = weights + p * WeightElements;
      if constexpr (Layout == nk) {
        copy_tile<WeightRows, WeightWidth, GroupThreads, Alignment>(thread, target, b, column, depth, n, k, ldb, stream);
      } else {
        copy_tile<WeightRows, WeightWidth, GroupThreads, Alignment>(thread, target, b, depth, column, k, n, ldb, stream);
      }
    }
    copy_tile<TileM, TileK, GroupThreads, Alignment>(thread, weights + 2 * WeightElements, a, row, depth, m, k, lda, keep);
  };

  float sums[Columns][Rows][4];
#pragma unroll
  for (int j = 0; j < Columns; ++j)
#pragma unroll
    for (int i = 0; i < Rows; ++i)
#pragma unroll
      for (int x = 0; x < 4; ++x) sums[j][i][x] = 0.0f;

  // Lanes 0-7 and 16-23 name rows of the gate, the others those of the up projection; lanes 16-31 the second 8 of k.
  const int half = lane / 8 % 2;
  const auto multiply = [&](const T* stage) {
    const T* weights = stage + half * WeightElements;
    const T* rows = stage + 2 * WeightElements;
#pragma unroll
    for (int part = 0; part < TileK / 32; ++part) {
      unsigned b[Rows][4];  // 32 of k
#pragma unroll
      for (int i = 0; i < Rows; ++i) load_matrix_x4(b[i], rows + swizzled<TileK>(i * 8 + lane % 8, part * 4 + lane / 8));
#pragma unroll
      for (int step = part * 2; step < part * 2 + 2; ++step) {
#pragma unroll
        for (int j = 0; j < Columns; ++j) {
          unsigned w[4];
          const int first = warp_column + j * 8;
          if constexpr (Layout == nk) {
            load_matrix_x4(w, weights + swizzled<WeightWidth>(first + lane % 8, step * 2 + lane / 16));
          } else {
            load_matrix_x4_transposed(w, weights + swizzled<WeightWidth>(step * 16 + lane / 16 * 8 + lane % 8, first / 8));
          }
#pragma unroll
          for (int i = 0; i < Rows; ++i) mma_m16n8<T>(sums[j][i], w, b[i][step % 2 * 2], b[i][step % 2 * 2 + 1]);
        }
      }
    }
  };

  constexpr int Sharers = GroupsK * ClusterK;
  const int first_block = static_cast<int>(rank) * GroupsK + group;
  const int blocks = static_cast<int>(ceil_div(k, TileK));
  const int own = blocks > first_block ? (blocks - first_block + Sharers - 1) / Sharers : 0;

  const unsigned columns = n - column < TileN ? static_cast<unsigned>(n - column) : TileN;
  const unsigned rows = m - row < TileM ? static_cast<unsigned>(m - row) : TileM;
  TileCopy<WeightRows, WeightWidth, GroupThreads, false, T, true> gate, up;
  TileCopy<TileM, TileK, GroupThreads, false, T, true> tokens;
  const long long depth = static_cast<long long>(first_block) * TileK;
  gate.begin(b1, Layout == nk ? column : depth, Layout == nk ? depth : column, ldb1);
  up.begin(b2, Layout == nk ? column : depth, Layout == nk ? depth : column, ldb2);
  tokens.begin(a, row, depth, lda);
  const auto fetch = [&](int stage) {
    keep_in_vector(stage);
    T* target = ring + stage * StageElements;
    constexpr int Step = Sharers * TileK;
    const auto column_wanted = [&](unsigned r) { return Layout == kn || r < columns; };
    gate.fetch(target, ldb1, Layout == nk ? Step : Step * ldb1, column_wanted, stream);
    up.fetch(target + WeightElements, ldb2, Layout == nk ? Step : Step * ldb2, column_wanted, stream);
    tokens.fetch(target + 2 * WeightElements, lda, Step, [&](unsigned r) { return r < rows; }, keep);
  };

  const auto group_barrier = [&] {
    if (ColumnWarps == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + group, GroupThreads);
    }
  };

  wait_for_previous_grid();
  // Goes through this group's stages, with Constant<1> enough of them to fill its ring; fetch_to(stage, i) starts on the i-th.
  const auto stream_through = [&](auto enough, auto fetch_to) __attribute__((always_inline)) {
#pragma unroll 1
    for (int s = 0; s < NumStages - 1; ++s) {
      if (decltype(enough)::value || s < own) fetch_to(s, s);
      copy_commit();
    }
    cluster_begin<ClusterK>(received, 16 * Pairs);
    int read = 0;
    int write = NumStages - 1;
#pragma unroll 1
    for (int i = 0; i < own; ++i) {
      copy_wait<NumStages - 2>();
      group_barrier();
      if (i + NumStages - 1 < own) fetch_to(write, i + NumStages - 1);
      copy_commit();
      multiply(ring + read * StageElements);
      read = read + 1 == NumStages ? 0 : read + 1;
      write = write + 1 == NumStages ? 0 : write + 1;
    }
  };
  const bool is_edge = Alignment < 16 || own < NumStages - 1 || k % TileK != 0 || (Layout == kn && n < column + TileN);
  if (is_edge) {
    stream_through(Constant<0>{}, [&](int stage, int i) { load(stage, first_block + i * Sharers); });
  } else {
    stream_through(Constant<1>{}, [&](int stage, int) { fetch(stage); });
  }

  // Where a pair's sums lie: swizzled, since four neighbouring lanes write pairs of one column, but lanes read along a row.
  const auto place = [](unsigned r, unsigned c) { return r * TileN + (c ^ (r % 4 * 2)); };
  group_barrier();  // all have read their stages
#pragma unroll
  for (int j = 0; j < Columns; ++j) {
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const float(&x)[4] = sums[j][i];
      reinterpret_cast<float4*>(ring)[place(i * 4 + lane % 4, warp_column + j * 8 + lane / 4)] = {x[0], x[1], x[2], x[3]};
    }
  }
  __syncthreads();
  const auto own_sum = [&](unsigned pair) {
    const unsigned at = place(pair / TileN, pair % TileN);
    float4 sum = reinterpret_cast<const float4*>(rings)[at];
#pragma unroll
    for (int s = 1; s < GroupsK; ++s) add(sum, reinterpret_cast<const float4*>(rings + s * RingElements)[at]);
    return sum;
  };
  // All lanes of a warp call this. Those of columns c and c + 1 trade: one gets both outputs of row 2r, the other those of 2r + 1.
  const auto finish = [&](const float4& x) {
    const float first = Activation::template apply<T>(x.x) * x.z;
    const float second = Activation::template apply<T>(x.y) * x.w;
    const bool odd = lane % 2;
    const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
    return pack_pair<T>(odd ? other : first, odd ? second : other);
  };
  const auto store = [&](unsigned pair, unsigned outputs) {
    const unsigned r = pair / TileN * 2 + pair % 2;
    const unsigned c = pair % TileN / 2 * 2;
    if (r >= rows || c >= columns) return;
    T* target = out + (row + r) * ldout + column + c;
    if (Alignment >= 4 && c + 1 < columns) {
      *reinterpret_cast<unsigned*>(target) = outputs;
    } else {
      target[0] = reinterpret_cast<const T*>(&outputs)[0];
      if (c + 1 < columns) target[1] = reinterpret_cast<const T*>(&outputs)[1];
    }
  };
  constexpr int Threads = GroupThreads * GroupsK;
  // Takes `count` pairs through two steps, middle = first(i), then second(i, middle), the second for none before the first for all,
  // so that memory is waited for once. The first is also called for a last warp's lanes beyond them.
  const auto in_two_steps = [&](auto count, auto first, auto second) {
    constexpr int Count = decltype(count)::value;
    constexpr int Turns = (Count + Threads - 1) / Threads;
    decltype(first(0u)) middle[Turns];
#pragma unroll
    for (int t = 0; t < Turns; ++t) {
      const unsigned i = t * Threads + threadIdx.x;
      if (Count % Threads == 0 || i < (Count + 31) / 32 * 32) middle[t] = first(Count % 32 == 0 || i < Count ? i : 0);
    }
#pragma unroll
    for (int t = 0; t < Turns; ++t) {
      const unsigned i = t * Threads + threadIdx.x;
      if (Count % Threads == 0 || i < Count) second(i, middle[t]);
    }
  };
  if constexpr (ClusterK == 1) {
    in_two_steps(Constant<Pairs>{}, [&](unsigned i) { return finish(own_sum(i)); }, store);
  } else {
    cluster_wait<ClusterK>();  // all have begun
    in_two_steps(Constant<Pairs>{}, own_sum, [&](unsigned i, const float4& sum) {
      send_to_block(sent + rank * Share + i % Share, sum, received, i / Share);
    });
    barrier_wait(received, 0);
    const auto whole_sum = [&](unsigned i) {
      float4 sum = sent[i];
#pragma unroll
      for (int s = 1; s < ClusterK; ++s) add(sum, sent[s * Share + i]);
      return sum;
    };
    in_two_steps(Constant<Share>{}, [&](unsigned i) { return finish(whole_sum(i)); },
                 [&](unsigned i, unsigned outputs) { store(rank * Share + i, outputs); });
  }
}
