// Soft thresholds, times a scale.
//
// Operands: x, a scale in device memory, and an array of the shape and dtype of x; groups of four along any axis.
// Steps: of 16-bit floats, a thread packs two groups into the halves of four words, thresholds both at once (simt/soft.h), and
// repeats by the definition what is rare. Other arrays go group by group.
// Constraints: the paired kernels need arrays aligned to 16 bytes, and an even number of groups, or eight neighbours.
#include "launch.h"
#include "simt/select.h"
#include "simt/soft.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

// Two groups of 16-bit floats in the halves of four words. Never inlined: rare.
template <class T>
__device__ __noinline__ Vector<uint32_t, 4> soft_by_definition(Vector<uint32_t, 4> x, float scale) {
  Vector<uint32_t, 4> y = {};
#pragma unroll 1
  for (int n = 0; n < 32; n += 16) {
    uint16_t group[4], made[4];
    S24_UNROLL
    for (int i = 0; i < 4; ++i) group[i] = uint16_t(x.at[i] >> n);
    soft24<T>(group, made);
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y.at[i] |= uint32_t(scaled<T>(made[i], scale)) << n;
  }
  return y;
}

template <class T>
__device__ __forceinline__ Vector<uint32_t, 4> soft_two(const Vector<uint32_t, 4>& x, float scale) {
  Vector<uint32_t, 4> y;
  if (!soft24_two<T>(x.at, y.at)) return soft_by_definition<T>(x, scale);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) y.at[i] = scaled_two<T>(y.at[i], scale);
  return y;
}

// The soft threshold of 16-bit floats: a unit is two groups, 16 bytes.
template <class T>
__global__ void __launch_bounds__(kThreads) soft_rows(const uint32_t* x, const void* scale, uint32_t* y,
                                                      int64_t units) {
  constexpr int kAccesses = 4;
  const float times = scale_of<T>(scale);
  const int64_t first = int64_t(blockIdx.x) * kThreads * kAccesses + threadIdx.x;
  Vector<uint32_t, 4> in[kAccesses];
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a)
    if (first + a * kThreads < units) in[a] = load<uint32_t, 4>(x + 4 * (first + a * kThreads));
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    if (first + a * kThreads >= units) break;
    const uint32_t* const w = in[a].at;
    const Vector<uint32_t, 4> made = soft_two<T>({{select_bytes(w[0], w[2], 0x5410u), select_bytes(w[0], w[2], 0x7632u),
                                                   select_bytes(w[1], w[3], 0x5410u), select_bytes(w[1], w[3], 0x7632u)}},
                                                  times);
    const uint32_t* const m = made.at;
    store(y + 4 * (first + a * kThreads),
          Vector<uint32_t, 4>{{select_bytes(m[0], m[1], 0x5410u), select_bytes(m[2], m[3], 0x5410u),
                               select_bytes(m[0], m[1], 0x7632u), select_bytes(m[2], m[3], 0x7632u)}});
  }
}

// The same across rows: eight neighbours of four rows. `row`: words of a row.
template <class T>
__global__ void __launch_bounds__(kThreads) soft_columns(const uint32_t* x, const void* scale, uint32_t* y,
                                                         int64_t units, int64_t row) {
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= units) return;
  const float times = scale_of<T>(scale);
  int64_t place;
  const int64_t group_row = divide(unit, row / 4, &place), at = 4 * (group_row * row + place);
  Vector<uint32_t, 4> in[4], out[4];
  S24_UNROLL
  for (int j = 0; j < 4; ++j) in[j] = load<uint32_t, 4>(x + at + j * row);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vector<uint32_t, 4> made = soft_two<T>({{in[0].at[i], in[1].at[i], in[2].at[i], in[3].at[i]}}, times);
    S24_UNROLL
    for (int j = 0; j < 4; ++j) out[j].at[i] = made.at[j];
  }
  S24_UNROLL
  for (int j = 0; j < 4; ++j) store(y + at + j * row, out[j]);
}

// Any array: a thread takes one group. Neighbouring threads are neighbours along inner.
template <class T, bool kRows>
__global__ void __launch_bounds__(kThreads) soft_groups(const typename T::Bits* x, const void* scale,
                                                        typename T::Bits* y, Groups g) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= g.count()) return;
  Vector<Bits, 4> in, out;
  int64_t at = 4 * unit;
  if constexpr (kRows) {
    in = load<Bits, 4>(x + at);
  } else {
    int64_t lane;
    at = unit + 3 * g.inner * divide(unit, g.inner, &lane);
    S24_UNROLL
    for (int j = 0; j < 4; ++j) in.at[j] = x[at + j * g.inner];
  }
  soft24<T>(in.at, out.at);
  S24_UNROLL
  for (int j = 0; j < 4; ++j) out.at[j] = scaled<T>(out.at[j], scale_of<T>(scale));
  if constexpr (kRows) {
    store(y + at, out);
  } else {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) y[at + j * g.inner] = out.at[j];
  }
}

template <class T>
cudaError_t launch(const SoftArgs& a, cudaStream_t stream) {
  using Bits = typename T::Bits;
  const int64_t groups = a.groups.count();
  const dim3 grid(blocks_for(groups, kThreads));
  if constexpr (sizeof(Bits) == 2) {
    const auto* from = static_cast<const uint32_t*>(a.x);
    auto* to = static_cast<uint32_t*>(a.out);
    const bool whole = aligned(from, 16) && aligned(to, 16);
    if (whole && groups % 2 == 0 && a.groups.inner == 1)
      return start(soft_rows<T>, dim3(blocks_for(groups / 2, 4 * kThreads)), kThreads, 0, stream, from, a.scale, to, groups / 2);
    if (whole && a.groups.inner % 8 == 0)
      return start(soft_columns<T>, dim3(blocks_for(groups / 8, kThreads)), kThreads, 0, stream, from, a.scale, to, groups / 8,
                   a.groups.inner / 2);
  }
  const auto* from = static_cast<const Bits*>(a.x);
  auto* to = static_cast<Bits*>(a.out);
  // Four elements of a row begin at a multiple of their size, as arrays do.
  if (a.groups.inner == 1) return start(soft_groups<T, true>, grid, kThreads, 0, stream, from, a.scale, to, a.groups);
  return start(soft_groups<T, false>, grid, kThreads, 0, stream, from, a.scale, to, a.groups);
}

}  // namespace

template <>
cudaError_t run(const SoftArgs& a, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    return launch<T>(a, stream);
  });
}

}  // namespace cuda
}  // namespace s24
