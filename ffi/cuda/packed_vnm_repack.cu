// V:N:M activations that are packed along their features, packed along their tokens, without the dense array between.
//
// Operands: values, metadata and columns of (tokens, features), packed along features; the same three packed along tokens.
// Steps: a block reads the packed rows of its tiles, which are few bytes because four of M features are stored, spreads them
// over zeros in shared memory, and packs these along tokens (packed_vnm_tile.cuh).
// Constraints: fits_repack_vnm: 16-bit floats in whole tiles. Where features are collected, every group of M features gives
// one to each of M tiles of V rows; a block makes several of these from one reading, as many as have 256 rows together.
#include "packed_vnm_tile.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kBlock = 512;     // threads
constexpr int kMostRows = 256;  // of the tiles of a block together

template <class T>
using Along = Tile<T, false, kBlock>;

// How many tiles a block takes: they follow each other, or where features are collected, are of the same groups.
int tiles_together(const RepackArgs& a) {
  const int64_t all = a.collected ? a.m : a.features / a.v;
  int64_t many = kMostRows / a.v;
  while (all % many != 0) many /= 2;
  return int(many);
}

struct Source {
  const uint32_t* pairs;
  const uint8_t* metadata;
  const uint32_t* columns;  // four bytes
  unsigned tokens, groups;  // groups of M features
  bool strided;
};

// Elements in shared memory, stored by their number.
struct Elements {
#if defined(__CUDA_ARCH__)
  uint32_t address;
  __device__ __forceinline__ explicit Elements(uint16_t* x) : address(shared_address(x)) {
    asm volatile("" : "+r"(address));  // found once; the compiler would find it again in front of every store
  }
  __device__ __forceinline__ void store_if(bool wanted, unsigned at, uint16_t bits) const {
    asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %0, 0; @wanted st.shared.u16 [%1], %2;}" ::"r"(uint32_t(wanted)),
                 "r"(address + 2 * at), "h"(bits)
                 : "memory");
  }
#else
  uint16_t* x;
  explicit Elements(uint16_t* x) : x(x) {}
  void store_if(bool wanted, unsigned at, uint16_t bits) const {
    if (wanted) x[at] = bits;
  }
#endif
};

// Spreads groups of M features over the tiles: a group's features over a row of each, or over rows that follow each other.
template <bool kCollected, class T>
__device__ __forceinline__ void spread(const Along<T>& t, const Source& from, unsigned group0, unsigned feature0) {
  const unsigned tile = unsigned(kWidth * t.stride), last = unsigned(t.m) - 1u;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < tile / kAccess << t.log_many; i += kBlock)
    store(reinterpret_cast<uint32_t*>(t.x + i * kAccess), Vector<uint32_t, 4>{});
  __syncthreads();
  const Elements elements(t.x);
  const int log_quads = (kCollected ? t.log_v : t.log_many + t.log_v - t.log_m) - 2;
  for (unsigned i = threadIdx.x; i < unsigned(kWidth) << log_quads; i += kBlock) {
    const unsigned k = i >> log_quads, group = (i & ((1u << log_quads) - 1u)) * 4, place = blockIdx.y * kWidth + k;
    const unsigned token = from.strided ? (place & last) * (from.tokens >> t.log_m) + (place >> t.log_m) : place;
    const uint64_t at = uint64_t(token) * from.groups + group0 + group;
    const auto pairs = load<uint32_t, 4>(from.pairs + at);
    const auto fours = load<uint32_t, 4>(from.columns + uint64_t(token >> t.log_v) * from.groups + group0 + group);
    const uint32_t nibbles = *reinterpret_cast<const uint16_t*>(from.metadata + at / 2);
    const unsigned line = k * unsigned(t.stride);
    S24_UNROLL
    for (unsigned q = 0; q < 4; ++q) {
      S24_UNROLL
      for (unsigned half = 0; half < 2; ++half) {
        const uint32_t slot = nibbles >> (4 * q + 2 * half) & 3u, feature = min_u32(byte_of(fours.at[q], slot), last);
        const uint16_t bits = uint16_t(pairs.at[q] >> (16 * half));
        if constexpr (kCollected) {
          elements.store_if(feature - feature0 < 1u << t.log_many, line + (feature - feature0) * tile + group + q, bits);
        } else {
          const unsigned row = ((group + q) << t.log_m) + feature;
          elements.store_if(true, line + (row >> t.log_v) * tile + (row & unsigned(t.v - 1)), bits);
        }
      }
    }
  }
  __syncthreads();
}

template <bool kCollected, class T>
__global__ void __launch_bounds__(kBlock) vnm_repack(PackVnmArgs to, Source from, Sizes sizes) {
  const int log_sets = sizes.log_m - sizes.log_many;  // of sets of tiles of the same groups, which neighbouring blocks read
  unsigned row_tile = blockIdx.x << sizes.log_many, group0 = row_tile << sizes.log_v >> sizes.log_m, feature0 = 0;
  if constexpr (kCollected) {
    group0 = blockIdx.x >> log_sets << sizes.log_v;
    feature0 = (blockIdx.x & ((1u << log_sets) - 1u)) << sizes.log_many;  // of each group
    row_tile = (feature0 * from.groups + group0) >> sizes.log_v;
  }
  const Along<T> t(to, sizes, row_tile, blockIdx.y, 0);
  spread<kCollected>(t, from, group0, feature0);
  pack_tile<false>(t, kCollected ? int64_t(from.groups) : int64_t(t.v));
}

template <bool kCollected, class T>
cudaError_t launch(const RepackArgs& a, cudaStream_t stream) {
  const auto kernel = vnm_repack<kCollected, T>;
  const int many = tiles_together(a), bytes = int(Along<T>::bytes(a.v, a.m, many));
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  PackVnmArgs to{};
  to.op = PackVnmOp::kPack, to.dtype = a.dtype;
  to.values = a.along_values, to.metadata = a.along_metadata, to.columns = a.along_columns;
  to.outer = 1, to.rows = a.features, to.depth = a.tokens, to.v = a.v, to.m = a.m;
  const Source from = {static_cast<const uint32_t*>(a.values), a.metadata, reinterpret_cast<const uint32_t*>(a.columns),
                       unsigned(a.tokens), unsigned(a.features / a.m), a.strided};
  const dim3 grid(unsigned(a.features / a.v / many), unsigned(a.tokens / kWidth), 1);
  return start(kernel, grid, kBlock, size_t(bytes), stream, to, from, Along<T>::sizes(a.v, a.m, many));
}

template <class T>
cudaError_t launch(const RepackArgs& a, cudaStream_t stream) {
  return a.collected ? launch<true, T>(a, stream) : launch<false, T>(a, stream);
}

}  // namespace

bool fits_repack_vnm(const RepackArgs& a) {
  if (a.dtype == Dtype::kF32 || !fits_a_tile(a.v, a.m)) return false;
  const int64_t groups = a.features / a.m;
  const bool tokens = a.tokens % kWidth == 0 && a.tokens % a.v == 0 && a.tokens / kWidth <= kMostAlongY;
  const bool features = a.features % a.v == 0 && (a.collected ? groups % a.v == 0 : a.v / a.m >= 4);
  const bool from = aligned(a.values, 16) && aligned(a.metadata, 2) && aligned(a.columns, 16);
  const bool to = aligned(a.along_values, 8) && aligned(a.along_metadata, 2) && aligned(a.along_columns, 4);
  return tokens && features && a.tokens <= INT32_MAX && a.features <= INT32_MAX && from && to;
}

cudaError_t launch_repack_vnm(const RepackArgs& a, cudaStream_t stream) {
  if (a.tokens * a.features == 0) return cudaSuccess;
  return a.dtype == Dtype::kBF16 ? launch<BF16>(a, stream) : launch<F16>(a, stream);
}

}  // namespace cuda
}  // namespace s24
