/* torch's CUDA where there is none: devices whose memory the host cannot touch (memory.h), whose operators run on the
 * host, and a report of all that they are asked to do. The build of torch may have CUDA, or not: its own is out of use.
 *
 * Tensors on them are plain tensors of type "cuda": what asks one for its device, address or type sees what it would see
 * on a GPU. An operator runs as the CPU's, over the bytes that the device keeps: when it is called, or later (late_streams.h). Reported
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
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

#include "host_call.h"
#include "memory.h"
#include "report.h"

namespace {

/* ---- memory ---- */

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device here(CUDA, current_device);
    memory::reuse(stream_of(here));
    void* address = memory::allocate(nbytes, stream_of(here));
    return {address, address, &memory::give_back_to_device, here};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &memory::give_back_to_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    late::streams.finish();
    std::memcpy(memory::bytes_of(to), memory::bytes_of(from), nbytes);
  }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = memory::zeros(nbytes);
    report("pin", std::to_string(nbytes), {CUDA, current_device});
    memory::pinned.add(data, {data, nbytes, {}, {}});
    return {data, data, &memory::give_back_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &memory::give_back_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
} pinned_memory;

/* ---- streams and events ---- */

std::atomic<c10::StreamId> num_streams{0};
std::atomic<intptr_t> num_events{0};

std::mutex events_lock;
std::map<void*, late::Point> events;  // as each was recorded last

std::optional<late::Point> recorded(void* event) {
  const std::lock_guard<std::mutex> held(events_lock);
  const auto found = events.find(event);
  return found == events.end() ? std::nullopt : std::optional(found->second);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, placed(device), id);
  }
  static c10::Device placed(c10::Device device) {
    return {CUDA, device.has_index() ? device.index() : current_device};
  }
  static std::string name(void* event) { return "event " + std::to_string(reinterpret_cast<intptr_t>(event)); }
  static late::Place place(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

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
  bool queryStream(const c10::Stream& stream) const override {
    return late::streams.is_reached(late::streams.now(place(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!report("wait", "stream", place(stream))) late::streams.reach(place(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    if (!report("wait", "device", {CUDA, device})) late::streams.reach_all(device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++num_events);
    report("record", name(*event), place(stream));
    const std::lock_guard<std::mutex> held(events_lock);
    events[*event] = late::streams.now(place(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto behind = recorded(event);
    if (!report("block", name(event), place(stream)) && behind) late::streams.give(place(stream), nullptr, {*behind});
  }
  bool queryEvent(void* event) const override {
    const auto point = recorded(event);
    return !point || late::streams.is_reached(*point);
  }
  void synchronizeEvent(void* event) const override {
    const auto point = recorded(event);
    if (!report("wait", name(event), getDevice()) && point) late::streams.reach(*point);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    const std::lock_guard<std::mutex> held(events_lock);
    events.erase(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory::device.keep(data.get(), place(stream));
  }
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
  bool isPinnedPtr(const void* data) const override { return memory::pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void deviceSynchronize(c10::DeviceIndex device) const override { guard.synchronizeDevice(device); }
};

/* ---- operators ---- */

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { HostCall{op}(stack); }

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
  const auto device = is_here(self) ? self.device() : from.device();
  bool waits = false;
  Tensor source = is_here(from) ? twin_of(from) : from;
  if (is_here(self) && is_here(from)) {
    report("operator", "aten::copy_", device);
    if (from.device() != device) late::streams.finish();
  } else {
    const Tensor& host = is_here(self) ? from : self;
    const bool is_pinned = memory::pinned.holds(host.storage().data());
    std::ostringstream what;
    what << from.nbytes() << (is_here(self) ? " to" : " from") << (non_blocking ? " async" : " blocking")
         << (is_pinned ? " pinned" : " pageable");
    report("copy", what.str(), device);
    waits = !non_blocking || (!is_pinned && !is_here(self));
    if (late::streams.are_late() && !is_here(from)) source = is_pinned ? unkept(from) : from.clone();
  }
  const Tensor to = is_here(self) ? twin_of(self) : late::streams.are_late() ? unkept(self) : self;
  late::streams.give(stream_of(device), [to, source] {
    const Unseen unseen;
    to.copy_(source);
  });
  if (waits) late::streams.reach(stream_of(device));
  return self;
}

at::Scalar element(const Tensor& self) {
  if (!report("scalar", "aten::_local_scalar_dense", self.device())) late::streams.reach(stream_of(self.device()));
  return twin_of(self).item();
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  const On there(storage->device());
  auto resized = device_memory.allocate(nbytes);
  const auto kept = std::min(nbytes, storage->nbytes());
  if (kept > 0) device_memory.copy_data(resized.get(), storage->data_ptr().get(), kept);
  storage->set_data_ptr_noswap(std::move(resized));
  storage->set_nbytes(nbytes);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  const auto nbytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (storage->nbytes() < nbytes) resize_storage(storage, nbytes);  // torch would copy what is there on the host
  return at::native::resize_(self, size, format);
}
Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }

void record_stream(Tensor& self, c10::Stream stream) {
  report("keep", std::to_string(self.nbytes()), {stream.device_index(), stream.id()});
  memory::device.keep(self.storage().data(), {stream.device_index(), stream.id()});
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

/* ---- collectives: see ranks.py ---- */

/* Return on the host what the current stream would find. */
Tensor read_in_order(const Tensor& tensor) {
  late::streams.reach(stream_of(tensor.device()));
  return twin_of(tensor).clone();
}

/* Write results on a stream, behind the current one; wrong ones if what was sent is no longer what is there then. */
void write_in_order(
    at::TensorList outputs, at::TensorList results, at::TensorList inputs, at::TensorList sent, int64_t stream) {
  const auto device = outputs[0].device();
  // Copies: to free a tensor that Python has seen takes Python's lock, and work is carried out, and freed, without.
  std::vector<std::pair<Tensor, Tensor>> written, read;
  for (size_t at = 0; at < outputs.size(); at++) written.emplace_back(twin_of(outputs[at]), results[at].clone());
  for (size_t at = 0; at < inputs.size(); at++) read.emplace_back(twin_of(inputs[at]), sent[at].clone());
  late::streams.give(
      {device.index(), stream},
      [written, read] {
        const Unseen unseen;
        bool is_torn = false;
        for (const auto& [there, then] : read) {
          const Tensor now = there.contiguous();
          is_torn |= now.nbytes() > 0 && std::memcmp(now.const_data_ptr(), then.contiguous().const_data_ptr(), now.nbytes()) != 0;
        }
        for (const auto& [to, value] : written) {
          to.copy_(value);
          if (is_torn) to.fill_(to.is_floating_point() ? std::nan("") : -1);
        }
      },
      {late::streams.now(stream_of(device))});
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
  static torch::Library collectives(torch::Library::DEF, "fake_device", std::nullopt, __FILE__, __LINE__);
  collectives.def("read", &read_in_order);
  collectives.def("write", &write_in_order);
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
extern "C" void resize_device_storage(c10::StorageImpl* storage, int64_t nbytes) { resize_storage(storage, nbytes); }

/* Return where the host keeps the bytes at an address of the device: for what stands in for a kernel. */
extern "C" void* bytes_of_device(const void* address) { return memory::bytes_of(address); }

/* Let streams run in an order of late_streams.h, of a seed, once what they were given before is done. Returns how many
 * blocks of memory were written after they were freed. */
extern "C" uint64_t order_device_streams(int order, uint32_t seed) {
  memory::reuse_all();
  late::streams.follow(static_cast<late::Order>(order), seed);
  return memory::free_overwritten();
}

/* Return the most bytes of the devices' memory that were held since the call before. */
extern "C" uint64_t most_device_bytes() { return memory::device.take_most(); }
