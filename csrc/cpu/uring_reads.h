// Reads pieces of files into memory by io_uring: the engine "io_uring" of specdec_kernels/stream/reader.py.
//
// A thread of our own takes the pieces from one queue, in order, and keeps `depth` of them with the kernel. It sleeps
// in the kernel until a read is done or somebody has something new, needs neither Python nor a core for long, and so
// the disk has work whatever the threads that compute do. What preads.py does by threads, this does the same way:
// the rest of a short read is read, what is not made of pages goes through the page cache and is dropped from it.
#pragma once
#include "cpu/uring.h"

#ifdef SK_URING
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace sk {

// As Piece in specdec_kernels/stream/batch.py.
struct ReadPiece {
  int file, direct, buffered;
  int64_t offset, size;
  char* to;
};

struct ReadFailure {
  int file;
  int64_t offset;
  int error;  // 0 = the file ends there
};

class UringState;

// Pieces that were submitted together. All methods may be called from any thread.
class ReadBatch {
 public:
  ReadBatch(std::shared_ptr<UringState> state, int64_t left) : state_(std::move(state)), left_(left) {}
  bool wait(double seconds);  // whether nothing is left to read, after so many seconds at most
  void cancel();              // what the kernel has already still lands
  std::optional<ReadFailure> failure() const;
  bool dropped() const;  // pieces never went to the kernel: cancelled, or others failed

 private:
  friend class UringState;
  std::shared_ptr<UringState> state_;
  int64_t left_;
  bool dropped_ = false;
  std::optional<ReadFailure> failure_;
};

class UringReads {
 public:
  // limit: bytes per second, 0 = none. most: bytes per read, 0 = a piece (tests make reads come back short by it).
  UringReads(int depth, double limit, int64_t most);  // throws std::system_error
  ~UringReads();                                      // close(); in a forked child it leaves everything as it is
  UringReads(const UringReads&) = delete;
  UringReads& operator=(const UringReads&) = delete;

  std::shared_ptr<ReadBatch> submit(const std::vector<ReadPiece>& pieces);
  std::pair<int64_t, double> counters() const;  // bytes read, seconds in which there was something to read
  void pause();                                 // starts no more reads, returns when none is under way; pauses nest
  void resume();
  void close();  // drops what is queued, waits for what is being read, ends the thread

 private:
  std::shared_ptr<UringState> state_;
  std::unique_ptr<std::thread> thread_;
  int pid_;
};

}  // namespace sk
#endif
