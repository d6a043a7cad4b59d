// Dtype dispatch and launches of sk/gpu/linear.cuh.
#include "sk/gpu/linear.cuh"

#include <algorithm>
#include <atomic>

#include "gpu/launch.h"
#include "gpu/on_device.h"

namespace sk::gpu {
namespace {

constexpr int64_t kSlice = 1024;         // rows that are prepared at a time: the workspace stays within a few MB
constexpr int64_t kSpan = 1024;          // values that a block prepares, if groups are short: more blocks, less waiting
constexpr int64_t kMaxBlocks = 1 << 20;  // the kernels loop

unsigned blocks_for(int64_t units) { return static_cast<unsigned>(std::min(units, kMaxBlocks)); }

int64_t words_bytes(const Walk& walk, int64_t rows) {
  const int64_t tiles = (std::min(rows, kSlice) + kTileRows - 1) / kTileRows;
  return tiles * kTileRows * walk.row_words() * static_cast<int64_t>(sizeof(uint32_t));
}

// Whether a block that multiplies can prepare x by itself.
bool by_row(const Walk& walk, int64_t rows) {
  return rows == 1 && walk.row_words() <= kRowWords && walk.groups <= kGroupsAtOnce;
}

Walk walk_of(int64_t k, int64_t group) {
  LinearInt8 a{};
  a.k = k, a.group = group;
  return Walk(a);
}

template <class Kernel>
bool matrix_unit(Kernel* kernel, int device) {  // asked once per device
  static std::atomic<int8_t> known[16];
  if (device < 0 || device >= 16) return has_matrix_unit(kernel);
  int8_t answer = known[device].load();
  if (answer == 0) known[device] = answer = has_matrix_unit(kernel) ? 1 : -1;
  return answer > 0;
}

template <class Unit>
void multiply(const LinearInt8& a, const XWords& x, const PerGroup<const float>& scale, StreamHandle stream) {
  const int64_t units = (a.n + kPanel - 1) / kPanel * ((a.rows + Unit::kRows - 1) / Unit::kRows);
  SK_LAUNCH((linear_kernel<Unit>), blocks_for(units), kLinearThreads, stream, a, x, scale);
}

template <class T>
void launch(const LinearInt8& args, LinearUnit unit, int device, StreamHandle stream) {
  const Walk walk(args);
  if (unit != LinearUnit::kMatrix && by_row(walk, args.rows)) {
    SK_LAUNCH((linear_row_kernel<T>), blocks_for((args.n + kPanel - 1) / kPanel), kLinearThreads, stream, args);
    return;
  }
  const bool wanted = unit == LinearUnit::kMatrix || (unit == LinearUnit::kBest && args.rows > 1);
  const bool matrix = wanted && matrix_unit(&linear_kernel<MatrixUnit<8>>, device);
  const XWords x{static_cast<uint32_t*>(args.workspace), walk.row_words() * kTileRows, kRoundSteps * kTileRows};
  const PerGroup<float> made{
      reinterpret_cast<float*>(static_cast<char*>(args.workspace) + words_bytes(walk, args.rows)), walk.groups, 1};
  const int at_once =
      static_cast<int>(std::clamp<int64_t>(kSpan / walk.group, 1, std::min<int64_t>(kGroupsAtOnce, walk.groups)));
  for (int64_t row = 0; row < args.rows; row += kSlice) {  // one after the other in the stream, in the same workspace
    LinearInt8 a = args;
    a.rows = std::min(kSlice, args.rows - row);
    a.x = static_cast<const T*>(args.x) + row * args.x_stride;
    a.x_scale.data = args.x_scale.data == nullptr ? nullptr : args.x_scale.data + row * args.x_scale.row_stride;
    a.out = static_cast<char*>(args.out) + row * args.out_stride * (args.out_type == Dtype::kF32 ? 4 : 2);
    SK_LAUNCH((linear_prepare_kernel<T>), blocks_for(a.rows * ((walk.groups + at_once - 1) / at_once)), kLinearThreads,
              stream, a, x, made, at_once);
    const PerGroup<const float> scale =
        a.x_scale.data != nullptr ? a.x_scale : PerGroup<const float>{made.data, made.row_stride, made.group_stride};
    if (matrix && a.rows <= 8)
      multiply<MatrixUnit<8>>(a, x, scale, stream);
    else if (matrix && a.rows <= 16)
      multiply<MatrixUnit<16>>(a, x, scale, stream);
    else if (matrix)
      multiply<MatrixUnit<4 * kPanel>>(a, x, scale, stream);
    else if (a.rows == 1)
      multiply<DotUnit<1, true>>(a, x, scale, stream);
    else
      multiply<DotUnit<8, false>>(a, x, scale, stream);
  }
}

}  // namespace

int64_t plan_linear(int64_t rows, int64_t k, int64_t group) {
  const Walk walk = walk_of(k, group);
  return words_bytes(walk, rows) + std::min(rows, kSlice) * walk.groups * static_cast<int64_t>(sizeof(float));
}

int linear_int8(const LinearInt8& args, LinearX type, LinearUnit unit, int device, void* stream) {
  if (args.rows * args.n == 0) return 0;
  const OnDevice on(device);
  if (on.error() != kSuccess) return static_cast<int>(on.error());
  const auto handle = static_cast<StreamHandle>(stream);
  switch (type) {
    case LinearX::kF32: launch<float>(args, unit, device, handle); break;
    case LinearX::kF16: launch<F16>(args, unit, device, handle); break;
    case LinearX::kBF16: launch<BF16>(args, unit, device, handle); break;
    case LinearX::kCodes: launch<int8_t>(args, unit, device, handle); break;
  }
  return static_cast<int>(last_error());
}

}  // namespace sk::gpu
