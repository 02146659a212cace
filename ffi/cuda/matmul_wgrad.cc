// The handler of 2:4 products in bfloat16 with the contracted axis first in the dense operand, which Hopper has.
#include "../call/compressed24.h"
#include "../call/handler.h"

namespace s24 {
namespace cuda {
namespace {

struct MatmulWgradCall : Call {
  MatmulWgradArgs args{};  // of the first element
  using Call::Call;

  // Operands: P (batch..., R, K), compressed; D (batch..., K, N). Results: (batch..., N, R) if rows_last, else (batch..., R, N); the
  // workspace, of which one serves all elements.
  static MatmulWgradCall of(const char* target, int64_t rows_last, int64_t strided, const ffi::AnyBuffer& compressed,
                            const ffi::AnyBuffer& dense, const ffi::AnyBuffer& out, const ffi::AnyBuffer& workspace) {
    MatmulWgradCall call(target);
    Check check(target);
    for (const auto& [name, array] : {std::pair{"the compressed matrix", &compressed}, {"dense", &dense}, {"the result", &out}})
      check.type(name, *array, ffi::DataType::BF16, "bfloat16");
    check.type("the workspace", workspace, ffi::DataType::U8, "uint8");
    const Dims c = dims_of(compressed), d = dims_of(dense), o = dims_of(out), w = dims_of(workspace);
    check.require(c.size() >= 2 && d.size() >= 2 && o.size() >= 2, "operands need two dimensions");
    MatmulWgradArgs& a = call.args;
    a.rows_last = check.flag("rows_last", rows_last), a.strided = check.flag("strided", strided);
    if (!check.ok()) return call.error = check.error(), call;
    a.depth = d[d.size() - 2], a.cols = d.back(), a.rows = a.rows_last ? o.back() : o[o.size() - 2];
    check.require(a.rows % kMatmulWgradRows == 0 && a.depth % kMatmulWgradDepth == 0 && a.cols % kMatmulWgradCols == 0 && a.depth > 0,
                  "needs R a multiple of " + std::to_string(kMatmulWgradRows) + ", K a positive multiple of " +
                      std::to_string(kMatmulWgradDepth) + " and N a multiple of " + std::to_string(kMatmulWgradCols) +
                      ", got a result " + text(o) + " and dense " + text(d));
    check.require(a.rows <= kMatmulWgradMost && a.depth <= kMatmulWgradMost && a.cols <= kMatmulWgradMost,
                  "needs sizes of at most " + std::to_string(kMatmulWgradMost) + ", got " + text({a.rows, a.depth, a.cols}));
    const Dims c_lead = leading(c, 2), d_lead = leading(d, 2);
    const Dims lead = check.broadcast("both factors", c_lead, d_lead);
    check.shape("the compressed matrix", c, of_lead(c_lead, {compressed_rows(a.rows, 2), a.depth / 2}));
    check.shape("the result", o, a.rows_last ? of_lead(lead, {a.cols, a.rows}) : of_lead(lead, {a.rows, a.cols}));
    check.shape("the workspace", w, {kMatmulWgradWorkspace});
    if (!check.ok()) return call.error = check.error(), call;
    call.batch = Batch(lead, {c_lead, d_lead}, lead.size());
    a.compressed = compressed.untyped_data(), a.dense = dense.untyped_data(), a.out = out.untyped_data();
    a.workspace = workspace.untyped_data();
    return call;
  }

  bool empty() const { return batch.count() * args.rows * args.cols == 0; }
  MatmulWgradArgs at(int64_t b) const {
    MatmulWgradArgs a = args;
    a.compressed = at_bytes(a.compressed, batch.index(0, b) * compressed_rows(a.rows, 2) * a.depth);
    a.dense = at_bytes(a.dense, batch.index(1, b) * a.depth * a.cols * 2);
    a.out = at_bytes(a.out, b * a.rows * a.cols * 2);
    return a;
  }
};

ffi::Error MatmulWgrad(Device stream, int64_t rows_last, int64_t strided, ffi::AnyBuffer compressed, ffi::AnyBuffer dense,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace) {
  const auto call = MatmulWgradCall::of("s24_matmul_wgrad", rows_last, strided, compressed, dense, *out, *workspace);
  if (call.error.failure() || call.empty()) return call.error;
  if (!has_matmul_wgrad()) return only_on_hopper(call.target, "s24.matmul");
  return compute(stream, call);
}

S24_TARGET("s24_matmul_wgrad", MatmulWgrad, "rows_last", "strided");

}  // namespace
}  // namespace cuda
}  // namespace s24
