// The kernels of gated activations, thread by thread on a CPU, against float64 and the packing kernels.
// Prints one line per check: its name, and how many cases were wrong.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../../ffi/core/floats.h"
#include "../../ffi/cuda/launch.h"
#include "checks.h"

using namespace s24;

// What a result of a few steps in float32 may differ from `want`: `size` bounds the terms of its sum.
template <class T>
static bool near(typename T::Bits got, double want, double size) {
  const double unit = sizeof(got) == 4 ? 0x1p-24 : T::kInf == BF16::kInf ? 0x1p-8 : 0x1p-11;
  return std::abs(double(float_of(T::to_f32(got))) - want) <= unit * std::abs(want) + 0x1p-21 * size + 0x1p-25;
}

// Gated activations in both orders of memory, and their gradients packed along rows as packing does it.
template <class T>
static void gated_case(const std::string& name, Dtype dtype, int64_t rows, int64_t cols) {
  using Bits = typename T::Bits;
  constexpr size_t kMost = 256 * 72;
  alignas(64) static Bits in[3][kMost], turned[3][kMost], out[3][kMost], values[4][kMost / 2];
  alignas(64) static uint8_t metadata[4][kMost / 8 + 8 * 72];
  const size_t total = size_t(rows * cols), bytes = size_t(cols * ceil_div(rows, 8));
  std::normal_distribution<float> normal;
  for (int n = 0; n < 3; ++n)
    for (int64_t i = 0; i < rows * cols; ++i)
      turned[n][i % cols * rows + i / cols] = in[n][i] = T::from_f32(bits_of(3 * normal(random_bits)));
  long wrong = 0, wrong_packed = 0;
  for (int variant = 0; variant < 8; ++variant) {
    const bool gelu = variant & 4;
    cuda::GatedArgs a{};
    a.dtype = dtype, a.activation = gelu ? cuda::Activation::kGelu : cuda::Activation::kSilu;
    a.transposed = variant & 1, a.dz_transposed = variant & 2, a.rows = rows, a.cols = cols;
    const auto& own = a.transposed ? turned : in;
    a.gate = own[0], a.up = own[1], a.z = out[0];
    for (auto& o : out) std::fill(o, o + total, Bits(7));
    cuda::run(a, nullptr);
    a.dz = (a.dz_transposed ? turned : in)[2], a.z = nullptr, a.dgate = out[1], a.dup = out[2];
    cuda::run(a, nullptr);
    for (size_t i = 0; i < total; ++i) {
      const auto number = [i](int n) { return double(float_of(T::to_f32(in[n][i]))); };
      const double x = number(0), up = number(1), dz = number(2), c = 2 * std::sqrt(2 / std::acos(-1.0));
      const double s = gelu ? c * (x + 0.044715 * x * x * x) : x, ds = gelu ? c * (1 + 3 * 0.044715 * x * x) : 1;
      const double share = 1 / (1 + std::exp(-s)), slope = share + x * share * (1 - share) * ds;
      const double size = (1 + std::abs(x)) * (1 + std::abs(s) + std::abs(x * ds));
      wrong += !near<T>(out[0][i], x * share * up, size * std::abs(up));
      wrong += !near<T>(out[1][i], dz * up * slope, size * std::abs(dz * up));
      wrong += !near<T>(out[2][i], dz * x * share, size * std::abs(dz));
    }
    const std::vector<Bits> dense[2] = {{out[1], out[1] + total}, {out[2], out[2] + total}};
    const uint32_t other[2] = {kKey[1], 5};
    const Draws draws[2] = {{kKey, true, cols, rows / 4 * cols}, {other}};
    cuda::PackedResults packed{variant % 3 ? PackOp::kMvueExact : PackOp::kMvueSequential, {}, {}, {}};
    for (int n = 0; n < 2; ++n) {
      packed.values[n] = values[n], packed.metadata[n] = metadata[n], packed.draws[n] = draws[n];
      const Groups groups = {1, rows, cols};
      cuda::run(PackArgs{packed.op, dtype, out[1 + n], nullptr, values[2 + n], metadata[2 + n], groups, draws[n]}, nullptr);
      std::fill(out[1 + n], out[1 + n] + total, Bits(7));
    }
    cuda::launch_gated_pack(a, packed, nullptr);
    for (int n = 0; n < 2; ++n) {
      wrong_packed += !std::equal(dense[n].begin(), dense[n].end(), out[1 + n]);
      wrong_packed += !std::equal(values[n], values[n] + total / 2, values[2 + n]);
      wrong_packed += !std::equal(metadata[n], metadata[n] + bytes, metadata[2 + n]);
    }
  }
  report(name + " gated", wrong);
  report(name + " gated and packed", wrong_packed);
}

int main() {
  gated_case<BF16>("bfloat16 256x72", Dtype::kBF16, 256, 72);
  gated_case<F32>("float32 128x40", Dtype::kF32, 128, 40);
  gated_case<F16>("float16 24x16", Dtype::kF16, 24, 16);
  gated_case<BF16>("bfloat16 12x6", Dtype::kBF16, 12, 6);
  return 0;
}
