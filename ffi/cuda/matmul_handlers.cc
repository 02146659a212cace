// FFI handler of the product of a packed and a dense matrix by our own kernels.
#include "handlers.h"

namespace s24 {
namespace cuda {

namespace {

Dims leading(const Dims& d) { return Dims(d.begin(), d.end() - 2); }

}  // namespace

Product Product::of(const char* target, bool dense_k_last, bool out_packed_last, const ffi::AnyBuffer& values,
                    const ffi::AnyBuffer& metadata, const ffi::AnyBuffer& dense, const ffi::AnyBuffer& out) {
  Check check(target);
  Product p{{}, Batch({}, {}), ffi::Error::Success()};
  MatmulArgs& a = p.args;
  a.in = check.dtype("values", values);
  a.out_dtype = check.dtype("the result", out);
  a.dense_k_last = dense_k_last;
  a.out_packed_last = out_packed_last;
  check.require(dense.element_type() == values.element_type(), "values and dense must have the same dtype");
  check.require(a.out_dtype == a.in || a.out_dtype == Dtype::kF32, "the result must have the dtype of values, or float32");
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  const Dims v = dims_of(values), m = dims_of(metadata), d = dims_of(dense), o = dims_of(out);
  check.require(v.size() >= 2 && m.size() >= 2 && d.size() >= 2 && o.size() >= 2, "operands need two dimensions");
  if (check.ok()) {
    a.rows = v[v.size() - 2];
    a.depth = 2 * v.back();
    a.cols = dense_k_last ? d[d.size() - 2] : d.back();
    check.require(a.depth % 4 == 0, "values hold pairs: their last dimension must be even, got " + text(v));
    check.require(m[m.size() - 2] == a.rows && m.back() == ceil_div(a.depth, 8),
                  "metadata of shape " + text(m) + " does not belong to values of shape " + text(v));
    check.require((dense_k_last ? d.back() : d[d.size() - 2]) == a.depth,
                  "contraction " + std::to_string(a.depth) + " of the packed operand differs from dense " + text(d));
    const Dims packed_lead = check.broadcast("values and metadata", leading(v), leading(m));
    Dims want = check.broadcast("packed and dense", packed_lead, leading(d));
    const Dims lead = want;
    want.push_back(out_packed_last ? a.cols : a.rows);
    want.push_back(out_packed_last ? a.rows : a.cols);
    check.shape("the result", out, want);
    if (check.ok()) p.batch = Batch(lead, {leading(v), leading(m), leading(d)}, lead.size());
  }
  if (!check.ok()) p.error = check.error();
  a.values = values.untyped_data();
  a.metadata = static_cast<const uint8_t*>(metadata.untyped_data());
  a.dense = dense.untyped_data();
  a.out = out.untyped_data();
  return p;
}

MatmulArgs Product::at(int64_t b) const {
  MatmulArgs a = args;
  const int64_t in = size_of(a.in);
  a.values = at_bytes(a.values, batch.index(0, b) * a.rows * (a.depth / 2) * in);
  a.metadata += batch.index(1, b) * a.rows * ceil_div(a.depth, 8);
  a.dense = at_bytes(a.dense, batch.index(2, b) * a.depth * a.cols * in);
  a.out = at_bytes(a.out, b * out_bytes());
  return a;
}

namespace {

ffi::Error Matmul(cudaStream_t stream, int64_t dense_k_last, int64_t out_packed_last, ffi::AnyBuffer values,
                  ffi::AnyBuffer metadata, ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  const Product p = Product::of("s24_matmul", dense_k_last != 0, out_packed_last != 0, values, metadata, dense, *out);
  if (p.error.failure()) return p.error;
  if (p.empty()) return ffi::Error::Success();
  if (p.args.depth == 0)
    return status("s24_matmul", cudaMemsetAsync(p.args.out, 0, size_t(p.batch.count() * p.out_bytes()), stream));
  for (int64_t b = 0; b < p.batch.count(); ++b) {
    const MatmulArgs a = p.at(b);
    const cudaError_t e = a.in == Dtype::kF32 ? launch_matmul_f32(a, stream) : launch_matmul(a, stream);
    if (e != cudaSuccess) return status("s24_matmul", e);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMatmul, Matmul,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("dense_k_last")
                           .Attr<int64_t>("out_packed_last")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const Target kMatmulTargets[] = {{"s24_matmul", kMatmul, nullptr}, {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
