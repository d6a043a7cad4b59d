// A file in memory, read-only and shared with every process that maps it, whose loss does not kill the process.
//
// Reading a mapped page that the file no longer has (somebody cut it), or that the disk can't deliver, raises SIGBUS.
// Here the handler of that signal puts zeroed pages in the place of what is lost, from the failing one to the end of
// the mapping, sets a flag and lets the reader go on. Whoever computes from a mapping looks at the flag afterwards and
// drops the result: a zero is never taken for a weight. A signal that belongs to no mapping goes to the handler that
// was there before.
#pragma once
#include <atomic>
#include <cstdint>

namespace sk {

class Mapping {
 public:
  // Maps the first `size` bytes of the file; nullptr and errno if that fails, ENOSYS where there are no mappings.
  static Mapping* of_file(int fd, int64_t size);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uintptr_t address() const;
  int64_t size() const;
  bool damaged() const;  // whether something that was read from it was not in the file

  // Brings pages in before they are needed. Does nothing about what is not there: reading it raises the flag.
  void load(int64_t offset, int64_t nbytes) const;

 private:
  struct Range;
  friend struct Guard;
  explicit Mapping(Range* range) : range_(range) {}
  Range* range_;
};

// Makes the handler the first one again, in case that somebody installed another one after it. False and errno if not.
bool guard_mappings();

}  // namespace sk
