// One spelling for CUDA, HIP and the CPU emulator of the tests. Kernel headers include this file and no other vendor
// header, so that the same text is compiled by nvcc, by hipcc, and by g++ with -DSK_EMULATOR.
//
// Only this file knows how many lanes a wave has (32 on NVIDIA and RDNA, 64 on CDNA) and what a full mask looks like:
// elsewhere write wave() and shuffle_xor(). Shared memory is declared with SK_SHARED, launches go through SK_LAUNCH.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

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
using simt::dot4;
using simt::shuffle_xor;
inline void matrix_multiply(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  simt::matrix_multiply<32>(d, a, b);
}
inline void matrix_multiply(int32_t (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
  simt::matrix_multiply<64>(d, a, b);
}
inline uint32_t fetch_add(uint32_t* address, uint32_t value) {  // fibers take turns
  const uint32_t before = *address;
  *address += value;
  return before;
}
inline void raise_to(uint32_t* address, uint32_t value) { *address = *address < value ? value : *address; }
inline int processors(int) { return 4; }
constexpr bool kMatrixUnit = true;
template <class F>
bool has_matrix_unit(F*) {
  return true;
}
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
__device__ inline void raise_to(uint32_t* address, uint32_t value) { atomicMax(address, value); }

// Which chips have which instructions for products of int8 (the names are the compilers').
#if defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || \
    defined(__gfx950__)
#define SK_MFMA
#endif
#if defined(SK_MFMA) || defined(__gfx906__) || defined(__gfx1011__) || defined(__gfx1012__) || defined(__gfx1030__) || \
    defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1034__) || defined(__gfx1035__) ||                    \
    defined(__gfx1036__)
#define SK_SDOT4
#endif

// c + the products of four signed bytes.
__device__ inline int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
#if defined(__CUDA_ARCH__)
  return __dp4a(static_cast<int32_t>(a), static_cast<int32_t>(b), c);
#elif defined(SK_SDOT4)
  return __builtin_amdgcn_sdot4(static_cast<int32_t>(a), static_cast<int32_t>(b), c, false);
#elif defined(__GFX11__) || defined(__GFX12__)
  return __builtin_amdgcn_sudot4(true, static_cast<int32_t>(a), true, static_cast<int32_t>(b), c, false);
#else
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
#endif
}

// Matrix units: d += A B for A [16, 8 words], B [8 words, columns], words of four signed bytes along k. Lane l brings
//   NVIDIA, 8 columns:  r = l / 4, j = l % 4:    a = A[r][j], A[r + 8][j], A[r][j + 4], A[r + 8][j + 4];
//                       b = B[j][r], B[j + 4][r];   gets D[r][2j], D[r][2j + 1], D[r + 8][2j], D[r + 8][2j + 1]
//   AMD, 16 columns:    r = l % 16, j = l / 16:  a = A[r][j], A[r][j + 4];
//                       b = B[j][r], B[j + 4][r];   gets D[4j][r] .. D[4j + 3][r]
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 || defined(SK_MFMA)
constexpr bool kMatrixUnit = true;
#else
constexpr bool kMatrixUnit = false;
#endif

__device__ inline void matrix_multiply(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

__device__ inline void matrix_multiply(int32_t (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
#if defined(SK_MFMA)
  typedef int32_t Four __attribute__((ext_vector_type(4)));
  Four sum = {d[0], d[1], d[2], d[3]};
#if defined(__gfx908__) || defined(__gfx90a__)
  sum = __builtin_amdgcn_mfma_i32_16x16x16i8(static_cast<int32_t>(a[0]), static_cast<int32_t>(b[0]), sum, 0, 0, 0);
  sum = __builtin_amdgcn_mfma_i32_16x16x16i8(static_cast<int32_t>(a[1]), static_cast<int32_t>(b[1]), sum, 0, 0, 0);
#else
  const int64_t long_a = static_cast<int64_t>(static_cast<uint64_t>(a[1]) << 32 | a[0]);
  const int64_t long_b = static_cast<int64_t>(static_cast<uint64_t>(b[1]) << 32 | b[0]);
  sum = __builtin_amdgcn_mfma_i32_16x16x32_i8(long_a, long_b, sum, 0, 0, 0);
#endif
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
#endif
}

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
// Whether `kernel` was compiled with kMatrixUnit for the current device. On NVIDIA the kernel's PTX says so, not the
// device: a new device may run what was written for an old one.
template <class F>
bool has_matrix_unit(F* kernel) {
#if defined(__HIPCC__)
  int device = 0;
  hipDeviceProp_t facts;
  if (hipGetDevice(&device) != hipSuccess || hipGetDeviceProperties(&facts, device) != hipSuccess) return false;
  for (const char* name : {"gfx908", "gfx90a", "gfx94", "gfx95"})
    if (std::strncmp(facts.gcnArchName, name, std::strlen(name)) == 0) return true;
  return false;
#else
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess &&
         attributes.ptxVersion >= 80;
#endif
}
#define SK_SHARED(type, name, count) __shared__ type name[count]
#define SK_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)

#endif

}  // namespace sk::gpu
