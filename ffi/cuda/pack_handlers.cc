// FFI handlers of packing and unpacking.
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

// The buffers of one call. Unused ones are null; the index is the operand's place in the batch (-1: as the result).
struct Operand {
  const void* data = nullptr;
  int batch_operand = -1;
};

struct PackCall {
  const char* target;
  PackOp op;
  Dtype dtype;
  Operand dense, mask, values, metadata, key;
};

ffi::Error run_pack(cudaStream_t stream, const PackCall& c, const GroupShape& g, const Batch& batch) {
  Groups groups = {batch.rest(), g.len, g.inner_size()};
  const int64_t elements = groups.count() * 4, bytes = groups.outer * groups.inner * g.bytes_len();
  // Rows of whole metadata bytes follow each other without a gap: then they are one long row.
  if (groups.inner == 1 && groups.len % 8 == 0) groups = Groups{1, groups.outer * groups.len, 1};
  const int64_t size = size_of(c.dtype);
  for (int64_t b = 0; b < batch.count(); ++b) {
    const auto place = [&](const Operand& o, int64_t step) -> char* {
      if (o.data == nullptr) return nullptr;
      return at_bytes(o.data, (o.batch_operand < 0 ? b : batch.index(size_t(o.batch_operand), b)) * step);
    };
    const PackArgs args = {c.op,
                           c.dtype,
                           place(c.dense, elements * size),
                           reinterpret_cast<uint8_t*>(place(c.mask, elements)),
                           place(c.values, elements / 2 * size),
                           reinterpret_cast<uint8_t*>(place(c.metadata, bytes)),
                           groups,
                           Key{0, 0}};
    const auto* key = reinterpret_cast<const uint32_t*>(place(c.key, 2 * sizeof(uint32_t)));
    const cudaError_t e = launch_pack(args, key, stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

void check_packed(Check& check, const GroupShape& g, const Dims& lead, const ffi::AnyBuffer& x,
                  const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata) {
  check.shape("values", values, g.packed(lead, g.values_len()));
  check.shape("metadata", metadata, g.packed(lead, g.bytes_len()));
  check.require(values.element_type() == x.element_type(), "values must have the dtype of x");
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
}

ffi::Error run_simple(const char* target, cudaStream_t stream, PackOp op, int64_t trailing, ffi::AnyBuffer& x,
                      ffi::AnyBuffer& values, ffi::AnyBuffer& metadata) {
  Check check(target);
  const Dtype dtype = check.dtype("x", x);
  const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
  if (!check.ok()) return check.error();
  check_packed(check, g, g.lead, x, values, metadata);
  if (!check.ok()) return check.error();
  const PackCall c{target, op, dtype, {x.untyped_data()}, {}, {values.untyped_data()}, {metadata.untyped_data()}, {}};
  return run_pack(stream, c, g, Batch(g.lead, {}));
}

ffi::Error Pack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> metadata) {
  return run_simple("s24_pack", stream, PackOp::kPlain, trailing, x, *values, *metadata);
}

ffi::Error SquaredReluPack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                           ffi::Result<ffi::AnyBuffer> metadata) {
  return run_simple("s24_squared_relu_pack", stream, PackOp::kSquaredRelu, trailing, x, *values, *metadata);
}

ffi::Error PackMasked(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                      ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  Check check("s24_pack_masked");
  const Dtype dtype = check.dtype("x", x);
  check.type("mask", mask, ffi::DataType::PRED, "bool");
  const GroupShape g = GroupShape::of(check, dims_of(x), trailing), gm = GroupShape::of(check, dims_of(mask), trailing);
  check.require(g.len == gm.len && g.inner == gm.inner,
                "mask has shape " + text(dims_of(mask)) + ", x has shape " + text(dims_of(x)));
  const Dims lead = check.broadcast("x and mask", g.lead, gm.lead);
  if (!check.ok()) return check.error();
  check_packed(check, g, lead, x, *values, *metadata);
  if (!check.ok()) return check.error();
  const PackCall c{"s24_pack_masked",       PackOp::kMasked,          dtype, {x.untyped_data(), 0}, {mask.untyped_data(), 1},
                   {values->untyped_data()}, {metadata->untyped_data()}, {}};
  return run_pack(stream, c, g, Batch(lead, {g.lead, gm.lead}));
}

ffi::Error MvuePack(cudaStream_t stream, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  Check check("s24_mvue_pack");
  const Dtype dtype = check.dtype("x", x);
  check.type("key", key, ffi::DataType::U32, "uint32");
  const KeyedBatch keyed = KeyedBatch::of(check, key, x, trailing);
  if (!check.ok()) return check.error();
  check_packed(check, keyed.group, keyed.lead, x, *values, *metadata);
  if (!check.ok()) return check.error();
  const PackCall c{"s24_mvue_pack",
                   exact ? PackOp::kMvueExact : PackOp::kMvueSequential,
                   dtype,
                   {x.untyped_data(), 1},
                   {},
                   {values->untyped_data()},
                   {metadata->untyped_data()},
                   {key.untyped_data(), 0}};
  return run_pack(stream, c, keyed.group, keyed.batch);
}

// Leading dims of a packed array (lead + inner, last); the part that belongs to `lead`.
Dims packed_lead(Check& check, const char* name, const ffi::AnyBuffer& packed, const GroupShape& g, int64_t last) {
  const Dims d = dims_of(packed);
  const size_t tail = g.inner.size() + 1;
  if (!check.require(d.size() >= tail, std::string(name) + " has too few dimensions: " + text(d))) return {};
  const Dims lead(d.begin(), d.end() - int64_t(tail));
  check.require(d == g.packed(lead, last),
                std::string(name) + " has shape " + text(d) + ", expected " + text(g.packed(lead, last)));
  return lead;
}

ffi::Error Gather(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> values) {
  Check check("s24_gather");
  const Dtype dtype = check.dtype("x", x);
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
  const Dims meta_lead = packed_lead(check, "metadata", metadata, g, g.bytes_len());
  const Dims lead = check.broadcast("x and metadata", g.lead, meta_lead);
  if (!check.ok()) return check.error();
  check.shape("values", *values, g.packed(lead, g.values_len()));
  check.require(values->element_type() == x.element_type(), "values must have the dtype of x");
  if (!check.ok()) return check.error();
  const PackCall c{"s24_gather", PackOp::kGather, dtype, {x.untyped_data(), 0}, {}, {values->untyped_data()},
                   {metadata.untyped_data(), 1}, {}};
  return run_pack(stream, c, g, Batch(lead, {g.lead, meta_lead}));
}

ffi::Error Unpack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> dense) {
  Check check("s24_unpack");
  const Dtype dtype = check.dtype("values", values);
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  check.require(dense->element_type() == values.element_type(), "the result must have the dtype of values");
  const GroupShape g = GroupShape::of(check, dims_of(*dense), trailing);
  const Dims value_lead = packed_lead(check, "values", values, g, g.values_len());
  const Dims meta_lead = packed_lead(check, "metadata", metadata, g, g.bytes_len());
  const Dims lead = check.broadcast("values and metadata", value_lead, meta_lead);
  check.require(lead == g.lead, "the result has shape " + text(dims_of(*dense)) + ", expected " + text(g.array(lead)));
  if (!check.ok()) return check.error();
  const PackCall c{"s24_unpack", PackOp::kUnpack, dtype, {dense->untyped_data()}, {}, {values.untyped_data(), 0},
                   {metadata.untyped_data(), 1}, {}};
  return run_pack(stream, c, g, Batch(lead, {value_lead, meta_lead}));
}

#define S24_PACK_BINDING ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("trailing")
#define S24_GRAPH {ffi::Traits::kCmdBufferCompatible}

XLA_FFI_DEFINE_HANDLER(kPack, Pack, S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kSquaredReluPack, SquaredReluPack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);
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
XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);

}  // namespace

const Target kPackTargets[] = {{"s24_pack", kPack, nullptr},
                               {"s24_squared_relu_pack", kSquaredReluPack, nullptr},
                               {"s24_pack_masked", kPackMasked, nullptr},
                               {"s24_mvue_pack", kMvuePack, nullptr},
                               {"s24_gather", kGather, nullptr},
                               {"s24_unpack", kUnpack, nullptr},
                               {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
