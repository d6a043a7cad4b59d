// Plans and launches of sk/gpu/verify_tree.cuh.
#include "sk/gpu/verify_tree.cuh"

#include "gpu/on_device.h"
#include "gpu/verify_plan.h"

namespace sk::gpu {

Plan plan_verify_tree(int64_t requests, int64_t nodes, int64_t vocabulary, int chunks, int device) {
  const int64_t groups = (vocabulary + kGroup - 1) / kGroup, rows = nodes + requests;
  Plan plan = plan_rows(requests, rows, rows, groups, groups * static_cast<int64_t>(sizeof(Group)), chunks, device);
  plan.workspace += rows * static_cast<int64_t>(sizeof(Node));
  return plan;
}

int verify_tree(const Verify& args, int device, void* stream) {
  if (args.requests == 0) return 0;
  const OnDevice on(device);
  if (on.error() != kSuccess) return static_cast<int>(on.error());
  const auto handle = static_cast<StreamHandle>(stream);
  if (args.plan.chunks > 0) {
    const unsigned blocks = static_cast<unsigned>((args.drafts + args.requests) * args.plan.chunks);
    SK_LAUNCH(verify_tree_survey_kernel, blocks, kWideBlock, handle, args);
  }
  SK_LAUNCH(verify_tree_kernel, static_cast<unsigned>(args.plan.blocks), kWideBlock, handle, args);
  return static_cast<int>(last_error());
}

}  // namespace sk::gpu
