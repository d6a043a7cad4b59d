// The kernel's queue of reads, io_uring, by its three system calls (io_uring_setup(2), io_uring(7)); no library.
//
// Two rings lie in memory that the kernel and this process share. Entries that say what to do go into one and become
// the kernel's by enter(); it works on all of them at once, and the results come back in the other in any order.
// One thread at a time may use a Ring. Linux 5.6 is the first that reads by it; containers often forbid it altogether.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <linux/time_types.h>
#endif

#ifdef IORING_FEAT_RW_CUR_POS  // came with 5.6
#define SK_URING 1

namespace sk {

class Ring {
 public:
  explicit Ring(unsigned entries);  // throws std::system_error where the kernel has no io_uring or does not allow it
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Ask for up to `entries` of these between two calls of enter(). `tag` comes back with the result.
  void read(int fd, void* to, uint32_t size, int64_t offset, uint64_t tag);
  void wake_after(double seconds, uint64_t tag);  // one at a time

  // Makes what was asked for the kernel's, and waits until a result is there.
  void enter();

  // Takes the results: each(tag, bytes read or -errno).
  template <class F>
  void results(F&& each) {
    uint32_t head = *done_.head;
    for (; head != load(done_.tail); ++head) {
      const io_uring_cqe entry = cqes_[head & done_.mask];
      __atomic_store_n(done_.head, head + 1, __ATOMIC_RELEASE);
      each(entry.user_data, entry.res);
    }
  }

 private:
  struct Queue {
    uint32_t *head, *tail, mask;
  };
  static uint32_t load(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
  io_uring_sqe& next(uint8_t operation, int fd, uint64_t tag);

  int fd_ = -1;
  void *rings_ = nullptr, *entries_ = nullptr;
  size_t rings_size_ = 0, entries_size_ = 0;
  Queue asked_{}, done_{};
  io_uring_sqe* sqes_ = nullptr;
  const io_uring_cqe* cqes_ = nullptr;
  __kernel_timespec pause_{};
};

}  // namespace sk
#endif
