// Launches of sk/gpu/rows.cuh.
#include "sk/gpu/rows.cuh"

#include <algorithm>

#include "gpu/on_device.h"

namespace sk::gpu {

int rows_int8(const RowsInt8& args, int device, void* stream) {
  if (args.count == 0) return 0;
  const OnDevice on(device);
  if (on.error() != kSuccess) return static_cast<int>(on.error());
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(args.count, 1 << 20));
  SK_LAUNCH(rows_kernel, blocks, kRowThreads, static_cast<StreamHandle>(stream), args);
  return static_cast<int>(last_error());
}

}  // namespace sk::gpu
