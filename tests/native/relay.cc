// Calls of FFI handlers with any arrays and attributes, made inside one call of XLA's: its context and its functions serve
// them all, and XLA compiles one program instead of one for each call.
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

// As tests/native/hostile.py declares them.
struct Array {
  const char* dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

// `text` if it is not null, else `fraction` if it is not null, else `whole`.
struct Attribute {
  const char* name;
  int64_t whole;
  double* fraction;
  const char* text;
};

static XLA_FFI_CallFrame* outer;  // XLA's call
static void (*inside)();

static XLA_FFI_DataType type_of(const char* dtype) {
  static const std::map<std::string, XLA_FFI_DataType> all = {
      {"bool", XLA_FFI_DataType_PRED},   {"uint8", XLA_FFI_DataType_U8},       {"int32", XLA_FFI_DataType_S32},
      {"uint32", XLA_FFI_DataType_U32}, {"bfloat16", XLA_FFI_DataType_BF16}, {"float32", XLA_FFI_DataType_F32}};
  return all.at(dtype);
}

extern "C" {

// What is called while XLA calls `relay`.
void set_inside(void (*f)()) { inside = f; }

XLA_FFI_Error* relay(XLA_FFI_CallFrame* frame) {
  auto* asked = frame->extension_start;
  if (asked != nullptr && asked->type == XLA_FFI_Extension_Metadata) {  // XLA registers it
    XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(asked)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return nullptr;
  }
  outer = frame;
  inside();
  return nullptr;
}

// Calls a handler; what it raises, or an empty string. Attributes come sorted by name.
const char* call_handler(XLA_FFI_Handler* handler, const Array* arrays, int64_t operands, int64_t results,
                         const Attribute* attributes, int64_t count) {
  static std::string message;
  std::deque<XLA_FFI_Buffer> buffers;
  std::vector<void*> places;
  for (int64_t i = 0; i < operands + results; ++i) {
    const Array& a = arrays[i];
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type_of(a.dtype), a.data, a.rank, a.dims});
    places.push_back(&buffers.back());
  }
  std::vector<XLA_FFI_ArgType> given(size_t(operands), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> taken(size_t(results), XLA_FFI_RetType_BUFFER);

  std::deque<XLA_FFI_ByteSpan> spans;
  std::deque<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_AttrType> kinds;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> values;
  const auto span = [&](const char* text) { return &spans.emplace_back(XLA_FFI_ByteSpan{text, std::char_traits<char>::length(text)}); };
  for (int64_t i = 0; i < count; ++i) {
    const Attribute& a = attributes[i];
    names.push_back(span(a.name));
    kinds.push_back(a.text != nullptr ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_SCALAR);
    if (a.text != nullptr)
      values.push_back(span(a.text));
    else if (a.fraction != nullptr)
      values.push_back(&scalars.emplace_back(XLA_FFI_Scalar{XLA_FFI_DataType_F64, a.fraction}));
    else
      values.push_back(&scalars.emplace_back(XLA_FFI_Scalar{XLA_FFI_DataType_S64, const_cast<int64_t*>(&a.whole)}));
  }

  XLA_FFI_Api api = *outer->api;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* error) {
    message = *error->message != 0 ? error->message : "no message";
    return reinterpret_cast<XLA_FFI_Error*>(&message);
  };
  XLA_FFI_CallFrame frame = *outer;
  frame.api = &api;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands, given.data(), places.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, results, taken.data(), places.data() + operands};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, count, kinds.data(), names.data(), values.data()};
  message.clear();
  handler(&frame);
  return message.c_str();
}

}  // extern "C"
