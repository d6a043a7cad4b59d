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
#define SK_TARGET_AVX512_BEGIN                                                                              \
  SK_PRAGMA(GCC push_options) SK_PRAGMA(GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl," \
                                                   "avx512vnni"))
#define SK_TARGET_END SK_PRAGMA(GCC pop_options)
#else
#define SK_X86 0
#endif

namespace sk {

// kAvx2 asks for AVX2, FMA and F16C; kAvx512 for F, BW, DQ, VL and VNNI on top (Cascade Lake, Zen 4 and later).
enum class Isa { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

Isa isa();                        // the set in use: the machine's best, or SPECDEC_CPU_ISA where that is less
Isa machine_isa();                // the best that this machine can run
const char* isa_name(Isa which);  // "scalar", "avx2", "avx512"
bool set_isa(const char* name);   // for tests and benchmarks; false if the machine can't run it

}  // namespace sk
