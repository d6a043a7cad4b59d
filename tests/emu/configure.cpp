// Sets the emulator up from Python (ctypes): the wave size, the run order and its seed.
#include "simt_emu.h"

extern "C" __attribute__((visibility("default"))) void simt_configure(int wave, int order, unsigned seed) {
  simt::config = {wave, static_cast<simt::Order>(order), seed};
}
