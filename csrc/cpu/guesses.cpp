#include "cpu/guesses.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "cpu/draw.h"
#include "cpu/float_mode.h"

namespace sk {

void Guesses::begin(int64_t last, int64_t capacity, BF16* features, const Filters& filters, const Noise& noise,
                    float* rows) {
  last_ = last;
  capacity_ = capacity;
  features_ = features;
  filters_ = filters;
  noise_ = noise;
  rows_ = rows;
  made_ = 0;
  column = -1;
}

void Guesses::pick(int threads) {
  const IeeeMode ieee;
  const Source source{b_.logits, Dtype::kF32, b_.columns};
  row_.read(source, threads);
  column = -1;
  if (row_.nan() || row_.empty()) return;
  if (rows_ != nullptr)
    std::memcpy(rows_ + made_ * b_.columns, b_.logits, static_cast<size_t>(b_.columns) * sizeof(float));
  noise_.index = static_cast<uint32_t>(made_++);
  if (filters_.temperature == 0.0f) {
    column = row_.argmax();
    probability = std::exp(row_.log_softmax(column));
    return;
  }
  row_.weigh(filters_, threads);
  all_.start(row_, threads);
  column = draw(all_, noise_);
}

void Guesses::feed() {
  const int64_t at = last_ + 1;
  if (column < 0 || at >= capacity_ || at >= b_.context || at >= b_.width * b_.page)
    throw std::logic_error("guesses: nothing was picked, or there is no room for it");
  if (b_.feature != nullptr)
    for (int64_t i = 0; i < b_.hidden; ++i) b_.feature[i] = to_f32(features_[last_ * b_.hidden + i]);
  *b_.id = b_.map == nullptr ? column : b_.map[column];
  *b_.position = at;
  *b_.slot = static_cast<int64_t>(b_.table[at / b_.page]) * b_.page + at % b_.page;
  *b_.length = static_cast<int32_t>(at + 1);
  std::memcpy(b_.turned, b_.rotary + at * b_.turns, static_cast<size_t>(b_.turns) * sizeof(float));
  last_ = at;
}

void Guesses::keep() {
  if (b_.state == nullptr) return;
  for (int64_t i = 0; i < b_.hidden; ++i) features_[last_ * b_.hidden + i] = from_f32<BF16>(b_.state[i]);
}

}  // namespace sk
