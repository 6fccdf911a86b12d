// Which output tile a block computes.
#pragma once

struct Tile {
  long long m, n;
};

// Walks GroupM tile rows downward before moving one tile column on, so that the blocks in flight share their rows of
// `a` and their columns of the weights in L2. `index` counts the tiles of one product.
template <int GroupM>
__device__ __forceinline__ Tile grouped_tile(long long index, long long tiles_m, long long tiles_n) {
  const long long per_group = GroupM * tiles_n;
  const long long first = index / per_group * GroupM;
  const long long rows = tiles_m - first < GroupM ? tiles_m - first : GroupM;
  const long long within = index % per_group;
  return {first + within % rows, within / rows};
}

__device__ __forceinline__ long long ceil_div(long long x, long long y) { return (x + y - 1) / y; }
