#include "cpu/uring.h"

#ifdef SK_URING
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>

#ifndef __NR_io_uring_setup  // the same on every architecture
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

namespace sk {
namespace {

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

template <class T>
T* at(void* base, uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

void* map(int fd, size_t size, int64_t offset) {
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

Ring::Ring(unsigned entries) {
  io_uring_params params{};
  fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  if (fd_ < 0) fail(errno, "io_uring_setup");
  const size_t asked = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  const size_t done = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  rings_size_ = asked > done ? asked : done;
  entries_size_ = params.sq_entries * sizeof(io_uring_sqe);
  if (params.features & IORING_FEAT_RW_CUR_POS) {
    rings_ = map(fd_, rings_size_, IORING_OFF_SQ_RING);
    entries_ = rings_ ? map(fd_, entries_size_, IORING_OFF_SQES) : nullptr;
  }
  if (!entries_) {
    const int error = params.features & IORING_FEAT_RW_CUR_POS ? errno : ENOSYS;
    if (rings_) munmap(rings_, rings_size_);
    close(fd_);
    fail(error, "io_uring_setup");
  }
  asked_ = {at<uint32_t>(rings_, params.sq_off.head), at<uint32_t>(rings_, params.sq_off.tail),
            *at<uint32_t>(rings_, params.sq_off.ring_mask)};
  done_ = {at<uint32_t>(rings_, params.cq_off.head), at<uint32_t>(rings_, params.cq_off.tail),
           *at<uint32_t>(rings_, params.cq_off.ring_mask)};
  sqes_ = static_cast<io_uring_sqe*>(entries_);
  cqes_ = at<io_uring_cqe>(rings_, params.cq_off.cqes);
  for (uint32_t i = 0; i < params.sq_entries; ++i) at<uint32_t>(rings_, params.sq_off.array)[i] = i;
}

Ring::~Ring() {
  munmap(entries_, entries_size_);
  munmap(rings_, rings_size_);
  close(fd_);
}

io_uring_sqe& Ring::next(uint8_t operation, int fd, uint64_t tag) {
  const uint32_t tail = *asked_.tail;
  io_uring_sqe& entry = sqes_[tail & asked_.mask];
  std::memset(&entry, 0, sizeof entry);
  entry.opcode = operation;
  entry.fd = fd;
  entry.user_data = tag;
  // The kernel looks at it in enter(), which this thread calls: the caller may still fill in the rest.
  __atomic_store_n(asked_.tail, tail + 1, __ATOMIC_RELEASE);
  return entry;
}

void Ring::read(int fd, void* to, uint32_t size, int64_t offset, uint64_t tag) {
  io_uring_sqe& entry = next(IORING_OP_READ, fd, tag);
  entry.addr = reinterpret_cast<uintptr_t>(to);
  entry.len = size;
  entry.off = static_cast<uint64_t>(offset);
}

void Ring::wake_after(double seconds, uint64_t tag) {
  const double whole = std::floor(seconds);
  pause_.tv_sec = static_cast<int64_t>(whole);
  pause_.tv_nsec = static_cast<int64_t>((seconds - whole) * 1e9);
  io_uring_sqe& entry = next(IORING_OP_TIMEOUT, -1, tag);
  entry.addr = reinterpret_cast<uintptr_t>(&pause_);
  entry.len = 1;
}

void Ring::enter() {
  for (;;) {
    const uint32_t news = *asked_.tail - load(asked_.head);
    const bool wait = load(done_.tail) == *done_.head;
    if (!news && !wait) return;
    const long taken = syscall(__NR_io_uring_enter, fd_, news, wait ? 1u : 0u, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0 && taken == static_cast<long>(news)) return;
    if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) fail(errno, "io_uring_enter");
    if (load(done_.tail) != *done_.head) return;  // what was not taken goes with the next call
  }
}

}  // namespace sk
#endif
