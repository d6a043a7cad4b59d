// Makes a device current for as long as this object lives. The launch goes to the device of the stream, and the
// caller's own choice of device is not disturbed.
#pragma once
#include "sk/gpu/compat.h"

namespace sk::gpu {

class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = current_device(&before_);
    if (error_ == kSuccess && before_ != device) {
      error_ = set_device(device);
      moved_ = error_ == kSuccess;
    }
  }
  ~OnDevice() {
    if (moved_) (void)set_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  Error error() const { return error_; }

 private:
  int before_ = 0;
  bool moved_ = false;
  Error error_ = kSuccess;
};

}  // namespace sk::gpu
