// The tile unit (Intel AMX): eight registers of at most 16 rows of 64 bytes, and products of two of
// them. One interface, two implementations: the instructions, and with QUIRE_EMULATE_TILES plain
// steps in the order in which the instructions sum, for tests (docs/testing.md). Included after
// simd-inl.h, inside a path's namespace and target region.
//
// A product is, for each row of `a`, column of `b` and sum c, over the pairs k of inputs ascending
//   even = fma(a[2k], b[2k], even), odd = fma(a[2k + 1], b[2k + 1], odd), both from +0
// then c = c + (even + odd). It rounds to nearest even and takes denormals for zeros where they
// come in and where they come out, whatever MXCSR says. tile_unit_test.cc holds both
// implementations to that.
//
// A tile of `a` is [row][pair][2] bfloat16, of `b` [pair][column][2], of sums [row][column]
// float32.
#ifndef QUIRE_KERNELS_CPU_TILE_UNIT_INL_H_
#define QUIRE_KERNELS_CPU_TILE_UNIT_INL_H_

// Rows and pairs of a tile, at most; columns are always 16.
constexpr int kTileRows = 16;
constexpr int kTilePairs = 16;
constexpr int kTileInputs = 2 * kTilePairs;
constexpr int64_t kTileRowBytes = 64;

// What the eight tiles hold.
constexpr int kSumTiles = 4;  // tiles 0 to 3, then two of `a`, then two of `b`
constexpr int kRowTiles = 2;
struct TileShape {
  int rows;   // of sums and of `a`
  int pairs;  // of `a` and of `b`: 4 bytes each, of a quad as of a pair
};

// While one lives, the calling thread flushes denormals; then its own environment is back. What is
// loaded from memory in between is computed in between.
class ScopedFlush {
 public:
  ScopedFlush() {
    constexpr uint32_t kNearestFlush = 0x9fc0;  // all exceptions masked, FTZ and DAZ set
    __asm__ volatile("stmxcsr %0" : "=m"(saved_) : : "memory");
    __asm__ volatile("ldmxcsr %0" : : "m"(kNearestFlush) : "memory");
  }
  ~ScopedFlush() { __asm__ volatile("ldmxcsr %0" : : "m"(saved_) : "memory"); }
  ScopedFlush(const ScopedFlush&) = delete;
  ScopedFlush& operator=(const ScopedFlush&) = delete;

 private:
  uint32_t saved_;
};

#if QUIRE_EMULATE_TILES

class TileUnit {
 public:
  explicit TileUnit(TileShape shape) : shape_(shape) {}
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  template <int kTile>
  void Clear() {
    __builtin_memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }
  template <int kTile>
  void Read(const void* from, int64_t stride) {
    Clear<kTile>();
    for (int row = 0; row < RowsOf(kTile); ++row) {
      __builtin_memcpy(tiles_[kTile][row], static_cast<const char*>(from) + row * stride,
                       BytesOf(kTile));
    }
  }
  template <int kTile>
  void ReadOnce(const void* from, int64_t stride) {
    Read<kTile>(from, stride);
  }
  template <int kTile>
  void Write(void* to, int64_t stride) const {
    for (int row = 0; row < RowsOf(kTile); ++row) {
      __builtin_memcpy(static_cast<char*>(to) + row * stride, tiles_[kTile][row], BytesOf(kTile));
    }
  }
  template <int kSums, int kRows, int kColumns>
  void Dot() {
    const ScopedFlush flush;
    __asm__ volatile("" : : "r"(tiles_) : "memory");  // or the sums below might leave the scope
    for (int row = 0; row < shape_.rows; ++row) {
      VF even = Set1(0.0F);
      VF odd = Set1(0.0F);
      for (int pair = 0; pair < shape_.pairs; ++pair) {
        const uint16_t* const a = tiles_[kRows][row] + 2 * pair;
        const VPair b = LoadPair(tiles_[kColumns][pair]);
        even = Fma(Set1(Bf16ToF32(a[0])), b.even, even);
        odd = Fma(Set1(Bf16ToF32(a[1])), b.odd, odd);
      }
      auto* const sums = reinterpret_cast<float*>(tiles_[kSums][row]);
      Store(sums, Add(Load(sums), Add(even, odd)));
    }
    __asm__ volatile("" : : "r"(tiles_) : "memory");
  }
  template <int kSums, int kRows, int kColumns>
  void DotBytes() {
    DotQuads<int8_t>(kSums, kRows, kColumns);
  }
  template <int kSums, int kRows, int kColumns>
  void DotUnsignedBytes() {
    DotQuads<uint8_t>(kSums, kRows, kColumns);
  }

 private:
  template <typename Byte>
  void DotQuads(int sums, int rows, int columns) {
    for (int row = 0; row < shape_.rows; ++row) {
      const auto* const a = reinterpret_cast<const Byte*>(tiles_[rows][row]);
      uint32_t sum[kLanes];
      __builtin_memcpy(sum, tiles_[sums][row], sizeof(sum));
      for (int quad = 0; quad < shape_.pairs; ++quad) {
        const auto* const b = reinterpret_cast<const int8_t*>(tiles_[columns][quad]);
        for (int i = 0; i < 4 * kLanes; ++i) {
          sum[i / 4] += static_cast<uint32_t>(a[4 * quad + i % 4] * b[i]);
        }
      }
      __builtin_memcpy(tiles_[sums][row], sum, sizeof(sum));
    }
  }
  int RowsOf(int tile) const { return tile >= kSumTiles + kRowTiles ? shape_.pairs : shape_.rows; }
  size_t BytesOf(int tile) const {
    const bool is_rows = tile >= kSumTiles && tile < kSumTiles + kRowTiles;
    return is_rows ? static_cast<size_t>(shape_.pairs) * 4 : static_cast<size_t>(kTileRowBytes);
  }

  TileShape shape_;
  uint16_t tiles_[8][kTileRows][kTileInputs];
};

#else

// Own assembly: GCC 12's intrinsics name neither the memory that a tile is loaded from nor all of
// the configuration, so that stores before them may be left out. The operating system has granted
// the tiles before (dispatch.cc). An object's life is within a task: its thread is the host's.
class TileUnit {
 public:
  explicit TileUnit(TileShape shape) {
    struct {
      uint8_t palette;
      uint8_t start_row;
      uint8_t reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_sums = tile < kSumTiles;
      const bool is_rows = !is_sums && tile < kSumTiles + kRowTiles;
      config.rows[tile] = static_cast<uint8_t>(is_sums || is_rows ? shape.rows : shape.pairs);
      config.row_bytes[tile] = static_cast<uint16_t>(is_rows ? 4 * shape.pairs : kTileRowBytes);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~TileUnit() { __asm__ volatile("tilerelease" : : : "memory"); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  template <int kTile>
  QUIRE_INLINE void Clear() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  QUIRE_INLINE void Read(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(from), "r"(stride), "i"(kTile)
                     : "memory");
  }
  // Leaves what is in L1 there, for memory that is read once.
  template <int kTile>
  QUIRE_INLINE void ReadOnce(const void* from, int64_t stride) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(from), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kTile>
  QUIRE_INLINE void Write(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(to), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kSums, int kRows, int kColumns>
  QUIRE_INLINE void Dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                     :
                     : "i"(kSums), "i"(kRows), "i"(kColumns));
  }
  // Signed bytes of `a` and of `b`.
  template <int kSums, int kRows, int kColumns>
  QUIRE_INLINE void DotBytes() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
                     :
                     : "i"(kSums), "i"(kRows), "i"(kColumns));
  }
  // Unsigned bytes of `a`, signed ones of `b`.
  template <int kSums, int kRows, int kColumns>
  QUIRE_INLINE void DotUnsignedBytes() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0"
                     :
                     : "i"(kSums), "i"(kRows), "i"(kColumns));
  }
};

#endif

#endif  // QUIRE_KERNELS_CPU_TILE_UNIT_INL_H_
