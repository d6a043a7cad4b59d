// From a dtype code to the type, on the right device.
#pragma once
#include "gpu/on_device.h"
#include "sk/numerics.h"

namespace sk::gpu {

// Runs launch(T{}) for the type T that `dtype` names, with `device` current. Returns what went wrong, or 0.
template <class Launch>
int dispatch(Dtype dtype, int device, const Launch& launch) {
  const OnDevice on(device);
  if (on.error() != kSuccess) return static_cast<int>(on.error());
  switch (dtype) {
    case Dtype::kF32: launch(float{}); break;
    case Dtype::kF16: launch(F16{}); break;
    case Dtype::kBF16: launch(BF16{}); break;
  }
  return static_cast<int>(last_error());
}

}  // namespace sk::gpu
