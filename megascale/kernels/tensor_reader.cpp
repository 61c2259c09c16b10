/* What the host must know of many tensors, in one walk over them.
 *
 * From Python every attribute of every tensor is a visit of its own, and each visit finds the tensor out of cache where
 * there are many: about 3 us a tensor and step. Here all attributes are read in one visit, and the memory of the next
 * tensors is fetched while this one is read. A walk costs what its cache lines cost: only those that are read are
 * fetched, and a parameter's gradient is read while the parameter is at hand.
 *
 * Called with the interpreter's lock held. The functions that return a number return 0 where all tensors could be read.
 */
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef Py_GIL_DISABLED
#error "lists could change while they are read"
#endif

namespace {

using c10::TensorImpl;

constexpr Py_ssize_t BLOCK = 32;       // tensors that are fetched together
constexpr Py_ssize_t FEW = 4 * BLOCK;  // not worth a second thread

/* Where tensors lie, and what lies there: [4][n]. */
struct Memory {
  int64_t *pointer, *numel, *kind, *layout;

  Memory(int64_t* out, Py_ssize_t n) : pointer(out), numel(out + n), kind(out + 2 * n), layout(out + 3 * n) {}
};

/* What Python may have changed of them: [2][n]. */
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

/* Into the second-level cache, which waits for many more lines at a time than the first. */
inline void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

/* Of an object, the bytes [begin, end), which lie on two cache lines at most. */
inline void fetch(const void* object, size_t begin, size_t end) {
  fetch(static_cast<const char*>(object) + begin);
  fetch(static_cast<const char*>(object) + end - 1);
}

void fetch_object(const PyObject* object) { fetch(object, 8, 24); }  // its type, and where its tensor is

void fetch_tensor(const TensorImpl* tensor) {
  fetch(tensor, 16, 48);  // where its parts are
  fetch(tensor, sizeof(TensorImpl) - 32, sizeof(TensorImpl));  // offset, elements, dtype, device, keys
}

void fetch_storage(const TensorImpl* tensor) {
  fetch(tensor->unsafe_storage().unsafeGetStorageImpl(), 16, 64);  // where its data is, and whether that may be written
}

void fetch_version(const TensorImpl* tensor) {
  const void* counter;
  std::memcpy(&counter, &tensor->version_counter(), sizeof counter);
  fetch(static_cast<const char*>(counter) + 16);
}

void fetch_autograd(const TensorImpl* tensor) {
  const auto* meta = reinterpret_cast<const char*>(tensor->autograd_meta());
  if (meta == nullptr) return;
  fetch(meta, 0, 48);  // its functions, and the gradient
  fetch(meta + 128);   // whether it requires one
}

/* ---- reading ---- */

/* Whether the tensor is plain memory. What Python dispatches, a DTensor's outside for one, is not; nor is what only
 * torch's operators know how to read: values that are to be negated or conjugated first, and zeros without memory.
 */
bool is_plain(TensorImpl* tensor) {
  using c10::DispatchKey;
  const auto special = c10::DispatchKeySet({
      DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::Negative, DispatchKey::Conjugate,
      DispatchKey::ZeroTensor});
  return tensor != nullptr && tensor->layout() == c10::kStrided && tensor->has_storage() &&
      !tensor->is_inference() && !tensor->key_set().has_any(special);
}

/* Two tensors are of one kind where dtype, device and contiguity are the same. Never negative. */
int64_t kind_of(const TensorImpl* tensor) {
  const auto device = tensor->device();
  return static_cast<int64_t>(c10::typeMetaToScalarType(tensor->dtype())) |
      static_cast<int64_t>(device.type()) << 8 | static_cast<int64_t>(device.index() + 1) << 16 |
      static_cast<int64_t>(tensor->is_contiguous()) << 32;
}

/* The same number for tensors of the same shape and strides; for others another one, but once in 2^64 times. */
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

/* The elements of its storage that a tensor with elements reaches: behind its last one. */
int64_t end_of(const TensorImpl* tensor) {
  if (tensor->is_contiguous()) return tensor->storage_offset() + tensor->numel();
  int64_t last = tensor->storage_offset();
  for (int64_t dim = 0; dim < tensor->dim(); dim++) last += (tensor->sizes()[dim] - 1) * tensor->strides()[dim];
  return last + 1;
}

/* Returns whether it could be read; its kind is -1 where not. */
bool read_memory(TensorImpl* tensor, const Memory& out, Py_ssize_t at) {
  out.kind[at] = -1;
  if (!is_plain(tensor)) return false;
  const auto numel = tensor->numel(), itemsize = static_cast<int64_t>(tensor->itemsize());
  // As Tensor.data_ptr(): an empty tensor lies nowhere. It throws for memory that may not be written.
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  auto* data = numel == 0 ? nullptr : static_cast<char*>(storage->mutable_data());
  if (numel != 0 && (data == nullptr || end_of(tensor) * itemsize > static_cast<int64_t>(storage->nbytes()))) return false;
  out.pointer[at] = data == nullptr ? 0 : reinterpret_cast<int64_t>(data + tensor->storage_offset() * itemsize);
  out.numel[at] = numel;
  out.kind[at] = kind_of(tensor);
  out.layout[at] = layout_of(tensor);
  return true;
}

/* Whether a tensor still is what was read of it. */
bool lies_there(TensorImpl* tensor, const Memory& kept, Py_ssize_t at) {
  if (!is_plain(tensor) || tensor->numel() != kept.numel[at] || kind_of(tensor) != kept.kind[at]) return false;
  if (!tensor->is_contiguous() && layout_of(tensor) != kept.layout[at]) return false;
  if (tensor->numel() == 0) return true;
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  const auto itemsize = static_cast<int64_t>(tensor->itemsize()), offset = tensor->storage_offset() * itemsize;
  // Where it is contiguous, what it reaches is known without its shape.
  const auto reach = tensor->is_contiguous() ? tensor->numel() * itemsize : 0;
  const auto* data = static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get());
  return data != nullptr && reinterpret_cast<int64_t>(data + offset) == kept.pointer[at] &&
      offset + reach <= static_cast<int64_t>(storage->nbytes());
}

void read_status(TensorImpl* tensor, const Status& out, Py_ssize_t at) {
  out.version[at] = tensor->version_counter().current_version();
  out.requires_grad[at] = tensor->requires_grad();
}

/* Call visit(tensors, begin, end) for blocks of a list; where an item is no plain tensor there is a null. Returns the sum
 * of what it returns.
 */
template <typename Visit>
int64_t each_block(PyObject* list, int threads, Visit visit) {
  const auto n = PyList_GET_SIZE(list);
  auto** items = items_of(list);
  int64_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum) if (n > FEW)
  for (Py_ssize_t begin = 0; begin < n; begin += BLOCK) {
    const auto end = std::min(begin + BLOCK, n);
    for (auto i = end; i < std::min(end + BLOCK, n); i++) fetch_object(items[i]);
    TensorImpl* tensors[BLOCK];
    for (auto i = begin; i < end; i++) fetch_tensor(tensors[i - begin] = tensor_of(items[i]));
    try {
      sum += visit(tensors, begin, end);
    } catch (...) {  // memory that may not be written
      sum++;
    }
  }
  return sum;
}

/* Call one(tensor) for the tensors of a block. */
template <typename One>
void each(TensorImpl** tensors, Py_ssize_t count, One one) {
  for (Py_ssize_t i = 0; i < count; i++)
    if (tensors[i] != nullptr) one(tensors[i]);
}

/* ---- dicts ---- */

void fetch_entries(PyObject* dict) {
  if (!PyDict_Check(dict)) return;
  const auto* keys = reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(dict)->ma_keys);
  fetch(keys, 0, 64);
  fetch(keys, 64, 128);
}

bool same_text(PyObject* one, PyObject* other) {
  if (one == other) return true;
  if (!PyUnicode_CheckExact(one) || !PyUnicode_CheckExact(other)) return false;
  const auto length = PyUnicode_GET_LENGTH(one);
  return length == PyUnicode_GET_LENGTH(other) && PyUnicode_KIND(one) == PyUnicode_KIND(other) &&
      !std::memcmp(PyUnicode_DATA(one), PyUnicode_DATA(other), length * PyUnicode_KIND(one));
}

/* Whether dict[names[j]] is columns[j][i] for all of k names. */
bool holds(PyObject* dict, Py_ssize_t i, PyObject** names, PyObject** columns, Py_ssize_t k) {
  if (!PyDict_Check(dict)) return false;
  PyObject *key, *value;
  Py_ssize_t at = 0, found = 0;
  while (PyDict_Next(dict, &at, &key, &value)) {
    for (Py_ssize_t name = 0; name < k; name++) {
      if (!same_text(key, names[name])) continue;
      if (value != items_of(columns[name])[i]) return false;
      found++;
      break;
    }
  }
  return found == k;
}

}  // namespace

extern "C" {

/* memory: [4][n]. status: [2][n]. grads: [4][n], the memory of their gradients, or null. A tensor without a gradient that
 * could be read counts as read, the gradient's kind is -1.
 */
int64_t read_tensors(PyObject* list, int64_t* memory, int64_t* status, int64_t* grads, int threads) {
  const auto n = PyList_GET_SIZE(list);
  const Memory out(memory, n), out_of_grads(grads, n);
  const Status out_of_status(status, n);
  return each_block(list, threads, [=](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
    const auto count = end - begin;
    each(tensors, count, fetch_autograd);
    each(tensors, count, fetch_storage);
    each(tensors, count, fetch_version);
    TensorImpl* of_grads[BLOCK] = {};
    if (grads != nullptr) {
      for (Py_ssize_t i = 0; i < count; i++)
        if (tensors[i] != nullptr) of_grads[i] = grad_of(tensors[i]);
      each(of_grads, count, fetch_tensor);
    }
    int64_t unread = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
      if (read_memory(tensors[i], out, begin + i)) read_status(tensors[i], out_of_status, begin + i);
      else unread++;
    }
    if (grads == nullptr) return unread;
    each(of_grads, count, fetch_storage);
    for (Py_ssize_t i = 0; i < count; i++) read_memory(of_grads[i], out_of_grads, begin + i);
    return unread;
  });
}

/* memory: [4][n]. */
int64_t read_memory_of(PyObject* list, int64_t* memory, int threads) {
  const Memory out(memory, PyList_GET_SIZE(list));
  return each_block(list, threads, [=](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
    each(tensors, end - begin, fetch_storage);
    int64_t unread = 0;
    for (auto i = begin; i < end; i++) unread += !read_memory(tensors[i - begin], out, i);
    return unread;
  });
}

/* Whether all tensors lie where they lay, and are what they were. memory: [4][n], from read_memory_of.
 *
 * Called for all of an optimizer's state in every step, so that it reads two lines of a tensor only: the shape of one
 * that is contiguous, as it was, is told by its elements. Objects are fetched two blocks ahead, tensors one.
 */
int64_t hold_memory(PyObject* list, const int64_t* memory, int threads) {
  const auto n = PyList_GET_SIZE(list);
  const Memory kept(const_cast<int64_t*>(memory), n);
  auto** items = items_of(list);
  const auto blocks = (n + BLOCK - 1) / BLOCK;
  int64_t wrong = 0;
#pragma omp parallel num_threads(threads) reduction(+ : wrong) if (n > FEW)
  {
    TensorImpl *now[BLOCK] = {}, *next[BLOCK] = {};
    const auto look_up = [=](Py_ssize_t block, TensorImpl** tensors) {
      for (auto i = block * BLOCK; i < std::min((block + 1) * BLOCK, n); i++)
        fetch_tensor(tensors[i % BLOCK] = tensor_of(items[i]));
    };
    Py_ssize_t looked_up = -1;
#pragma omp for schedule(static)
    for (Py_ssize_t block = 0; block < blocks; block++) {
      if (looked_up != block) look_up(block, next);
      std::copy(next, next + BLOCK, now);
      const auto begin = block * BLOCK, end = std::min(begin + BLOCK, n);
      for (auto i = end + BLOCK; i < std::min(end + 2 * BLOCK, n); i++) fetch_object(items[i]);
      if (block + 1 < blocks) look_up(looked_up = block + 1, next);
      for (auto i = begin; i < end; i++)
        if (now[i - begin] != nullptr) fetch_storage(now[i - begin]);
      for (auto i = begin; i < end; i++) wrong += !lies_there(now[i - begin], kept, i);
    }
  }
  return wrong == 0;
}

/* versions: [n]. */
int64_t read_versions(PyObject* list, int64_t* versions, int threads) {
  return each_block(list, threads, [=](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
    each(tensors, end - begin, fetch_version);
    int64_t unread = 0;
    for (auto i = begin; i < end; i++) {
      auto* tensor = tensors[i - begin];
      const bool counts = tensor != nullptr && !tensor->is_inference();
      if (counts) versions[i] = tensor->version_counter().current_version();
      unread += !counts;
    }
    return unread;
  });
}

/* Tell autograd that all tensors have been written; where one cannot be told, all others are. versions: [n], as they are
 * then; 0 of one that has none.
 */
int64_t increment_versions(PyObject* list, int64_t* versions, int threads) {
  return each_block(list, threads, [=](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
    each(tensors, end - begin, fetch_version);
    int64_t untold = 0;
    for (auto i = begin; i < end; i++) {
      auto* tensor = tensors[i - begin];
      const bool counts = tensor != nullptr && !tensor->is_inference();
      if (counts) tensor->bump_version();
      versions[i] = counts ? tensor->version_counter().current_version() : 0;
      untold += tensor == nullptr;
    }
    return untold;
  });
}

/* Whether two lists hold the same objects. */
int64_t same_objects(PyObject* one, PyObject* other) {
  const auto n = PyList_GET_SIZE(one);
  return n == PyList_GET_SIZE(other) && (n == 0 || !std::memcmp(items_of(one), items_of(other), n * sizeof(PyObject*)));
}

/* Whether the values of a dict, in its order, are the objects of a list. */
int64_t same_values(PyObject* dict, PyObject* list) {
  const auto n = PyList_GET_SIZE(list);
  if (PyDict_GET_SIZE(dict) != n) return 0;
  auto** items = items_of(list);
  PyObject *key, *value;
  Py_ssize_t at = 0, i = 0;
  while (PyDict_Next(dict, &at, &key, &value))
    if (i == n || items[i++] != value) return 0;
  return i == n;
}

/* Whether entries[i][names[k]] is columns[k][i], for all dicts and all names. */
int64_t hold_objects(PyObject* entries, PyObject* names, PyObject* columns, int threads) {
  const auto n = PyList_GET_SIZE(entries), k = PyList_GET_SIZE(names);
  for (Py_ssize_t name = 0; name < k; name++)
    if (PyList_GET_SIZE(PyList_GET_ITEM(columns, name)) != n) return 0;
  auto** dicts = items_of(entries);
  int64_t wrong = 0;
  // Dicts are walked, not asked: what asks them might run Python code, which only this thread may.
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : wrong) if (n > FEW)
  for (Py_ssize_t i = 0; i < n; i++) {
    if (i + 2 * BLOCK < n) fetch(dicts[i + 2 * BLOCK], 8, 48);
    if (i + BLOCK < n) fetch_entries(dicts[i + BLOCK]);
    wrong += !holds(dicts[i], i, items_of(names), items_of(columns), k);
  }
  return wrong == 0;
}
}
