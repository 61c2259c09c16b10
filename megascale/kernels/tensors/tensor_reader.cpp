/* Reads addresses, versions and types of many tensors in one walk.
 *
 * From Python each attribute needs one visit of all tensors, and if there are many each visit misses the cache: about
 * 6 to 10 us per parameter and step. Here all attributes are read in one visit, while the memory of the next tensors is
 * prefetched. The cost is that of cache lines: only those that are needed are fetched, and a gradient is read together
 * with its parameter.
 *
 * functions() returns a module of functions, which Python calls without ctypes' conversions: these would cost a step of
 * hundreds of tensors more than the walks.
 */
#include <ATen/Parallel.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "tensor_memory.h"

#ifdef Py_GIL_DISABLED
#error "lists could change while they are read"
#endif

namespace {

constexpr Py_ssize_t AHEAD = 16;   // tensors between a prefetch and its use
constexpr Py_ssize_t WINDOW = 128;  // tensors in flight at a time: a power of two
constexpr Py_ssize_t FEW = 2048;   // with fewer tensors a second thread does not pay

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
int64_t walk(const Source& source, Py_ssize_t n, const Read& read, const Fetch&... fetch) {
  const Py_ssize_t parts = n > FEW ? at::get_num_threads() : 1;
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

/* ---- arguments ---- */

/* The numbers of an int64 array that is written. */
class Numbers {
 public:
  Numbers(PyObject* array, Py_ssize_t count) {
    if (PyObject_GetBuffer(array, &view_, PyBUF_WRITABLE) != 0) return;
    if (view_.len == count * static_cast<Py_ssize_t>(sizeof(int64_t))) return;
    PyErr_Format(PyExc_ValueError, "an array of %zd bytes, %zd numbers are written", view_.len, count);
    PyBuffer_Release(&view_);
  }
  Numbers(const Numbers&) = delete;
  ~Numbers() { PyBuffer_Release(&view_); }

  explicit operator bool() const { return view_.obj != nullptr; }  // if not, an error is set
  int64_t* get() const { return static_cast<int64_t*>(view_.buf); }

 private:
  Py_buffer view_{};
};

PyObject* truth(bool value) { return Py_NewRef(value ? Py_True : Py_False); }

bool takes(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments, %zd are taken", given, wanted);
  return given == wanted;
}

/* Whether an argument is a list; if not, an error is set. */
bool is_list(PyObject* argument) {
  if (!PyList_Check(argument)) PyErr_Format(PyExc_TypeError, "%R is no list", argument);
  return PyList_Check(argument);
}

/* ---- functions: Python's arguments are named before each ---- */

/* read_facts(tensors, facts, grads: bool) -> bool | None
 *
 * facts: [10][n], the memory of the tensors, [4], their status, [2], and the memory of their gradients, [4]; [6][n]
 * without gradients. A gradient that is missing or cannot be read has kind -1; its tensor counts as read.
 *
 * Returns whether anything but a version or a gradient's address differs from what the array held; None if a tensor
 * could not be read.
 */
PyObject* read_facts(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!takes(count, 3) || !is_list(given[0])) return nullptr;
  const auto n = PyList_GET_SIZE(given[0]);
  const bool with_grads = given[2] == Py_True;
  const Numbers facts(given[1], (with_grads ? 10 : 6) * n);
  if (!facts) return nullptr;
  const Memory out(facts.get(), n), out_of_grads(facts.get() + 6 * n, n);
  const Status out_of_status(facts.get() + 4 * n, n);
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
  const auto read_one = [=](TensorImpl* tensor, Py_ssize_t i, bool& is_other) {
    const bool is_read = read_memory(tensor, out, i, is_other, is_other);
    if (is_read) read_status(tensor, out_of_status, i, is_other);
    return !is_read;
  };
  const auto read_alone = [=](const Visited& at, Py_ssize_t i) {
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
  const Listed tensors{items_of(given[0])};
  const auto fetch_tensor = [](const Visited& at) { fetch_whole(at.tensor); };
  const auto sum = with_grads
      ? walk(tensors, n, read_both, fetch_tensor, fetch_parts, fetch_grad, fetch_storage_of_grad)
      : walk(tensors, n, read_alone, fetch_tensor, fetch_parts);
  if (sum % CHANGED != 0) Py_RETURN_NONE;
  return truth(sum >= CHANGED);
}

/* expect_memory(tensors) -> capsule | None
 *
 * Returns the tensors' present values for holds_memory(); None if one of them could not be read.
 */
PyObject* expect_memory(PyObject*, PyObject* list) {
  if (!is_list(list)) return nullptr;
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

/* holds_memory(capsule) -> bool: whether no tensor has moved or changed its form.
 *
 * Called for all of an optimizer's state in every step, so it reads only two or three cache lines per tensor, not the
 * Python object, which keeps its tensor while the capsule owns that too.
 */
PyObject* holds_memory(PyObject*, PyObject* capsule) {
  const auto* kept = static_cast<Expectations*>(PyCapsule_GetPointer(capsule, EXPECTATIONS));
  if (kept == nullptr) return nullptr;
  const auto is_wrong = [kept](const Visited&, Py_ssize_t i) { return !kept->all[i].holds(); };
  const auto fetch_looked_at = [](const Visited& at) {
    fetch(&at.tensor->unsafe_storage());
    fetch_end(at.tensor);
  };
  const auto fetch_its_storage = [](const Visited& at) { fetch_storage(at.tensor); };
  return truth(walk(*kept, kept->all.size(), is_wrong, fetch_looked_at, fetch_its_storage) == 0);
}

/* read_versions(tensors, versions) -> bool: whether all tensors have a version. versions: [n]. */
PyObject* read_versions(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!takes(count, 2) || !is_list(given[0])) return nullptr;
  const auto n = PyList_GET_SIZE(given[0]);
  const Numbers versions(given[1], n);
  if (!versions) return nullptr;
  const auto visit = [out = versions.get()](const Visited& at, Py_ssize_t i) {
    auto* tensor = at.tensor;
    const bool counts = tensor != nullptr && !tensor->is_inference();
    if (counts) out[i] = tensor->version_counter().current_version();
    return !counts;
  };
  return truth(walk(Listed{items_of(given[0])}, n, visit, fetch_counted, fetch_counter) == 0);
}

/* increment_versions(tensors, versions) -> bool
 *
 * Tells autograd that all tensors have been written, or all that can be; returns whether that is all.
 * versions: [n], the new ones; 0 if a tensor has none.
 */
PyObject* increment_versions(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!takes(count, 2) || !is_list(given[0])) return nullptr;
  const auto n = PyList_GET_SIZE(given[0]);
  const Numbers versions(given[1], n);
  if (!versions) return nullptr;
  const auto visit = [out = versions.get()](const Visited& at, Py_ssize_t i) {
    auto* tensor = at.tensor;
    const bool counts = tensor != nullptr && !tensor->is_inference();
    if (counts) tensor->bump_version();
    out[i] = counts ? tensor->version_counter().current_version() : 0;
    return tensor == nullptr;
  };
  return truth(walk(Listed{items_of(given[0])}, n, visit, fetch_counted, fetch_counter) == 0);
}

/* same_objects(one, other) -> bool: whether two lists hold the same objects. */
PyObject* same_objects(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!takes(count, 2) || !is_list(given[0]) || !is_list(given[1])) return nullptr;
  const auto n = PyList_GET_SIZE(given[0]);
  const bool is_long = n == PyList_GET_SIZE(given[1]);
  return truth(is_long && (n == 0 || !std::memcmp(items_of(given[0]), items_of(given[1]), n * sizeof(PyObject*))));
}

/* same_values(dict, list, tag) -> bool: whether the values of a dict, in its order, are the objects of a list.
 *
 * tag: [1], see hold_objects().
 */
PyObject* same_values(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!takes(count, 3) || !is_list(given[1])) return nullptr;
  auto *dict = given[0], *list = given[1];
  const Numbers tag(given[2], 1);
  if (!tag) return nullptr;
  const auto n = PyList_GET_SIZE(list);
  if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "%R is no dict", dict);
  if (has_tag(dict, *tag.get())) Py_RETURN_TRUE;
  if (PyDict_GET_SIZE(dict) != n) Py_RETURN_FALSE;
  auto** items = items_of(list);
  PyObject *key, *value;
  Py_ssize_t at = 0, i = 0;
  while (PyDict_Next(dict, &at, &key, &value))
    if (i == n || items[i++] != value) Py_RETURN_FALSE;
  if (i == n) *tag.get() = tag_of(dict);
  return truth(i == n);
}

/* hold_objects(entries, names, columns, tags) -> bool: whether entries[i][names[k]] is columns[k][i], for all dicts and
 * all names.
 *
 * tags: [n], zeros in the first call with the same lists. A dict that was right and has not changed since is not read
 * again, which saves two or three of its cache lines.
 */
PyObject* hold_objects(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!takes(count, 4) || !is_list(given[0]) || !is_list(given[1]) || !is_list(given[2])) return nullptr;
  auto *names = given[1], *columns = given[2];
  const auto n = PyList_GET_SIZE(given[0]), k = PyList_GET_SIZE(names);
  const Numbers all_tags(given[3], n);
  if (!all_tags) return nullptr;
  if (PyList_GET_SIZE(columns) != k) Py_RETURN_FALSE;
  for (Py_ssize_t name = 0; name < k; name++) {
    if (!is_list(PyList_GET_ITEM(columns, name))) return nullptr;
    if (PyList_GET_SIZE(PyList_GET_ITEM(columns, name)) != n) Py_RETURN_FALSE;
  }
  auto* tags = all_tags.get();
  auto** dicts = items_of(given[0]);
  int64_t wrong = 0;
  // Dicts are iterated: a look-up might run Python code, which other threads may not.
  const int parts = n > FEW ? at::get_num_threads() : 1;
#pragma omp parallel for num_threads(parts) schedule(static) reduction(+ : wrong) if (parts > 1)
  for (Py_ssize_t i = 0; i < n; i++) {
    if (i + 2 * AHEAD < n) fetch(dicts[i + 2 * AHEAD], 8, 48);
    if (i + AHEAD < n && !has_tag(dicts[i + AHEAD], tags[i + AHEAD])) fetch_entries(dicts[i + AHEAD]);
    if (has_tag(dicts[i], tags[i])) continue;
    const bool is_held = holds(dicts[i], i, items_of(names), items_of(columns), k);
    tags[i] = is_held ? tag_of(dicts[i]) : 0;
    wrong += !is_held;
  }
  return truth(wrong == 0);
}

template <typename Function>
PyMethodDef method(const char* name, Function* function, int kind) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), kind, nullptr};
}

}  // namespace

/* Return a new module of the functions above. Call with the interpreter's lock held, as they are called. */
extern "C" PyObject* functions() {
  static PyMethodDef methods[] = {
      method("read_facts", read_facts, METH_FASTCALL),
      method("expect_memory", expect_memory, METH_O),
      method("holds_memory", holds_memory, METH_O),
      method("read_versions", read_versions, METH_FASTCALL),
      method("increment_versions", increment_versions, METH_FASTCALL),
      method("same_objects", same_objects, METH_FASTCALL),
      method("same_values", same_values, METH_FASTCALL),
      method("hold_objects", hold_objects, METH_FASTCALL),
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "megascale.tensor_reader", nullptr, -1, methods};
  return PyModule_Create(&definition);
}
