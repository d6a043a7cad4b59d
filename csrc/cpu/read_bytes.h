// Reads memory and does nothing else: what a memory-bound kernel is measured against.
#pragma once
#include <cstdint>

namespace sk {

uint64_t read_bytes(const void* data, int64_t n, int threads);  // the xor of all whole 8-byte words

}  // namespace sk
