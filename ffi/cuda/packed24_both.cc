// Handlers of packing a matrix along its rows and its columns at once.
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

// One loop goes over the batches of both, and matrices that are compressed have a batch of their own.
ffi::Error check_both(const PackCall& rows, const PackCall& columns) {
  if (rows.error.failure()) return rows.error;
  if (columns.error.failure()) return columns.error;
  if (rows.batch.count() == columns.batch.count()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(rows.target) + ": both values must be compressed matrices, or neither");
}

// mask: given, or written by `pack`.
template <class F>
ffi::Error run(cudaStream_t stream, const char* target, const ffi::AnyBuffer& x, const ffi::AnyBuffer& mask,
               const ffi::AnyBuffer& row_values, const ffi::AnyBuffer& row_metadata, const ffi::AnyBuffer& values,
               const ffi::AnyBuffer& metadata, F pack) {
  const PackCall rows = PackCall::masked(target, 0, x, mask, row_values, row_metadata);
  const PackCall columns = PackCall::masked(target, 1, x, mask, values, metadata);
  if (ffi::Error error = check_both(rows, columns); error.failure()) return error;
  for (int64_t b = 0; b < columns.batch.count(); ++b) {
    cudaError_t e = pack(rows.at(b), columns.at(b));
    if (e == cudaSuccess) e = finish(rows, b, stream);
    if (e == cudaSuccess) e = finish(columns, b, stream);
    if (e != cudaSuccess) return status(target, e);
  }
  return ffi::Error::Success();
}

ffi::Error PackMaskedBoth(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> row_values,
                          ffi::Result<ffi::AnyBuffer> row_metadata, ffi::Result<ffi::AnyBuffer> values,
                          ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, "s24_pack_masked_both", x, mask, *row_values, *row_metadata, *values, *metadata,
             [&](const PackArgs& rows, const PackArgs& columns) { return launch_pack_masked_both(rows, columns, stream); });
}

ffi::Error TransposablePack(cudaStream_t stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> mask,
                            ffi::Result<ffi::AnyBuffer> row_values, ffi::Result<ffi::AnyBuffer> row_metadata,
                            ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, "s24_transposable_pack", w, *mask, *row_values, *row_metadata, *values, *metadata,
             [&](const PackArgs& rows, const PackArgs& columns) {
               return launch_transposable_pack(rows, columns, const_cast<uint8_t*>(columns.mask), stream);
             });
}

ffi::Error SquaredReluPackBoth(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> row_values,
                               ffi::Result<ffi::AnyBuffer> row_metadata, ffi::Result<ffi::AnyBuffer> values,
                               ffi::Result<ffi::AnyBuffer> metadata) {
  constexpr const char* kName = "s24_squared_relu_pack_both";
  const PackCall rows = PackCall::plain(kName, PackOp::kSquaredRelu, 0, x, *row_values, *row_metadata);
  const PackCall columns = PackCall::plain(kName, PackOp::kSquaredRelu, 1, x, *values, *metadata);
  if (ffi::Error error = check_both(rows, columns); error.failure()) return error;
  for (int64_t b = 0; b < rows.batch.count(); ++b) {
    cudaError_t e = launch_squared_relu_both(rows.at(b), columns.at(b), stream);
    if (e == cudaSuccess) e = finish(rows, b, stream);
    if (e == cudaSuccess) e = finish(columns, b, stream);
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_pack_masked_both", PackMaskedBoth, on_stream(takes<2>, gives<4>), kInGraphs);
S24_TARGET("s24_transposable_pack", TransposablePack, on_stream(takes<1>, gives<5>), kInGraphs);
S24_TARGET("s24_squared_relu_pack_both", SquaredReluPackBoth, on_stream(takes<1>, gives<4>), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
