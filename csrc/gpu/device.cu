// Whether this build can run on the current device, and what the error codes mean.
#include "gpu/launch.h"
#include "sk/gpu/compat.h"

namespace sk::gpu {
namespace {
__global__ void nothing() {}

int clear(Error error) {  // an error that we report must not show up again in the next launch
  (void)last_error();
  return static_cast<int>(error);
}
}  // namespace

// The image of a trivial kernel stands for all: they are compiled for the same architectures.
int probe() {
  int count = 0;
  if (const Error error = device_count(&count)) return clear(error);
  if (const Error error = kernel_image(&nothing)) return clear(error);
  return 0;
}

const char* error_name(int code) { return name_of(static_cast<Error>(code)); }
const char* error_text(int code) { return text_of(static_cast<Error>(code)); }

}  // namespace sk::gpu
