// One spelling for CUDA, HIP and the CPU emulator of the tests. Kernel headers include this file and no other vendor
// header, so that the same text is compiled by nvcc, by hipcc, and by g++ with -DSK_EMULATOR.
//
// Only this file knows how many lanes a wave has (32 on NVIDIA and RDNA, 64 on CDNA) and what a full mask looks like:
// elsewhere write wave() and shuffle_xor(). Shared memory is declared with SK_SHARED, launches go through SK_LAUNCH.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(SK_EMULATOR)
#include "simt_emu.h"
#elif defined(__HIPCC__)
#include <hip/hip_runtime.h>
#else
#include <cuda_runtime.h>
#endif

namespace sk::gpu {

constexpr int kSmallestWave = 32;  // for the size of arrays with one entry per wave

// Threads of a block that serves one request on its own. In the emulator each costs a stack and a switch per barrier.
#if defined(SK_EMULATOR)
constexpr int kWideBlock = 128;
#else
constexpr int kWideBlock = 512;
#endif

#if defined(SK_EMULATOR)

using StreamHandle = void*;
using Error = int;
constexpr Error kSuccess = 0;
inline int wave() { return simt::config.wave; }
inline int host_wave() { return simt::config.wave; }
using simt::any_in_wave;
using simt::shuffle_xor;
inline uint32_t fetch_add(uint32_t* address, uint32_t value) {  // fibers take turns
  const uint32_t before = *address;
  *address += value;
  return before;
}
inline int processors(int) { return 4; }
inline Error last_error() { return kSuccess; }
inline Error current_device(int* device) { return *device = 0, kSuccess; }
inline Error set_device(int) { return kSuccess; }
inline Error device_count(int* count) { return *count = 1, kSuccess; }
inline const char* name_of(Error) { return "success"; }
inline const char* text_of(Error) { return "no error"; }
template <class F>
Error kernel_image(F*) {
  return kSuccess;
}
#define SK_SHARED(type, name, count) \
  static char name##_site;           \
  type* const name = simt::shared<type>(&name##_site, count)
#define SK_LAUNCH(kernel, blocks, threads, stream, ...) \
  ((void)(stream), simt::launch(blocks, threads, [=] { kernel(__VA_ARGS__); }))

#else

#if defined(__HIPCC__)
#define SK_GPU(name) hip##name
__device__ inline int wave() { return warpSize; }
inline int host_wave() {  // of the current device; one fat binary may hold code for both sizes
  int device = 0, lanes = 0;
  const bool known = hipGetDevice(&device) == hipSuccess &&
                     hipDeviceGetAttribute(&lanes, hipDeviceAttributeWarpSize, device) == hipSuccess;
  return known ? lanes : 64;
}
template <class T>
__device__ inline T shuffle_xor(T value, int distance) {
  return __shfl_xor(value, distance);
}
__device__ inline bool any_in_wave(bool value) { return __any(value); }
#else
#define SK_GPU(name) cuda##name
__device__ constexpr int wave() { return 32; }
constexpr int host_wave() { return 32; }
template <class T>
__device__ inline T shuffle_xor(T value, int distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}
__device__ inline bool any_in_wave(bool value) { return __any_sync(0xffffffffu, value); }
#endif
__device__ inline uint32_t fetch_add(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }

using StreamHandle = SK_GPU(Stream_t);
using Error = SK_GPU(Error_t);
constexpr Error kSuccess = SK_GPU(Success);
inline Error last_error() { return SK_GPU(GetLastError)(); }  // also clears it
inline Error current_device(int* device) { return SK_GPU(GetDevice)(device); }
inline Error set_device(int device) { return SK_GPU(SetDevice)(device); }
inline Error device_count(int* count) { return SK_GPU(GetDeviceCount)(count); }
inline const char* name_of(Error error) { return SK_GPU(GetErrorName)(error); }
inline const char* text_of(Error error) { return SK_GPU(GetErrorString)(error); }
// How many multiprocessors a device has; a guess where the driver does not say.
inline int processors(int device) {
#if defined(__HIPCC__)
  constexpr auto attribute = hipDeviceAttributeMultiprocessorCount;
#else
  constexpr auto attribute = cudaDevAttrMultiProcessorCount;
#endif
  int count = 0;
  return SK_GPU(DeviceGetAttribute)(&count, attribute, device) == kSuccess && count > 0 ? count : 64;
}
// Whether this build holds code that the current device can run.
template <class F>
Error kernel_image(F* kernel) {
  SK_GPU(FuncAttributes) attributes;
  return SK_GPU(FuncGetAttributes)(&attributes, reinterpret_cast<const void*>(kernel));
}
#define SK_SHARED(type, name, count) __shared__ type name[count]
#define SK_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)

#endif

}  // namespace sk::gpu
