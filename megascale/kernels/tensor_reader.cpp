/* What the host must know of many tensors, in one walk over them.
 *
 * From Python every attribute of every tensor is a visit of its own, and each visit finds the tensor out of cache where
 * there are many: about 3 us a tensor and step. Here all attributes are read in one visit, and the memory of the next
 * tensors is fetched while this one is read.
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

struct Columns {
  int64_t *version, *pointer, *numel, *kind, *requires_grad;

  Columns(int64_t* out, Py_ssize_t n)
      : version(out), pointer(out + n), numel(out + 2 * n), kind(out + 3 * n), requires_grad(out + 4 * n) {}
};

PyObject** items_of(PyObject* list) { return reinterpret_cast<PyListObject*>(list)->ob_item; }

TensorImpl* tensor_of(PyObject* object) {
  return THPVariable_CheckExact(object) ? THPVariable_Unpack(object).unsafeGetTensorImpl() : nullptr;
}

TensorImpl* grad_of(TensorImpl* tensor) {
  const auto& grad = tensor->grad();
  return grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
}

void fetch(const void* address, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(static_cast<const char*>(address) + offset);
}

/* What a tensor that has been fetched points to. */
void fetch_parts(const TensorImpl* tensor) {
  if (tensor == nullptr) return;
  fetch(tensor->unsafe_storage().unsafeGetStorageImpl(), 64);
  fetch(tensor->autograd_meta(), 128);
}

/* Whether the tensor is plain memory. What Python dispatches, a DTensor's outside for one, is not. */
bool is_plain(TensorImpl* tensor) {
  const auto special = c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  return tensor != nullptr && tensor->layout() == c10::kStrided && tensor->has_storage() &&
      !tensor->is_inference() && !tensor->key_set().has_any(special);
}

/* Two tensors are of one kind where dtype, device and contiguity are the same. */
int64_t kind_of(const TensorImpl* tensor) {
  const auto device = tensor->device();
  return static_cast<int64_t>(c10::typeMetaToScalarType(tensor->dtype())) |
      static_cast<int64_t>(device.type()) << 8 | static_cast<int64_t>(device.index() + 1) << 16 |
      static_cast<int64_t>(tensor->is_contiguous()) << 32;
}

bool read_one(TensorImpl* tensor, const Columns& out, Py_ssize_t at) {
  if (!is_plain(tensor)) return false;
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  const auto numel = tensor->numel();
  // As Tensor.data_ptr(): an empty tensor lies nowhere.
  auto* data = numel == 0 ? nullptr : static_cast<char*>(storage->mutable_data());
  out.version[at] = tensor->version_counter().current_version();
  out.pointer[at] = data == nullptr
      ? 0
      : reinterpret_cast<int64_t>(data + tensor->storage_offset() * static_cast<int64_t>(tensor->itemsize()));
  out.numel[at] = numel;
  out.kind[at] = kind_of(tensor);
  out.requires_grad[at] = tensor->requires_grad();
  return true;
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
    for (auto i = end; i < std::min(end + BLOCK, n); i++) fetch(items[i], sizeof(THPVariable));
    TensorImpl* tensors[BLOCK];
    for (auto i = begin; i < end; i++) fetch(tensors[i - begin] = tensor_of(items[i]), sizeof(TensorImpl));
    try {
      sum += visit(tensors, begin, end);
    } catch (...) {  // memory that may not be written
      sum++;
    }
  }
  return sum;
}

int64_t read_each(TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end, const Columns& out) {
  for (auto i = begin; i < end; i++) fetch_parts(tensors[i - begin]);
  int64_t unread = 0;
  for (auto i = begin; i < end; i++) unread += !read_one(tensors[i - begin], out, i);
  return unread;
}

}  // namespace

extern "C" {

/* columns: [5][n], see Columns. */
int64_t read_tensors(PyObject* list, int64_t* columns, int threads) {
  const Columns out(columns, PyList_GET_SIZE(list));
  return each_block(list, threads, [=](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
    return read_each(tensors, begin, end, out);
  });
}

/* The gradients of a list of parameters; one that has none cannot be read. */
int64_t read_grads(PyObject* list, int64_t* columns, int threads) {
  const Columns out(columns, PyList_GET_SIZE(list));
  return each_block(list, threads, [=](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
    for (auto i = begin; i < end; i++) fetch_parts(tensors[i - begin]);
    for (auto i = begin; i < end; i++) {
      auto*& tensor = tensors[i - begin];
      if (tensor != nullptr) tensor = grad_of(tensor);
      fetch(tensor, sizeof(TensorImpl));
    }
    return read_each(tensors, begin, end, out);
  });
}

/* versions: [n]. */
int64_t read_versions(PyObject* list, int64_t* versions, int threads) {
  return each_block(list, threads, [=](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
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

/* Tell autograd that all tensors have been written; where one cannot be told, all others are. */
int64_t increment_versions(PyObject* list, int threads) {
  return each_block(list, threads, [](TensorImpl** tensors, Py_ssize_t begin, Py_ssize_t end) {
    int64_t untold = 0;
    for (auto i = begin; i < end; i++) {
      auto* tensor = tensors[i - begin];
      if (tensor == nullptr) untold++;
      else if (!tensor->is_inference()) tensor->bump_version();
    }
    return untold;
  });
}

/* Whether two lists hold the same objects. */
int64_t same_objects(PyObject* one, PyObject* other) {
  const auto n = PyList_GET_SIZE(one);
  return n == PyList_GET_SIZE(other) && (n == 0 || !std::memcmp(items_of(one), items_of(other), n * sizeof(PyObject*)));
}

/* Whether entries[i][names[k]] is columns[k][i], for all dicts and all names. */
int64_t hold_objects(PyObject* entries, PyObject* names, PyObject* columns) {
  const auto n = PyList_GET_SIZE(entries), k = PyList_GET_SIZE(names);
  auto** dicts = items_of(entries);
  for (Py_ssize_t i = 0; i < n; i++) {
    if (i + 2 * BLOCK < n) fetch(dicts[i + 2 * BLOCK], sizeof(PyDictObject));
    if (i + BLOCK < n && PyDict_Check(dicts[i + BLOCK]))
      fetch(reinterpret_cast<PyDictObject*>(dicts[i + BLOCK])->ma_keys, 256);
    if (!PyDict_Check(dicts[i])) return 0;
    for (Py_ssize_t name = 0; name < k; name++) {
      auto* column = PyList_GET_ITEM(columns, name);
      if (PyList_GET_SIZE(column) != n) return 0;
      auto* held = PyDict_GetItemWithError(dicts[i], PyList_GET_ITEM(names, name));
      if (held == nullptr) PyErr_Clear();
      if (held == nullptr || held != PyList_GET_ITEM(column, i)) return 0;
    }
  }
  return 1;
}
}
