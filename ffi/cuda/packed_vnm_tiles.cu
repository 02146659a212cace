// V:N:M arrays of bfloat16 and float16 in whole tiles.
//
// Operands: as in packed_vnm.cu; squared ReLU may come before packing.
// Steps: a block copies V rows x 128 columns into shared memory once, and chooses the columns and the two of four there
// (packed_vnm_tile.cuh).
// Constraints: fits_pack_vnm_tiles: V of 64, 128 or 256, M of 8, 16 or 32, K a multiple of 128, no exact search and no given mask.
#include "packed_vnm_tile.cuh"

namespace s24 {
namespace cuda {
namespace {

// Which tile a block takes: neighbours in memory follow one another.
struct Place {
  unsigned row_tile, depth_tile;
  int64_t matrix;
  __device__ __forceinline__ static Place of(bool depth_last) {
    return depth_last ? Place{blockIdx.y, blockIdx.x, blockIdx.z} : Place{blockIdx.x, blockIdx.y, blockIdx.z};
  }
  static dim3 grid(const PackVnmArgs& a) {
    const unsigned rows = unsigned(a.rows / a.v), depth = unsigned(a.depth / kWidth), matrices = unsigned(a.outer);
    return a.depth_last ? dim3(depth, rows, matrices) : dim3(rows, depth, matrices);
  }
};

// Eight elements of a row that start at column c0 of a group, from its two kept ones.
__device__ __forceinline__ Vector<uint32_t, 4> spread_pair(uint32_t pair, uint32_t first, uint32_t second, uint32_t c0) {
  Vector<uint32_t, 4> eight;
  const uint32_t low = (pair & 0xffffu) << (first % 2 * 16), high = pair >> 16 << (second % 2 * 16);
  S24_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t word = c0 / 2 + i;
    eight.at[i] = (first / 2 == word ? low : 0u) | (second / 2 == word ? high : 0u);
  }
  return eight;
}

// Eight bits as eight bytes, 0 or 1.
__device__ __forceinline__ Vector<uint32_t, 2> spread_bits(uint32_t bits) {
  return {{(bits & 15u) * 0x00204081u & 0x01010101u, (bits >> 4 & 15u) * 0x00204081u & 0x01010101u}};
}

template <class T, bool kDepthLast>
__device__ __forceinline__ void unpack(const Tile<T, kDepthLast>& t) {
  auto* const dense = static_cast<uint16_t*>(t.a.dense) + t.first;
  const auto nibble_at = [&](int r, int g) { return uint32_t(*t.metadata_at(r, g)) >> (g % 2 * 4) & 15u; };
  const uint32_t last = uint32_t(t.m) - 1u;
  if constexpr (kDepthLast) {
    t.template for_accesses<kAccess>([&](int r, int c) {
      const int g = c >> t.log_m;
      const uint32_t nibble = nibble_at(r, g);
      const uint32_t four = *reinterpret_cast<const uint32_t*>(t.columns_at(0) + 4 * g);
      const uint32_t first = min_u32(byte_of(four, nibble & 3u), last), second = min_u32(byte_of(four, nibble >> 2), last);
      const Vector<uint32_t, 4> eight = spread_pair(*t.values_at(r, g), first, second, uint32_t(c) & last);
      store(reinterpret_cast<uint32_t*>(dense + r * t.line + c), eight);
    });
  } else {
    // Of every group, the pairs and nibbles of all rows.
    t.for_groups(true, [&](int r, int g) {
      t.work[(g << t.log_v) + r] = *t.values_at(r, g);
      t.nibbles[(g << t.log_v) + r] = uint8_t(nibble_at(r, g));
    });
    if (threadIdx.x < kWidth) t.slots[threadIdx.x] = kNoSlot;
    __syncthreads();
    if (int(threadIdx.x) < 4 * t.groups) {
      const uint32_t column = min_u32(t.columns_at(0)[threadIdx.x], last);
      t.slots[(threadIdx.x / 4 << t.log_m) + column] = uint8_t(threadIdx.x % 4);
    }
    __syncthreads();
    t.template for_accesses<kAccess>([&](int c, int r) {
      const uint32_t slot = t.slots[c];
      Vector<uint32_t, 4> eight = {};
      if (slot != kNoSlot) {
        const int at = (c >> t.log_m << t.log_v) + r;
        S24_UNROLL
        for (int i = 0; i < kAccess; ++i) {
          const uint32_t nibble = t.nibbles[at + i], pair = t.work[at + i];
          const uint32_t kept = slot == (nibble & 3u) ? pair & 0xffffu : slot == nibble >> 2 ? pair >> 16 : 0u;
          eight.at[i / 2] |= kept << (i % 2 * 16);
        }
      }
      store(reinterpret_cast<uint32_t*>(dense + c * t.line + r), eight);
    });
  }
}

template <class T, bool kDepthLast>
__device__ __forceinline__ void mask(const Tile<T, kDepthLast>& t) {
  find_columns<false>(t);
  t.for_groups(kDepthLast, [&](int r, int g) {
    const uint32_t four = columns_of(t, g);
    Pair<uint16_t> pair;
    const uint32_t nibble = encode<PackOp::kPlain, T>(in_columns(t, r, g, four), 0, 0, Draw<0>(), pair);
    if constexpr (kDepthLast)
      *t.pair_at(r, g) = 1u << byte_of(four, nibble & 3u) | 1u << byte_of(four, nibble >> 2);
    else  // a bit for each slot
      t.nibbles[(g << t.log_v) + r] = uint8_t(1u << (nibble & 3u) | 1u << (nibble >> 2));
  });
  __syncthreads();
  uint8_t* const out = t.a.mask + t.first;
  if constexpr (kDepthLast) {
    t.template for_accesses<kAccess>([&](int r, int c) {
      const uint32_t bits = *t.pair_at(r, c >> t.log_m) >> (c & (t.m - 1));
      store(reinterpret_cast<uint32_t*>(out + r * t.line + c), spread_bits(bits));
    });
  } else {
    t.template for_accesses<16>([&](int c, int r) {
      const uint32_t slot = t.slots[c];
      auto rows = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(t.nibbles + (c >> t.log_m << t.log_v) + r));
      S24_UNROLL
      for (int i = 0; i < 4; ++i) rows.at[i] = rows.at[i] >> slot & 0x01010101u;  // no row keeps kNoSlot
      store(reinterpret_cast<uint32_t*>(out + c * t.line + r), rows);
    });
  }
}

template <PackVnmOp op, bool kDepthLast, class T, bool kSquared = false>
__global__ void __launch_bounds__(kThreads) vnm_tile(PackVnmArgs a, Sizes sizes) {
  const Place p = Place::of(kDepthLast);
  const Tile<T, kDepthLast> t(a, sizes, p.row_tile, p.depth_tile, p.matrix);
  if constexpr (op == PackVnmOp::kUnpack) {
    unpack(t);
    return;
  }
  const auto* const dense = static_cast<const uint16_t*>(a.dense) + t.first;
  t.template for_accesses<kAccess>(
      [&](int line, int at) { copy_async<16>(t.x + line * t.stride + at, dense + line * t.line + at, true); });
  commit_copies();
  if (op == PackVnmOp::kGather && int(threadIdx.x) < 4 * t.groups)
    t.columns[threadIdx.x] = uint8_t(min_u32(t.columns_at(0)[threadIdx.x], uint32_t(t.m) - 1u));
  wait_copies<0>();
  __syncthreads();
  if constexpr (op == PackVnmOp::kPack) {
    pack_tile<kSquared>(t);
  } else if constexpr (op == PackVnmOp::kGather) {
    t.for_pairs([&](int, int r, int g) {
      const uint32_t nibbles = *t.metadata_at(r, g);
      Pair<uint16_t> pairs[2];
      S24_UNROLL
      for (int n = 0; n < 2; ++n)
        encode<PackOp::kGather, T>(in_columns(t, r, g + n, columns_of(t, g + n)), 0, nibbles >> (4 * n) & 15u, Draw<0>(), pairs[n]);
      store(t.values_at(r, g), Vector<uint32_t, 2>{{word_of(pairs[0]), word_of(pairs[1])}});
    });
  } else {
    mask(t);
  }
}

template <PackVnmOp op, bool kDepthLast, class T, bool kSquared = false>
cudaError_t launch(const PackVnmArgs& a, cudaStream_t stream) {
  using OfTile = Tile<T, kDepthLast>;
  const auto kernel = vnm_tile<op, kDepthLast, T, kSquared>;
  const int bytes = int(OfTile::bytes(a.v, a.m));
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  return start(kernel, Place::grid(a), kThreads, size_t(bytes), stream, a, OfTile::sizes(a.v, a.m));
}

template <PackVnmOp op, class T>
cudaError_t launch(const PackVnmArgs& a, cudaStream_t stream) {
  return a.depth_last ? launch<op, true, T>(a, stream) : launch<op, false, T>(a, stream);
}

template <PackVnmOp op>
cudaError_t select(const PackVnmArgs& a, cudaStream_t stream) {
  return a.dtype == Dtype::kBF16 ? launch<op, BF16>(a, stream) : launch<op, F16>(a, stream);
}

}  // namespace

bool fits_pack_vnm_tiles(const PackVnmArgs& a) {
  const bool sizes = fits_a_tile(a.v, a.m) && a.depth % kWidth == 0;
  const bool places = aligned(a.dense, 16) && aligned(a.mask, 16) && aligned(a.values, 8) && aligned(a.metadata, 2) &&
                      aligned(a.columns, 4);
  const dim3 grid = Place::grid(a);
  const bool launchable = grid.y <= kMostAlongY && a.outer <= kMostAlongY;
  return a.dtype != Dtype::kF32 && !a.exact && a.op != PackVnmOp::kPackMasked && sizes && places && launchable;
}

cudaError_t launch_pack_vnm_tiles(const PackVnmArgs& a, cudaStream_t stream) {
  switch (a.op) {
    case PackVnmOp::kMask: return select<PackVnmOp::kMask>(a, stream);
    case PackVnmOp::kPack: return select<PackVnmOp::kPack>(a, stream);
    case PackVnmOp::kGather: return launch<PackVnmOp::kGather, BF16>(a, stream);  // bits, of either type
    case PackVnmOp::kUnpack: return launch<PackVnmOp::kUnpack, BF16>(a, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch_squared_relu_vnm(const PackVnmArgs& a, cudaStream_t stream) {
  if (a.outer * a.rows * a.depth == 0) return cudaSuccess;
  return a.dtype == Dtype::kBF16 ? launch<PackVnmOp::kPack, true, BF16, true>(a, stream)
                                 : launch<PackVnmOp::kPack, true, F16, true>(a, stream);
}

}  // namespace cuda
}  // namespace s24
