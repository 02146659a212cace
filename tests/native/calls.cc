#include "calls.h"

#include <deque>
#include <map>
#include <string>
#include <vector>

static std::string message;  // of the error that was raised last
static int64_t pool_threads;

static XLA_FFI_DataType type_of(const char* dtype) {
  static const std::map<std::string, XLA_FFI_DataType> all = {
      {"bool", XLA_FFI_DataType_PRED},   {"uint8", XLA_FFI_DataType_U8},       {"int32", XLA_FFI_DataType_S32},
      {"uint32", XLA_FFI_DataType_U32},  {"bfloat16", XLA_FFI_DataType_BF16},  {"float16", XLA_FFI_DataType_F16},
      {"float32", XLA_FFI_DataType_F32}, {"float8_e4m3fn", XLA_FFI_DataType_F8E4M3FN}};
  return all.at(dtype);
}

static XLA_FFI_Api functions() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* error) {
    message = *error->message != 0 ? error->message : "no message";
    return reinterpret_cast<XLA_FFI_Error*>(&message);
  };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* asked) -> XLA_FFI_Error* {
    *asked->num_threads = pool_threads;
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* asked) -> XLA_FFI_Error* {
    asked->task(asked->data);
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* asked) -> XLA_FFI_Error* {
    asked->device_ordinal = 0;
    return nullptr;
  };
  return api;
}

const char* call_handler(XLA_FFI_Handler* handler, const ArrayOfCall* arrays, int64_t operands, int64_t results,
                         const AttributeOfCall* attributes, int64_t count, int64_t threads) {
  std::deque<XLA_FFI_Buffer> buffers;
  std::vector<void*> places;
  for (int64_t i = 0; i < operands + results; ++i) {
    const ArrayOfCall& a = arrays[i];
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
    const AttributeOfCall& a = attributes[i];
    names.push_back(span(a.name));
    kinds.push_back(a.text != nullptr ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_SCALAR);
    if (a.text != nullptr)
      values.push_back(span(a.text));
    else if (a.fraction != nullptr)
      values.push_back(&scalars.emplace_back(XLA_FFI_Scalar{XLA_FFI_DataType_F64, a.fraction}));
    else
      values.push_back(&scalars.emplace_back(XLA_FFI_Scalar{XLA_FFI_DataType_S64, const_cast<int64_t*>(&a.whole)}));
  }

  static const XLA_FFI_Api api = functions();
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands, given.data(), places.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, results, taken.data(), places.data() + operands};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, count, kinds.data(), names.data(), values.data()};
  pool_threads = threads;
  message.clear();
  handler(&frame);
  return message.c_str();
}
