// Launches of sk/gpu/gate.cuh.
#include "sk/gpu/gate.cuh"

#include "gpu/dispatch.h"
#include "gpu/quantize_teams.h"

namespace sk::gpu {
namespace {

template <class T, bool kSilu>
void launch(const GateMul& args, StreamHandle stream) {
  if (args.quantize) {
    with_team<T>(args.shape, [&](auto team, unsigned blocks) {
      using Team = decltype(team);
      SK_LAUNCH((gate_quantize_kernel<T, Team, kSilu>), blocks, Team::kThreads, stream, args);
    });
    return;
  }
  using Team = BlockTeam<256>;
  const int64_t piece = Team::kThreads * kPackOf<T>, pieces = (args.shape.width + piece - 1) / piece;
  const unsigned blocks = blocks_for(args.shape.rows * pieces, 1);
  if (blocks > 0) SK_LAUNCH((gate_kernel<T, Team, kSilu>), blocks, Team::kThreads, stream, args);
}

}  // namespace

int gate_mul(const GateMul& args, Dtype dtype, int device, void* stream) {
  if (args.shape.rows * args.shape.groups == 0) return 0;
  return dispatch(dtype, device, [&](auto type) {
    using T = decltype(type);
    const auto handle = static_cast<StreamHandle>(stream);
    args.gate == Gate::kSilu ? launch<T, true>(args, handle) : launch<T, false>(args, handle);
  });
}

}  // namespace sk::gpu
