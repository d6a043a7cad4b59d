#include "cpu/uring_reads.h"

#include "cpu/short_turns.h"

#ifdef SK_URING
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <system_error>

namespace sk {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kFolio = int64_t{2} << 20;  // as FOLIO in preads.py
constexpr double kCredit = 0.1;               // as CREDIT in batch.py
constexpr uint64_t kNews = ~uint64_t{0}, kTimer = kNews - 1;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

class UringState : public std::enable_shared_from_this<UringState> {
 public:
  UringState(int depth, double limit, int64_t most)
      : ring_(std::in_place, depth + 2), slots_(depth), limit_(limit), most_(most) {
    news_ = eventfd(0, EFD_CLOEXEC);
    if (news_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (int i = depth; i-- > 0;) free_.push_back(i);
  }
  ~UringState() { shut(); }

  std::shared_ptr<ReadBatch> submit(const std::vector<ReadPiece>& pieces) {
    auto batch = std::make_shared<ReadBatch>(shared_from_this(), static_cast<int64_t>(pieces.size()));
    if (pieces.empty()) return batch;
    bool asleep;  // whether nothing else makes the thread look into the queue: a read that lands, a timer, resume()
    {
      const std::lock_guard<std::mutex> hold(lock);
      if (stopped_) {
        batch->left_ = 0;
        batch->dropped_ = true;
        return batch;
      }
      if (idle()) since_ = now(), paid_until_ = std::max(paid_until_, since_);
      asleep = queue_.empty() && !free_.empty();
      for (const ReadPiece& piece : pieces) queue_.push_back({batch, piece, 0});
    }
    if (asleep) tell();
    return batch;
  }

  bool wait(const ReadBatch& batch, double seconds) {
    std::unique_lock<std::mutex> hold(lock);
    const auto done = [&] { return batch.left_ == 0; };
    return seconds <= 0 ? done() : landed.wait_for(hold, std::chrono::duration<double>(seconds), done);
  }

  void cancel(ReadBatch& batch) {
    const std::lock_guard<std::mutex> hold(lock);
    if (batch.left_) drop(batch);
  }

  std::pair<int64_t, double> counters() {
    const std::lock_guard<std::mutex> hold(lock);
    return {bytes_, seconds_ + (idle() ? 0.0 : now() - since_)};
  }

  void pause() {
    std::unique_lock<std::mutex> hold(lock);
    ++pauses_;
    landed.wait(hold, [&] { return reading() == 0; });
  }

  void resume() {
    {
      const std::lock_guard<std::mutex> hold(lock);
      --pauses_;
    }
    tell();
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> hold(lock);
      stopped_ = true;
      while (!queue_.empty()) drop(*std::shared_ptr(queue_.front().batch));
    }
    tell();
  }

  void shut() {  // the descriptors; batches may live on
    const std::lock_guard<std::mutex> hold(lock);
    ring_.reset();
    if (news_ >= 0) ::close(news_);
    news_ = -1;
  }

  void run() {
    short_turns();
    try {
      serve();
    } catch (const std::system_error& error) {  // the kernel has no more to do with us: whoever waits shall know
      const std::lock_guard<std::mutex> hold(lock);
      stopped_ = true;
      for (size_t slot = 0; slot < slots_.size(); ++slot)
        if (slots_[slot].batch) take(static_cast<int>(slot), -error.code().value());
      while (!queue_.empty()) drop(*std::shared_ptr(queue_.front().batch));
    }
  }

  std::mutex lock;
  std::condition_variable landed;  // a batch is done, or nothing is being read any more

 private:
  // The thread: hands out reads, sleeps, takes results.
  void serve() {
    bool listening = false, timed = false;
    for (;;) {
      {
        const std::lock_guard<std::mutex> hold(lock);
        if (stopped_ && reading() == 0 && !listening) return;
        if (!listening && !stopped_) ring_->read(news_, &count_, sizeof count_, 0, kNews), listening = true;
        const double due = start();
        if (due > 0 && !timed) ring_->wake_after(due, kTimer), timed = true;
      }
      ring_->enter();
      const std::lock_guard<std::mutex> hold(lock);
      ring_->results([&](uint64_t tag, int32_t result) {
        if (tag == kNews)
          listening = false;
        else if (tag == kTimer)
          timed = false;
        else
          take(static_cast<int>(tag), result);
      });
    }
  }

  struct Read {
    std::shared_ptr<ReadBatch> batch;
    ReadPiece piece;
    int64_t done;
    bool direct() const { return piece.direct >= 0 && done % kPage == 0; }
  };

  // All but tell() with the lock held.

  int reading() const { return static_cast<int>(slots_.size() - free_.size()); }
  bool idle() const { return queue_.empty() && reading() == 0; }

  // Gives the kernel what it may have now. Returns the seconds until the next piece is paid for, or 0.
  double start() {
    while (!queue_.empty() && !free_.empty() && !pauses_) {
      if (limit_ > 0) {
        const double time = now();
        if (!paid_) paid_until_ = std::max(paid_until_, time - kCredit) + queue_.front().piece.size / limit_;
        paid_ = true;
        if (paid_until_ > time) return paid_until_ - time;
        paid_ = false;
      }
      const int slot = free_.back();
      free_.pop_back();
      slots_[slot] = std::move(queue_.front());
      queue_.pop_front();
      ask(slot);
    }
    return 0;
  }

  void ask(int slot) {
    const Read& read = slots_[slot];
    const int64_t left = read.piece.size - read.done, size = most_ > 0 ? std::min(left, most_) : left;
    ring_->read(read.direct() ? read.piece.direct : read.piece.buffered, read.piece.to + read.done,
                static_cast<uint32_t>(size), read.piece.offset + read.done, slot);
  }

  void take(int slot, int32_t result) {
    Read& read = slots_[slot];
    const int64_t offset = read.piece.offset + read.done;
    if (result > 0) {
      if (!read.direct()) {
        const int64_t start = offset / kFolio * kFolio;
        posix_fadvise(read.piece.buffered, start, offset + result - start, POSIX_FADV_DONTNEED);
      }
      bytes_ += result;
      read.done += result;
    }
    const bool again = result == -EINTR || result == -EAGAIN;
    if (again || (result > 0 && read.done < read.piece.size)) return ask(slot);
    const auto batch = std::move(read.batch);
    free_.push_back(slot);
    if (result <= 0 && !batch->failure_) {
      batch->failure_ = ReadFailure{read.piece.file, offset, -result};
      drop(*batch);
    }
    count_off(*batch, 1);
  }

  void drop(ReadBatch& batch) {
    batch.dropped_ = true;
    const auto ours = [&](const Read& read) { return read.batch.get() == &batch; };
    const auto kept = std::remove_if(queue_.begin(), queue_.end(), ours);
    const int64_t count = queue_.end() - kept;
    queue_.erase(kept, queue_.end());
    if (count) count_off(batch, count);
  }

  void count_off(ReadBatch& batch, int64_t count) {
    batch.left_ -= count;
    if (idle()) seconds_ += now() - since_;
    if (!batch.left_ || !reading()) landed.notify_all();
  }

  void tell() {
    const std::lock_guard<std::mutex> hold(lock);  // it may be closed in the meantime
    const uint64_t one = 1;
    while (news_ >= 0 && write(news_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  std::optional<Ring> ring_;
  std::deque<Read> queue_;
  std::vector<Read> slots_;  // what the kernel reads now
  std::vector<int> free_;
  const double limit_;
  const int64_t most_;
  int news_ = -1, pauses_ = 0;
  uint64_t count_ = 0;  // the kernel writes here how often somebody told news
  bool stopped_ = false, paid_ = false;
  double paid_until_ = 0, since_ = 0, seconds_ = 0;
  int64_t bytes_ = 0;
};

bool ReadBatch::wait(double seconds) { return state_->wait(*this, seconds); }
void ReadBatch::cancel() { state_->cancel(*this); }
std::optional<ReadFailure> ReadBatch::failure() const {
  const std::lock_guard<std::mutex> hold(state_->lock);
  return failure_;
}
bool ReadBatch::dropped() const {
  const std::lock_guard<std::mutex> hold(state_->lock);
  return dropped_;
}

UringReads::UringReads(int depth, double limit, int64_t most)
    : state_(std::make_shared<UringState>(depth, limit, most)), pid_(getpid()) {
  sigset_t all, before;  // signals belong to Python's threads, but for what a fault here raises
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::make_unique<std::thread>([state = state_.get()] { state->run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

UringReads::~UringReads() {
  if (getpid() == pid_) {
    close();
  } else {  // the thread is not in this process, and the lock may be somebody's who isn't, either
    (void)thread_.release();
    new std::shared_ptr<UringState>(state_);
  }
}

std::shared_ptr<ReadBatch> UringReads::submit(const std::vector<ReadPiece>& pieces) { return state_->submit(pieces); }
std::pair<int64_t, double> UringReads::counters() const { return state_->counters(); }
void UringReads::pause() { state_->pause(); }
void UringReads::resume() { state_->resume(); }

void UringReads::close() {
  if (!thread_) return;
  state_->stop();
  thread_->join();
  thread_.reset();
  state_->shut();
}

}  // namespace sk
#endif
