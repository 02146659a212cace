// Gated activations and their gradients, in float32.
//
// Operands: gate and up (rows, cols), or (cols, rows) if transposed; dz likewise. Results: z = act(gate) up, or dgate and dup,
// all (rows, cols), and on request the estimates of both gradients packed along rows.
// Steps: where all operands lie alike a thread goes along rows; otherwise a block loads tiles of 128 rows, transposes through
// shared memory what lies the other way, computes, stores, and packs the gradients from registers.
// Constraints: tiles need aligned arrays whose sizes are multiples of an access, packing whole tiles of rows. Other calls run
// element by element, and pack in passes of their own.
#include "elementwise_tiles.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr float kGeluCubic = 0.044715f, kGeluScale = 1.5957691216057308f;  // 2 sqrt(2 / pi)

// 1 / (1 + exp(-s)), with subnormals as zero. For results of 16 bits it uses the hardware's approximations, which are good to a
// few units of float32.
template <class T>
__device__ __forceinline__ float logistic(float s) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(typename T::Bits) == 2) {
    float power, share;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(s * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
    return share;
  }
#endif
  return 1.0f / (1.0f + expf(-s));
}

struct Activated {
  float value, slope;
};

// Both activations are x logistic(s): SiLU with s = x, GELU by tanh with s = 2 sqrt(2 / pi) (x + 0.044715 x^3).
template <class T>
__device__ __forceinline__ Activated activate(Activation activation, float x) {
  const bool gelu = activation == Activation::kGelu;
  const float cubic = kGeluCubic * x * x;
  const float s = gelu ? kGeluScale * x * (1.0f + cubic) : x;
  const float share = logistic<T>(s), value = x * share;
  return {value, share + value * (1.0f - share) * (gelu ? kGeluScale * (1.0f + 3.0f * cubic) : 1.0f)};
}

template <class T>
__device__ __forceinline__ float number(typename T::Bits b) {
  return float_of(T::to_f32(b));
}

// A NaN stays one on a GPU and on the host.
template <class T>
__device__ __forceinline__ typename T::Bits rounded(float x) {
  return round_number<T>(bits_of(x));
}

// One element. in: gate, up, dz; out: z, or dgate and dup.
template <class T, bool kBackward>
__device__ __forceinline__ void apply(Activation activation, const typename T::Bits* in, typename T::Bits* out) {
  const Activated act = activate<T>(activation, number<T>(in[0]));
  const float up = number<T>(in[1]);
  if constexpr (kBackward) {
    const float dz = number<T>(in[2]);
    out[0] = rounded<T>(dz * up * act.slope);
    out[1] = rounded<T>(dz * act.value);
  } else {
    out[0] = rounded<T>(act.value * up);
  }
}

// The same of a row of four, for tiles.
template <class Number, bool kBackward>
struct Gates {
  using T = Number;
  using Bits = typename T::Bits;
  static constexpr int kIn = kBackward ? 3 : 2, kOut = kBackward ? 2 : 1;
  Activation activation;

  __device__ __forceinline__ void operator()(const Words16 (&in)[kIn][4], int j, Words16 (&out)[kOut][4]) const {
    S24_UNROLL
    for (int l = 0; l < Tile<Bits>::kLanes; ++l) {
      Bits x[kIn], y[kOut];
      S24_UNROLL
      for (int n = 0; n < kIn; ++n) x[n] = element<Bits>(in[n][j], l);
      apply<T, kBackward>(activation, x, y);
      S24_UNROLL
      for (int n = 0; n < kOut; ++n) set_element(out[n][j], l, y[n]);
    }
  }

  static Operands<Bits, kIn, kOut> operands(const GatedArgs& a) {
    const auto in = [](const void* p) { return static_cast<const Bits*>(p); };
    const auto out = [](void* p) { return static_cast<Bits*>(p); };
    if constexpr (kBackward)
      return {{in(a.gate), in(a.up), in(a.dz)}, {a.transposed, a.transposed, a.dz_transposed}, {out(a.dgate), out(a.dup)}};
    else
      return {{in(a.gate), in(a.up)}, {a.transposed, a.transposed}, {out(a.z)}};
  }
};

// Element by element, in the order of the results, whose rows lie one after the other. With kLanes > 1 a thread takes kLanes
// neighbours at once; then no operand may be transposed.
template <class F, int kLanes>
__global__ void __launch_bounds__(kThreads) gated_rows(Operands<typename F::Bits, F::kIn, F::kOut> operands, F f, int64_t rows,
                                                       int64_t cols) {
  using Bits = typename F::Bits;
  constexpr int kAccesses = kLanes > 1 ? 2 : 1;
  const auto place = [](int a) {
    return ((int64_t(blockIdx.x) * kAccesses + a) * kThreads + threadIdx.x) * kLanes;
  };
  const int64_t count = rows * cols;
  Vector<Bits, kLanes> in[kAccesses][F::kIn];
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t at = place(a);
    if (at >= count) break;
    int64_t from_column = at;
    if constexpr (kLanes == 1) {
      int64_t col;
      const int64_t row = divide(at, cols, &col);
      from_column = col * rows + row;
    }
    S24_UNROLL
    for (int n = 0; n < F::kIn; ++n)
      in[a][n] = load<Bits, kLanes>(operands.in[n] + (operands.transposed[n] ? from_column : at));
  }
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t at = place(a);
    if (at >= count) break;
    Vector<Bits, kLanes> out[F::kOut];
    S24_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      Bits x[F::kIn], y[F::kOut];
      S24_UNROLL
      for (int n = 0; n < F::kIn; ++n) x[n] = in[a][n].at[l];
      apply<typename F::T, (F::kIn > 2)>(f.activation, x, y);
      S24_UNROLL
      for (int n = 0; n < F::kOut; ++n) out[n].at[l] = y[n];
    }
    S24_UNROLL
    for (int n = 0; n < F::kOut; ++n) store(operands.out[n] + at, out[n]);
  }
}

int64_t lanes_of(const GatedArgs& a) { return a.dtype == Dtype::kF32 ? 4 : 8; }

bool all_aligned(const GatedArgs& a) {
  bool all = true;
  for (const void* p : {a.gate, a.up, a.dz, static_cast<const void*>(a.z), static_cast<const void*>(a.dgate),
                        static_cast<const void*>(a.dup)})
    all = all && aligned(p, 16);
  return all;
}

bool fits_tiles(const GatedArgs& a) {
  return a.rows % lanes_of(a) == 0 && a.cols % lanes_of(a) == 0 && ceil_div(a.rows, 4 * kTileGroups) <= 65535 &&
         all_aligned(a);
}

template <class T, bool kBackward, PackOp op>
cudaError_t launch_gated_tiles(const GatedArgs& a, const PackedResults& packed, cudaStream_t stream) {
  using F = Gates<T, kBackward>;
  return launch_tiles<op>(F::operands(a), F{a.activation}, a.rows, a.cols, packed, stream);
}

template <class T, bool kBackward>
cudaError_t launch(const GatedArgs& a, cudaStream_t stream) {
  using F = Gates<T, kBackward>;
  const auto operands = F::operands(a);
  const bool transposed = a.transposed || (kBackward && a.dz_transposed);
  if (transposed && fits_tiles(a)) return launch_gated_tiles<T, kBackward, kNothing>(a, PackedResults{}, stream);
  const int64_t count = a.rows * a.cols;
  if (!transposed && count % lanes_of(a) == 0 && all_aligned(a)) {
    constexpr int kLanes = 16 / int(sizeof(typename T::Bits));
    return start(gated_rows<F, kLanes>, dim3(blocks_for(count, 2 * kThreads * kLanes)), kThreads, 0, stream, operands,
                 F{a.activation}, a.rows, a.cols);
  }
  return start(gated_rows<F, 1>, dim3(blocks_for(count, kThreads)), kThreads, 0, stream, operands, F{a.activation}, a.rows,
               a.cols);
}

}  // namespace

template <>
cudaError_t run(const GatedArgs& a, cudaStream_t stream) {
  if (a.rows * a.cols == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    return a.dz == nullptr ? launch<T, false>(a, stream) : launch<T, true>(a, stream);
  });
}

cudaError_t launch_gated_pack(const GatedArgs& a, const PackedResults& packed, cudaStream_t stream) {
  if (a.rows * a.cols == 0) return cudaSuccess;
  bool fits = fits_tiles(a) && a.rows % (4 * kTileGroups) == 0;
  for (int n = 0; n < 2; ++n) fits = fits && aligned(packed.values[n], 16) && aligned(packed.metadata[n], 16);
  if (!fits) {
    cudaError_t e = run(a, stream);
    for (int n = 0; n < 2 && e == cudaSuccess; ++n) {
      void* const dense = n == 0 ? a.dgate : a.dup;
      const Groups groups = {1, a.rows, a.cols};
      e = run(PackArgs{packed.op, a.dtype, dense, nullptr, packed.values[n], packed.metadata[n], groups, packed.draws[n]}, stream);
    }
    return e;
  }
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    return packed.op == PackOp::kMvueExact ? launch_gated_tiles<T, true, PackOp::kMvueExact>(a, packed, stream)
                                           : launch_gated_tiles<T, true, PackOp::kMvueSequential>(a, packed, stream);
  });
}

}  // namespace cuda
}  // namespace s24
