// What lies between two passes of a small decoder that guesses token after token: the next token is picked from a row
// of logits, and with its place in the text becomes the input of the next pass.
//
// The pass over one row is recorded (bind/program.h) and runs on buffers that never move; picking and feeding are calls
// of the same program, so that a guess is one call from Python. A feature head (EAGLE, 2401.15077) also reads its own
// last hidden state, rounded to bfloat16 as caches keep it.
#pragma once
#include <cstdint>

#include "cpu/residual.h"
#include "cpu/row.h"
#include "sk/accept.h"
#include "sk/numerics.h"

namespace sk {

// The buffers of the recorded pass, and tables. `features` below are those of a request's cache.
struct GuessBuffers {
  const float* logits;
  int64_t columns;     // of which those may be picked
  const int32_t* map;  // the ids that columns stand for; null: they are ids
  int64_t *id, *position, *slot;
  int32_t* length;       // of the cache with the row in it
  const int32_t* table;  // its pages
  int64_t width, page;   // most pages, tokens per page
  const float* rotary;   // [context][turns]: cosines and sines by position
  float* turned;         // [turns] of the row
  int64_t context, turns;
  const float* state;  // [hidden], the row behind the last norm; null for a model that reads no features
  float* feature;      // [hidden], what the row reads beside its id
  int64_t hidden;
};

class Guesses {
 public:
  explicit Guesses(const GuessBuffers& buffers) : b_(buffers) {}

  // A chain begins. The logits are those of position `last`, the features of its row are in the cache; passes may be
  // made up to position `capacity` - 1. Temperature 0: the likeliest token each time. Otherwise tokens are drawn, as
  // sample() draws with stream 0. Every row is copied to `rows` [.., columns], if that is not null.
  void begin(int64_t last, int64_t capacity, BF16* features, const Filters& filters, const Noise& noise, float* rows);

  void pick(int threads);  // column, probability
  void feed();             // makes the picked token the next row's
  void keep();             // the row's state, as a feature

  int64_t column = -1;       // -1: the logits have a NaN, or no candidate
  double probability = 0.0;  // softmax of the raw logits; only at temperature 0

 private:
  const GuessBuffers b_;
  int64_t last_ = 0, capacity_ = 0;
  BF16* features_ = nullptr;
  Filters filters_{};
  Noise noise_{};
  float* rows_ = nullptr;
  int64_t made_ = 0;  // guesses of this chain
  Row row_;
  Residual all_;
};

}  // namespace sk
