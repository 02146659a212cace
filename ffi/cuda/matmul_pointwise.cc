// The handlers of 2:4 products in bfloat16 with an elementwise operation, which Hopper has.
#include "../call/compressed24.h"
#include "../call/handler.h"

namespace s24 {
namespace cuda {
namespace {

struct MatmulPointwiseCall : Call {
  MatmulPointwiseArgs args{};  // of the first element
  using Call::Call;

  // Operands: P (batch..., R, K), compressed; D (batch..., N, K); of slopes what was saved (batch..., N, R), else null. Result:
  // (batch..., N, R).
  static MatmulPointwiseCall of(const char* target, Pointwise op, const ffi::AnyBuffer& compressed, const ffi::AnyBuffer& dense,
                                const ffi::AnyBuffer* saved, const ffi::AnyBuffer& out) {
    MatmulPointwiseCall call(target);
    Check check(target);
    for (const auto& [name, array] : {std::pair{"the compressed matrix", &compressed}, {"dense", &dense}, {"the result", &out}})
      check.type(name, *array, ffi::DataType::BF16, "bfloat16");
    if (saved != nullptr) check.type("saved", *saved, ffi::DataType::BF16, "bfloat16");
    const Dims c = dims_of(compressed), d = dims_of(dense), o = dims_of(out), s = saved == nullptr ? o : dims_of(*saved);
    check.require(c.size() >= 2 && d.size() >= 2 && o.size() >= 2 && s.size() >= 2, "operands need two dimensions");
    if (!check.ok()) return call.error = check.error(), call;
    MatmulPointwiseArgs& a = call.args;
    a.op = op, a.rows = o.back(), a.depth = d.back(), a.cols = d[d.size() - 2];
    require_hopper_sizes(check, a.rows, a.depth, a.cols, 1, o, d);
    const Dims c_lead = leading(c, 2), d_lead = leading(d, 2), s_lead = saved == nullptr ? d_lead : leading(s, 2);
    const Dims lead = check.broadcast("the factors and saved", check.broadcast("both factors", c_lead, d_lead), s_lead);
    check.shape("the compressed matrix", c, of_lead(c_lead, {compressed_rows(a.rows, 2), a.depth / 2}));
    if (saved != nullptr) check.shape("saved", s, of_lead(s_lead, {a.cols, a.rows}));
    check.shape("the result", o, of_lead(lead, {a.cols, a.rows}));
    if (!check.ok()) return call.error = check.error(), call;
    call.batch = Batch(lead, {c_lead, d_lead, s_lead}, lead.size());
    a.compressed = compressed.untyped_data(), a.dense = dense.untyped_data(), a.out = out.untyped_data();
    a.saved = saved == nullptr ? nullptr : saved->untyped_data();
    return call;
  }

  bool empty() const { return batch.count() * args.rows * args.cols == 0; }
  int64_t out_bytes() const { return args.rows * args.cols * 2; }
  MatmulPointwiseArgs at(int64_t b) const {
    MatmulPointwiseArgs a = args;
    a.compressed = at_bytes(a.compressed, batch.index(0, b) * compressed_rows(a.rows, 2) * a.depth);
    a.dense = at_bytes(a.dense, batch.index(1, b) * a.cols * a.depth * 2);
    if (a.saved != nullptr) a.saved = at_bytes(a.saved, batch.index(2, b) * out_bytes());
    a.out = at_bytes(a.out, b * out_bytes());
    return a;
  }
};

ffi::Error multiply(Device stream, const MatmulPointwiseCall& call) {
  if (call.error.failure() || call.empty()) return call.error;
  if (!has_matmul_pointwise()) return only_on_hopper(call.target, "s24.matmul, and the activation or its gradient by itself");
  return compute(stream, call);
}

ffi::Error MatmulSquaredRelu(Device stream, ffi::AnyBuffer compressed, ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  constexpr const char* kName = "s24_matmul_squared_relu";
  return multiply(stream, MatmulPointwiseCall::of(kName, Pointwise::kSquaredRelu, compressed, dense, nullptr, *out));
}

ffi::Error MatmulSlope(Device stream, int64_t relu, ffi::AnyBuffer compressed, ffi::AnyBuffer dense, ffi::AnyBuffer saved,
                       ffi::Result<ffi::AnyBuffer> out) {
  constexpr const char* kName = "s24_matmul_slope";
  Check check(kName);
  const auto op = check.flag("relu", relu) ? Pointwise::kSlopeOfRelu : Pointwise::kSlopeOfSquaredRelu;
  if (!check.ok()) return check.error();
  return multiply(stream, MatmulPointwiseCall::of(kName, op, compressed, dense, &saved, *out));
}

S24_TARGET("s24_matmul_squared_relu", MatmulSquaredRelu);
S24_TARGET("s24_matmul_slope", MatmulSlope, "relu");

}  // namespace
}  // namespace cuda
}  // namespace s24
