// Plans and launches of sk/gpu/verify_chain.cuh.
#include "sk/gpu/verify_chain.cuh"

#include <algorithm>

#include "gpu/on_device.h"

namespace sk::gpu {
namespace {
constexpr int64_t kMostSurveyed = 16 << 20;  // bytes of surveys that a call may ask for
}

// Blocks with a request each are enough for the device when they are half as many as its processors (predicted). Below
// that all rows are surveyed first, by about four blocks per processor.
Plan plan_verify(int64_t requests, int64_t width, int64_t vocabulary, int64_t draft_columns, int chunks, int device) {
  const auto groups = [](int64_t n) { return (n + kGroup - 1) / kGroup; };
  const int64_t slot = (groups(vocabulary) + groups(draft_columns)) * static_cast<int64_t>(sizeof(Group));
  const int64_t units = requests * width * (draft_columns > 0 ? 2 : 1), many = processors(device);
  if (chunks < 0) {
    const int64_t most = groups(vocabulary) / (kAhead * kTeams) + 1;
    const bool few = 2 * requests <= many && units * slot <= kMostSurveyed;
    chunks = few ? static_cast<int>(std::clamp<int64_t>(4 * many / std::max<int64_t>(units, 1), 1, most)) : 0;
  }
  const int64_t blocks = std::min<int64_t>(requests, chunks > 0 ? 1 << 30 : 2 * many);
  const int64_t slots = chunks > 0 ? requests * width : blocks, ratios = blocks * width;
  return {chunks, static_cast<int32_t>(blocks), slot * slots + ratios * static_cast<int64_t>(sizeof(double))};
}

int verify(const Verify& args, int device, void* stream) {
  if (args.requests == 0) return 0;
  const OnDevice on(device);
  if (on.error() != kSuccess) return static_cast<int>(on.error());
  const auto handle = static_cast<StreamHandle>(stream);
  if (args.plan.chunks > 0) {
    const int64_t sides = args.draft_rows.data == nullptr ? 1 : 2;
    const unsigned blocks = static_cast<unsigned>(args.requests * args.width * sides * args.plan.chunks);
    SK_LAUNCH(verify_survey_kernel, blocks, kWideBlock, handle, args);
  }
  SK_LAUNCH(verify_kernel, static_cast<unsigned>(args.plan.blocks), kWideBlock, handle, args);
  return static_cast<int>(last_error());
}

}  // namespace sk::gpu
