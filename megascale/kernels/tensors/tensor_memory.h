/* One tensor's memory: what of it is prefetched, and what is read. */
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>

namespace {

using c10::TensorImpl;

/* Addresses and forms of tensors: [4][n]. At first the result of an earlier walk, or zeros. */
struct Memory {
  int64_t *pointer, *numel, *kind, *layout;

  Memory(int64_t* out, Py_ssize_t n) : pointer(out), numel(out + n), kind(out + 2 * n), layout(out + 3 * n) {}
};

/* What may change without new memory: [2][n]. */
struct Status {
  int64_t *version, *requires_grad;

  Status(int64_t* out, Py_ssize_t n) : version(out), requires_grad(out + n) {}
};

PyObject** items_of(PyObject* list) { return reinterpret_cast<PyListObject*>(list)->ob_item; }

TensorImpl* tensor_of(PyObject* object) {
  return THPVariable_CheckExact(object) ? THPVariable_Unpack(object).unsafeGetTensorImpl() : nullptr;
}

TensorImpl* grad_of(TensorImpl* tensor) {
  const auto& grad = tensor->grad();
  return grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
}

/* ---- fetching ---- */

/* Prefetch for one read: what the second-level cache holds is left to the kernels. */
inline void fetch(const void* address) { __builtin_prefetch(address, 0, 0); }

/* Prefetch bytes [begin, end) of an object, which are on at most two cache lines. */
inline void fetch(const void* object, size_t begin, size_t end) {
  fetch(static_cast<const char*>(object) + begin);
  fetch(static_cast<const char*>(object) + end - 1);
}

void fetch_object(const PyObject* object) { fetch(object, 8, 24); }  // its type, and the pointer to its tensor

/* Prefetch the fields after the shape: offset, elements, dtype, device, keys. */
inline void fetch_end(const TensorImpl* tensor) { fetch(tensor, sizeof(TensorImpl) - 32, sizeof(TensorImpl)); }

/* Prefetch all but shape and strides. */
inline void fetch_ends(const TensorImpl* tensor) {
  fetch(tensor, 16, 48);  // pointers to its parts
  fetch_end(tensor);
}

inline void fetch_whole(const TensorImpl* tensor) {
  for (size_t at = 16; at < sizeof(TensorImpl); at += 64) fetch(reinterpret_cast<const char*>(tensor) + at);
  fetch_end(tensor);
}

inline void fetch_storage(const TensorImpl* tensor) {
  fetch(tensor->unsafe_storage().unsafeGetStorageImpl(), 16, 64);  // the data pointer, and whether it may be written
}

inline void fetch_version(const TensorImpl* tensor) {
  const void* counter;
  std::memcpy(&counter, &tensor->version_counter(), sizeof counter);
  fetch(static_cast<const char*>(counter) + 16);
}

inline void fetch_autograd(const TensorImpl* tensor) {
  const auto* meta = reinterpret_cast<const char*>(tensor->autograd_meta());
  if (meta == nullptr) return;
  fetch(meta, 0, 48);  // its vtable, and the gradient
  fetch(meta + 128);   // whether it requires one
}

/* ---- reading ---- */

/* Whether the tensor is plain memory: no wrapper that Python dispatches, such as a DTensor, no conj or neg bit, and no
 * zeros without memory.
 */
bool is_plain(TensorImpl* tensor) {
  using c10::DispatchKey;
  const auto special = c10::DispatchKeySet({
      DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::Negative, DispatchKey::Conjugate,
      DispatchKey::ZeroTensor});
  return tensor != nullptr && tensor->layout() == c10::kStrided &&
      tensor->unsafe_storage().unsafeGetStorageImpl() != nullptr && !tensor->is_inference() &&
      !tensor->key_set().has_any(special);
}

/* Return a number, not negative, that is equal for two tensors of the same dtype, device and contiguity.
 * in_a_row: whether it is contiguous.
 */
inline int64_t kind_of(const TensorImpl* tensor, bool in_a_row) {
  const auto device = tensor->device();
  return static_cast<int64_t>(c10::typeMetaToScalarType(tensor->dtype())) |
      static_cast<int64_t>(device.type()) << 8 | static_cast<int64_t>(device.index() + 1) << 16 |
      static_cast<int64_t>(in_a_row) << 32;
}

/* Return a hash, of 64 bits, of shape and strides. */
int64_t layout_of(const TensorImpl* tensor) {
  uint64_t mixed = tensor->dim();
  const auto mix = [&mixed](int64_t number) {
    mixed = (mixed ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 29;
  };
  for (const auto size : tensor->sizes()) mix(size);
  for (const auto stride : tensor->strides()) mix(stride);
  return static_cast<int64_t>(mixed);
}

/* Return the end of a non-empty tensor in its storage, in elements. in_a_row: whether it is contiguous. */
inline int64_t end_of(const TensorImpl* tensor, bool in_a_row) {
  if (in_a_row) return tensor->storage_offset() + tensor->numel();
  int64_t last = tensor->storage_offset();
  for (int64_t dim = 0; dim < tensor->dim(); dim++) last += (tensor->sizes()[dim] - 1) * tensor->strides()[dim];
  return last + 1;
}

/* Write a number if it differs, as a cache line that is only read need not go back to memory. */
void put(int64_t& place, int64_t number, bool& changed) {
  if (place == number) return;
  place = number;
  changed = true;
}

/* Return whether the tensor could be read; if not, its kind is -1.
 *
 * moved, changed: set if its address, or its form, differs from the last walk.
 */
[[gnu::flatten]] inline bool read_memory(
    TensorImpl* tensor, const Memory& out, Py_ssize_t at, bool& moved, bool& changed) {
  const auto unread = [&] {
    put(out.kind[at], -1, changed);
    return false;
  };
  if (!is_plain(tensor)) return unread();
  const bool in_a_row = tensor->is_contiguous();
  const auto numel = tensor->numel(), itemsize = static_cast<int64_t>(tensor->itemsize());
  // As Tensor.data_ptr(): null for an empty tensor. Throws for memory that may not be written.
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  auto* data = numel == 0 ? nullptr : static_cast<char*>(storage->mutable_data());
  const auto nbytes = static_cast<int64_t>(storage->nbytes());
  if (numel != 0 && (data == nullptr || end_of(tensor, in_a_row) * itemsize > nbytes)) return unread();
  const auto* first = data == nullptr ? nullptr : data + tensor->storage_offset() * itemsize;
  put(out.pointer[at], reinterpret_cast<int64_t>(first), moved);
  put(out.numel[at], numel, changed);
  put(out.kind[at], kind_of(tensor, in_a_row), changed);
  put(out.layout[at], layout_of(tensor), changed);
  return true;
}

void read_status(TensorImpl* tensor, const Status& out, Py_ssize_t at, bool& changed) {
  out.version[at] = tensor->version_counter().current_version();
  put(out.requires_grad[at], tensor->requires_grad(), changed);
}

}  // namespace
