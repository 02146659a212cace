// Handlers of gated activations and their gradients.
#include "../call/packed24.h"

namespace s24 {
namespace cuda {
namespace {

// The checked shapes of one call. Operands and results are (batch..., rows, cols), or any shape if all lie alike in memory
// and nothing is packed.
struct GatedCall : Call {
  GatedArgs args{};  // of the first element
  Dims lead;
  using Call::Call;

  static GatedCall of(const char* target, int64_t gelu, int64_t transposed, int64_t dz_transposed, bool matrices,
                      const ffi::AnyBuffer& gate, const ffi::AnyBuffer& up, const ffi::AnyBuffer* dz,
                      const ffi::AnyBuffer& first, const ffi::AnyBuffer* second) {
    GatedCall c(target);
    Check check(target);
    const size_t tail = matrices || transposed || dz_transposed ? 2 : 0;
    c.args = {check.dtype("gate", gate), check.flag("gelu", gelu) ? Activation::kGelu : Activation::kSilu,
              check.flag("transposed", transposed), check.flag("dz_transposed", dz_transposed),
              gate.untyped_data(), up.untyped_data(), nullptr, nullptr, nullptr, nullptr, 1, 1};
    check.require(dims_of(gate).size() >= tail, "gate needs two dimensions, got shape " + text(dims_of(gate)));
    if (!check.ok()) return c.error = check.error(), c;
    const Dims gate_lead = leading(dims_of(gate), tail), up_lead = leading(dims_of(up), tail);
    Dims dz_lead = up_lead;
    c.lead = check.broadcast("gate and up", gate_lead, up_lead);
    if (tail != 0) {
      c.args.rows = gate.dimensions()[gate_lead.size() + (transposed ? 1 : 0)];
      c.args.cols = gate.dimensions()[gate_lead.size() + (transposed ? 0 : 1)];
    }
    const auto like = [&](const Dims& all, bool turned) {
      Dims d = all;
      if (tail != 0) d.push_back(turned ? c.args.cols : c.args.rows), d.push_back(turned ? c.args.rows : c.args.cols);
      return d;
    };
    check.shape("up", up, like(up_lead, c.args.transposed));
    if (dz != nullptr) {
      dz_lead = leading(dims_of(*dz), tail);
      c.lead = check.broadcast("gate and dz", c.lead, dz_lead);
      check.shape("dz", *dz, like(dz_lead, c.args.dz_transposed));
      c.args.dz = dz->untyped_data();
      c.args.dgate = first.untyped_data();
      c.args.dup = second->untyped_data();
    } else {
      c.args.z = first.untyped_data();
    }
    for (const ffi::AnyBuffer* b : {&up, dz, &first, second})
      check.require(b == nullptr || b->element_type() == gate.element_type(), "all arrays must have the dtype of gate");
    check.shape("the first result", first, like(c.lead, false));
    if (second != nullptr) check.shape("the second result", *second, like(c.lead, false));
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = Batch(c.lead, {gate_lead, up_lead, dz_lead}, tail == 0 ? 0 : c.lead.size());
    c.args.cols *= c.batch.rest();
    return c;
  }

  GatedArgs at(int64_t b) const {
    const int64_t bytes = args.rows * args.cols * size_of(args.dtype);
    const auto operand = [&](const void* p, size_t n) { return p == nullptr ? p : at_bytes(p, batch.index(n, b) * bytes); };
    const auto result = [&](void* p) -> void* { return p == nullptr ? p : at_bytes(p, b * bytes); };
    GatedArgs a = args;
    a.gate = operand(a.gate, 0), a.up = operand(a.up, 1), a.dz = operand(a.dz, 2);
    a.z = result(a.z), a.dgate = result(a.dgate), a.dup = result(a.dup);
    return a;
  }
};

ffi::Error Gated(Device stream, int64_t gelu, int64_t transposed, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                 ffi::Result<ffi::AnyBuffer> z) {
  return compute(stream, GatedCall::of("s24_gated", gelu, transposed, 0, false, gate, up, nullptr, *z, nullptr));
}

ffi::Error Backward(Device stream, int64_t gelu, int64_t transposed, int64_t dz_transposed, ffi::AnyBuffer gate,
                    ffi::AnyBuffer up, ffi::AnyBuffer dz, ffi::Result<ffi::AnyBuffer> dgate,
                    ffi::Result<ffi::AnyBuffer> dup) {
  return compute(stream,
                 GatedCall::of("s24_gated_backward", gelu, transposed, dz_transposed, false, gate, up, &dz, *dgate, &*dup));
}

ffi::Error BackwardPack(Device stream, int64_t gelu, int64_t transposed, int64_t dz_transposed, int64_t exact,
                        ffi::AnyBuffer gate_key, ffi::AnyBuffer up_key, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                        ffi::AnyBuffer dz, ffi::Result<ffi::AnyBuffer> dgate, ffi::Result<ffi::AnyBuffer> dup,
                        ffi::Result<ffi::AnyBuffer> gate_values, ffi::Result<ffi::AnyBuffer> gate_metadata,
                        ffi::Result<ffi::AnyBuffer> up_values, ffi::Result<ffi::AnyBuffer> up_metadata) {
  constexpr const char* kName = "s24_gated_backward_pack";
  const GatedCall c = GatedCall::of(kName, gelu, transposed, dz_transposed, true, gate, up, &dz, *dgate, &*dup);
  if (c.error.failure()) return c.error;
  // Packing what the results hold: every operand has as many leading dimensions, vmap has seen to it.
  const PackCall packs[2] = {PackCall::mvue(kName, 1, exact, gate_key, *dgate, *gate_values, *gate_metadata),
                             PackCall::mvue(kName, 1, exact, up_key, *dup, *up_values, *up_metadata)};
  for (const PackCall& p : packs) {
    if (p.error.failure()) return p.error;
    if (p.batch.count() != c.batch.count())
      return ffi::Error::InvalidArgument(std::string(kName) + ": keys need the leading dimensions of the operands");
  }
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    PackedResults packed{};
    packed.op = packs[0].op;
    for (int n = 0; n < 2; ++n) {
      const PackArgs p = packs[n].at(b);
      packed.values[n] = p.values, packed.metadata[n] = p.metadata, packed.draws[n] = p.draws;
    }
    cudaError_t e = launch_gated_pack(c.at(b), packed, stream);
    for (const PackCall& p : packs)
      if (e == cudaSuccess) e = append_metadata(p.at(b), stream);
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_gated", Gated, "gelu", "transposed");
S24_TARGET("s24_gated_backward", Backward, "gelu", "transposed", "dz_transposed");
S24_TARGET("s24_gated_backward_pack", BackwardPack, "gelu", "transposed", "dz_transposed", "exact");

}  // namespace
}  // namespace cuda
}  // namespace s24
