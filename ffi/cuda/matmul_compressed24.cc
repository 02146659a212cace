// The handler of 2:4 products of 16-bit floats, of a matrix that is compressed for cuSPARSELt, by our kernel for Hopper.
#include "../call/compressed24.h"
#include "../call/handler.h"

namespace s24 {
namespace cuda {
namespace {

struct MatmulCompressed24Call : Call {
  MatmulCompressed24Args args{};  // of the first element
  using Call::Call;

  // Operands: P (batch..., R, K), compressed; D (batch..., N, K) if dense_k_last, else (batch..., K, N); a bias (batch..., R), or
  // (batch..., 0) for none. Results: (batch..., N, R) if rows_last, else (batch..., R, N); the workspace, of which one serves all elements.
  static MatmulCompressed24Call of(const char* target, int64_t dense_k_last, int64_t rows_last, int64_t strided,
                                   const ffi::AnyBuffer& compressed, const ffi::AnyBuffer& dense, const ffi::AnyBuffer& bias,
                                   const ffi::AnyBuffer& out, const ffi::AnyBuffer& workspace) {
    MatmulCompressed24Call call(target);
    Check check(target);
    MatmulCompressed24Args& a = call.args;
    a.dtype = check.dtype("dense", dense);
    check.require(a.dtype != Dtype::kF32, "dense must be bfloat16 or float16");
    for (const auto& [name, array] : {std::pair{"the compressed matrix", &compressed}, {"the bias", &bias}, {"the result", &out}})
      check.type(name, *array, dense.element_type(), "of the dtype of dense");
    check.type("the workspace", workspace, ffi::DataType::U8, "uint8");
    const Dims c = dims_of(compressed), d = dims_of(dense), b = dims_of(bias), o = dims_of(out), w = dims_of(workspace);
    check.require(c.size() >= 2 && d.size() >= 2 && o.size() >= 2 && !b.empty(), "operands need two dimensions, and a bias one");
    a.dense_k_last = check.flag("dense_k_last", dense_k_last), a.rows_last = check.flag("rows_last", rows_last);
    a.strided = check.flag("strided", strided);
    check.require(!(a.strided && a.dense_k_last), "strided rows need dense (K, N): dense_k_last must be 0");
    if (!check.ok()) return call.error = check.error(), call;
    a.depth = d[d.size() - 2], a.cols = d.back(), a.rows = a.rows_last ? o.back() : o[o.size() - 2];
    if (a.dense_k_last) std::swap(a.depth, a.cols);
    require_hopper_sizes(check, a.rows, a.depth, a.cols, kMatmulCompressed24Cols, o, d);
    const Dims c_lead = leading(c, 2), d_lead = leading(d, 2), b_lead = leading(b, 1);
    const Dims lead = check.broadcast("the factors and the bias", check.broadcast("both factors", c_lead, d_lead), b_lead);
    check.shape("the compressed matrix", c, of_lead(c_lead, {compressed_rows(a.rows, 2), a.depth / 2}));
    if (b.back() != 0) check.shape("the bias", b, of_lead(b_lead, {a.rows}));
    check.shape("the result", o, a.rows_last ? of_lead(lead, {a.cols, a.rows}) : of_lead(lead, {a.rows, a.cols}));
    check.shape("the workspace", w, {kMatmulCompressed24Workspace});
    if (!check.ok()) return call.error = check.error(), call;
    call.batch = Batch(lead, {c_lead, d_lead, b_lead}, lead.size());
    a.compressed = compressed.untyped_data(), a.dense = dense.untyped_data(), a.out = out.untyped_data();
    a.bias = b.back() == 0 ? nullptr : bias.untyped_data(), a.workspace = workspace.untyped_data();
    return call;
  }

  bool empty() const { return batch.count() * args.rows * args.cols == 0; }
  MatmulCompressed24Args at(int64_t b) const {
    MatmulCompressed24Args a = args;
    a.compressed = at_bytes(a.compressed, batch.index(0, b) * compressed_rows(a.rows, 2) * a.depth);
    a.dense = at_bytes(a.dense, batch.index(1, b) * a.depth * a.cols * 2);
    if (a.bias != nullptr) a.bias = at_bytes(a.bias, batch.index(2, b) * a.rows * 2);
    a.out = at_bytes(a.out, b * a.rows * a.cols * 2);
    return a;
  }
};

ffi::Error MatmulCompressed24(Device stream, int64_t dense_k_last, int64_t rows_last, int64_t strided, ffi::AnyBuffer compressed,
                              ffi::AnyBuffer dense, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::AnyBuffer> workspace) {
  const auto call = MatmulCompressed24Call::of("s24_matmul_compressed24", dense_k_last, rows_last, strided, compressed, dense, bias,
                                               *out, *workspace);
  if (call.error.failure() || call.empty()) return call.error;
  if (!has_matmul_compressed24()) return only_on_hopper(call.target, "s24.matmul");
  return compute(stream, call);
}

S24_TARGET("s24_matmul_compressed24", MatmulCompressed24, "dense_k_last", "rows_last", "strided");

}  // namespace
}  // namespace cuda
}  // namespace s24
