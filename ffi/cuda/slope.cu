// The gradient of the input of an activation, and its estimate packed along rows.
//
// Operands: what the forward pass saved (rows, cols) and dY2. Results: dY1 (rows, cols), and its estimate.
// Steps: those of elementwise_tiles.cuh.
// Constraints: 16-bit floats, rows a multiple of kSavedTokens, cols of 8.
#include "elementwise_tiles.cuh"
#include "simt/slope.h"

namespace s24 {
namespace cuda {
namespace {

template <class Number, Slope slope>
struct Sloped {
  using T = Number;
  static constexpr int kIn = 2, kOut = 1;

  __device__ __forceinline__ void operator()(const Words16 (&in)[2][4], int j, Words16 (&out)[1][4]) const {
    S24_UNROLL
    for (int i = 0; i < 4; ++i) out[0][j].at[i] = activation_gradients<T, slope>(in[0][j].at[i], in[1][j].at[i]);
  }
};

template <class F>
cudaError_t launch(const SlopeArgs& a, cudaStream_t stream) {
  const auto in = [](const void* p) { return static_cast<const uint16_t*>(p); };
  const Operands<uint16_t, 2, 1> operands = {{in(a.saved), in(a.dy2)}, {false, false}, {static_cast<uint16_t*>(a.dy1)}};
  return a.packed.op == PackOp::kMvueExact ? launch_tiles<PackOp::kMvueExact>(operands, F(), a.rows, a.cols, a.packed, stream)
                                           : launch_tiles<PackOp::kMvueSequential>(operands, F(), a.rows, a.cols, a.packed, stream);
}

template <class T>
cudaError_t launch_of(const SlopeArgs& a, cudaStream_t stream) {
  return a.slope == Slope::kRelu ? launch<Sloped<T, Slope::kRelu>>(a, stream)
                                 : launch<Sloped<T, Slope::kSquaredRelu>>(a, stream);
}

}  // namespace

static_assert(kSavedTokens == 4 * kTileGroups, "a tile");

template <>
cudaError_t run(const SlopeArgs& a, cudaStream_t stream) {
  if (a.rows * a.cols == 0) return cudaSuccess;
  return a.dtype == Dtype::kF16 ? launch_of<F16>(a, stream) : launch_of<BF16>(a, stream);
}

}  // namespace cuda
}  // namespace s24
