/* Reads addresses, versions and types of many tensors in one walk.
 *
 * From Python each attribute needs one visit of all tensors, and if there are many each visit misses the cache: about
 * 6 to 10 us per parameter and step. Here all attributes are read in one visit, while the memory of the next tensors is
 * prefetched. The cost is that of cache lines: only those that are needed are fetched, and a gradient is read together
 * with its parameter.
 *
 * Call with the interpreter's lock held. The functions that return a number return 0 if all tensors could be read.
 */
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "lists could change while they are read"
#endif

namespace {

using c10::TensorImpl;

constexpr Py_ssize_t AHEAD = 16;   // tensors between a prefetch and its use
constexpr Py_ssize_t WINDOW = 128;  // tensors in flight at a time: a power of two
constexpr Py_ssize_t FEW = 2048;   // with fewer tensors a second thread does not pay

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

/* Prefetch into the second-level cache, which can wait for many more lines at once than the first. */
inline void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

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
  if (numel != 0 && (data == nullptr || end_of(tensor, in_a_row) * itemsize > static_cast<int64_t>(storage->nbytes()))) return unread();
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

/* ---- walking ---- */

/* A tensor on its way through a walk, null for an item that is none, and its gradient once a stage has looked it up. */
struct Visited {
  TensorImpl *tensor, *grad;
};

/* The tensors of a list. */
struct Listed {
  PyObject** items;

  void fetch_at(Py_ssize_t i) const { fetch_object(items[i]); }
  TensorImpl* at(Py_ssize_t i) const { return tensor_of(items[i]); }
};

/* Walk over tensors [begin, end). See walk(). */
template <typename Source, typename Read, typename... Fetch>
int64_t walk_part(const Source& source, Py_ssize_t begin, Py_ssize_t end, const Read& read, const Fetch&... fetch) {
  constexpr Py_ssize_t ahead = (sizeof...(fetch) + 1) * AHEAD;
  static_assert(ahead < WINDOW);
  Visited window[WINDOW];
  int64_t sum = 0;
  // Prefetches check their bounds only near the edges.
  const auto visit = [&](Py_ssize_t i, auto at_edge) {
    const auto is_inside = [&](Py_ssize_t at) { return !at_edge || (at >= begin && at < end); };
    auto at = i + ahead;
    if (is_inside(at)) source.fetch_at(at);
    at -= AHEAD;
    if (is_inside(at)) window[at % WINDOW] = {source.at(at), nullptr};
    const auto run = [&](const auto& stage) {
      if (is_inside(at) && window[at % WINDOW].tensor != nullptr) stage(window[at % WINDOW]);
      at -= AHEAD;
    };
    (run(fetch), ...);
    if (!is_inside(i)) return;
    try {
      sum += read(window[i % WINDOW], i);
    } catch (...) {  // memory that may not be written
      sum++;
    }
  };
  auto i = begin - ahead;
  while (i < begin) visit(i++, std::true_type());
  while (i < end - ahead) visit(i++, std::false_type());
  while (i < end) visit(i++, std::true_type());
  return sum;
}

/* Call read(visited, i) for each of n tensors. Returns the sum of its results.
 *
 * Each stage of `fetch` prefetches, for a tensor some places ahead, what the next stage or read() needs. The first runs
 * as soon as the tensor's address is known.
 */
template <typename Source, typename Read, typename... Fetch>
int64_t walk(const Source& source, Py_ssize_t n, int threads, const Read& read, const Fetch&... fetch) {
  const Py_ssize_t parts = n > FEW ? threads : 1;
  int64_t sum = 0;
#pragma omp parallel for num_threads(parts) schedule(static) reduction(+ : sum) if (parts > 1)
  for (Py_ssize_t part = 0; part < parts; part++)
    sum += walk_part(source, n * part / parts, n * (part + 1) / parts, read, fetch...);
  return sum;
}

/* The stages of a walk over versions. */
constexpr auto fetch_counted = [](const Visited& at) { fetch_ends(at.tensor); };
constexpr auto fetch_counter = [](const Visited& at) { fetch_version(at.tensor); };

/* ---- expecting ---- */

/* Return the kind of a tensor, combined with its layout if it is not contiguous. */
inline int64_t form_of(const TensorImpl* tensor, bool in_a_row) {
  const auto kind = kind_of(tensor, in_a_row);
  return in_a_row ? kind : kind ^ layout_of(tensor);
}

/* A tensor, kept alive, and the values that it is expected to have. */
struct Expected {
  c10::intrusive_ptr<TensorImpl> tensor;
  int64_t pointer, numel, form;
  uint64_t keys;  // dispatch keys: they also tell whether it is plain

  [[gnu::flatten]] bool holds() const {
    const bool in_a_row = tensor->is_contiguous();
    if (tensor->key_set().raw_repr() != keys || tensor->numel() != numel) return false;
    if (form_of(tensor.get(), in_a_row) != form) return false;
    auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (numel == 0 || storage == nullptr) return numel == 0;
    const auto itemsize = static_cast<int64_t>(tensor->itemsize()), offset = tensor->storage_offset() * itemsize;
    // The end of a contiguous tensor is known without its shape.
    const auto reach = in_a_row ? numel * itemsize : 0;
    const auto* data = static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get());
    return data != nullptr && reinterpret_cast<int64_t>(data + offset) == pointer &&
        offset + reach <= static_cast<int64_t>(storage->nbytes());
  }
};

struct Expectations {
  const std::vector<Expected> all;

  void fetch_at(Py_ssize_t) const {}  // they are contiguous
  TensorImpl* at(Py_ssize_t i) const { return all[i].tensor.get(); }
};

constexpr char EXPECTATIONS[] = "megascale.Expectations";

/* ---- dicts ---- */

/* Return a version tag that changes with a dict and is unique among dicts; 0 if this Python has none. */
int64_t tag_of(PyObject* object) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  if (PyDict_Check(object)) return static_cast<int64_t>(reinterpret_cast<PyDictObject*>(object)->ma_version_tag);
#pragma GCC diagnostic pop
#endif
  return 0;
}

/* Whether a dict has not changed since it had this tag. */
bool has_tag(PyObject* dict, int64_t tag) { return tag != 0 && tag_of(dict) == tag; }

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

/* memory: [4][n]. status: [2][n]. grads: [4][n], the memory of their gradients, or null. A gradient that is missing or
 * cannot be read has kind -1; its tensor counts as read.
 *
 * changed: whether anything but a version or a gradient's address differs from what the arrays held. Only valid if all tensors could be read.
 */
int64_t read_tensors(
    PyObject* list, int64_t* memory, int64_t* status, int64_t* grads, int64_t* changed, int threads) {
  const auto n = PyList_GET_SIZE(list);
  const Memory out(memory, n), out_of_grads(grads, n);
  const Status out_of_status(status, n);
  const auto fetch_parts = [](const Visited& at) {
    fetch_storage(at.tensor);
    fetch_version(at.tensor);
    fetch_autograd(at.tensor);
  };
  const auto fetch_grad = [](Visited& at) {
    at.grad = grad_of(at.tensor);
    if (at.grad != nullptr) fetch_whole(at.grad);
  };
  const auto fetch_storage_of_grad = [](const Visited& at) {
    if (at.grad != nullptr) fetch_storage(at.grad);
  };
  // The upper half of a walk's sum counts changed tensors, the lower half unreadable ones.
  constexpr auto CHANGED = int64_t{1} << 32;
  const auto told = [changed](int64_t sum) {
    *changed = sum >= CHANGED;
    return sum % CHANGED;
  };
  const auto read_one = [=](TensorImpl* tensor, Py_ssize_t i, bool& is_other) {
    const bool is_read = read_memory(tensor, out, i, is_other, is_other);
    if (is_read) read_status(tensor, out_of_status, i, is_other);
    return !is_read;
  };
  const auto read = [=](const Visited& at, Py_ssize_t i) {
    bool is_other = false;
    const bool is_unread = read_one(at.tensor, i, is_other);
    return is_unread + CHANGED * is_other;
  };
  const auto read_both = [=](const Visited& at, Py_ssize_t i) {
    bool is_other = false, has_moved = false;
    read_memory(at.grad, out_of_grads, i, has_moved, is_other);
    const bool is_unread = read_one(at.tensor, i, is_other);
    return is_unread + CHANGED * is_other;
  };
  const Listed tensors{items_of(list)};
  const auto fetch_tensor = [](const Visited& at) { fetch_whole(at.tensor); };
  if (grads == nullptr) return told(walk(tensors, n, threads, read, fetch_tensor, fetch_parts));
  return told(walk(tensors, n, threads, read_both, fetch_tensor, fetch_parts, fetch_grad, fetch_storage_of_grad));
}

/* Return a capsule of the tensors' present values for hold_tensors(); None if one of them could not be read. */
PyObject* expect_tensors(PyObject* list) {
  std::vector<Expected> all;
  const auto n = PyList_GET_SIZE(list);
  all.reserve(n);
  try {
    std::vector<int64_t> memory(4);
    for (Py_ssize_t i = 0; i < n; i++) {
      auto* tensor = tensor_of(PyList_GET_ITEM(list, i));
      const Memory out(memory.data(), 1);
      bool changed;
      if (!read_memory(tensor, out, 0, changed, changed)) Py_RETURN_NONE;
      const auto& owner = THPVariable_Unpack(PyList_GET_ITEM(list, i)).getIntrusivePtr();
      const auto form = form_of(tensor, tensor->is_contiguous());
      all.push_back({owner, *out.pointer, *out.numel, form, tensor->key_set().raw_repr()});
    }
  } catch (...) {  // memory that may not be written
    Py_RETURN_NONE;
  }
  auto kept = std::make_unique<Expectations>(Expectations{std::move(all)});
  auto* capsule = PyCapsule_New(kept.get(), EXPECTATIONS, [](PyObject* dropped) {
    delete static_cast<Expectations*>(PyCapsule_GetPointer(dropped, EXPECTATIONS));
  });
  if (capsule != nullptr) kept.release();
  return capsule;
}

/* Whether no tensor has moved or changed its form. capsule: from expect_tensors().
 *
 * Called for all of an optimizer's state in every step, so it reads only two or three cache lines per tensor, not the
 * Python object, which keeps its tensor while the capsule owns that too.
 */
int64_t hold_tensors(PyObject* capsule, int threads) {
  const auto& kept = *static_cast<Expectations*>(PyCapsule_GetPointer(capsule, EXPECTATIONS));
  const auto is_wrong = [&kept](const Visited&, Py_ssize_t i) { return !kept.all[i].holds(); };
  const auto fetch_looked_at = [](const Visited& at) {
    fetch(&at.tensor->unsafe_storage());
    fetch_end(at.tensor);
  };
  const auto fetch_its_storage = [](const Visited& at) { fetch_storage(at.tensor); };
  return walk(kept, kept.all.size(), threads, is_wrong, fetch_looked_at, fetch_its_storage) == 0;
}

/* versions: [n]. */
int64_t read_versions(PyObject* list, int64_t* versions, int threads) {
  const auto read = [=](const Visited& at, Py_ssize_t i) {
    auto* tensor = at.tensor;
    const bool counts = tensor != nullptr && !tensor->is_inference();
    if (counts) versions[i] = tensor->version_counter().current_version();
    return !counts;
  };
  return walk(Listed{items_of(list)}, PyList_GET_SIZE(list), threads, read, fetch_counted, fetch_counter);
}

/* Tell autograd that all tensors have been written, or all that can be. versions: [n], the new ones; 0 if a tensor has
 * none.
 */
int64_t increment_versions(PyObject* list, int64_t* versions, int threads) {
  const auto increment = [=](const Visited& at, Py_ssize_t i) {
    auto* tensor = at.tensor;
    const bool counts = tensor != nullptr && !tensor->is_inference();
    if (counts) tensor->bump_version();
    versions[i] = counts ? tensor->version_counter().current_version() : 0;
    return tensor == nullptr;
  };
  return walk(Listed{items_of(list)}, PyList_GET_SIZE(list), threads, increment, fetch_counted, fetch_counter);
}

/* Whether two lists hold the same objects. */
int64_t same_objects(PyObject* one, PyObject* other) {
  const auto n = PyList_GET_SIZE(one);
  return n == PyList_GET_SIZE(other) && (n == 0 || !std::memcmp(items_of(one), items_of(other), n * sizeof(PyObject*)));
}

/* Whether the values of a dict, in its order, are the objects of a list. tag: see hold_objects(). */
int64_t same_values(PyObject* dict, PyObject* list, int64_t* tag) {
  const auto n = PyList_GET_SIZE(list);
  if (has_tag(dict, *tag)) return 1;
  if (PyDict_GET_SIZE(dict) != n) return 0;
  auto** items = items_of(list);
  PyObject *key, *value;
  Py_ssize_t at = 0, i = 0;
  while (PyDict_Next(dict, &at, &key, &value))
    if (i == n || items[i++] != value) return 0;
  if (i == n) *tag = tag_of(dict);
  return i == n;
}

/* Whether entries[i][names[k]] is columns[k][i], for all dicts and all names.
 *
 * tags: [n], zeros in the first call with the same lists. A dict that was right and has not changed since is not read
 * again, which saves two or three of its cache lines.
 */
int64_t hold_objects(PyObject* entries, PyObject* names, PyObject* columns, int64_t* tags, int threads) {
  const auto n = PyList_GET_SIZE(entries), k = PyList_GET_SIZE(names);
  for (Py_ssize_t name = 0; name < k; name++)
    if (PyList_GET_SIZE(PyList_GET_ITEM(columns, name)) != n) return 0;
  auto** dicts = items_of(entries);
  int64_t wrong = 0;
  // Dicts are iterated: a look-up might run Python code, which other threads may not.
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : wrong) if (n > FEW)
  for (Py_ssize_t i = 0; i < n; i++) {
    if (i + 2 * AHEAD < n) fetch(dicts[i + 2 * AHEAD], 8, 48);
    if (i + AHEAD < n && !has_tag(dicts[i + AHEAD], tags[i + AHEAD])) fetch_entries(dicts[i + AHEAD]);
    if (has_tag(dicts[i], tags[i])) continue;
    const bool is_held = holds(dicts[i], i, items_of(names), items_of(columns), k);
    tags[i] = is_held ? tag_of(dicts[i]) : 0;
    wrong += !is_held;
  }
  return wrong == 0;
}
}
