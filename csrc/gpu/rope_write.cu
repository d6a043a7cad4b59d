// Launches of sk/gpu/rope_write.cuh.
#include "sk/gpu/rope_write.cuh"

#include <algorithm>

#include "gpu/dispatch.h"

namespace sk::gpu {

int rope_write_kv_int8(const RopeWrite& args, Dtype dtype, int device, void* stream) {
  if (args.tokens == 0) return 0;
  return dispatch(dtype, device, [&](auto type) {
    using T = decltype(type);
    // A block each for a few heads where there are few tokens; with many, a block for all heads of a token.
    const int64_t waves = kRopeThreads / host_wave(), units = args.q_heads + 2 * args.kv_heads;
    const int64_t most = std::max<int64_t>(1, 4096 / args.tokens), useful = (units + waves - 1) / waves;
    const int parts = static_cast<int>(std::max<int64_t>(1, std::min(useful, most)));
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(args.tokens * parts, 1 << 20));
    SK_LAUNCH((rope_write_kernel<T>), blocks, kRopeThreads, static_cast<StreamHandle>(stream), args, parts);
  });
}

}  // namespace sk::gpu
