// Which instruction set the CPU kernels use: asked once at load, never baked in by -march flags.
//
// One binary serves old and new processors. A family file holds its hot loops several times, each copy inside a
// SK_TARGET_* region (function multiversioning by hand, as in exllamav3's avx2_target), and picks one with
// `switch (sk::isa())`. Inside such a region call no std:: templates: an inline function instantiated there could be
// the copy that the linker keeps for the whole program.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define SK_X86 1
#include <immintrin.h>
#define SK_PRAGMA(x) _Pragma(#x)
#define SK_TARGET_AVX2_BEGIN SK_PRAGMA(GCC push_options) SK_PRAGMA(GCC target("avx2,fma,f16c,bmi2"))
#define SK_TARGET_AVX512_BEGIN                                            \
  SK_PRAGMA(GCC push_options)                                             \
  SK_PRAGMA(                                                              \
      GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl," \
                 "avx512vnni"))
#define SK_TARGET_END SK_PRAGMA(GCC pop_options)
#else
#define SK_X86 0
#endif

#if defined(__aarch64__) && defined(__GNUC__)
#define SK_NEON 1  // every such processor has it: no region needed
#include <arm_neon.h>
#if defined(__ARM_FEATURE_DOTPROD)
#define SK_DOTPROD 1
#define SK_TARGET_DOTPROD_BEGIN
#define SK_TARGET_DOTPROD_END
#elif !defined(__clang__)
#define SK_DOTPROD 1
#define SK_TARGET_DOTPROD_BEGIN _Pragma("GCC push_options") _Pragma("GCC target(\"arch=armv8.2-a+dotprod\")")
#define SK_TARGET_DOTPROD_END _Pragma("GCC pop_options")
#else
#define SK_DOTPROD 0
#endif
#else
#define SK_NEON 0
#define SK_DOTPROD 0
#endif

namespace sk {

// kAvx2 asks for AVX2, FMA and F16C; kAvx512 for F, BW, DQ, VL and VNNI on top (Cascade Lake, Zen 4 and later). On Arm
// only linear_int8 has kernels of its own (kDotprod: with the dot product of ARMv8.2); everything else is the scalar
// text, of which the compiler makes NEON code.
enum class Isa { kScalar, kAvx2, kAvx512, kNeon, kDotprod };

Isa isa();                        // the set in use: the machine's best, or SPECDEC_CPU_ISA where that is less
Isa machine_isa();                // the best that this machine can run
const char* isa_name(Isa which);  // "scalar", "avx2", "avx512", "neon", "dotprod"
bool set_isa(const char* name);   // for tests and benchmarks; false if the machine can't run it
bool fetch_every_line();          // see fetch.h

}  // namespace sk
