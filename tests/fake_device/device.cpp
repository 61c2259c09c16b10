/* torch's CUDA where there is none: two devices whose memory is the host's and whose operators run on the host, and a
 * report of all that they are asked to do. The build of torch may have CUDA, or not: its own is out of use.
 *
 * Tensors on them are plain tensors of type "cuda": what asks one for its device, address or type sees what it would see
 * on a GPU. An operator runs as the CPU's, over the same memory, when it is called: a device is never behind. Reported
 * are, in the order of the calls, with the stream that each is put on:
 *
 *   operator  one that ran on a device, by its name
 *   mask      one that a GPU cannot run before the host knows how many elements of a mask are set
 *   scalar    the host read an element
 *   copy      between host and device: its bytes, whether the host waits for it, and what memory of the host's it is
 *   wait      the host waits for an event, a stream or a device
 *   record    an event is recorded
 *   block     a stream waits for an event
 *   pin       memory of the host is pinned, by its bytes
 *   keep      memory of the device is not to be given to others before a stream is done with it, by its bytes
 */
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

namespace {

using at::Tensor;

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex NUM_DEVICES = 2;

/* ---- reports ---- */

using Report = void (*)(const char* kind, const char* what, int device, int64_t stream);
std::atomic<Report> report_to{nullptr};

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, NUM_DEVICES> current_streams{};

void report(const char* kind, const std::string& what, c10::DeviceIndex device, c10::StreamId stream) {
  if (const auto to = report_to.load()) to(kind, what.c_str(), device, stream);
}

void report(const char* kind, const std::string& what, c10::Device device) {
  const auto index = device.has_index() ? device.index() : current_device;
  report(kind, what, index, current_streams[index]);
}

/* ---- memory ---- */

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // by address: bytes

bool is_pinned(const void* data) {
  const auto* address = static_cast<const char*>(data);
  const std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned.upper_bound(address);
  return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

void* zeros(size_t nbytes) {
  void* data = nullptr;
  if (nbytes == 0 || posix_memalign(&data, 512, nbytes) != 0) return nullptr;  // as CUDA's allocator aligns
  return std::memset(data, 0, nbytes);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = zeros(nbytes);
    return {data, data, &free, c10::Device(CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  static void give_back(void* data) {
    const std::lock_guard<std::mutex> held(pinned_lock);
    pinned.erase(static_cast<const char*>(data));
    free(data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = zeros(nbytes);
    report("pin", std::to_string(nbytes), {CUDA, current_device});
    const std::lock_guard<std::mutex> held(pinned_lock);
    if (data != nullptr) pinned[static_cast<const char*>(data)] = nbytes;
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
} pinned_memory;

/* ---- streams and events ---- */

std::atomic<c10::StreamId> num_streams{0};
std::atomic<intptr_t> num_events{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, placed(device), id);
  }
  static c10::Device placed(c10::Device device) {
    return {CUDA, device.has_index() ? device.index() : current_device};
  }
  static std::string name(void* event) { return "event " + std::to_string(reinterpret_cast<intptr_t>(event)); }
  static void report_on(const char* kind, const std::string& what, const c10::Stream& stream) {
    report(kind, what, stream.device_index(), stream.id());
  }

  c10::DeviceType type() const override { return CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  c10::Device getDevice() const override { return {CUDA, current_device}; }
  c10::Device exchangeDevice(c10::Device to) const override { return {CUDA, std::exchange(current_device, to.index())}; }
  void setDevice(c10::Device to) const override { current_device = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = to.index(); }

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[placed(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, ++num_streams); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, ++num_streams); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(to.device(), std::exchange(current_streams[to.device_index()], to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { report_on("wait", "stream", stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override { report("wait", "device", {CUDA, device}); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++num_events);
    report_on("record", name(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override { report_on("block", name(event), stream); }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { report("wait", name(event), getDevice()); }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
} guard;

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  int getNumGPUs() const override { return NUM_DEVICES; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  c10::DeviceIndex current_device() const override { return guard.getDevice().index(); }
  c10::DeviceIndex getCurrentDevice() const override { return guard.getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex to) const override { guard.setDevice({CUDA, to}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override { return guard.exchangeDevice({CUDA, to}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void deviceSynchronize(c10::DeviceIndex device) const override { guard.synchronizeDevice(device); }
};

/* ---- operators ---- */

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }

/* A tensor of the CPU over the same memory; where there is none, one of its own, which can grow. */
Tensor twin_of(const Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  auto* data = static_cast<char*>(tensor.storage().mutable_data());
  if (data == nullptr) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  data += tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

/* One call of an operator, carried over to the host, and its results, carried back. */
class HostCall {
 public:
  explicit HostCall(std::string name) : name_(std::move(name)) {}

  c10::IValue argument(const c10::IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == CUDA) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_host(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        has_mask_ |= tensor && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
        list.push_back(tensor ? std::optional<Tensor>(to_host(*tensor)) : tensor);
      }
      return list;
    }
    return value;
  }

  /* Called when all arguments are known. */
  void report_it() const { report(has_mask_ ? "mask" : "operator", name_, device()); }

  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
      return list;
    }
    return value;
  }

  /* Give outputs the shapes that the host has given them. */
  void follow_resizes() {
    for (auto& [tensor, twin] : twins_)
      if (tensor.sizes() != twin.sizes()) {
        tensor.resize_(twin.sizes());
        twin_of(tensor).copy_(twin);
      }
  }

 private:
  c10::Device device() const { return twins_.empty() ? c10::Device(CUDA, current_device) : twins_[0].first.device(); }

  Tensor to_host(const Tensor& tensor) {
    if (!is_here(tensor)) {
      TORCH_CHECK(!tensor.defined() || tensor.dim() == 0, name_, " got a tensor on ", tensor.device(), " beside one on a GPU");
      return tensor;
    }
    twins_.emplace_back(tensor, twin_of(tensor));
    return twins_.back().second;
  }

  Tensor to_device(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [tensor, twin] : twins_) {
      if (result.is_same(twin)) return tensor;
      if (result.storage().is_alias_of(twin.storage()))
        return tensor.as_strided(result.sizes(), result.strides(), tensor.storage_offset() + result.storage_offset());
    }
    auto made = at::empty_strided(result.sizes(), result.strides(), result.options().device(device()));
    twin_of(made).copy_(result);
    return made;
  }

  std::string name_;
  bool has_mask_ = false;
  std::vector<std::pair<Tensor, Tensor>> twins_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall call(toString(op.operator_name()));
  const auto num_arguments = op.schema().arguments().size(), num_returns = op.schema().returns().size();
  for (auto at = stack->size() - num_arguments; at < stack->size(); at++) (*stack)[at] = call.argument((*stack)[at]);
  call.report_it();
  op.callBoxed(stack);
  call.follow_resizes();
  for (auto at = stack->size() - num_returns; at < stack->size(); at++) (*stack)[at] = call.result((*stack)[at]);
}

struct On {  // allocate there
  explicit On(std::optional<at::Device> device) : before(current_device) {
    if (device && device->has_index()) current_device = device->index();
  }
  ~On() { current_device = before; }
  c10::DeviceIndex before;
};

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const On there(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const On there(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

Tensor& copy(Tensor& self, const Tensor& from, bool non_blocking) {
  if (is_here(self) && is_here(from)) {
    report("operator", "aten::copy_", self.device());
  } else {
    const Tensor& host = is_here(self) ? from : self;
    std::ostringstream what;
    what << from.nbytes() << (is_here(self) ? " to" : " from") << (non_blocking ? " async" : " blocking")
         << (is_pinned(host.storage().data()) ? " pinned" : " pageable");
    report("copy", what.str(), is_here(self) ? self.device() : from.device());
  }
  Tensor to = is_here(self) ? twin_of(self) : self;
  to.copy_(is_here(from) ? twin_of(from) : from);
  return self;
}

at::Scalar element(const Tensor& self) {
  report("scalar", "aten::_local_scalar_dense", self.device());
  return twin_of(self).item();
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}
Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }

void record_stream(Tensor& self, c10::Stream stream) {
  report("keep", std::to_string(self.nbytes()), stream.device_index(), stream.id());
}

void implement_here(torch::Library& m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &element);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view", &view);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

/* ---- kernels of a build with CUDA ---- */

/* The key of a backend that torch has no kernel for: what is dispatched to it falls back, or is composed of what does. */
constexpr auto NO_BACKEND = c10::DispatchKey::PrivateUse3;

void run_as_built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(NO_BACKEND), stack);
}

/* Put out of use the kernels that torch has for the device. A build without CUDA has next to none: all builds run, and
 * report, the same operators. */
void replace_kernels(torch::Library& m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.getNamespace() != "aten") continue;  // process groups: theirs know no device
    const auto in_aten = toString(name).substr(std::strlen("aten::"));
    m.impl(in_aten.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_as_built_without_cuda>());
  }
}

/* ---- what torch finds ---- */

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void register_operators() {
  static torch::Library replaced = MAKE_TORCH_LIBRARY_IMPL(aten, CUDA), here = MAKE_TORCH_LIBRARY_IMPL(aten, CUDA);
  static torch::Library rest = MAKE_TORCH_LIBRARY_IMPL(_, CUDA), replaced_rest = MAKE_TORCH_LIBRARY_IMPL(_, PrivateUse3);
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard silenced(&silence);  // of one kernel that replaces another
  replace_kernels(replaced);
  implement_here(here);  // of two kernels, the later one counts
  rest.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  replaced_rest.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

[[maybe_unused]] const bool installed = [] {
  register_operators();
  c10::impl::DeviceGuardImplRegistrar(CUDA, &guard);
  c10::SetAllocator(CUDA, &device_memory, 255);
  // torch has made its hooks already: those of the build. Neither these nor ours have members of their own.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
  return true;
}();

}  // namespace

/* Call to(kind, what, device, stream) from now on, on whatever thread; null: nobody. */
extern "C" void report_device_calls(Report to) { report_to = to; }

/* UntypedStorage.resize_, whose CUDA part no key, hook or guard reaches: torch calls it, or refuses to, itself. */
extern "C" void resize_device_storage(c10::StorageImpl* storage, int64_t nbytes) {
  const On there(storage->device());
  auto resized = device_memory.allocate(nbytes);
  const auto kept = std::min<size_t>(nbytes, storage->nbytes());
  if (kept > 0) std::memcpy(resized.get(), storage->data_ptr().get(), kept);
  storage->set_data_ptr_noswap(std::move(resized));
  storage->set_nbytes(nbytes);
}
