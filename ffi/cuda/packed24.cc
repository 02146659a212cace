// FFI handlers of packing and unpacking.
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const PackCall& c) {
  if (c.error.failure()) return c.error;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    cudaError_t e = launch_pack({c.at(b), c.strided}, c.key(b), stream);
    if (e == cudaSuccess && c.op != PackOp::kUnpack) e = finish(c, b, stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

ffi::Error Pack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::plain("s24_pack", PackOp::kPlain, trailing, x, *values, *metadata));
}

// Groups along axis -2 whose members are a quarter of the axis apart.
ffi::Error PackStrided(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                       ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::plain("s24_pack_strided", PackOp::kPlain, 1, x, *values, *metadata, true));
}

ffi::Error SquaredReluPack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                           ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::plain("s24_squared_relu_pack", PackOp::kSquaredRelu, trailing, x, *values, *metadata));
}

// Along rows, with counts (batch..., tokens / kKeptTokens, features) of what is kept and not zero.
ffi::Error PackCounted(cudaStream_t stream, int64_t squared, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                       ffi::Result<ffi::AnyBuffer> metadata, ffi::Result<ffi::AnyBuffer> counts) {
  constexpr const char* kName = "s24_pack_counted";
  Check check(kName);
  const PackOp op = check.flag("squared", squared) ? PackOp::kSquaredRelu : PackOp::kPlain;
  const PackCall c = PackCall::plain(kName, op, 0, x, *values, *metadata);
  if (c.error.failure()) return c.error;
  Dims parts = dims_of(x);
  const int64_t features = parts.back(), tokens = parts.size() < 2 ? 0 : parts[parts.size() - 2];
  check.require(c.dtype != Dtype::kF32 && parts.size() >= 2 && tokens % kKeptTokens == 0 && features % 8 == 0,
                "needs 16-bit floats, tokens a multiple of " + std::to_string(kKeptTokens) + " and features of 8, got x " +
                    text(parts));
  if (!check.ok()) return check.error();
  parts[parts.size() - 2] = tokens / kKeptTokens;
  check.shape("counts", *counts, parts);
  check.type("counts", *counts, ffi::DataType::U8, "uint8");
  if (!check.ok()) return check.error();
  const int64_t step = c.batch.rest() / kKeptTokens * features;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    auto* const to = reinterpret_cast<uint8_t*>(at_bytes(counts->untyped_data(), b * step));
    const PackArgs a = c.at(b);
    uint8_t* const behind = c.rows == 0 ? nullptr : static_cast<uint8_t*>(a.values) + c.rows * c.depth;
    const cudaError_t e = launch_pack_counted(a, features, to, behind, stream);
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
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

ffi::Error PackMasked(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                      ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::masked("s24_pack_masked", trailing, x, mask, *values, *metadata));
}

ffi::Error MvuePack(cudaStream_t stream, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::mvue("s24_mvue_pack", trailing, exact, key, x, *values, *metadata));
}

ffi::Error MvuePackStrided(cudaStream_t stream, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::mvue("s24_mvue_pack_strided", 1, exact, key, x, *values, *metadata, true));
}

ffi::Error Gather(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> values) {
  return run(stream, PackCall::gather("s24_gather", trailing, x, metadata, *values));
}

ffi::Error Unpack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> dense) {
  return run(stream, PackCall::unpack("s24_unpack", trailing, values, metadata, *dense));
}

#define S24_PACK_BINDING ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("trailing")
#define S24_GRAPH {ffi::Traits::kCmdBufferCompatible}

XLA_FFI_DEFINE_HANDLER(kPack, Pack, S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(
    kPackStrided, PackStrided,
    ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kSquaredReluPack, SquaredReluPack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kPackCounted, PackCounted,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("squared")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kSquaredReluPackBoth, SquaredReluPackBoth,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kPackMasked, PackMasked,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kMvuePack, MvuePack,
                       S24_PACK_BINDING.Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kMvuePackStrided, MvuePackStrided,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);

}  // namespace

const Target kPackTargets[] = {{"s24_pack", kPack, nullptr},
                               {"s24_pack_strided", kPackStrided, nullptr},
                               {"s24_squared_relu_pack", kSquaredReluPack, nullptr},
                               {"s24_pack_counted", kPackCounted, nullptr},
                               {"s24_squared_relu_pack_both", kSquaredReluPackBoth, nullptr},
                               {"s24_pack_masked", kPackMasked, nullptr},
                               {"s24_mvue_pack", kMvuePack, nullptr},
                               {"s24_mvue_pack_strided", kMvuePackStrided, nullptr},
                               {"s24_gather", kGather, nullptr},
                               {"s24_unpack", kUnpack, nullptr},
                               {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
