// Launches of sk/gpu/expand.cuh.
#include "sk/gpu/expand.cuh"

#include <algorithm>

#include "gpu/dispatch.h"

namespace sk::gpu {
namespace {

constexpr int64_t kMaxBlocks = 1 << 20;  // the kernels loop

template <class T>
void launch(const ExpandInt8& a, StreamHandle stream) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  if (a.rotated && a.group > kAcross * kPackOf<T>) {
    const int64_t parts = kPanel / std::min<int64_t>(kLongestRotation / a.group, kPanel);
    const auto blocks = static_cast<unsigned>(std::min(panels * (a.k / a.group) * parts, kMaxBlocks));
    SK_LAUNCH((expand_long_kernel<T>), blocks, kExpandThreads, stream, a);
  } else {
    const auto blocks = static_cast<unsigned>(std::min(panels * ExpandUnits<T>(a).tiles(), kMaxBlocks));
    SK_LAUNCH((expand_kernel<T>), blocks, kExpandThreads, stream, a);
  }
}

}  // namespace

int expand(const ExpandInt8& args, Dtype dtype, int device, void* stream) {
  if (args.n * args.k == 0) return 0;
  return dispatch(dtype, device, [&](auto type) { launch<decltype(type)>(args, static_cast<StreamHandle>(stream)); });
}

}  // namespace sk::gpu
