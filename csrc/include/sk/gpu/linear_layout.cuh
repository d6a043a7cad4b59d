// What the kernels of linear_int8 agree on: how a packed weight is walked, and where the codes of x lie.
//
// A panel is 16 channels. Its k axis is a row of steps of 4 k, each 64 bytes: [16 channels][4 k]. Eight steps make a
// round: 512 bytes, one instruction's worth of a matrix unit. A group starts a new round; the steps of its last round
// that do not exist are not read. k's order inside a round is free as long as x has the same.
//
// The codes of x are words of 4 k, eight per round and row, and eight rows side by side: [tile][round][8 rows][8
// words]. Word w of a round is step w / 2 + 4 * (w % 2): a lane of a matrix unit wants steps j and j + 4, and so takes
// both at once. Words of steps that do not exist are 0.
#pragma once
#include "sk/gpu/compat.h"

#include "gpu/launch.h"

namespace sk::gpu {

constexpr int kPanel = 16, kStep = 4;
constexpr int kStepBytes = kPanel * kStep;
constexpr int kRoundSteps = 8;
constexpr int kTileRows = 8;  // of x, side by side in the workspace
constexpr int kLinearThreads = 256;
constexpr int kRowWords = 1024;     // a row of at most so many words is prepared by the block that multiplies it
constexpr int kGroupsAtOnce = 128;  // that a block prepares

// Of the groups of a row; all fit 32 bits.
struct Walk {
  int32_t groups, group, steps, rounds;  // how many; values, steps and rounds of each
  explicit SK_HD Walk(const LinearInt8& a)
      : groups(static_cast<int32_t>(a.k) / static_cast<int32_t>(a.group)),
        group(static_cast<int32_t>(a.group)),
        steps((group + kStep - 1) / kStep),
        rounds((steps + kRoundSteps - 1) / kRoundSteps) {}
  SK_HD int64_t panel_bytes() const { return static_cast<int64_t>(groups) * steps * kStepBytes; }
  SK_HD int64_t row_words() const { return static_cast<int64_t>(groups) * rounds * kRoundSteps; }
};

// Codes of x: those of row r in round i (counted over all groups) are at row(r, i)[word].
struct XWords {
  uint32_t* data;
  int64_t tile;   // words from one tile of rows to the next
  int32_t round;  // words from one round to the next
  SK_HD uint32_t* row(int64_t r, int64_t i) const {
    return data + r / kTileRows * tile + i * round + r % kTileRows * kRoundSteps;
  }
};
SK_HD int word_of(int step) { return step % (kRoundSteps / 2) * 2 + step / (kRoundSteps / 2); }

}  // namespace sk::gpu
