// Dtype dispatch and launches of sk/gpu/quantize.cuh.
#include "sk/gpu/quantize.cuh"

#include <algorithm>

#include "gpu/launch.h"
#include "gpu/on_device.h"

namespace sk::gpu {
namespace {

// A wave takes a group that it can hold in registers, a block takes a longer one. The kernels loop over the units, so
// that the grid can stay below what every driver accepts.
struct Split {
  bool by_wave;
  unsigned blocks;
};

Split split(const Shape& shape, int pack) {
  const int lanes = host_wave();
  const bool by_wave = shape.width <= static_cast<int64_t>(lanes) * pack * kHeld;
  const int64_t units = shape.rows * shape.groups, teams = by_wave ? kQuantizeThreads / lanes : 1;
  return {by_wave, static_cast<unsigned>(std::min<int64_t>((units + teams - 1) / teams, 1 << 20))};
}

template <class T>
void launch(const QuantizeInt8& args, StreamHandle stream) {
  const Split s = split(args.shape, kPackOf<T>);
  if (s.by_wave)
    SK_LAUNCH((quantize_kernel<T, WaveTeam<kQuantizeThreads>>), s.blocks, kQuantizeThreads, stream, args);
  else
    SK_LAUNCH((quantize_kernel<T, BlockTeam<kQuantizeThreads>>), s.blocks, kQuantizeThreads, stream, args);
}

template <class T>
void launch(const DequantizeInt8& args, StreamHandle stream) {
  const Split s = split(args.shape, kPackOf<T>);
  if (s.by_wave)
    SK_LAUNCH((dequantize_kernel<T, WaveTeam<kQuantizeThreads>>), s.blocks, kQuantizeThreads, stream, args);
  else
    SK_LAUNCH((dequantize_kernel<T, BlockTeam<kQuantizeThreads>>), s.blocks, kQuantizeThreads, stream, args);
}

template <class Args>
int dispatch(const Args& args, Dtype dtype, int device, void* stream) {
  if (args.shape.rows * args.shape.groups == 0) return 0;
  const OnDevice on(device);
  if (on.error() != kSuccess) return static_cast<int>(on.error());
  const auto handle = static_cast<StreamHandle>(stream);
  switch (dtype) {
    case Dtype::kF32: launch<float>(args, handle); break;
    case Dtype::kF16: launch<F16>(args, handle); break;
    case Dtype::kBF16: launch<BF16>(args, handle); break;
  }
  return static_cast<int>(last_error());
}

}  // namespace

int quantize_int8(const QuantizeInt8& args, Dtype dtype, int device, void* stream) {
  return dispatch(args, dtype, device, stream);
}

int dequantize_int8(const DequantizeInt8& args, Dtype dtype, int device, void* stream) {
  return dispatch(args, dtype, device, stream);
}

}  // namespace sk::gpu
