// Launches of sk/gpu/norm.cuh.
#include "sk/gpu/norm.cuh"

#include "gpu/dispatch.h"
#include "gpu/quantize_teams.h"

namespace sk::gpu {
namespace {

template <class T, class Team>
void launch(const Norm& args, StreamHandle stream) {
  SK_LAUNCH((norm_kernel<T, Team>), blocks_for(args.rows, 1), Team::kThreads, stream, args);
}

}  // namespace

// The block is chosen by the row's length and nothing else: it decides in which order the row is summed up.
int norm(const Norm& args, Dtype dtype, int device, void* stream) {
  if (args.rows == 0) return 0;
  return dispatch(dtype, device, [&](auto type) {
    using T = decltype(type);
    using Narrow = BlockTeam<2 * kSmallestWave>;
    using Wide = BlockTeam<512>;
    const auto handle = static_cast<StreamHandle>(stream);
    if (args.width <= Narrow::kThreads * kHeld * kPackOf<T>)
      launch<T, Narrow>(args, handle);
    else
      launch<T, Wide>(args, handle);
  });
}

}  // namespace sk::gpu
