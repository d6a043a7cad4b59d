// How a call of verify or verify_tree is spread over a device.
#pragma once
#include <algorithm>

#include "gpu/launch.h"
#include "sk/gpu/compat.h"
#include "sk/gpu/verify_survey.cuh"

namespace sk::gpu {

constexpr int64_t kMostSurveyed = 16 << 20;  // bytes of surveys that a call may ask for

// Blocks with a request each are enough for the device when they are half as many as its processors (predicted). Below
// that all rows are surveyed first, by about four blocks per processor. `surveys` counts the rows of target and drafts,
// `slot` the bytes that belong to one target row; `groups` is a row's length.
inline Plan plan_rows(int64_t requests, int64_t rows, int64_t surveys, int64_t groups, int64_t slot, int chunks,
                      int device) {
  const int64_t many = processors(device);
  if (chunks < 0) {
    const int64_t most = groups / (kAhead * kTeams) + 1, wanted = 4 * many / std::max<int64_t>(surveys, 1);
    const bool few = 2 * requests <= many && rows * slot <= kMostSurveyed;
    chunks = few ? static_cast<int>(std::clamp<int64_t>(wanted, 1, most)) : 0;
  }
  const int64_t blocks = chunks > 0 ? requests : std::min<int64_t>(requests, 2 * many);
  return {chunks, static_cast<int32_t>(blocks), slot * (chunks > 0 ? rows : blocks)};
}

}  // namespace sk::gpu
