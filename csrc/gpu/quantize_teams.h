// Which team takes a group: the smallest one whose registers hold it. The kernels loop over the groups, so that the grid
// can stay below what every driver accepts.
#pragma once
#include <algorithm>

#include "gpu/launch.h"
#include "sk/gpu/pack.cuh"
#include "sk/gpu/reduce.cuh"

namespace sk::gpu {

constexpr int kLanes = 8;
using FewLanes = LaneTeam<256, kLanes>;
using OneWave = WaveTeam<256>;
using OneBlock = BlockTeam<512>;

inline unsigned blocks_for(int64_t teams, int64_t per_block) {
  return static_cast<unsigned>(std::min<int64_t>((teams + per_block - 1) / per_block, 1 << 20));
}

// launch(team, blocks) with a value of the team's type.
template <class T, class Launch>
void with_team(const Shape& shape, const Launch& launch) {
  const int64_t units = shape.rows * shape.groups, held = kHeld * kPackOf<T>;
  const int lanes = host_wave();
  if (shape.width <= kLanes * held)
    launch(FewLanes{}, blocks_for(units, FewLanes::kThreads / kLanes));
  else if (shape.width <= lanes * held)
    launch(OneWave{}, blocks_for(units, OneWave::kThreads / lanes));
  else
    launch(OneBlock{}, blocks_for(units, 1));
}

}  // namespace sk::gpu
