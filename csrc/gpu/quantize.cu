// Launches of sk/gpu/quantize.cuh.
#include "sk/gpu/quantize.cuh"

#include "gpu/dispatch.h"
#include "gpu/quantize_teams.h"

namespace sk::gpu {

int quantize_int8(const QuantizeInt8& args, Dtype dtype, int device, void* stream) {
  if (args.shape.rows * args.shape.groups == 0) return 0;
  return dispatch(dtype, device, [&](auto type) {
    using T = decltype(type);
    with_team<T>(args.shape, [&](auto team, unsigned blocks) {
      using Team = decltype(team);
      SK_LAUNCH((quantize_kernel<T, Team>), blocks, Team::kThreads, static_cast<StreamHandle>(stream), args);
    });
  });
}

int dequantize_int8(const DequantizeInt8& args, Dtype dtype, int device, void* stream) {
  if (args.shape.rows * args.shape.groups == 0) return 0;
  return dispatch(dtype, device, [&](auto type) {
    using T = decltype(type);
    with_team<T>(args.shape, [&](auto team, unsigned blocks) {
      using Team = decltype(team);
      SK_LAUNCH((dequantize_kernel<T, Team>), blocks, Team::kThreads, static_cast<StreamHandle>(stream), args);
    });
  });
}

}  // namespace sk::gpu
