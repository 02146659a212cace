// The handler of a 2:4 product in bfloat16 with squared ReLU, which Hopper has.
#include "../call/compressed24.h"
#include "../call/handler.h"

namespace s24 {
namespace cuda {
namespace {

struct MatmulSquaredReluCall : Call {
  MatmulSquaredReluArgs args{};  // of the first element
  using Call::Call;

  // Operands: P (batch..., R, K), compressed; D (batch..., N, K). Result: (batch..., N, R).
  static MatmulSquaredReluCall of(const char* target, const ffi::AnyBuffer& compressed, const ffi::AnyBuffer& dense,
                                  const ffi::AnyBuffer& out) {
    MatmulSquaredReluCall call(target);
    Check check(target);
    for (const auto& [name, array] : {std::pair{"the compressed matrix", &compressed}, {"dense", &dense}, {"the result", &out}})
      check.type(name, *array, ffi::DataType::BF16, "bfloat16");
    const Dims c = dims_of(compressed), d = dims_of(dense), o = dims_of(out);
    check.require(c.size() >= 2 && d.size() >= 2 && o.size() >= 2, "operands need two dimensions");
    if (!check.ok()) return call.error = check.error(), call;
    MatmulSquaredReluArgs& a = call.args;
    a.rows = o.back(), a.depth = d.back(), a.cols = d[d.size() - 2];
    check.require(a.rows % kMatmulSquaredReluRows == 0 && a.depth % kMatmulSquaredReluDepth == 0,
                  "needs R a multiple of " + std::to_string(kMatmulSquaredReluRows) + " and K of " +
                      std::to_string(kMatmulSquaredReluDepth) + ", got a result " + text(o) + " and dense " + text(d));
    check.require(a.rows <= kMatmulSquaredReluMost && a.depth <= kMatmulSquaredReluMost && a.cols <= kMatmulSquaredReluMost,
                  "needs sizes of at most " + std::to_string(kMatmulSquaredReluMost) + ", got " + text({a.rows, a.depth, a.cols}));
    const auto of_lead = [](Dims lead, int64_t first, int64_t last) { return lead.insert(lead.end(), {first, last}), lead; };
    const Dims c_lead = leading(c, 2), d_lead = leading(d, 2), lead = check.broadcast("both operands", c_lead, d_lead);
    check.shape("the compressed matrix", c, of_lead(c_lead, compressed_rows(a.rows, 2), a.depth / 2));
    check.shape("the result", o, of_lead(lead, a.cols, a.rows));
    if (!check.ok()) return call.error = check.error(), call;
    call.batch = Batch(lead, {c_lead, d_lead}, lead.size());
    a.compressed = compressed.untyped_data(), a.dense = dense.untyped_data(), a.out = out.untyped_data();
    return call;
  }

  bool empty() const { return batch.count() * args.rows * args.cols == 0; }
  int64_t out_bytes() const { return args.rows * args.cols * 2; }
  MatmulSquaredReluArgs at(int64_t b) const {
    MatmulSquaredReluArgs a = args;
    a.compressed = at_bytes(a.compressed, batch.index(0, b) * compressed_rows(a.rows, 2) * a.depth);
    a.dense = at_bytes(a.dense, batch.index(1, b) * a.cols * a.depth * 2);
    a.out = at_bytes(a.out, b * out_bytes());
    return a;
  }
};

ffi::Error MatmulSquaredRelu(Device stream, ffi::AnyBuffer compressed, ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  const MatmulSquaredReluCall call = MatmulSquaredReluCall::of("s24_matmul_squared_relu", compressed, dense, *out);
  if (call.error.failure() || call.empty()) return call.error;
  if (call.args.depth == 0) return clear(call.target, stream, call.args.out, call.batch.count() * call.out_bytes());
  if (!has_matmul_squared_relu())
    return ffi::Error::Internal(std::string(call.target) +
                                ": needs a GPU of compute capability 9.0 that runs its machine code (without "
                                "CUDA_FORCE_PTX_JIT); use s24.matmul and the activation by itself");
  return compute(stream, call);
}

S24_TARGET("s24_matmul_squared_relu", MatmulSquaredRelu);

}  // namespace
}  // namespace cuda
}  // namespace s24
