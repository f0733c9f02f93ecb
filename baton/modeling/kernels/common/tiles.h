// Matrices in registers: Intel's AMX. A tile is 16 rows of 64 bytes; one instruction adds to 16 x 16 sums of fp32 the
// product of 16 x 32 and 32 x 16 numbers of bf16, the latter in pairs: row i holds inputs 2 i and 2 i + 1 of 16
// columns.
//
// A thread that uses tiles holds a TileScope.

#pragma once

#include <cstdint>

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace {

// Returns whether this process may use tiles: the operating system must grant their state before the first use.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

constexpr int kTileHeight = 16;
constexpr int kTileDepth = 32;  // bf16 numbers of a tile's row
constexpr int kTileBytes = 1024;

// Configures the thread's tiles, all eight of full size. Throws std::runtime_error where there are none.
class TileScope {
 public:
  TileScope() {
    if (!has_tiles()) throw std::runtime_error("this process may not use AMX tiles");
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = 64, shape.rows[i] = kTileHeight;
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
};

// Orders memory before tile instructions: the intrinsics do not tell the compiler which memory they read and write.
inline void settle_memory() { asm volatile("" : : : "memory"); }

}  // namespace
#else
inline bool has_tiles() { return false; }
#endif
