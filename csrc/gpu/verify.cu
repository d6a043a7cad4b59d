// Plans and launches of sk/gpu/verify_chain.cuh.
#include "sk/gpu/verify_chain.cuh"

#include "gpu/on_device.h"
#include "gpu/verify_plan.h"

namespace sk::gpu {

Plan plan_verify(int64_t requests, int64_t width, int64_t vocabulary, int64_t draft_columns, int chunks, int device) {
  const auto groups = [](int64_t n) { return (n + kGroup - 1) / kGroup; };
  const int64_t slot = (groups(vocabulary) + groups(draft_columns)) * static_cast<int64_t>(sizeof(Group));
  const int64_t rows = requests * width;
  Plan plan = plan_rows(requests, rows, rows * (draft_columns > 0 ? 2 : 1), groups(vocabulary), slot, chunks, device);
  plan.workspace += plan.blocks * width * static_cast<int64_t>(sizeof(double));
  return plan;
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
