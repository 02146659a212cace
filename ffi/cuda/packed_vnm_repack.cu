// V:N:M activations that are packed along their features, packed along their tokens, without the dense array between.
//
// Operands: values, metadata and columns of (tokens, features), packed along features; the same three packed along tokens.
// Steps: a block reads the packed rows of its tile, which are few bytes because four of M features are stored, spreads them
// over tiles of zeros in shared memory, and packs these along tokens (packed_vnm_tile.cuh).
// Constraints: fits_repack_vnm: 16-bit floats in whole tiles. Where features are collected, every group of M features gives
// one to each of M tiles of V rows; a block takes several of these, as each has to read all of them.
#include "packed_vnm_tile.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kTogether = 2;  // tiles of a block where features are collected

struct Source {
  const uint32_t* pairs;
  const uint8_t* metadata;
  const uint32_t* columns;  // four bytes
  unsigned tokens, groups;  // groups of M features
  bool strided;
};

template <int kMany, class T>
__global__ void __launch_bounds__(kThreads) vnm_repack(PackVnmArgs to, Source from, Sizes sizes) {
  constexpr bool collected = kMany > 1;
  const unsigned v = 1u << sizes.log_v, m = 1u << sizes.log_m;
  // Neighbouring blocks read the same groups.
  const unsigned sets = collected ? m / kMany : 1;
  const unsigned group0 = collected ? blockIdx.x / sets * v : blockIdx.x << (sizes.log_v - sizes.log_m);
  const unsigned feature0 = collected ? blockIdx.x % sets * kMany : 0;  // of its group
  const unsigned row_tile = collected ? (feature0 * from.groups + group0) >> sizes.log_v : blockIdx.x;
  Tile<T, false> t(to, sizes, row_tile, blockIdx.y, 0);
  const unsigned elements = unsigned(kWidth * t.stride);
  for (unsigned i = threadIdx.x; i < kMany * elements / kAccess; i += kThreads)
    store(reinterpret_cast<uint32_t*>(t.x + i * kAccess), Vector<uint32_t, 4>{});
  __syncthreads();

  const int log_quads = (collected ? sizes.log_v : sizes.log_v - sizes.log_m) - 2;
  for (unsigned i = threadIdx.x; i < unsigned(kWidth) << log_quads; i += kThreads) {
    const unsigned k = i >> log_quads, of_tile = (i & ((1u << log_quads) - 1u)) * 4, group = group0 + of_tile;
    const unsigned place = blockIdx.y * kWidth + k;
    const unsigned token = from.strided ? (place & (m - 1)) * (from.tokens >> sizes.log_m) + (place >> sizes.log_m) : place;
    const int64_t at = int64_t(token) * from.groups + group;
    const auto pairs = load<uint32_t, 4>(from.pairs + at);
    const auto fours = load<uint32_t, 4>(from.columns + int64_t(token >> sizes.log_v) * from.groups + group);
    const uint32_t nibbles = *reinterpret_cast<const uint16_t*>(from.metadata + at / 2);
    uint16_t* const line = t.x + k * unsigned(t.stride);
    S24_UNROLL
    for (unsigned q = 0; q < 4; ++q) {
      S24_UNROLL
      for (unsigned half = 0; half < 2; ++half) {
        const uint32_t slot = nibbles >> (4 * q + 2 * half) & 3u;
        const uint32_t feature = min_u32(byte_of(fours.at[q], slot), m - 1);
        const uint16_t bits = uint16_t(pairs.at[q] >> (16 * half));
        if (!collected)
          line[((of_tile + q) << sizes.log_m) + feature] = bits;
        else if (feature - feature0 < unsigned(kMany))
          line[(feature - feature0) * elements + of_tile + q] = bits;
      }
    }
  }
  __syncthreads();
  for (int i = 0;; ++i) {
    pack_tile(t);
    if (i + 1 == kMany) break;
    t.x += elements;
    t.row0 += from.groups;
    __syncthreads();
  }
}

template <int kMany, class T>
cudaError_t launch(const RepackArgs& a, cudaStream_t stream) {
  using OfTile = Tile<T, false>;
  const auto kernel = vnm_repack<kMany, T>;
  const int bytes = int(OfTile::bytes(a.v, a.m, kMany));
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  PackVnmArgs to{};
  to.op = PackVnmOp::kPack, to.dtype = a.dtype;
  to.values = a.along_values, to.metadata = a.along_metadata, to.columns = a.along_columns;
  to.outer = 1, to.rows = a.features, to.depth = a.tokens, to.v = a.v, to.m = a.m;
  const Source from = {static_cast<const uint32_t*>(a.values), a.metadata, reinterpret_cast<const uint32_t*>(a.columns),
                       unsigned(a.tokens), unsigned(a.features / a.m), a.strided};
  const dim3 grid(unsigned(a.features / a.v / kMany), unsigned(a.tokens / kWidth), 1);
  return start(kernel, grid, kThreads, size_t(bytes), stream, to, from, OfTile::sizes(a.v, a.m, kMany));
}

template <class T>
cudaError_t launch(const RepackArgs& a, cudaStream_t stream) {
  return a.collected ? launch<kTogether, T>(a, stream) : launch<1, T>(a, stream);
}

}  // namespace

bool fits_repack_vnm(const RepackArgs& a) {
  if (a.dtype == Dtype::kF32 || !fits_a_tile(a.v, a.m)) return false;
  const int64_t groups = a.features / a.m;
  const bool tokens = a.tokens % kWidth == 0 && a.tokens % a.v == 0 && a.tokens / kWidth <= kMostAlongY;
  const bool features = a.features % a.v == 0 && (a.collected ? groups % a.v == 0 : a.v / a.m >= 4);
  const bool from = aligned(a.values, 16) && aligned(a.metadata, 2) && aligned(a.columns, 16);
  const bool to = aligned(a.along_values, 4) && aligned(a.along_metadata, 2) && aligned(a.along_columns, 4);
  return tokens && features && a.tokens <= INT32_MAX && a.features <= INT32_MAX && from && to;
}

cudaError_t launch_repack_vnm(const RepackArgs& a, cudaStream_t stream) {
  if (a.tokens * a.features == 0) return cudaSuccess;
  return a.dtype == Dtype::kBF16 ? launch<BF16>(a, stream) : launch<F16>(a, stream);
}

}  // namespace cuda
}  // namespace s24
