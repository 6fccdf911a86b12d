// Which output tile a block computes.
#pragma once

template <typename Index>
struct Tile {
  Index m, n;
};

// Walks GroupM tile rows downward before moving one tile column on, so that the blocks in flight share their rows of
// `a` and their columns of the weights in L2. `index` counts the tiles of one product.
template <int GroupM, typename Index>
__device__ __forceinline__ Tile<Index> grouped_tile(Index index, Index tiles_m, Index tiles_n) {
  const Index per_group = GroupM * tiles_n;
  const Index group = index / per_group;
  const Index first = group * GroupM;
  const Index rows = tiles_m - first < GroupM ? tiles_m - first : GroupM;
  const Index within = index - group * per_group;
  const Index column = within / rows;
  return {first + within - column * rows, column};
}

__device__ __forceinline__ long long ceil_div(long long x, long long y) { return (x + y - 1) / y; }
