// A buffer that grows to its largest use and is kept: one per thread and kernel, as a thread_local.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>

namespace sk {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // At least `bytes` on a cache line; what the last call returned is gone.
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      data_ = nullptr, size_ = 0;
      if (posix_memalign(&data_, 64, bytes) != 0) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<char*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace sk
